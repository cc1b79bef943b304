"""Exact moments: against fractions, under any cut, beyond any range, and through JSON."""

from __future__ import annotations

import json
import math
import random
from fractions import Fraction

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from augend._numerics import COUNT_LIMIT, Moments, fraction

ANY_FLOAT = st.floats(allow_nan=False, allow_infinity=False)
COUNT = st.integers(0, 2**63 - 1)
ROWS = st.lists(st.tuples(ANY_FLOAT, COUNT))
EXTREME_ROWS = [(5e-324, 0), (1e300, 2**62), (-1e-300, 2**63 - 1), (1.7976931348623157e308, 2**53 + 1), (0.0, 0)]


def moments_of(rows: list[tuple[float, int]]) -> Moments:
    """Take the moments of (total, count) pairs at once."""
    totals = torch.tensor([total for total, _ in rows], dtype=torch.float64)
    return Moments.of(totals, torch.tensor([count for _, count in rows], dtype=torch.int64))


def reference(rows: list[tuple[float, float]]) -> Moments:
    """Take the moments one row at a time in fractions."""
    exact = [(Fraction(total), Fraction(count)) for total, count in rows]
    return Moments(
        rows=len(exact),
        total=sum((s for s, _ in exact), Fraction(0)),
        count=sum((c for _, c in exact), Fraction(0)),
        total_total=sum((s * s for s, _ in exact), Fraction(0)),
        total_count=sum((s * c for s, c in exact), Fraction(0)),
        count_count=sum((c * c for _, c in exact), Fraction(0)),
    )


@given(ROWS)
@example(EXTREME_ROWS)
def test_moments_are_exact_on_any_floats_and_counts(rows):
    """Subnormal, huge and mixed totals and counts up to 2^63 - 1: no sum is rounded."""
    assert reference(rows) == moments_of(rows)


@given(ROWS, st.randoms(use_true_random=False), st.integers(1, 5))
@example(EXTREME_ROWS, random.Random(0), 2)  # noqa: S311  it shuffles
def test_moments_are_the_same_bits_for_any_cut_and_order(rows, shuffler, size):
    """Cut into parts of any size, in any order, merged: equal to the moments of all at once."""
    expected = moments_of(rows)
    shuffler.shuffle(rows)
    parts = [moments_of(rows[start : start + size]) for start in range(0, len(rows), size)]
    shuffler.shuffle(parts)
    assert expected == sum(parts, Moments())


