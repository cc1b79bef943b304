"""What ranks do in the tests of ``dtype="exact"``: runs of the proof's jobs, told in what can be compared."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from job import Job, Outcome
from tasks import TASKS, Task
from torch import Tensor, nn

import augend

STEPS = 12  # three epochs of four batches: 9, 9, 9 and 4 rows, two of them in a micro-batch


@functools.cache
def order(steps: int) -> tuple[tuple[int, ...], ...]:
    """Return which rows the tasks' batches have, step by step."""
    task = TASKS["mlp"]()
    data = augend.Batches(task.rows, batch_size=task.batch_size, microbatch_size=task.microbatch_size)
    return tuple(tuple(batch.indices.tolist()) for batch, _ in zip(data, range(steps), strict=False))


def weighted(task: Task, weights: Mapping[int, float]) -> Task:
    """Return the task with the loss of some rows multiplied: by 10^6 for a spike, by nan for what cannot be counted."""
    every = torch.ones(31)
    for row, weight in weights.items():
        every[row] = weight

    def loss(model: nn.Module, rows: Any) -> augend.Tally:
        tally = task.loss(model, rows)
        return augend.Tally(tally.total * rows["weight"], tally.count)

    return replace(task, rows={**task.rows, "weight": every}, loss=loss)


def train(
    kind: str,
    place: str = "replicated",
    deal: str | None = None,
    steps: int = STEPS,
    weights: Mapping[int, float] | None = None,
    options: Mapping[str, Any] | None = None,
) -> Outcome:
    """Train a task from its beginning.

    Args:
        kind: A name of ``TASKS``.
        place: A name of ``job.PLACES``.
        deal: A name of ``dealing.DEALS``; None for augend's own.
        steps: How many.
        weights: What the loss of a row is multiplied by, where it is.
        options: For the ``Job``.
    """
    task = weighted(TASKS[kind](), weights) if weights else TASKS[kind]()
    return Job(task, place, deal, **(options or {})).train(steps)


class Rare(nn.Module):
    """Sixty-four experts, of which a batch uses one.

    Args:
        others: What becomes of those that it does not use: "skipped", or called with an "empty" input, as sharded
            ones must be.
    """

    def __init__(self, others: str) -> None:
        super().__init__()
        self.others = others
        self.first = nn.Linear(6, 5)
        self.experts = nn.ModuleList(nn.Linear(5, 5) for _ in range(64))
        self.last = nn.Linear(5, 3)

    def forward(self, x: Tensor, expert: int) -> Tensor:
        x = torch.tanh(self.first(x))
        if self.others == "skipped":
            return self.last(torch.tanh(self.experts[expert](x)))
        parts = [each(x if number == expert else x[:0]) for number, each in enumerate(self.experts)]
        return self.last(torch.tanh(torch.cat(parts)))


def rare(steps: int, others: str) -> Task:
    """Return the task of the rare experts, with a batch of six rows for each of so many steps."""
    generator = torch.Generator().manual_seed(5)
    rows = {
        "x": torch.randn(6 * steps, 6, generator=generator),
        "y": torch.randint(0, 3, (6 * steps,), generator=generator),
        "expert": torch.randint(0, 64, (steps,), generator=generator).repeat_interleave(6),
    }

    def build() -> nn.Module:
        torch.manual_seed(6)
        return Rare(others)

    def loss(model: nn.Module, rows: Any) -> augend.Tally:
        return augend.losses.cross_entropy(model(rows["x"], int(rows["expert"][0])), rows["y"])

    return replace(TASKS["mlp"](), build=build, loss=loss, blocks=(), rows=rows, batch_size=6, shuffle=False)


def train_rare(place: str, deal: str | None, steps: int, others: str) -> Outcome:
    """Train the rare experts."""
    return Job(rare(steps, others), place, deal).train(steps)


def alike(expected: Outcome, outcomes: list[Outcome]) -> None:
    """Assert that runs ended with the same bits, and told the same of each step."""
    for each in outcomes:
        assert expected.weights == each.weights
        assert expected.optimizer == each.optimizer
        assert repr(expected.steps) == repr(each.steps)


def train_terms(place: str, deal: str | None) -> Outcome:
    """Train with a second loss term of another size, which is silent in the first two batches, and a loss scale."""
    task = TASKS["mlp"]()
    late = torch.ones(31)
    late[[row for rows in order(2) for row in rows]] = 0.0

    def losses(model: nn.Module, rows: Any) -> dict[str, augend.Tally]:
        logits = model(rows["x"])
        size = logits.square().sum(1) * rows["late"]
        return {
            "loss": augend.losses.cross_entropy(logits, rows["y"]),
            "size": augend.Tally(size * 2.0**-20, torch.ones_like(size)),
        }

    task = replace(task, rows={**task.rows, "late": late}, loss=losses)
    weights = ("term_weights", {"size": 2.0**18})
    return Job(task, place, deal, step=(weights,), terms=("loss", "size"), loss_scale=64.0).train(6)
