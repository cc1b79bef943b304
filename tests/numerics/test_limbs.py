"""Moments as limbs: what ranks add up is exactly what one process would have, for any rows and any deal of them."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from augend._numerics import COUNT_LIMIT, LIMBS, Moments, from_limbs, to_limbs

FLOATS = st.floats(allow_nan=True, allow_infinity=True, width=64)
WEIGHTS = st.floats(min_value=0, max_value=2.0**62, width=64)
ROWS = st.lists(st.tuples(FLOATS, WEIGHTS), max_size=8)


def moments_of(rows: list[tuple[float, float]]) -> Moments:
    """Take the moments of rows."""
    total = torch.tensor([one for one, _ in rows], dtype=torch.float64)
    return Moments.of(total, torch.tensor([one for _, one in rows], dtype=torch.float64))


@given(ROWS)
def test_moments_come_back(rows: list[tuple[float, float]]) -> None:
    """Reading what was written gives the same exact fractions and flags."""
    moments = moments_of(rows)
    assert moments == from_limbs(to_limbs(moments))


@given(st.lists(ROWS, min_size=1, max_size=4))
def test_sums_of_limbs_are_the_moments_of_all_rows(deal: list[list[tuple[float, float]]]) -> None:
    """Adding limbs as int64, as ranks do, gives the moments of all their rows, whatever the deal."""
    added = torch.tensor([to_limbs(moments_of(rows)) for rows in deal], dtype=torch.int64).sum(dim=0).tolist()
    expected = moments_of([row for rows in deal for row in rows])
    merged = sum((moments_of(rows) for rows in deal), Moments())
    assert merged == from_limbs(added)
    assert expected.total == from_limbs(added).total


def test_the_extremes_of_float64_fit() -> None:
    """The largest and the smallest float64 and the largest count, squared and multiplied, are exact."""
    extreme = [torch.finfo(torch.float64).max, -5e-324, 5e-324]
    moments = Moments.of(torch.tensor(extreme, dtype=torch.float64), torch.tensor([COUNT_LIMIT, 0, 1]))
    assert len(to_limbs(moments)) == LIMBS
    assert moments == from_limbs(to_limbs(moments))


def test_what_is_no_sum_of_floats_is_refused() -> None:
    """A moment off the grid, as only a forged state has it, is an error and not rounded."""
    with pytest.raises(ValueError, match="'total' is no sum of float64 numbers"):
        to_limbs(Moments(rows=1, total=Fraction(1, 2**1075)))
    with pytest.raises(ValueError, match="'count' is no sum of float64 numbers"):
        to_limbs(Moments(rows=1, count=Fraction(2**200)))
