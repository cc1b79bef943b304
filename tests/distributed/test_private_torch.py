"""What augend uses of torch that is private: when torch changes it, this fails first and says what."""

from __future__ import annotations

import private_torch
import pytest
import torch
from ranks import Ranks


@pytest.mark.parametrize("shape", [(2,), (1, 2), (2, 1)])
def test_the_flat_gradients_of_a_sharded_module(ranks2: Ranks, shape: tuple[int, ...]) -> None:
    """The layout of the reduce-scatter output is that of ``fsdp_params``, padded, without frozen ones.

    Parts taken by it are what torch itself writes to ``.grad``, which is a sum after the public switches are set; with
    replicas each holds its own part of it until they are added up.
    """
    results = ranks2.run(private_torch.layout, shape)
    replicas = shape[0] if len(shape) > 1 else 1
    for switches, parts, public, left in results:
        assert private_torch.SWITCHES == switches
        assert 0 == left
        assert 3 == len(parts)
        for part, one in zip(parts, public, strict=True):
            assert torch.equal(replicas * part, one)
    first = torch.cat([public[0] for _, _, public, _ in results]) if shape[-1] == 2 else results[0][2][0]
    assert torch.equal(torch.full((3, 2), 2.0), first)
