"""dtype="exact" on ranks: what cannot have the same bits on any cut is refused, on all ranks alike."""

from __future__ import annotations

import placed
import pytest
import torch
import torch.distributed
import zoo
from ranks import Ranks
from torch import Tensor, nn

import augend
from augend.errors import ContractError, PlacementError, StateError


class Normed(nn.Module):
    """A layer with batch statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 5)
        self.norm = nn.BatchNorm1d(5)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.first(x))


def train_normed(place: str) -> None:
    """Run a backward of a model whose forward changes a buffer."""
    model = Normed()
    there = placed.PLACES[place](model, ())
    grads = there.grads(dtype="exact")
    for batch in there.batches(zoo.rows(), batch_size=10, microbatch_size=3):
        for rows in grads.microbatches(batch):
            grads.backward(augend.losses.sum(there.model(rows["x"])))


@pytest.mark.parametrize("place", ["replicated", "fsdp"])
def test_batch_statistics_are_refused_on_all_ranks(ranks2: Ranks, place: str) -> None:
    """What a forward leaves in a buffer depends on which micro-batches a rank had: the buffer is named."""
    errors = ranks2.outcomes(train_normed, place)
    assert [StateError, StateError] == [type(each) for each in errors]
    assert all("buffer 'norm." in str(each) for each in errors)


def construct_on_two_threads(which: int) -> None:
    """Let one rank have two threads."""
    rank = torch.distributed.get_rank()
    torch.set_num_threads(2 if rank == which else 1)
    try:
        augend.Accumulator(zoo.KINDS["smooth"].build(), dtype="exact")
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("which", [0, 1])
def test_ranks_with_other_threads_are_refused(ranks2: Ranks, which: int) -> None:
    """Their kernels round otherwise: whose micro-batch it is would show. All ranks say so, and by what they differ."""
    errors = ranks2.outcomes(construct_on_two_threads, which)
    assert [ContractError, ContractError] == [type(each) for each in errors]
    assert all("threads" in str(each) for each in errors)


def construct(place: str, kind: str) -> None:
    """Make an exact accumulator."""
    one = zoo.KINDS[kind]
    placed.PLACES[place](one.build(), one.blocks).grads(dtype="exact")


@pytest.mark.parametrize("place", ["tensor", "tensor beside whole", "tensor and fsdp"])
def test_tensor_parallelism_is_refused(ranks2: Ranks, place: str) -> None:
    """It cuts a micro-batch's own arithmetic, which nothing here can make whole again."""
    errors = ranks2.outcomes(construct, place, "columns")
    assert [PlacementError, PlacementError] == [type(each) for each in errors]


def construct_many() -> None:
    """Ask for more micro-batches than there is head-room for."""
    augend.Accumulator(zoo.KINDS["smooth"].build(), dtype="exact", max_microbatches=2**20 + 1)


def test_too_many_micro_batches_are_refused(ranks2: Ranks) -> None:
    """2^20 are the most."""
    errors = ranks2.outcomes(construct_many)
    assert [ContractError, ContractError] == [type(each) for each in errors]
