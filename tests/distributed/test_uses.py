"""Whatever is done with an accumulator on one process gives the same bits on two ranks, however the model is placed."""

from __future__ import annotations

import functools

import pytest
import torch
import uses
from ranks import Ranks

PLACES = ["replicated", "last", "fsdp", "hsdp of 2 replicas", "hybrid of 2 replicas"]


@functools.cache
def alone(use: str) -> list[uses.Made]:
    """Return what one process makes of it."""
    return uses.USES[use]("alone")


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("use", list(uses.USES))
def test_it_is_the_same_on_ranks(ranks2: Ranks, use: str, place: str) -> None:
    """All sums of the model are exact, so every gradient is that of one process to the bit, on both ranks."""
    expected = alone(use)
    assert all(torch.any(one != 0) for made in expected for one in [made["first.weight"]])
    for found in ranks2.run(uses.USES[use], place):
        assert len(expected) == len(found)
        for made, one in zip(found, expected, strict=True):
            assert one.keys() == made.keys()
            assert all(torch.equal(one[name], made[name]) for name in one)


def test_all_uses_are_of_one_gradient() -> None:
    """On one process, every way through the batch ends with the gradient of the plain loop."""
    (expected,) = alone("plain")
    for use in set(uses.USES) - {"given", "given_summed"}:
        for made in alone(use):
            assert expected.keys() == made.keys()
            assert all(torch.equal(expected[name], made[name]) for name in expected)
