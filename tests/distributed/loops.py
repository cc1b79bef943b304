"""The training loop of these tests: what a user writes, and what a test wants to know of each of its steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import placed
import torch
import zoo
from torch import Tensor

import augend
import reference

ONE_BATCH = {"batch_size": zoo.BATCH, "microbatch_size": zoo.MICROBATCH, "shuffle": False, "epochs": 1}


@dataclass(frozen=True)
class Step:
    """One step as one rank saw it.

    Attributes:
        before: All weights before the step, whole.
        norm: What ``norm()`` said before the finish.
        done: What the finish returned.
        gradients: What it wrote, whole.
        after: All weights after the step, whole.
        state: Whether the optimizer has a state for each parameter.
        forwards: Forward calls of the model on this rank.
        real: How many of them were for rows that count.
    """

    before: dict[str, Tensor]
    norm: float
    done: augend.Finished
    gradients: dict[str, Tensor]
    after: dict[str, Tensor]
    state: dict[str, bool]
    forwards: int
    real: int


def train(
    kind: str,
    place: str,
    accumulator: dict[str, Any] | None = None,
    finish: dict[str, Any] | None = None,
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
    **data: Any,
) -> list[Step]:
    """Train a model of the zoo for an epoch, placed as asked, and tell of every step."""
    one = zoo.KINDS[kind]
    there = placed.PLACES[place](one.build(), one.blocks)
    calls: list[None] = []
    there.model.register_forward_pre_hook(lambda module, inputs: calls.append(None))
    grads = there.grads(**{"unused": one.unused, **(accumulator or {})})
    stepper = optimizer(there.model.parameters(), lr=0.125)
    steps = []
    for batch in there.batches(zoo.rows(), **{**ONE_BATCH, **data}):
        before, real = placed.weights(there.model), 0
        calls.clear()
        for microbatch in grads.microbatches(batch):
            grads.backward(one.loss(there.model, microbatch))
            real += microbatch.real_rows > 0
        forwards = len(calls)
        norm = grads.norm()
        done = grads.finish(**(finish or {}))
        gradients = placed.gradients(there.model)
        stepper.step()
        state = {name: len(stepper.state[each]) > 0 for name, each in placed.parameters(there.model)}
        after = placed.weights(there.model)
        steps.append(Step(before, norm, done, gradients, after, state, forwards, real))
    return steps


def parts(kind: str, weights: dict[str, Tensor], step: int) -> tuple[list[reference.Part], augend.Tally]:
    """Return every micro-batch of a step as a plain model with these weights makes it, and the tally of all rows."""
    one = zoo.KINDS[kind]
    model = one.build()
    model.load_state_dict(weights, strict=False)  # a tied parameter has one name of its two
    every = zoo.rows()
    first, end = step * zoo.BATCH, min((step + 1) * zoo.BATCH, zoo.ROWS)
    made, tallies = [], []
    for start in range(first, end, zoo.MICROBATCH):
        cut = slice(start, min(start + zoo.MICROBATCH, end))
        tally = one.loss(model, {name: column[cut] for name, column in every.items()})
        made.append(reference.part(model, tally.total, float(tally.count.sum())))
        tallies.append(augend.Tally(tally.total.detach(), tally.count))
    return made, augend.Tally(torch.cat([t.total for t in tallies]), torch.cat([t.count for t in tallies]))


def off(expected: reference.Arrays, sizes: reference.Arrays, actual: dict[str, Tensor], k: int) -> float:
    """Return the largest error over its bound γ(k)·Σ|g|/N; inf where a gradient is missing or too many.

    Beside the bound, the value that is stored may be below float32's normal numbers: half of the least subnormal.
    """
    if expected.keys() != actual.keys():
        return float("inf")
    worst = 0.0
    for name, exact in expected.items():
        bound = reference.gamma(k, torch.float32) * sizes[name] + 2.0**-150
        worst = max(worst, float(np.max(np.abs(actual[name].double().numpy() - exact) / bound)))
    return worst


def train_as_usual(kind: str, place: str) -> dict[str, Tensor]:
    """Return the gradient of the first batch as loops without augend have it: means of means, averaged over ranks."""
    one = zoo.KINDS[kind]
    there = placed.PLACES[place](one.build(), one.blocks)
    microbatches = [each for each in next(iter(there.batches(zoo.rows(), **ONE_BATCH))) if each.real_rows]
    for microbatch in microbatches:
        tally = one.loss(there.model, microbatch)
        mean = tally.total.sum() / tally.count.sum().clamp(min=1)
        (mean / len(microbatches)).backward()
    return placed.gradients(there.model)
