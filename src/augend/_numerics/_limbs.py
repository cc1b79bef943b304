"""Exact moments as small integers that ranks can add up without rounding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Final, final

from augend._numerics._moments import Moments

_LIMB_BITS: Final = 32  # a sum of 2^31 such limbs still fits an int64


@final
@dataclass(frozen=True, slots=True)
class _Grid:
    """The integers that one sum is written in: multiples of ``2**-bits``, in ``limbs`` digits of 32 bits.

    Floats are multiples of 2^-1074 below 2^1024; counts of 2^-40, at most 2^63; there are fewer than 2^63 rows.
    """

    name: str
    bits: int
    limbs: int


_GRIDS: Final = (
    _Grid("total", 1074, 68),
    _Grid("count", 40, 4),
    _Grid("total_total", 2148, 134),
    _Grid("total_count", 1114, 69),
    _Grid("count_count", 80, 7),
)
_FLAGS: Final = ("finite", "by_row", "known")
LIMBS: Final = 1 + len(_FLAGS) + sum(grid.limbs for grid in _GRIDS)


def to_limbs(moments: Moments) -> list[int]:
    """Write moments as ``LIMBS`` integers, of which sums over ranks are the moments of all their rows.

    Raises:
        ValueError: A moment is on no such grid, as those of floats and counts up to 2^63 - 1 are.
    """
    limbs = [moments.rows, *(not getattr(moments, name) for name in _FLAGS)]
    for grid in _GRIDS:
        limbs.extend(_digits(getattr(moments, grid.name), grid))
    return limbs


def from_limbs(limbs: Sequence[int]) -> Moments:
    """Read what ``to_limbs`` wrote, or a sum of several such."""
    rows, *flags = limbs[: 1 + len(_FLAGS)]
    begin = 1 + len(_FLAGS)
    sums: dict[str, Fraction] = {}
    for grid in _GRIDS:
        digits = limbs[begin : begin + grid.limbs]
        begin += grid.limbs
        integer = sum(digit << (_LIMB_BITS * place) for place, digit in enumerate(digits))
        sums[grid.name] = Fraction(integer, 1 << grid.bits)
    finite, by_row, known = (flag == 0 for flag in flags)
    return Moments(rows=rows, finite=finite, by_row=by_row, known=known, **sums)


def _digits(number: Fraction, grid: _Grid) -> list[int]:
    integer = number * (1 << grid.bits)
    if integer.denominator != 1 or abs(integer.numerator).bit_length() > _LIMB_BITS * grid.limbs:
        raise ValueError(f"moment {grid.name!r} is no sum of float64 numbers")
    sign, rest = (-1, -integer.numerator) if integer < 0 else (1, integer.numerator)
    return [sign * (rest >> (_LIMB_BITS * place) & (1 << _LIMB_BITS) - 1) for place in range(grid.limbs)]
