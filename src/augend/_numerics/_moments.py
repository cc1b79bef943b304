"""The exact first and second moments of per-row totals and counts."""

from __future__ import annotations

from dataclasses import dataclass, fields
from fractions import Fraction
from typing import final

import torch
from torch import Tensor

from augend._numerics._exact import fixed, on_grid, scaled


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
    finite: bool = True  # no total was inf or nan
    by_row: bool = True  # every total came with its row, so a standard error exists
    known: bool = True  # every count came with a total, so a value exists

    @staticmethod
    def of(total: Tensor, count: Tensor) -> Moments:
        """Take the moments of rows.

        Args:
            total: ``[rows]``, or 0-d for a sum over unknown rows; floating, without a graph. A non-finite total
                clears ``finite`` and adds nothing to the sums of totals.
            count: The same shape; int64, or weights, which are rounded to multiples of 2^-40.
        """
        by_row = total.dim() == 1
        total, count = total.reshape(-1), count.reshape(-1)
        if count.is_floating_point():
            count = on_grid(count)
        usable = torch.isfinite(total)
        totals, low_total = fixed(torch.where(usable, total, torch.zeros_like(total)))
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
            ValueError: A field is missing, unknown, of another type, or no number.
        """
        kinds = {field.name: type(field.default) for field in fields(Moments)}
        if plain.keys() != kinds.keys():
            raise ValueError(f"moments need the fields {sorted(kinds)}; got {sorted(map(str, plain))}")
        values: dict[str, object] = {}
        for name, kind in kinds.items():
            value = plain[name]
            if kind is Fraction and isinstance(value, str):
                value = Fraction(value)
            if type(value) is not kind:
                raise ValueError(f"moment {name!r} must be a {kind.__name__}; got {value!r}")
            values[name] = value
        return Moments(**values)  # type: ignore[arg-type]  # each was checked against its field just above
