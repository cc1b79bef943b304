"""One step is the same step on any number of ranks, however the model is placed."""

from __future__ import annotations

import functools
import math

import numpy as np
import pytest
import torch
import zoo
from loops import Step, off, parts, train, train_as_usual

import augend
import reference

TWO = ["replicated", "last", "wrapped", "fsdp", "hsdp of 2 replicas", "hybrid of 2 replicas"]
WITHOUT_REPLICAS = ["hsdp of 1 replica", "hybrid of 1 replica"]
FOUR = ["replicated", "last", "wrapped", "fsdp", "hsdp of 2 replicas", "hybrid of 2 replicas"]
GRID = [
    *[(1, place, kind) for place in ["replicated", "fsdp"] for kind in ["narrow", "smooth"]],
    *[(2, place, kind) for place in TWO for kind in ["narrow", "smooth", "tied", "frozen", "adapted", "conditional"]],
    *[(2, place, "smooth") for place in WITHOUT_REPLICAS],
    *[
        (3, place, kind)
        for place in ["replicated", "last", "fsdp", "hsdp of 3 replicas"]
        for kind in ["narrow", "smooth"]
    ],
    *[(2, place, "experts") for place in ["fsdp", "hsdp of 1 replica", "replicated"]],
    *[(2, place, "scaled") for place in ["replicated", "last", "wrapped"]],
    *[(world, place, "columns") for world in (2, 3) for place in ["replicated", "fsdp"]],
    *[(2, place, "columns") for place in ["tensor", "tensor beside whole", "tensor and fsdp", "sequence and fsdp"]],
]
LONG = [
    *[
        (2, place, kind)
        for place in WITHOUT_REPLICAS
        for kind in ["narrow", "tied", "frozen", "adapted", "conditional"]
    ],
    *[
        (4, place, kind)
        for place in FOUR
        for kind in zoo.KINDS
        if kind not in ("skipping", "scaled", "half", "columns", "rounded")
    ],
    *[
        (3, place, kind)
        for place in ["replicated", "fsdp"]
        for kind in ["tied", "frozen", "adapted", "conditional", "experts"]
    ],
    *[(4, place, "columns") for place in ["replicated", "fsdp", "tensor and fsdp", "sequence and fsdp"]],
]
LONG = [pytest.param(*one, marks=pytest.mark.long) for one in LONG]


def data_ranks(place: str, world: int) -> int:
    """Return over how many ranks the rows of a batch are dealt."""
    if place in ("tensor", "tensor beside whole"):
        return 1
    return world // 2 if place in ("tensor and fsdp", "sequence and fsdp") else world


@functools.cache
def alone(kind: str) -> list[Step]:
    """Train on one process without a group."""
    return train(kind, "alone")


def check(kind: str, number: int, step: Step, world: int) -> float:
    """Compare one step with what a plain model makes of its weights; return the gradient's error over its bound."""
    made, tally = parts(kind, step.before, number)
    mean = augend.Mean()
    mean.update(tally)
    loss = mean.compute()
    assert int(tally.count.sum()) == step.done.count
    assert (loss.value, loss.error, loss.count) == (step.done.loss.value, step.done.loss.error, step.done.loss.count)
    means, sizes = reference.whole_mean([made])
    if number == 0:
        first = alone(kind)[0]
        assert (first.done.count, first.done.loss) == (step.done.count, step.done.loss)
        if zoo.KINDS[kind].exact:
            exact = math.sqrt(math.fsum(float(np.sum(each**2)) for each in means.values()))
            assert abs(step.norm - exact) <= 1e-12 * exact
            assert reference.digest(first.gradients) == reference.digest(step.gradients)
            assert reference.digest(first.after) == reference.digest(step.after)
    return off(means, sizes, step.gradients, len(made) + world + 3)


@pytest.mark.parametrize(("world", "place", "kind"), [*GRID, *LONG])
def test_a_step_does_not_depend_on_ranks(ranks, world: int, place: str, kind: str) -> None:
    """Count, loss and error bar are those of one process, to the bit; the gradient is within its bound of the exact.

    The bound is γ(k)·Σ|g|/N per element, k = micro-batches + ranks + 3, of the micro-batches' gradients. Where all sums
    are exact, the gradient is that of one process to the bit, and the norm is right to 1e-12. Weights are equal on all
    ranks after every step, and so is what the finish returned. The model is called once a micro-batch or filler.
    """
    steps = ranks(world).run(train, kind, place)
    assert world == len(steps)
    assert 2 == len(steps[0])
    for number, (step, *others) in enumerate(zip(*steps, strict=True)):
        error = check(kind, number, step, world)
        print(f"world {world}, {place}, {kind}, step {number}: {error:.3f} of the bound")  # noqa: T201  to be read with -rA
        assert 1 >= error
        assert [reference.digest(step.after)] * (world - 1) == [reference.digest(other.after) for other in others]
        assert [(step.done, step.norm)] * (world - 1) == [(other.done, other.norm) for other in others]
        assert not torch.equal(*(torch.cat([one.flatten() for one in w.values()]) for w in (step.before, step.after)))
        of = data_ranks(place, world)
        microbatches = 4 - number
        rounds = -(-microbatches // of)
        assert [rounds] * world == [each.forwards for each in (step, *others)]
        assert microbatches * world // of == sum(each.real for each in (step, *others))
        assert microbatches == step.done.microbatches


@pytest.mark.parametrize("place", ["wrapped", "fsdp", "hsdp of 2 replicas"])
def test_the_mean_of_means_fails_the_same_comparison(ranks2, place: str) -> None:
    """The control: what DDP and FSDP2 make of means of micro-batches is no rounding of the right gradient."""
    (gradients, _) = ranks2.run(train_as_usual, "smooth", place)
    made, _ = parts("smooth", zoo.KINDS["smooth"].build().state_dict(), 0)
    means, sizes = reference.whole_mean([made])
    error = off(means, sizes, gradients, len(made) + 2 + 3)
    print(f"{place}: {error:.0f} times the bound")  # noqa: T201  to be read with -rA
    assert error > 1e4
    usual = reference.mean_of_means(reference.deal(made, 2))
    assert 1 >= off(usual, sizes, gradients, 100)
