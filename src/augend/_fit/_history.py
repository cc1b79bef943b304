"""What a training run tells while it runs, and what is left of it afterwards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias, final

from augend import Estimate, Position


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One batch was trained on.

    Args:
        step: Its number over all epochs, from 0, as ``Batch.step``.
        epoch: Its epoch, from 0.
        rows: Rows of the batch.
        losses: Each loss term over the rows of the batch, before the update.
        count: Supervised items of the first term; an int unless weights are fractional.
        norm: 2-norm of the mean gradient before clipping.
        scale: The factor that clipping put on it, at most 1.
        skipped: Whether the optimizer was left out.
        update: Updates really taken so far, this one included.
        lr: Learning rate of the optimizer's first group of parameters.
        seconds: Wall time of the step, without validation and listeners.
        offers: How often the batch was offered: 2 where ``dtype="exact"`` had to measure or to widen its scales.
        digests: Of each trained parameter after the step, see ``augend.Accumulator.digests()``; empty where none were
            asked for.
    """

    step: int
    epoch: int
    rows: int
    losses: Mapping[str, Estimate]
    count: int | float
    norm: float
    scale: float
    skipped: bool
    update: int
    lr: float
    seconds: float
    offers: int = 1
    digests: Mapping[str, str] = field(default_factory=dict)

    @property
    def loss(self) -> Estimate:
        """The first loss term."""
        return next(iter(self.losses.values()))


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Validation:
    """The held-out rows were looked at.

    Args:
        step: Number of the last step before it, from 0.
        epoch: Epoch of that step, from 0.
        estimates: Each loss term, then each metric, over all held-out rows.
        seconds: Wall time it took.
    """

    step: int
    epoch: int
    estimates: Mapping[str, Estimate]
    seconds: float

    @property
    def loss(self) -> Estimate:
        """The first loss term: what early stopping watches."""
        return next(iter(self.estimates.values()))


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class History:
    """All that ``fit`` told, in order, and why it stopped.

    Args:
        steps: One record a step.
        validations: One record a validation.
        stopped: Why training ended, for people.
    """

    steps: tuple[Step, ...]
    validations: tuple[Validation, ...]
    stopped: str

    def __str__(self) -> str:
        """Return a few lines for people: how far it went, the first and last loss, the last validation."""
        lines = [f"{len(self.steps)} steps: {self.stopped}"]
        if self.steps:
            lines.append(f"training loss {self.steps[0].loss} at first, {self.steps[-1].loss} at last")
        if self.validations:
            estimates = self.validations[-1].estimates
            lines.append("validation " + ", ".join(f"{name} {estimate}" for name, estimate in estimates.items()))
        return "\n".join(lines)


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Begin:
    """Training is about to begin, or to go on.

    Args:
        steps: Where training will end unless it is stopped early, counted from the start of ``data``.
        history: What was done before, and is not told again: empty where nothing was saved yet. None without a
            checkpoint, which is to say that nobody knows.
        restarts: How often the checkpoint's directory was gone on from, this time included.
        position: Where training goes on; None where it begins.
        world: How many ranks train together.
    """

    steps: int
    history: History | None = None
    restarts: int = 0
    position: Position | None = None
    world: int = 1


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class End:
    """Training is over, and not because of an exception.

    Args:
        history: What ``fit`` is about to return.
    """

    history: History


Event: TypeAlias = Begin | Step | Validation | End


class Listener(Protocol):
    """Anything that can be called with an event; a plain function will do."""

    def __call__(self, event: Event, /) -> object:
        """Take note of what happened; called on the training thread, so be quick."""
