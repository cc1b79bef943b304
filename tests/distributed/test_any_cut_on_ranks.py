"""Any batch, cut anyhow, dealt to any ranks, placed anyhow: bitwise one result; what else knows nothing of ranks."""

from __future__ import annotations

import functools

import placed
import pytest
import torch
import torch.distributed
import zoo
from hypothesis import given, settings
from hypothesis import strategies as st
from placed import PLACES, Placed
from ranks import Ranks
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import augend
import reference
from augend.errors import EmptyWindowError
from augend.optim import MasterWeights

ROWS = 24
COUNTS = st.lists(st.sampled_from([0, 0, 1, 2, 3]), min_size=ROWS, max_size=ROWS)
WEIGHTS = st.lists(st.sampled_from([0.0, 0.1, 0.7, 1.3, 1 / 3]), min_size=ROWS, max_size=ROWS)
Summary = list[tuple[str, str]]


def an_epoch(place: str, counts: list[float], batch_size: int, microbatch_size: int, seed: int) -> Summary:
    """Go through all batches of an epoch without a step; return the digest of the gradients and the rest of each."""
    there = PLACES[place](zoo.KINDS["narrow"].build(), ("second", "third"))
    grads = there.grads()
    rows = {"x": zoo.rows(ROWS)["x"], "count": torch.tensor(counts)}
    summary = []
    data = there.batches(rows, batch_size=batch_size, microbatch_size=microbatch_size, seed=seed, epochs=1)
    for batch in data:
        for microbatch in grads.microbatches(batch):
            out, count = there.model(microbatch["x"]).sum(1), microbatch["count"]
            grads.backward(augend.Tally(out * (count > 0) * 4, count))
        try:
            done = grads.finish()
        except EmptyWindowError as error:
            summary.append(("empty", type(error).__name__))
            grads.reset()
            break
        # The sum of a -0.0 alone is -0.0, and with a filler's 0.0 it is 0.0.
        gradients = {name: one + 0.0 for name, one in placed.gradients(there.model).items()}
        loss = done.loss
        summary.append((reference.digest(gradients), repr((done.count, done.microbatches, loss.value, loss.error))))
    return summary


