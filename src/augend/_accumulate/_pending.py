"""What one accumulator holds between two finishes, and how things get in: checks first, then the change."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Final, Literal, final

import torch
from torch import Tensor, nn

from augend._accumulate._arguments import check_numbers
from augend._accumulate._contract import WORK_DTYPES, Contract
from augend._accumulate._course import BatchLike, Course, M, MicrobatchLike
from augend._accumulate._gradients import Taker, check_given
from augend._accumulate._slots import Slots
from augend._accumulate._terms import Gradients, Terms
from augend._accumulate._window import Window
from augend._tally import Tally
from augend.errors import GradientError, StateError, TallyError

_FAILED: Final = "an exception left backward() or add(), so one micro-batch may be half added"


@final
class Pending:
    """Parameters, contract, window and way through the batch of one accumulator.

    Args:
        model: The module to train.
        dtype: Name of the work dtype.
        loss_scale: What every loss sum is multiplied by.
        terms: Names of the loss terms.
        foreign: What to do with a gradient that somebody else left in ``.grad``.
        max_microbatches: The most micro-batches of one window.

    Raises:
        ContractError: A number or a name is out of its domain, or a parameter cannot be trained.
        GradientError: The model makes sparse gradients.
        PlacementError: A parameter is not a plain tensor.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        dtype: str,
        loss_scale: float,
        terms: tuple[str, ...],
        foreign: Literal["error", "drop"],
        max_microbatches: int,
    ) -> None:
        check_numbers(dtype, loss_scale, terms, max_microbatches)
        self.work = WORK_DTYPES[dtype]
        self.slots = Slots(model, self.work)
        self.contract = Contract(dtype, loss_scale, terms, self.slots.tensors)
        self.terms = Terms(terms)
        self.taker = Taker(self.slots, foreign)
        self.course = Course()
        self.window = Window(terms, self.work)
        self.max_microbatches = max_microbatches

    def backward(self, tallies: Mapping[str, Tally], *, retain_graph: bool) -> None:
        """Differentiate each term's loss sum and keep gradients and rows."""
        microbatch = self._ready()
        _check_rows(tallies, microbatch)
        self._begin()
        last = self.terms.names[-1]
        for term, tally in tallies.items():
            taken = 0
            if tally.total.requires_grad:
                loss = tally.total.to(self.work).sum() * self.contract.loss_scale  # []
                taken = self.taker.run(loss, self.window, term, retain_graph=retain_graph or term != last)
            self.window.add_tally(term, tally, gradients=taken)
        self._end()

    def add(self, gradients: Mapping[str, Gradients], counts: Mapping[str, Fraction]) -> None:
        """Copy gradients that were made elsewhere."""
        for term, named in gradients.items():
            check_given(named, self.slots)
            if counts[term] and not named:
                raise GradientError(f"term {term!r} counts {counts[term]} items and brings no gradient")
        self._ready()
        self._begin()
        for term, named in gradients.items():
            for name, gradient in named.items():
                self.window.add_gradient(term, name, gradient.detach(), self.slots.parameters[name])
            self.window.add_count(term, counts[term])
        self._end()

    def like(self, name: str, tensor: Tensor) -> Tensor:
        """Return a copy in the work dtype, in the memory layout of the parameter ``name``."""
        return torch.empty_like(self.slots.parameters[name], dtype=self.work).copy_(tensor.detach())

    def check_drain(self) -> None:
        """Raise if the window cannot be finished: broken, rows not offered, or a changed model."""
        self.window.guard()
        self.course.check_finishable()
        self.slots.check()

    def drain(self) -> None:
        """Empty the window; the batch stays open until it is closed."""
        self.window = Window(self.terms.names, self.work)

    def swap(self, window: Window) -> None:
        """Put another window in the place of this one."""
        if self.window.broken is not None:
            self.taker.drop()  # a backward that failed may have left gradients behind
        self.window = window

    def _ready(self) -> MicrobatchLike | None:
        """Check all that can be checked without reading values; nothing is changed."""
        self.window.guard()
        self.slots.check()
        microbatch = self.course.current()
        if self.window.microbatches >= self.max_microbatches:
            raise StateError(f"the window holds {self.max_microbatches} micro-batches, which is max_microbatches")
        self.taker.check_foreign()
        return microbatch

    def _begin(self) -> None:
        self.taker.drop()
        self.window.broken = _FAILED

    def _end(self) -> None:
        self.window.broken = None
        self.window.microbatches += 1
        at = self.course.advance()
        if at is None:
            self.window.loose = True
        else:
            self.window.step, self.window.rows_done = at


def offer(batch: BatchLike[M], members: Sequence[tuple[object, Pending]]) -> Iterator[M]:
    """Offer what is left of a batch to several accumulators at once: the first one's share, one backward each.

    Args:
        batch: The batch.
        members: Each accumulator with what it holds.
    """
    turn = object()
    for owner, pending in members:
        pending.window.guard()
        pending.course.enter(owner, batch, pending.window, turn)
    _check_alike(batch, [owner for owner, _ in members])
    try:
        for microbatch in batch.remaining(members[0][0]):
            for _, pending in members:
                pending.course.hand_out(microbatch)
            yield microbatch
            for _, pending in members:
                pending.course.check_done(microbatch)
            batch.check_live()
    finally:
        for _, pending in members:
            pending.course.leave(turn)


def _check_alike(batch: BatchLike[M], owners: Sequence[object]) -> None:
    """One micro-batch for several is right only if all of them have done the same rows."""
    rows = []
    for owner in owners:
        progress = batch.progress(owner)
        rows.append(batch.rows if progress.closed else progress.rows_done)
    if len(set(rows)) > 1:
        raise StateError(
            f"accumulators that go through batch {batch.step} together have done {', '.join(map(str, rows))} of its "
            "rows; call reset() on each of them, and offer the batch again"
        )


def _check_rows(tallies: Mapping[str, Tally], microbatch: MicrobatchLike | None) -> None:
    """A tally of other rows than the micro-batch's would give a wrong standard error, silently."""
    if microbatch is None:
        return
    for term, tally in tallies.items():
        if tally.total.dim() == 1 and len(tally.total) != microbatch.real_rows:
            raise TallyError(
                f"the tally of term {term!r} has {len(tally.total)} rows and the micro-batch {microbatch.real_rows}: "
                "error bars need one number a row. Sum what belongs to one row, or give a 0-d total and count if the "
                "loss has no rows"
            )
