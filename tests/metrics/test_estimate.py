"""Estimate: correctly rounded, undefined where it must be, printed to the digits that mean something."""

from __future__ import annotations

import dataclasses
import json
import math
from decimal import Decimal, localcontext
from fractions import Fraction

import pytest
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st

from augend import Estimate
from augend._numerics import Moments

ANY_FLOAT = st.floats(-1e300, 1e300)
ROWS = st.lists(st.tuples(ANY_FLOAT, st.integers(0, 2**62)), min_size=2)


def moments_of(rows: list[tuple[float, float]]) -> Moments:
    """Take the moments of (total, count) pairs."""
    return Moments.of_units((Fraction(total), Fraction(count)) for total, count in rows)


def float_of(square: Fraction) -> float:
    """Return the float64 nearest to a root, from 1,500 decimals of it."""
    with localcontext() as context:
        context.prec = 1500
        return float((Decimal(square.numerator) / Decimal(square.denominator)).sqrt())


@given(ROWS)
@example([(1e300, 1), (-1e300, 1), (1.0, 1)])
@example([(5e-324, 1), (0.0, 2**62)])
def test_ratio_and_error_are_correctly_rounded(rows):
    """Value and error are the float64 nearest to the exact S/C and the exact root of n/(n-1)·Σ(s - rc)²/C²."""
    exact = [(Fraction(s), Fraction(c)) for s, c in rows]
    assume(sum(c > 0 for _, c in exact) > 1)
    total, count, n = sum(s for s, _ in exact), sum(c for _, c in exact), len(exact)
    square = Fraction(n, n - 1) * sum((s - total / count * c) ** 2 for s, c in exact) / count**2
    estimate = Estimate.ratio(moments_of(rows))
    assert (float(total / count), float_of(square), count) == (estimate.value, estimate.error, estimate.count)


@given(ROWS, st.randoms(use_true_random=False))
def test_the_order_of_rows_changes_no_bit(rows, shuffler):
    """The same rows in another order: value, error, count and interval are equal to the bit."""
    hits = [(count - int(abs(total)) % (count + 1), count) for total, count in rows]
    expected = repr(Estimate.ratio(moments_of(rows))), repr(Estimate.proportion(moments_of(hits)))
    shuffler.shuffle(rows)
    shuffler.shuffle(hits)
    assert expected == (repr(Estimate.ratio(moments_of(rows))), repr(Estimate.proportion(moments_of(hits))))


def test_a_variance_does_not_cancel():
    """The variance of [1e8, 1e8 + 1] is 1/4 over the sample, not 0: the error is √(2/1 · 1/4 · 2)/2 = 1/2."""
    assert Estimate(1e8 + 0.5, 0.5, 2) == Estimate.ratio(moments_of([(1e8, 1), (1e8 + 1, 1)]))


@pytest.mark.parametrize(
    ("rows", "value"),
    [
        ([(1.0, 1)] * 8 + [(6.0, 1)] * 2, 2.0),  # a last short batch is not over-weighted
        ([(2.0, 1), (90.0, 9)], 9.2),  # the mean of means would be 6
        ([(3.0, 1), (8.0, 4)], 2.2),
    ],
)
def test_the_value_is_the_sum_over_the_count(rows, value):
    """Every item weighs the same, wherever it was cut."""
    assert value == Estimate.ratio(moments_of(rows)).value


NOTHING_COUNTED = Moments(rows=3)
NO_VALUE = {
    "nothing was counted": NOTHING_COUNTED,
    "no rows": Moments(),
    "a total was not finite": dataclasses.replace(moments_of([(1, 2), (3, 4)]), finite=False),
    "a total is not known": moments_of([(1, 2), (3, 4)]) + Moments.counted(Fraction(2)),
}
NO_ERROR = {
    "one row": moments_of([(3, 2)]),
    "one row that counted something": moments_of([(3, 2), (0, 0), (0, 0)]),
    "a sum over unknown rows": moments_of([(1, 2), (3, 4)]) + Moments.of(torch.tensor(3.0), torch.tensor(2)),
}


