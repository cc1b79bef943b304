"""Estimate: a number, its standard error, and how much it was taken from."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Final, final

from augend._numerics import Moments, nearest, root

# Fewer than five hits or misses, and the normal interval of a proportion fails; docs/error-bars.md measures it.
_FEWEST_EVENTS: Final = 5
_MOST_DECIMALS: Final = 9
_LARGEST_FIXED: Final = 1e9


@final
@dataclass(frozen=True, slots=True)
class Estimate:
    """A measured number with its standard error. What is undefined is NaN.

    Args:
        value: The number.
        error: Its standard error: about 68 of 100 such intervals cover the true value. NaN where fewer than two
            rows were counted, or where the rows are not known.
        count: How many items (or how much weight) the number was taken from; an int where it is integral.
        low: The lower end of the interval; ``value - error`` where it is left out.
        high: The upper end; ``value + error`` where it is left out. The interval of an accuracy near 0 or 1, and
            that of a perplexity, is not symmetric.

    Example:
        >>> print(augend.Estimate(3.84731, 0.01423, 32_768))
        3.8473 ± 0.0142
        >>> f"{augend.Estimate(3.84731, 0.01423, 32_768):.2f}"
        '3.85 ± 0.01'
    """

    value: float
    error: float
    count: int | float
    low: float = field(default=math.nan, kw_only=True)
    high: float = field(default=math.nan, kw_only=True)

    def __post_init__(self) -> None:
        if math.isnan(self.low):
            object.__setattr__(self, "low", self.value - self.error)
        if math.isnan(self.high):
            object.__setattr__(self, "high", self.value + self.error)

    def __str__(self) -> str:
        """Show three significant digits of the error, and as many decimals of the value."""
        if not math.isfinite(self.error) or self.error == 0:
            return format(self, ".5g")
        decimals = max(0, 2 - int(f"{self.error:.2e}".partition("e")[2]))
        if decimals > _MOST_DECIMALS or max(abs(self.value), self.error) >= _LARGEST_FIXED:
            return f"{self.value:.4e} ± {self.error:.2e}"
        return format(self, f".{decimals}f")

    def __format__(self, spec: str) -> str:
        """Apply a format to value and error both; without one, the same as ``str``."""
        return f"{self.value:{spec}} ± {self.error:{spec}}" if spec else str(self)

    @staticmethod
    def ratio(moments: Moments) -> Estimate:
        """Estimate the sum of all totals over the sum of all counts: the mean of an item.

        The rows are the sample, not the items: items of one row may resemble each other as they like. With r = S/C
        over n rows, error² = n/(n-1) · Σ(sᵢ - r·cᵢ)² / C² (Cochran 1977, §2.11, without the finite-population term).

        Args:
            moments: Of the rows.

        Returns:
            NaN with a NaN error where nothing was counted, a total was not finite, or a total is not known. A NaN
            error where fewer than two rows counted anything, or where some total did not come with its row.

        Numerics:
            Value and error are formed once from exact sums, and are the float64 nearest to the exact results: the
            same bits for any cut and any order of the rows.
        """
        count = _plain(moments.count)
        if not _has_value(moments):
            return Estimate(math.nan, math.nan, count)
        value = moments.total / moments.count
        error = nearest(root(_variance(moments, value))) if _has_error(moments) else math.nan
        return Estimate(nearest(value), error, count)

    @staticmethod
    def proportion(moments: Moments) -> Estimate:
        """Estimate the share of items that are hits, each total being between 0 and its count.

        As ``ratio`` where at least five hits and five misses were seen, else Wilson's interval, which is not empty
        when all were right (Wilson 1927; Brown, Cai and DasGupta 2001). The items of a row may be right or wrong
        together, so what is counted are the events that would be as uncertain if they were independent: k = M²/Σmᵢ²
        for mᵢ misses (or hits, whichever gives fewer) of row i, M of them in all (Kish 1965). One more event, of the
        size of a whole row, is added to learn how large events are: C items are worth
        n = C · (k + 1) / (M + Σcᵢ²/C) independent ones. With one item a row, k = M and n = C.

        Args:
            moments: Of the rows.

        Returns:
            The interval in ``low`` and ``high``; ``error`` is the larger of their distances from ``value``. NaN as
            in ``ratio``.

        Numerics:
            As ``ratio``.
        """
        if not (_has_value(moments) and _has_error(moments)):
            return Estimate.ratio(moments)
        events, items = _rarer(moments)
        if events >= _FEWEST_EVENTS:
            return Estimate.ratio(moments)
        worth = moments.count * (events + 1) / (items + moments.count_count / moments.count)
        value = moments.total / moments.count
        low, high = _wilson(value, worth)
        return Estimate(
            nearest(value),
            nearest(max(value - low, high - value)),
            _plain(moments.count),
            low=nearest(low),
            high=nearest(high),
        )


def _has_value(moments: Moments) -> bool:
    return moments.known and moments.finite and moments.count != 0


def _has_error(moments: Moments) -> bool:
    """Tell whether two rows or more counted something; Σc² = (Σc)² says that only one did."""
    return moments.by_row and moments.rows > 1 and moments.count_count != moments.count**2


def _variance(moments: Moments, ratio: Fraction) -> Fraction:
    deviations = (
        moments.total_total - 2 * ratio * moments.total_count + ratio**2 * moments.count_count
    )  # Σ(s - r·c)², never negative because it is exact
    return deviations * moments.rows / (moments.rows - 1) / moments.count**2


def _rarer(moments: Moments) -> tuple[Fraction, Fraction]:
    """Return how many independent events the hits or the misses amount to, and their items: of what has fewer."""
    misses = moments.count - moments.total
    misses_misses = moments.count_count - 2 * moments.total_count + moments.total_total
    return min(_events(moments.total, moments.total_total), _events(misses, misses_misses))


def _events(items: Fraction, squares: Fraction) -> tuple[Fraction, Fraction]:
    return (items**2 / squares if squares else Fraction(0)), items


def _wilson(share: Fraction, worth: Fraction) -> tuple[Fraction, Fraction]:
    """Return Wilson's interval of one standard error for a share seen in ``worth`` independent items."""
    shrink = 1 + 1 / worth
    centre = (share + 1 / (2 * worth)) / shrink
    half = root((share * (1 - share) / worth + 1 / (4 * worth**2)) / shrink**2)
    return max(centre - half, Fraction(0)), min(centre + half, Fraction(1))


def _plain(count: Fraction) -> int | float:
    return count.numerator if count.denominator == 1 else nearest(count)
