"""Pending sums go from any placement to any other in one program: ``state_dict`` here, ``load_state_dict`` there."""

from __future__ import annotations

import warnings
from typing import Any

import placed
import pytest
import torch
import zoo
from ranks import Ranks
from torch import Tensor

import augend

PLACES = ["replicated", "last", "fsdp", "hsdp of 2 replicas", "hsdp of 1 replica", "hybrid of 2 replicas"]
SPLIT = ["tensor beside whole", "tensor and fsdp", "replicated", "fsdp"]
FOUR = ["last", "fsdp", "hsdp of 2 replicas", "hybrid of 2 replicas", "tensor and fsdp"]


def pending(kind: str, place: str, microbatches: int) -> augend.Accumulator:
    """Return an accumulator in the middle of a batch."""
    one = zoo.KINDS[kind]
    there = placed.PLACES[place](one.build(), one.blocks)
    grads = there.grads(unused=one.unused)
    batch = next(iter(there.batches(zoo.rows(), batch_size=zoo.BATCH, microbatch_size=zoo.MICROBATCH, shuffle=False)))
    for _, microbatch in zip(range(microbatches), grads.microbatches(batch), strict=False):
        grads.backward(one.loss(there.model, microbatch))
    return grads


def whole(state: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return a state's plain part, and its sums whole."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of tensors that are split twice, torch says that gathering them is slow
        sums = {name: placed.whole(one) for name, one in state["sums"]["loss"].items()}
    return {name: value for name, value in state.items() if name != "sums"}, sums


def move(kind: str, places: list[str]) -> list[str]:
    """Carry one state through every placement, and tell where it was not the same any more."""
    state = pending(kind, places[0], 1).state_dict()
    expected = whole(state)
    norm = pending(kind, places[0], 1).norm()
    wrong = []
    for place in [*places, *reversed(places)]:
        one = zoo.KINDS[kind]
        there = placed.PLACES[place](one.build(), one.blocks)
        grads = there.grads(unused=one.unused)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # as above
            grads.load_state_dict(state)
        state = grads.state_dict()
        plain, sums = whole(state)
        same = plain == expected[0] and sums.keys() == expected[1].keys()
        if not same or not all(torch.equal(one, expected[1][name]) for name, one in sums.items()):
            wrong.append(place)
        if abs(grads.norm() - norm) > 1e-12 * norm:
            wrong.append(f"the norm, {place}")
    return wrong


@pytest.mark.parametrize("kind", ["narrow", "tied"])
def test_sums_are_the_same_wherever_they_lie(ranks2: Ranks, kind: str) -> None:
    """Bit by bit and by every counter, through all placements and back, with empty shards and replicas."""
    assert [[], []] == ranks2.run(move, kind, PLACES)


def test_sums_that_are_split_by_tensors(ranks2: Ranks) -> None:
    """The same where a parameter is split by tensor parallelism, and then sharded."""
    assert [[], []] == ranks2.run(move, "columns", SPLIT)


@pytest.mark.long
def test_sums_that_are_split_twice(ranks4: Ranks) -> None:
    """The same on four ranks, on which a parameter is split along both axes."""
    assert [[]] * 4 == ranks4.run(move, "columns", FOUR)


def test_other_states_on_two_ranks_are_refused(ranks2: Ranks) -> None:
    """Ranks that load states of different moments are told so, and go on with what they had."""
    for told, same in ranks2.run(mixed):
        assert "the saved state must be the same on all ranks" in told
        assert same


def mixed() -> tuple[str, bool]:
    """Load another moment's state on rank 1."""
    grads = pending("narrow", "fsdp", 1)
    early, late = grads.state_dict(), pending("narrow", "fsdp", 2).state_dict()
    before = {name: one.clone() for name, one in grads.pending.items()}
    try:
        grads.load_state_dict(late if torch.distributed.get_rank() == 1 else early)
    except augend.errors.StateError as error:
        return str(error), all(torch.equal(before[name], one) for name, one in grads.pending.items())
    return "nothing was refused", False
