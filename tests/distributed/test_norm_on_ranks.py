"""The norm is that of all elements once, over shards, replicas and tensor parallelism, to 1e-12, alike on all ranks."""

from __future__ import annotations

import placed
import pytest
import torch
import torch.distributed
import zoo
from loops import ONE_BATCH
from placed import PLACES
from ranks import Ranks
from torch import Tensor, nn

import augend
import reference

TWO = ["replicated", "last", "wrapped", "fsdp", "hsdp of 1 replica", "hsdp of 2 replicas"]
TWO += ["hybrid of 1 replica", "hybrid of 2 replicas"]
SPLIT = ["tensor", "tensor beside whole", "tensor and fsdp", "sequence and fsdp"]
FOUR = [(place, "smooth") for place in ["replicated", "last", "fsdp", "hsdp of 2 replicas", "hybrid of 2 replicas"]]
FOUR += [(place, "rounded") for place in ["fsdp", "tensor and fsdp", "sequence and fsdp"]]


def measure(place: str, kind: str) -> tuple[float, float, float, dict[str, Tensor], dict[str, Tensor], object]:
    """Return the norm before, at and after a finish of the same window, its sums, its clipped gradient, its state.

    The window is saved before the first finish and loaded for the second, by another accumulator.
    """
    one = zoo.KINDS[kind]
    there = PLACES[place](one.build(), one.blocks)
    grads = there.grads(loss_scale=4.0)
    batch = next(iter(there.batches(zoo.rows(), **ONE_BATCH)))
    for microbatch in grads.microbatches(batch):
        grads.backward(one.loss(there.model, microbatch))
    before = grads.norm()
    state = grads.state_dict()
    done = grads.finish(max_norm=before / 2)
    clipped = placed.gradients(there.model)
    again = there.grads(loss_scale=4.0)
    again.load_state_dict(state)
    after = again.norm()
    sums = again.finish_sums()
    return before, done.norm, after, {name: placed.whole(each) for name, each in sums.gradients.items()}, clipped, done


def check(outcomes: list) -> None:
    """Compare the norms with that of the whole sums, exactly added."""
    before, at, after, sums, clipped, done = outcomes[0]
    assert float is type(before) is type(at) is type(after)
    exact = reference.norm(sums) / (4 * done.count)
    assert abs(exact - before) <= 1e-12 * exact
    assert before == at == after
    for rank in outcomes[1:]:
        assert (before, at, after) == rank[:3]
        assert reference.digest(sums, clipped) == reference.digest(rank[3], rank[4])
    half = reference.norm(clipped)
    assert abs(before / 2 - half) <= reference.gamma(3, torch.float32) * half


@pytest.mark.parametrize(
    ("place", "kind"), [*[(place, "smooth") for place in TWO], *[(place, "rounded") for place in SPLIT]]
)
def test_the_norm_is_that_of_the_whole_sums(ranks2: Ranks, place: str, kind: str) -> None:
    """On two ranks: against an exact sum of squares of the gathered sums, read, finished, and after save and load."""
    check(ranks2.run(measure, place, kind))


@pytest.mark.long
@pytest.mark.parametrize(("place", "kind"), FOUR)
def test_the_norm_is_that_of_the_whole_sums_on_four(ranks4: Ranks, place: str, kind: str) -> None:
    """On four ranks, where shards, replicas and tensor parallelism come together."""
    check(ranks4.run(measure, place, kind))


@pytest.mark.parametrize("place", ["replicated", "fsdp", "hsdp of 3 replicas"])
def test_the_norm_on_three(ranks3: Ranks, place: str) -> None:
    """On three ranks, where most parameters are unevenly cut."""
    check(ranks3.run(measure, place, "smooth"))


class Rows(nn.Module):
    """A weight whose gradient is its input."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(rows))

    def forward(self, gradient: Tensor) -> Tensor:
        return (self.weight * gradient).sum().reshape(1).clone()


def extremes(place: str, gradient: Tensor) -> float:
    """Return the norm of a gradient that is spread over ranks."""
    there = PLACES[place](Rows(len(gradient)), ())
    grads = there.grads()
    here = torch.distributed.get_rank() == 0
    grads.backward(augend.Tally(there.model(gradient * here), torch.tensor([int(here)])))
    return grads.finish().norm


@pytest.mark.parametrize("place", ["replicated", "last", "fsdp", "hsdp of 2 replicas"])
@pytest.mark.parametrize("size", [1e30, 1e-30, 0.0])
def test_norms_of_any_size(ranks2: Ranks, place: str, size: float) -> None:
    """Gradients of 1e30 and 1e-30 neither overflow nor vanish, whichever rank has them; no gradient has norm 0."""
    gradient = torch.tensor([3.0, 0.0, 4.0]) * size
    exact = reference.norm({"": gradient})
    for norm in ranks2.run(extremes, place, gradient):
        assert abs(exact - norm) <= 1e-12 * exact


def sums_on_another_placement(saved: str, loaded: str) -> tuple[str, str, float, float]:
    """Return digests of the window's sums and norms, where it was saved and where it was loaded."""
    kind = zoo.KINDS["narrow"]
    results = []
    state: dict[str, object] = {}
    for place in (saved, loaded):
        there = PLACES[place](kind.build(), kind.blocks)
        grads = there.grads()
        if place == saved and not state:
            batch = next(iter(there.batches(zoo.rows(), **ONE_BATCH)))
            for microbatch in grads.microbatches(batch):
                grads.backward(kind.loss(there.model, microbatch))
            state = grads.state_dict()
            grads.reset()
        grads.load_state_dict(state)
        norm = grads.norm()
        sums = {name: placed.whole(one) for name, one in grads.finish_sums().gradients.items()}
        results.append((reference.digest(dict(sorted(sums.items()))), norm))
    return results[0][0], results[1][0], results[0][1], results[1][1]


@pytest.mark.parametrize("saved", ["replicated", "last", "fsdp", "hsdp of 2 replicas"])
@pytest.mark.parametrize("loaded", ["replicated", "last", "fsdp", "hybrid of 2 replicas"])
def test_a_window_moves_from_one_placement_to_another(ranks2: Ranks, saved: str, loaded: str) -> None:
    """Pending sums saved under one placement and loaded under another are bitwise the same sums."""
    for there, here, norm, same in ranks2.run(sums_on_another_placement, saved, loaded):
        assert there == here
        assert abs(norm - same) <= 1e-12 * norm
