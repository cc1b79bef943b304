"""The window: everything that was added since the last finish, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import final

import torch
from torch import Tensor

from augend._accumulate._scales import Scales, Sizes
from augend._numerics import COUNT_LIMIT, Moments, add_fixed_, exact_sum
from augend._placement import Dtypes
from augend._tally import Tally
from augend.errors import CounterOverflowError, GradientError, StateError, TallyError


@final
class Window:
    """Pending sums, counts and moments of one accumulator, as far as this rank holds them.

    Per-row totals and counts are kept as they came (a few bytes a row, nothing is read from the device) and folded
    into exact moments when somebody asks.

    Args:
        terms: Names of the loss terms.
        dtypes: Of gradients and of sums.
        scales: The grids of exact sums; None of others.
    """

    def __init__(self, terms: tuple[str, ...], dtypes: Dtypes, scales: Scales | None = None) -> None:
        self.work, self.held = dtypes
        self.scales = scales
        self.offer = 0  # how often the batch was offered before
        self.unfit: Sizes | None = None  # what its grids could not hold, of a batch that nobody offers again
        self.before: Scales | None = None  # the grids of the first offer, where this is the second
        self.resumed = False  # its first micro-batches were made before a load, perhaps of another size
        self.seen: tuple[int, ...] | None = None  # how large gradients were in the first offer, if that was here
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
        """Add one gradient to its sum; an exact one whose term is only measured stays zero.

        Args:
            term: The loss term.
            name: The parameter.
            gradient: Shaped like the parameter, floating or on the sum's grid already, and only read: autograd may
                have given its memory to others too.
            like: The parameter, whose memory layout the sum takes.
        """
        sums = self.sums[term]
        if gradient.shape != like.shape:  # else it would be broadcast
            raise GradientError(
                f"the gradient of {name!r} has shape {list(gradient.shape)} here, and its sum {list(like.shape)}: it "
                "is cut otherwise than its parameter"
            )
        if self.scales is not None and gradient.is_floating_point():
            if name not in sums:
                sums[name] = torch.zeros_like(like, dtype=self.held)
            scale = self.scales.of(term, name)
            if scale is not None:
                add_fixed_(sums[name], gradient, scale)
        elif name in sums:
            sums[name].add_(gradient)
        else:
            sums[name] = torch.empty_like(like, dtype=self.held).copy_(gradient)

    def see(self, term: str, name: str, size: Tensor) -> None:
        """Take note of how large a gradient is, ``[]`` float64, where scales are made of it."""
        if self.scales is not None:
            self.scales.see(term, name, size)

    def shared(self, term: str, name: str, gradient: Tensor) -> Tensor:
        """Return a gradient of this rank in the form in which ranks add it up."""
        if self.scales is None:
            return gradient
        whole = torch.zeros_like(gradient, dtype=self.held)
        scale = self.scales.of(term, name)
        if scale is not None:
            add_fixed_(whole, gradient, scale)
        return whole

    def add_tally(self, term: str, tally: Tally, *, gradients: int) -> None:
        """Keep the rows of one micro-batch, and whether its backward made any gradient."""
        count = tally.count.clone()  # copies: the caller may use its buffers again before they are read
        self._tallies[term].append(Tally(tally.total.detach().clone(), count))
        if gradients == 0:
            self._without_gradient[term].append(count)

    def counted(self) -> dict[str, bool]:
        """Tell of each term whether anything was counted on this rank. Waits for the device."""
        return {
            term: bool(self._moments[term].count) or any(bool((one.count != 0).any()) for one in tallies)
            for term, tallies in self._tallies.items()
        }

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