@given(ROWS)
@example(EXTREME_ROWS)
def test_moments_of_units_are_those_of_rows(rows):
    """Units given by exact totals and counts have the moments of rows with those totals and counts."""
    assert moments_of(rows) == Moments.of_units((Fraction(s), Fraction(c)) for s, c in rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_moments_take_narrow_totals_as_they_are(dtype):
    """Totals of narrow dtypes are read exactly, with their own values and not those they were rounded from."""
    totals = torch.tensor([0.1, -3.7, 257.0, 6e-5], dtype=dtype)
    expected = reference([(total, 3) for total in totals.tolist()])
    assert expected == Moments.of(totals, torch.full((4,), 3))


def test_counts_beyond_63_bits_are_exact():
    """Four counts of 2^62 sum to 2^64, their squares to 2^126: the sums do not wrap."""
    moments = Moments.of(torch.ones(4), torch.full((4,), 2**62))
    assert (2**64, 2**126) == (moments.count, moments.count_count)
    assert moments.count > COUNT_LIMIT


def test_a_running_total_does_not_stop_growing():
    """1e8 and a thousand times 1.0 are 100001000, as no float32 sum finds."""
    totals = torch.tensor([1e8] + [1.0] * 1000)
    assert 100_001_000 == sum((Moments.of(one, torch.tensor(1)) for one in totals), Moments()).total


@given(st.lists(st.floats(0, 1e18), min_size=1))
@example([1 / 3, 1e-13, 0.0])
def test_fractional_counts_are_rounded_once_a_row(weights):
    """Weights count as multiples of 2^-40, and their sum is that of the rounded ones exactly."""
    rounded = [float(round(Fraction(weight) * 2**40)) / 2**40 if weight < 2**13 else weight for weight in weights]
    expected = reference([(1.0, weight) for weight in rounded])
    counts = torch.tensor(weights, dtype=torch.float64)
    assert expected == Moments.of(torch.ones(len(weights)), counts)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_total_that_is_not_finite_sets_a_flag(bad):
    """Inf and nan are remembered, through merges too, and do not spoil the sums of the others."""
    moments = Moments.of(torch.tensor([1.0, bad]), torch.tensor([2, 3])) + Moments.of(torch.ones(1), torch.ones(1))
    assert (False, 2, 6) == (moments.finite, moments.total, moments.count)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_count_that_is_not_finite_sets_the_same_flag(bad):
    """A weight of inf or nan makes the value undefined rather than large."""
    moments = Moments.of(torch.ones(2), torch.tensor([bad, 3.0]))
    assert (False, 2, 3) == (moments.finite, moments.total, moments.count)


def test_a_sum_over_unknown_rows_says_so():
    """A 0-d total counts no row and clears by_row; a count without a total clears known as well."""
    loose = Moments.of(torch.tensor(3.0), torch.tensor(2))
    assert (0, 3, 2, False, True) == (loose.rows, loose.total, loose.count, loose.by_row, loose.known)
    both = Moments.of(torch.ones(1), torch.ones(1)) + Moments.counted(Fraction(5))
    assert (1, 1, 6, False, False) == (both.rows, both.total, both.count, both.by_row, both.known)


def test_no_rows_are_the_neutral_element():
    """The moments of nothing are Moments(), and adding them changes nothing."""
    empty = Moments.of(torch.empty(0), torch.empty(0, dtype=torch.int64))
    some = moments_of([(1.5, 2)])
    assert Moments() == empty
    assert some == some + empty


@given(ROWS, st.booleans())
@example(EXTREME_ROWS, True)
@example([(1.7976931348623157e308, 2**63 - 1)] * 3 + [(5e-324, 0)], False)
def test_moments_survive_json(rows, loose):
    """to_plain, JSON, from_plain: equal, to the last bit of the widest sums."""
    moments = moments_of(rows) + (Moments.counted(Fraction(7, 8)) if loose else Moments())
    assert moments == Moments.from_plain(json.loads(json.dumps(moments.to_plain())))


REFUSED = {
    "rows": [-1, 1.0, "1", True, None],
    "total": [1, 0.5, "nan", "inf", "1e999999999", "0.5", "1/3", "2/4", "1/0", " 1", "1_0", "", None, "400/1", "99"],
    "count": ["-1", "nan", "-0", "9223372036854775808"],
    "total_total": ["-1/2", "0"],
    "total_count": ["99", "-99"],
    "count_count": ["-1", "0"],
    "finite": [1, "true", None],
    "by_row": [0],
    "known": ["yes"],
}


@pytest.mark.parametrize(("name", "bad"), [(name, bad) for name, values in REFUSED.items() for bad in values])
def test_from_plain_refuses_what_no_rows_have(name, bad):
    """Another type, no number, a denominator that is no power of two, or sums that no rows have: refused at once."""
    plain = moments_of([(1.5, 2), (2.0, 1)]).to_plain() | {name: bad}
    with pytest.raises(ValueError, match=r"moment|no rows|fraction"):
        Moments.from_plain(plain)


def test_from_plain_names_missing_and_unknown_fields():
    """A field too few or too many is refused."""
    plain = Moments().to_plain()
    with pytest.raises(ValueError, match="need the fields"):
        Moments.from_plain(plain | {"more": 1})
    del plain["known"]
    with pytest.raises(ValueError, match="need the fields"):
        Moments.from_plain(plain)


@pytest.mark.parametrize("text", ["-3/8", "0", "17", "1/2"])
def test_a_fraction_is_read_as_it_is_written(text):
    """fraction() is the inverse of str()."""
    assert text == str(fraction("x", text))
