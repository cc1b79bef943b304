"""What ruda-optim's sharded accumulation promises for several ranks: sums, counts, resharding, norm."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import placed
import pytest
import torch
import torch.distributed as dist
from ranks import Ranks
from torch import Tensor

import augend
import reference

PLACES = ("replicated", "last", "fsdp", "hsdp of 2 replicas")


class Rows(torch.nn.Module):
    """A weight [1, 2], less than a row for each rank, whose gradient is what comes in; an idle one; a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.used = torch.nn.Linear(2, 1, bias=False)
        self.idle = torch.nn.Linear(2, 1, bias=False)
        self.fixed = torch.nn.Linear(2, 1, bias=False).requires_grad_(requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x).sum(dim=1) + 0 * self.fixed(x).sum(dim=1)


def opened(place: str, **options: Any) -> tuple[placed.Placed, augend.Accumulator]:
    """Return a model where it is wanted, and its accumulator."""
    torch.manual_seed(0)
    there = placed.PLACES[place](Rows(), ("used",))
    return there, there.grads(**options)


def give(there: placed.Placed, grads: augend.Accumulator, x: list[float], count: float) -> None:
    """Add one row with gradient x that counts so much."""
    grads.backward(augend.Tally(there.model(torch.tensor([x])), torch.tensor([count])))


def told(grads: augend.Accumulator) -> tuple[dict[str, list[float]], float, int]:
    """Return the whole pending sums, the count and the micro-batches of all ranks."""
    sums = grads.state_dict()["sums"]["loss"]
    return {n: placed.whole(s).flatten().tolist() for n, s in sums.items()}, grads.state.count, grads.state.microbatches


def mean_of(
    place: str, mine: list[tuple[list[float], float]]
) -> tuple[dict[str, list[float]], float, dict[str, list[float]]]:
    """Finish one window of rank-specific rows; return what was pending, its count, and the mean."""
    there, grads = opened(place)
    give(there, grads, *mine[dist.get_rank()])
    sums, count, _ = told(grads)
    means = grads.finish_mean().gradients
    return sums, count, {name: placed.whole(one).flatten().tolist() for name, one in means.items()}


@pytest.mark.parametrize("place", PLACES)
def test_the_global_count_divides_the_global_sum(ranks2: Ranks, place: str) -> None:
    """Nine over three items on one rank and seven over one on the other are 16 / 4; absent stays absent, on both."""
    for sums, count, means in ranks2.run(mean_of, place, [([9.0, 0.0], 3), ([7.0, 0.0], 1)]):
        assert ({"used.weight": [16.0, 0.0]}, 4, {"used.weight": [4.0, 0.0]}) == (sums, count, means)


@pytest.mark.parametrize("place", PLACES)
def test_a_rank_that_counts_nothing_still_adds_its_gradient(ranks2: Ranks, place: str) -> None:
    """A rank with gradient 3 and count 0 takes part: with 5 over two items of the other the mean is 8 / 2."""
    for _, count, means in ranks2.run(mean_of, place, [([3.0, 0.0], 0), ([5.0, 0.0], 2)]):
        assert (2, {"used.weight": [4.0, 0.0]}) == (count, means)


def weight_of(weights: list[float]) -> Fraction | float:
    """Return the total weight of one row a rank."""
    there, grads = opened("fsdp")
    give(there, grads, [1.0, 1.0], weights[dist.get_rank()])
    return grads.state.count


def test_weights_are_summed_exactly(ranks2: Ranks) -> None:
    """0.1 and 0.2 are rounded to multiples of 2^-40 once, and summed without rounding, in whatever order."""
    exact = sum(Fraction(round(Fraction(torch.tensor(one).item()) * 2**40), 2**40) for one in (0.1, 0.2))
    assert [float(exact)] * 2 == ranks2.run(weight_of, [0.1, 0.2]) == ranks2.run(weight_of, [0.2, 0.1])


def shard_and_norm(place: str) -> tuple[int, float]:
    """Return how many elements of the sum are on this rank, and the norm of the mean [3, 4] of all ranks together."""
    there, grads = opened(place)
    give(there, grads, [1.5, 2.0], 0.5)
    return grads.pending["used.weight"].numel(), grads.norm()


@pytest.mark.parametrize("place", ["replicated", "fsdp"])
def test_padding_is_no_part_of_anything(ranks2: Ranks, place: str) -> None:
    """A weight of one row on two ranks is whole on one and nothing on the other; its norm is 5, counted once."""
    assert [(2, 5.0), (0, 5.0)] == ranks2.run(shard_and_norm, place)


def added(place: str, summed: bool) -> tuple[dict[str, list[float]], float, int]:
    """Add one gradient: [12, 0] as the sum of all ranks, or rank + 1 times that as each rank's own."""
    _, grads = opened(place, loss_scale=4.0)
    each = 1 if summed else dist.get_rank() + 1
    grads.add({"used.weight": torch.tensor([[12.0 * each, 0.0]])}, 3 * each, summed=summed)
    return told(grads)


@pytest.mark.parametrize("place", PLACES)
def test_gradients_that_are_summed_already_count_once(ranks2: Ranks, place: str) -> None:
    """summed=True takes gradient and count of all ranks as they are; summed=False adds those of each rank."""
    assert [({"used.weight": [12.0, 0.0]}, 3, 1)] * 2 == ranks2.run(added, place, True)
    assert [({"used.weight": [36.0, 0.0]}, 9, 2)] * 2 == ranks2.run(added, place, False)


def resharded(source: str, target: str) -> tuple[str, str, dict[str, list[float]]]:
    """Take a window from one placement to another, and finish it there; return the whole states, and the mean."""
    there, grads = opened(source)
    give(there, grads, [1.0 + dist.get_rank(), 0.25], 5 + dist.get_rank())
    saved = grads.state_dict()
    _, live = opened(target)
    live.load_state_dict(saved)
    drained = live.finish_sums()
    model = placed.PLACES[source](Rows(), ("used",)).model
    back = augend.Accumulator.from_sums(model, drained, live.contract, sync="last" if source == "last" else "every")
    again = back.state_dict()
    means = back.finish_mean().gradients
    return digest(saved), digest(again), {name: placed.whole(one).flatten().tolist() for name, one in means.items()}


def digest(state: dict[str, Any]) -> str:
    """Hash all of a state but which batch it is of, with its sums whole."""
    sums = {name: placed.whole(one) for name, one in state["sums"]["loss"].items()}
    return reference.digest({**state, "sums": sums, "loose": None})


@pytest.mark.parametrize("target", PLACES)
@pytest.mark.parametrize("source", PLACES)
def test_pending_sums_are_resharded_in_memory(ranks2: Ranks, source: str, target: str) -> None:
    """From one placement to another and back: the sums to the bit, counters once; the mean is (1 + 2) / (5 + 6)."""
    for before, after, means in ranks2.run(resharded, source, target):
        assert before == after
        expected = torch.tensor([3.0, 0.5]) / 11
        assert {"used.weight": expected.tolist()} == means
