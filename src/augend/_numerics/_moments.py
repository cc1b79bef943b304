"""The exact first and second moments of per-row totals and counts."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, fields
from fractions import Fraction
from typing import Final, final

import torch
from torch import Tensor

from augend._numerics._exact import fixed, on_grid, scaled

# What str(Fraction) writes. Fraction itself would read "1e999999999" too, and be busy for hours.
_FRACTION: Final = re.compile(r"-?[0-9]{1,4000}(/[1-9][0-9]{0,3999})?")


@final
@dataclass(frozen=True, slots=True)
class Moments:
    """Exact sums over rows of total s, count c, and their products; merging two is addition, without rounding.

    Every finite float64 is an integer multiple of 2^-1074, so the sums are integers on that grid (2^-2148 for
    products), kept as reduced fractions. Hence the same bits for any order and any cut of the rows.
    """

    rows: int = 0
    total: Fraction = Fraction(0)  # Σ s
    count: Fraction = Fraction(0)  # Σ c
    total_total: Fraction = Fraction(0)  # Σ s²
    total_count: Fraction = Fraction(0)  # Σ s·c
    count_count: Fraction = Fraction(0)  # Σ c²
    finite: bool = True  # no total (and no count) was inf or nan
    by_row: bool = True  # every total came with its row, so a standard error exists
    known: bool = True  # every count came with a total, so a value exists

    @staticmethod
    def of(total: Tensor, count: Tensor) -> Moments:
        """Take the moments of rows.

        Args:
            total: ``[rows]``, or 0-d for a sum over unknown rows; floating, without a graph. A non-finite total
                clears ``finite`` and adds nothing to the sums of totals.
            count: The same shape; int64, or weights, which are rounded to multiples of 2^-40. A non-finite one
                clears ``finite`` and counts nothing.
        """
        by_row = total.dim() == 1
        total, count = total.reshape(-1), count.reshape(-1)
        usable = torch.isfinite(total)
        totals, low_total = fixed(torch.where(usable, total, torch.zeros_like(total)))
        if count.is_floating_point():
            countable = torch.isfinite(count)
            count = on_grid(torch.where(countable, count, torch.zeros_like(count)))
            usable = usable & countable
        counts, low_count = fixed(count)
        return Moments(
            rows=len(totals) if by_row else 0,
            total=scaled(int(totals.sum()), low_total),
            count=scaled(int(counts.sum()), low_count),
            total_total=scaled(int((totals * totals).sum()), 2 * low_total),
            total_count=scaled(int((totals * counts).sum()), low_total + low_count),
            count_count=scaled(int((counts * counts).sum()), 2 * low_count),
            finite=bool(usable.all()),
            by_row=by_row,
        )

    @staticmethod
    def of_units(units: Iterable[tuple[Fraction, Fraction]]) -> Moments:
        """Take the moments of sampling units whose exact total and count are known already.

        Args:
            units: A total and a count each; every one is counted as a row.
        """
        totals, counts = [], []
        for total, count in units:
            totals.append(total)
            counts.append(count)
        finest = max((one.denominator for one in (*totals, *counts)), default=1)  # powers of two: it holds the others
        s = [total.numerator * (finest // total.denominator) for total in totals]
        c = [count.numerator * (finest // count.denominator) for count in counts]
        return Moments(
            rows=len(totals),
            total=Fraction(sum(s), finest),
            count=Fraction(sum(c), finest),
            total_total=Fraction(sum(one * one for one in s), finest**2),
            total_count=Fraction(sum(one * other for one, other in zip(s, c, strict=True)), finest**2),
            count_count=Fraction(sum(one * one for one in c), finest**2),
        )

    @staticmethod
    def counted(count: Fraction) -> Moments:
        """Return the moments of a count whose total is not known, as of gradients made elsewhere."""
        return Moments(count=count, by_row=False, known=False)

    def __add__(self, other: Moments) -> Moments:
        """Merge the moments of two disjoint sets of rows, exactly."""
        return Moments(
            rows=self.rows + other.rows,
            total=self.total + other.total,
            count=self.count + other.count,
            total_total=self.total_total + other.total_total,
            total_count=self.total_count + other.total_count,
            count_count=self.count_count + other.count_count,
            finite=self.finite and other.finite,
            by_row=self.by_row and other.by_row,
            known=self.known and other.known,
        )

    def to_plain(self) -> dict[str, int | str | bool]:
        """Return the moments as numbers and strings that JSON keeps exactly."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: str(value) if isinstance(value, Fraction) else value for name, value in values.items()}

    @staticmethod
    def from_plain(plain: dict[str, int | str | bool]) -> Moments:
        """Read what ``to_plain`` wrote.

        Raises:
            ValueError: A field is missing, unknown, of another type, or no number; or no rows have such moments.
        """
        kinds: dict[str, type] = {field.name: type(field.default) for field in fields(Moments)}
        if plain.keys() != kinds.keys():
            raise ValueError(f"moments need the fields {sorted(kinds)}; got {sorted(map(str, plain))}")
        values: dict[str, object] = {}
        for name, kind in kinds.items():
            value = plain[name]
            if kind is not Fraction and type(value) is not kind:
                raise ValueError(f"moment {name!r} must be of type {kind.__name__}; got {value!r:.80}")
            values[name] = fraction(name, value) if kind is Fraction else value
        moments = Moments(**values)  # type: ignore[arg-type]  # each was checked against its field just above
        moments._check()
        return moments

    def _check(self) -> None:
        """Raise ValueError if no rows can have these moments."""
        for name in ("rows", "count", "total_total", "count_count"):
            if getattr(self, name) < 0:
                raise ValueError(f"moment {name!r} cannot be negative; got {getattr(self, name)}")
        bounds = {"total_count": (self.total_count, self.total_total * self.count_count)}
        if self.by_row:
            bounds["total"] = self.total, self.rows * self.total_total
            bounds["count"] = self.count, self.rows * self.count_count
        for name, (value, largest_square) in bounds.items():
            if value**2 > largest_square:  # Cauchy and Schwarz
                raise ValueError(f"no rows have these moments: {name!r} is {value}, too large for the sums of squares")


def fraction(name: str, text: object) -> Fraction:
    """Read an exact sum of floats from what ``str`` made of it.

    Raises:
        ValueError: It is no such text, or its denominator is no power of two, as that of every sum of floats is.
    """
    if not isinstance(text, str) or not _FRACTION.fullmatch(text):
        raise ValueError(f"{name!r} must be a fraction written like '-3/8'; got {text!r:.80}")
    number = Fraction(text)
    if number.denominator & (number.denominator - 1) or str(number) != text:
        raise ValueError(f"{name!r} must be a reduced fraction over a power of two; got {text:.80}")
    return number
