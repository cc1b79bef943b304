"""The window: everything that was added since the last finish, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import final

import torch
from torch import Tensor

from augend._numerics import COUNT_LIMIT, Moments, exact_sum
from augend._tally import Tally
from augend.errors import CounterOverflowError, GradientError, StateError, TallyError


@final
class Window:
    """Pending sums, counts and moments of one accumulator, as far as this rank holds them.

    Per-row totals and counts are kept as they came (a few bytes a row, nothing is read from the device) and folded
    into exact moments when somebody asks.

    Args:
        terms: Names of the loss terms.
        work: Dtype of the sums.
    """

    def __init__(self, terms: tuple[str, ...], work: torch.dtype) -> None:
        self.work = work
        self.sums: dict[str, dict[str, Tensor]] = {term: {} for term in terms}  # this rank's parts
        self.used: dict[str, set[str]] = {term: set() for term in terms}  # what had a gradient on this rank
        self.microbatches = 0  # of this rank, fillers not counted
        self.rounds = 0  # fillers counted: equally many on every rank
        self.rows_done = 0  # of the batch that is open
        self.step: int | None = None  # which batch that is
        self.loose = False  # some micro-batch did not come from Accumulator.microbatches()
        self.broken: str | None = None  # why only reset() and load_state_dict() go on
        self._moments: dict[str, Moments] = {term: Moments() for term in terms}
        self._tallies: dict[str, list[Tally]] = {term: [] for term in terms}
        self._without_gradient: dict[str, list[Tensor]] = {term: [] for term in terms}

    def guard(self) -> None:
        """Raise StateError if an earlier failure left this window unusable."""
        if self.broken is not None:
            raise StateError(
                f"{self.broken}; the window cannot go on. Call reset() to drop it and offer the batch again, "
                "or load_state_dict() to go back to a saved one"
            )

    def add_gradient(self, term: str, name: str, gradient: Tensor, like: Tensor) -> None:
        """Add one gradient to its sum; the first one of a window is copied.

        Args:
            term: The loss term.
            name: The parameter.
            gradient: Shaped like the parameter, and only read: autograd may have given its memory to others too.
            like: The parameter, whose memory layout the sum takes.
        """
        sums = self.sums[term]
        if gradient.shape != like.shape:  # else it would be broadcast
            raise GradientError(
                f"the gradient of {name!r} has shape {list(gradient.shape)} here, and its sum {list(like.shape)}: it "
                "is cut otherwise than its parameter"
            )
        if name in sums:
            sums[name].add_(gradient)
        else:
            sums[name] = torch.empty_like(like, dtype=self.work).copy_(gradient)

    def add_tally(self, term: str, tally: Tally, *, gradients: int) -> None:
        """Keep the rows of one micro-batch, and whether its backward made any gradient."""
        count = tally.count.clone()  # copies: the caller may use its buffers again before they are read
        self._tallies[term].append(Tally(tally.total.detach().clone(), count))
        if gradients == 0:
            self._without_gradient[term].append(count)

    def add_count(self, term: str, count: Fraction) -> None:
        """Count items whose gradients were made elsewhere and whose total nobody knows."""
        self._moments[term] += Moments.counted(count)

    def add_moments(self, moments: Mapping[str, Moments]) -> None:
        """Merge moments that were saved."""
        for term, one in moments.items():
            self._moments[term] += one

    def moments(self) -> dict[str, Moments]:
        """Return the exact moments of every term. Waits for the device.

        Raises:
            TallyError: A count is negative, inf or nan. The window cannot go on after this.
            GradientError: Something was counted whose backward made no gradient. The same.
            CounterOverflowError: The counts of a term sum to more than 2^63 - 1. The same.
        """
        self.guard()
        try:
            for term, tallies in self._tallies.items():
                self._fold(term, tallies)
        except (TallyError, GradientError, CounterOverflowError) as error:
            self.broken = f"its values were refused ({error})"
            raise
        return dict(self._moments)

    def _fold(self, term: str, tallies: list[Tally]) -> None:
        merged = self._moments[term] + _moments_of(term, tallies)
        if merged.count > COUNT_LIMIT:
            raise CounterOverflowError(
                f"the counts of term {term!r} sum to {merged.count}, and at most 2^63 - 1 = {COUNT_LIMIT} can be held; "
                "use smaller weights or batches"
            )
        uncovered = sum((exact_sum(count.reshape(-1)) for count in self._without_gradient[term]), Fraction(0))
        if uncovered:
            raise GradientError(
                f"term {term!r} counted {uncovered} items in micro-batches whose backward reached no trainable "
                "parameter; was the loss built under no_grad or detached? Give such a micro-batch a count of 0"
            )
        self._moments[term] = merged
        self._without_gradient[term].clear()
        tallies.clear()


def _moments_of(term: str, tallies: list[Tally]) -> Moments:
    """Take the exact moments of many tallies: those of one kind together, since a sum of exact sums is exact."""
    merged = Moments()
    for weighted in (False, True):
        kind = [tally for tally in tallies if tally.count.is_floating_point() == weighted]
        rows = [tally for tally in kind if tally.total.dim() == 1]
        if rows:
            merged += _checked(term, torch.cat([one.total for one in rows]), torch.cat([one.count for one in rows]))
        for tally in kind:
            if tally.total.dim() == 0:
                merged += _checked(term, tally.total, tally.count)
    return merged


def _checked(term: str, total: Tensor, count: Tensor) -> Moments:
    bad = ~torch.isfinite(count) | (count < 0)
    if bool(bad.any()):
        value = count[bad].reshape(-1)[0].item() if count.dim() else count.item()
        raise TallyError(f"a count of term {term!r} is {value}; counts and weights must be finite and not negative")
    return Moments.of(total, count)