@pytest.mark.parametrize("case", NO_VALUE)
@pytest.mark.parametrize("estimate", [Estimate.ratio, Estimate.proportion])
def test_an_undefined_value_is_nan(estimate, case):
    """Value, error and interval are NaN, never 0 and never an exception; the count stays."""
    actual = estimate(NO_VALUE[case])
    assert all(math.isnan(number) for number in (actual.value, actual.error, actual.low, actual.high))
    assert NO_VALUE[case].count == actual.count


@pytest.mark.parametrize("case", NO_ERROR)
@pytest.mark.parametrize("estimate", [Estimate.ratio, Estimate.proportion])
def test_an_undefined_error_is_nan(estimate, case):
    """The value stands, the error and the interval are NaN: one row says nothing about the spread of rows."""
    actual = estimate(NO_ERROR[case])
    assert float(NO_ERROR[case].total / NO_ERROR[case].count) == actual.value
    assert all(math.isnan(number) for number in (actual.error, actual.low, actual.high))


def test_a_value_beyond_float64_is_inf():
    """A total over a tiny weight may exceed float64; the value says so instead of failing."""
    assert math.inf == Estimate.ratio(moments_of([(1e308, 2.0**-30), (1e308, 2.0**-30)])).value


@pytest.mark.parametrize(("count", "kind"), [(Fraction(3), int), (Fraction(2**64), int), (Fraction(1, 2), float)])
def test_a_count_is_an_int_where_it_is_integral(count, kind):
    """Items are counted in integers of any size, weights in floats."""
    estimate = Estimate.ratio(Moments.of_units([(Fraction(1), count / 2), (Fraction(1), count / 2)]))
    assert (kind, count) == (type(estimate.count), estimate.count)


def test_the_interval_is_one_standard_error_to_either_side():
    """Low and high are value ± error unless they are given."""
    assert (2.5, 3.5) == (Estimate(3.0, 0.5, 4).low, Estimate(3.0, 0.5, 4).high)
    assert (2.0, 3.25) == (Estimate(3.0, 0.5, 4, low=2.0).low, Estimate(3.0, 0.5, 4, high=3.25).high)


def test_an_estimate_is_plain_numbers_and_back():
    """asdict, JSON, and back: equal."""
    estimate = Estimate(0.99, 0.0099, 100, low=0.98, high=0.995)
    assert estimate == Estimate(**json.loads(json.dumps(dataclasses.asdict(estimate))))


@pytest.mark.parametrize(
    ("estimate", "text"),
    [
        (Estimate(3.84731, 0.01423, 9), "3.8473 ± 0.0142"),
        (Estimate(0.8, math.sqrt(0.8 * 0.2 / 99), 100), "0.8000 ± 0.0402"),
        (Estimate(3.84731, math.nan, 9), "3.8473 ± nan"),
        (Estimate(math.nan, math.nan, 0), "nan ± nan"),
        (Estimate(2.0, 0.0, 9), "2 ± 0"),
        (Estimate(1234.56, 12.345, 9), "1234.6 ± 12.3"),
        (Estimate(56789.4, 1234.5, 9), "56789 ± 1234"),
        (Estimate(1.0, 0.09996, 9), "1.000 ± 0.100"),  # three digits after rounding
        (Estimate(-1e-7, 2e-8, 9), "-1.0000e-07 ± 2.00e-08"),
        (Estimate(1e30, 1e28, 9), "1.0000e+30 ± 1.00e+28"),
        (Estimate(math.inf, math.inf, 9), "inf ± inf"),
    ],
)
def test_three_digits_of_the_error_set_the_decimals(estimate, text):
    """Printed are the digits that the error leaves, in a line that stays short."""
    assert text == str(estimate) == f"{estimate}"


def test_a_format_goes_to_both_numbers():
    """A format specification is applied to value and error alike."""
    assert f"{Estimate(3.84731, 0.01423, 9):.1%}" == "384.7% ± 1.4%"


# Accuracy


