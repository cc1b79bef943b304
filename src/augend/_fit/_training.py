"""The training loop itself. Built on the public API alone: copy it, change it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Final, final

import torch
from torch import nn

from augend import Accumulator, Checkpoint, Finished, Tally, schedules
from augend._fit._evaluate import LossFunction, MetricFunction, evaluate
from augend._fit._history import Step, Validation
from augend._fit._told import Told
from augend.data import Batch, Batches, Microbatch

_UNTIL_ALL_KNOW: Final = 2  # ranks tell each other of a request in one save_if_due, and stop in the next


@final
class Unkept:
    """Stands in for a ``Checkpoint`` where there is none."""

    stop_requested: Final = False

    def save_if_due(self) -> None:
        """Nothing ever is."""


@final
@dataclass(frozen=True, slots=True)
class HeldOut:
    """What is measured as training goes on, and when it ends training.

    Args:
        rows: The held-out rows.
        every_steps: Steps between two validations.
        patience: The most validations in a row without a lower loss; None for any number.
        metrics: What is measured beside the loss.
    """

    rows: Batches
    every_steps: int
    patience: int | None
    metrics: Mapping[str, MetricFunction]


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """All that a training loop needs.

    Args:
        model: What the loss is given.
        data: Training rows.
        loss: The loss.
        optimizer: The optimizer.
        grads: Sums the gradients.
        finish: Ends a batch: ``grads.step`` with all of its arguments.
        schedule: Learning rate by the number of updates taken before.
        held_out: None for no validation.
        limit: Where training ends, in steps from the start of ``data``.
        digest_every: Steps between two with digests; None for none.
        told: Is told everything, and knows what was told before.
        keeper: Saves it all.
    """

    model: nn.Module
    data: Batches
    loss: LossFunction
    optimizer: torch.optim.Optimizer
    grads: Accumulator
    finish: Callable[[], Finished]
    schedule: Callable[[int], float] | None
    held_out: HeldOut | None
    limit: int
    digest_every: int | None
    told: Told
    keeper: Checkpoint | Unkept

    def run(self) -> str:
        """Train to the end, and say why it is the end."""
        for step in self._steps():
            if self.held_out is not None and self._is_enough(step, self.held_out):
                return f"no lower validation loss in {self.held_out.patience} validations"
        return f"all {self.limit} steps are done"

    def _steps(self) -> Iterator[Step]:
        """Yield every step once it is taken, told and saved; first of all the last one of an interrupted run."""
        last = self.told.steps[-1:]
        yield from last  # its validation may be still to do
        for batch in self.data:
            if batch.step >= self.limit:
                return
            if last and batch.step == last[0].step:
                continue  # handed out again, because another accumulator of the checkpoint knows nothing of it
            yield self._step(batch)

    def _step(self, batch: Batch) -> Step:
        begun = perf_counter()
        for microbatch in self.grads.microbatches(batch):
            self.grads.backward(self.loss(self.model, microbatch))
            self.keeper.save_if_due()
        if self.schedule is not None:
            schedules.apply(self.optimizer, self.schedule, self.grads.updates)
        done = self.finish()
        due = self.digest_every is not None and (batch.step + 1) % self.digest_every == 0
        digests = self.grads.digests() if due else {}
        (seconds,) = self.told.ranks.from_first([perf_counter() - begun])
        step = step_of(batch, done, self.optimizer, seconds, digests)
        self.told(step)
        self.keeper.save_if_due()
        return step

    def _is_enough(self, step: Step, held_out: HeldOut) -> bool:
        """Validate where that is due, and tell whether a validation of this step has used up the patience."""
        done = step.step + 1
        if not self._is_validated(step) and (done == self.limit or done % held_out.every_steps == 0):
            self._validate(step, held_out)
        return self._is_validated(step) and is_out_of_patience(self.told.validations, held_out.patience)

    def _is_validated(self, step: Step) -> bool:
        return any(validation.step == step.step for validation in self.told.validations[-1:])

    def _validate(self, step: Step, held_out: HeldOut) -> None:
        """Measure the held-out rows; a request to stop leaves it as if not begun, and ends in ``save_if_due``."""

        def loss(model: nn.Module, microbatch: Microbatch) -> Tally | Mapping[str, Tally]:
            if self.told.ranks.any(self.keeper.stop_requested):
                raise _StoppedError
            return self.loss(model, microbatch)

        begun = perf_counter()
        try:
            estimates = evaluate(self.model, held_out.rows, loss=loss, metrics=held_out.metrics, ranks=self.told.ranks)
        except _StoppedError:
            for _ in range(_UNTIL_ALL_KNOW):
                self.keeper.save_if_due()
        else:
            (seconds,) = self.told.ranks.from_first([perf_counter() - begun])
            self.told(Validation(step=step.step, epoch=step.epoch, estimates=estimates, seconds=seconds))


class _StoppedError(Exception):
    """A stop was requested while the held-out rows were measured."""


def step_of(
    batch: Batch, done: Finished, optimizer: torch.optim.Optimizer, seconds: float, digests: Mapping[str, str]
) -> Step:
    """Return the record of a batch."""
    return Step(
        step=batch.step,
        epoch=batch.epoch,
        rows=batch.rows,
        losses=done.losses,
        count=done.count,
        norm=done.norm,
        scale=done.scale,
        skipped=done.skipped,
        update=done.update,
        lr=float(optimizer.param_groups[0]["lr"]),
        seconds=seconds,
        offers=done.offers,
        digests=digests,
    )


def is_out_of_patience(validations: Sequence[Validation], patience: int | None) -> bool:
    """Whether the lowest first loss (the earliest one, and any number before NaN) is ``patience`` validations old."""
    values = [validation.loss.value for validation in validations]
    best = min(range(len(values)), key=lambda index: (math.isnan(values[index]), values[index]))
    return patience is not None and len(values) - 1 - best >= patience
