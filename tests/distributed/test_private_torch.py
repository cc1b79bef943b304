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


def test_a_reduce_scatter_of_our_own(ranks2: Ranks) -> None:
    """It gets one row of gradients for each rank, in the order of ``fsdp_params`` and padded by zeros.

    Its output is what torch goes on with; a module with one shard never calls it.
    """
    first = torch.tensor([[1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 0.0, 0.0]])  # of 3 rows of 2, two to each rank
    idle, last = torch.zeros(2, 1), torch.tensor([[11.0], [0.0]])  # the sum of 6 and 5 ones
    for inputs, gradients, widths in ranks2.run(private_torch.scatter, (2,)):
        assert [4, 1, 1] == widths
        (given,) = inputs
        assert torch.equal(torch.cat([first, idle, last], dim=1), given)
        assert all(bool((one == 1).all()) for one in gradients)
    for inputs, _, _ in ranks2.run(private_torch.scatter, (2, 1)):
        assert [] == inputs


def test_a_reduce_scatter_of_a_user_s_own_stays(ranks2: Ranks) -> None:
    """Exact sums take its place in their own backward alone."""
    assert [(True, 0)] * 2 == ranks2.run(private_torch.kept)