def shares(hits: int, items: int) -> Moments:
    """Return the moments of rows of one item each."""
    return moments_of([(1, 1)] * hits + [(0, 1)] * (items - hits))


def wilson(share: float, n: float) -> tuple[float, float]:
    """Return Wilson's interval for z = 1 in floats, as in Brown, Cai and DasGupta (2001), equation 4."""
    centre, half = share * n + 0.5, math.sqrt(n) * math.sqrt(share * (1 - share) + 1 / (4 * n))
    return (centre - half) / (n + 1), (centre + half) / (n + 1)


def test_eighty_of_a_hundred():
    """80 right of 100 are 0.80 ± √(0.8·0.2/99)."""
    estimate = Estimate.proportion(shares(80, 100))
    assert (0.8, float_of(Fraction(16, 100) / 99), 100) == (estimate.value, estimate.error, estimate.count)
    assert str(estimate) == "0.8000 ± 0.0402"


@pytest.mark.parametrize(("hits", "items"), [(2, 2), (3, 3), (100, 100), (10_000, 10_000), (0, 7), (0, 100)])
def test_all_right_or_all_wrong_is_not_certain(hits, items):
    """Of n of n, Wilson's interval is [n/(n+1), 1]: at 100 % the error is 1/(n+1), and the interval ends at 1."""
    estimate = Estimate.proportion(shares(hits, items))
    expected = (items / (items + 1), 1.0) if hits else (0.0, 1 / (items + 1))
    assert expected == (estimate.low, estimate.high)
    assert 1 / (items + 1) == estimate.error


@pytest.mark.parametrize(("hits", "items"), [(1, 10), (4, 1000), (97, 100), (3, 5), (2, 4)])
def test_wilson_where_fewer_than_five_are_hits_or_misses(hits, items):
    """The interval is Wilson's, and the error the larger distance to its ends."""
    estimate = Estimate.proportion(shares(hits, items))
    low, high = wilson(hits / items, items)
    # The reference takes about eight roundings of numbers up to n, divided by n + 1.
    assert low == pytest.approx(estimate.low, abs=8 * 2**-53)
    assert high == pytest.approx(estimate.high, abs=8 * 2**-53)
    assert max(estimate.value - estimate.low, estimate.high - estimate.value) == pytest.approx(
        estimate.error, abs=2**-52
    )


@pytest.mark.parametrize(("hits", "items"), [(5, 10), (5, 1000), (995, 1000), (50, 100)])
def test_the_normal_interval_from_five_on(hits, items):
    """With five hits and five misses, accuracy is the ratio of any other metric."""
    assert Estimate.ratio(shares(hits, items)) == Estimate.proportion(shares(hits, items))


def test_items_of_a_row_that_all_went_right_are_worth_one_row():
    """64 rows of 100 items, all right: [64/65, 1] as of 64 items, since whole rows may go wrong together."""
    estimate = Estimate.proportion(moments_of([(100, 100)] * 64))
    assert (64 / 65, 1.0, 6400) == (estimate.low, estimate.high, estimate.count)


def test_few_misses_are_worth_what_their_rows_say():
    """Three misses in three of 64 rows: k = 3, so n = C·(k+1)/(M + Σc²/C) = 6400·4/103, and Wilson's interval."""
    estimate = Estimate.proportion(moments_of([(100, 100)] * 61 + [(99, 100)] * 3))
    low, high = wilson(6397 / 6400, 6400 * 4 / 103)
    assert low == pytest.approx(estimate.low, abs=8 * 2**-53)
    assert high == pytest.approx(estimate.high, abs=8 * 2**-53)


def test_many_misses_in_one_row_are_one_event():
    """100 misses in one row of 64 are one event, and not 100 that would make the normal interval right."""
    estimate = Estimate.proportion(moments_of([(100, 100)] * 63 + [(0, 100)]))
    low, high = wilson(63 / 64, 64)
    assert low == pytest.approx(estimate.low, abs=8 * 2**-53)
    assert high == pytest.approx(estimate.high, abs=8 * 2**-53)
