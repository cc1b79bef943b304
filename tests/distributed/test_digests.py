"""Digests of parameters are those of one process, on any ranks and however the parameters are placed."""

from __future__ import annotations

import functools

import pytest
import torch
import zoo
from placed import PLACES, Placed, mesh, world
from ranks import Ranks
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

import augend
from augend.errors import LostRankError, StateError

TWO = ["replicated", "last", "wrapped", "fsdp", "hsdp of 1 replica", "hsdp of 2 replicas"]
TWO += ["hybrid of 1 replica", "hybrid of 2 replicas"]
SPLIT = ["tensor", "tensor beside whole", "tensor and fsdp", "sequence and fsdp"]
Digests = dict[str, str]


def columns(model: nn.Module, blocks: tuple[str, ...]) -> Placed:
    """Shard matrices by FSDP2 along their second dim: no part of one is consecutive."""

    def along(parameter: nn.Parameter) -> Shard:
        return Shard(1 if parameter.dim() > 1 and parameter.shape[1] % world() == 0 else 0)

    return Placed(fully_shard(model, mesh=mesh((world(),), ("shard",)), shard_placement_fn=along))


def digests(place: str, kind: str) -> tuple[Digests, Digests]:
    """Return the digests before a step and after it."""
    one = zoo.KINDS[kind]
    there = {**PLACES, "columns": columns}[place](one.build(), one.blocks)
    grads = there.grads(unused=one.unused)
    before = grads.digests()
    optimizer = torch.optim.SGD(there.model.parameters(), lr=0.5)
    for batch in there.batches(zoo.rows(), batch_size=zoo.ROWS, microbatch_size=zoo.MICROBATCH, epochs=1):
        for microbatch in grads.microbatches(batch):
            grads.backward(one.loss(there.model, microbatch))
        grads.step(optimizer)
    return before, grads.digests()


@functools.cache
def alone(kind: str) -> tuple[Digests, Digests]:
    """Return those of one process."""
    return digests("alone", kind)


@pytest.mark.parametrize(
    ("place", "kind"),
    [
        *[(place, "narrow") for place in TWO],
        *[(place, "columns") for place in [*SPLIT, "columns"]],
        *[("fsdp", kind) for kind in ["tied", "frozen"]],
        *[("replicated", kind) for kind in ["half", "scaled"]],
    ],
)
def test_digests_are_those_of_one_process(ranks2: Ranks, place: str, kind: str) -> None:
    """Replicated, sharded, mixed and split by tensors, on two ranks; a step changes them alike everywhere."""
    assert [alone(kind)] * 2 == ranks2.run(digests, place, kind)
    assert alone(kind)[0] != alone(kind)[1]


@pytest.mark.parametrize("place", ["replicated", "fsdp", "hsdp of 3 replicas"])
def test_digests_on_three(ranks3: Ranks, place: str) -> None:
    """On three ranks, where most parameters are unevenly cut and some ranks have nothing of one."""
    assert [alone("narrow")] * 3 == ranks3.run(digests, place, "narrow")


def at_different_places() -> str:
    """Ask for digests on one rank, and for the norm on the other."""
    grads = augend.Accumulator(zoo.KINDS["narrow"].build())
    try:
        _ = grads.digests() if torch.distributed.get_rank() else grads.norm()
    except (StateError, LostRankError) as error:
        return type(error).__name__
    return "nothing"


def test_a_rank_that_does_something_else_is_told(ranks2: Ranks) -> None:
    """Digests are collective: ranks at different places are told so, on both, and nobody hangs."""
    assert ["StateError"] * 2 == ranks2.run(at_different_places)