@pytest.mark.parametrize(
    ("world", "place"),
    [
        *[(2, place) for place in ["replicated", "last", "fsdp", "hsdp of 2 replicas", "hybrid of 2 replicas"]],
        *[(3, place) for place in ["replicated", "fsdp"]],
    ],
)
def test_any_cut_over_ranks_is_one_process(ranks, world: int, place: str) -> None:
    """Gradients, counts, losses and error bars are those of one process, to the bit (but for the sign of a zero).

    All sums of totals and gradients are exact here; counts may be fractions, which are summed on a grid.
    """

    @settings(max_examples=settings().max_examples // 6)  # each is an epoch on all ranks
    @given(
        counts=st.one_of(COUNTS, WEIGHTS),
        batch_size=st.integers(1, ROWS),
        microbatch_size=st.integers(1, 7),
        seed=st.integers(0, 9),
    )
    def holds(counts: list[float], batch_size: int, microbatch_size: int, seed: int) -> None:
        batch_size = max(batch_size, 8)  # at most three batches
        alone = an_epoch("alone", counts, batch_size, microbatch_size, seed)
        assert [alone] * world == ranks(world).run(an_epoch, place, counts, batch_size, microbatch_size, seed)

    holds()


class Noisy(nn.Module):
    """A layer between two dropouts."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 6)
        self.head = nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(nn.functional.dropout(torch.relu(self.layer(nn.functional.dropout(x, 0.5))), 0.5))


def with_dropout(place: str) -> tuple[str, str]:
    """Return the digest of the gradients of a batch, and its loss, of a model that draws random numbers."""
    there = PLACES[place](zoo.integers(Noisy()), ())
    grads = there.grads()
    for batch in there.batches(zoo.rows(), batch_size=zoo.ROWS, microbatch_size=zoo.MICROBATCH, epochs=1):
        for microbatch in grads.microbatches(batch):
            grads.backward(zoo.counted(there.model, microbatch))
        done = grads.finish()
    return reference.digest(placed.gradients(there.model)), repr(done.loss)


@pytest.mark.parametrize("place", ["replicated", "last", "fsdp", "hsdp of 2 replicas"])
def test_random_numbers_do_not_know_of_ranks(ranks2: Ranks, place: str) -> None:
    """Dropout masks belong to the rows of a micro-batch, not to the rank that runs it."""
    assert [with_dropout("alone")] * 2 == ranks2.run(with_dropout, place)


def alone_on_an_axis(rows_of_rank: list[list[float]]) -> tuple[float, float]:
    """Train a model for each rank by itself, over an axis of one rank of a mesh of two."""
    mesh = placed.mesh((2, 1), ("others", "own"))["own"]
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    there = Placed(model, {"mesh": mesh}, {"mesh": mesh})
    grads = there.grads()
    rows = torch.tensor(rows_of_rank[torch.distributed.get_rank()])[:, None]
    for batch in there.batches({"x": rows}, batch_size=len(rows), microbatch_size=1, epochs=1):
        for microbatch in grads.microbatches(batch):
            grads.backward(augend.Tally(model(microbatch["x"]).sum(1), torch.ones(1, dtype=torch.int64)))
        done = grads.finish()
    return float(model.weight.grad), done.count


def test_a_mesh_of_some_ranks_is_a_world_of_its_own(ranks2: Ranks) -> None:
    """Two jobs in one process group do not add each other's gradients, nor wait for each other's micro-batches."""
    assert [(2.0, 3), (7.0, 1)] == ranks2.run(alone_on_an_axis, [[1.0, 2.0, 3.0], [7.0]])


def empty_windows(place: str, empty: str) -> tuple[dict[str, Tensor], augend.Finished, int]:
    """Finish a batch in which nothing counts, with a gradient of one on rank 1 nevertheless."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    there = PLACES[place](model, ())
    grads = there.grads()
    gradient = float(torch.distributed.get_rank())
    grads.backward(augend.Tally(there.model(torch.tensor([[gradient]])).sum(1), torch.tensor([0])))
    done = grads.finish(empty=empty)
    return {name: float(one) for name, one in placed.gradients(there.model).items()}, done, grads.updates


@pytest.mark.parametrize("place", ["replicated", "last", "fsdp", "hsdp of 2 replicas"])
@pytest.mark.parametrize(("empty", "gradient"), [("one", {"weight": 1.0}), ("zero", {"weight": 0.0}), ("skip", {})])
def test_empty_windows_are_one_decision(ranks2: Ranks, place: str, empty: str, gradient: dict) -> None:
    """Dividing by one, exact zeros and skipping are the same on all ranks."""
    first, second = ranks2.run(empty_windows, place, empty)
    assert gradient == first[0] == second[0]
    assert (empty == "skip") == first[1].skipped == second[1].skipped
    assert repr(first[1:]) == repr(second[1:])


def masters(place: str) -> tuple[str, str]:
    """Return digests of weights and masters of a bfloat16 model after a step with float32 masters."""
    kind = zoo.KINDS["half"]
    model = kind.build()
    if place == "fsdp":
        policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
        full = placed.mesh((torch.distributed.get_world_size(),), ("shard",))
        there = Placed(placed.sharded(model, kind.blocks, full, mp_policy=policy))
    else:
        there = PLACES[place](model, kind.blocks)
    grads = there.grads()
    optimizer = MasterWeights(there.model.parameters(), functools.partial(torch.optim.AdamW, lr=2.0**-9))
    for batch in there.batches(zoo.rows(), batch_size=zoo.ROWS, microbatch_size=zoo.MICROBATCH, epochs=1):
        for microbatch in grads.microbatches(batch):
            tally = kind.loss(there.model, microbatch)
            grads.backward(augend.Tally(tally.total.float(), tally.count))
        grads.step(optimizer, max_norm=1e9)
    kept = {name: placed.whole(optimizer.masters[one]) for name, one in there.model.named_parameters()}
    return reference.digest(placed.weights(there.model)), reference.digest(kept)


@pytest.mark.parametrize("place", ["replicated", "last", "fsdp"])
def test_masters_of_16_bit_weights(ranks2: Ranks, place: str) -> None:
    """Sums in float32 reach the float32 masters unrounded: weights and masters are those of one process, to the bit."""
    assert [masters("alone")] * 2 == ranks2.run(masters, place)
