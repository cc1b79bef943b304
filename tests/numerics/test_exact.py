"""Sums without rounding, the grid of weights, and the two roundings at the end."""

from __future__ import annotations

import math
import random
from decimal import Decimal, localcontext
from fractions import Fraction

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from augend._numerics import exact_sum, fixed, nearest, on_grid, root, scaled

ANY_FLOAT = st.floats(allow_nan=False, allow_infinity=False)  # subnormal ones too
INT64 = st.integers(-(2**63), 2**63 - 1)
FLOATING = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
EXTREMES = [5e-324, -5e-324, 2.2e-308, 1e-300, 1.0, -1.0, 1e300, 1.7976931348623157e308, 0.0, -0.0]


def written(values: torch.Tensor) -> list[Fraction]:
    """Return what ``fixed`` says the values are."""
    integers, exponent = fixed(values)
    return [scaled(integer, exponent) for integer in integers.tolist()]


@given(st.lists(ANY_FLOAT))
@example(EXTREMES)
@example([])
@example([0.0, -0.0])
def test_fixed_writes_every_float64_without_rounding(values):
    """Every finite float64, from the least subnormal to the largest, is written exactly."""
    assert [Fraction(value) for value in values] == written(torch.tensor(values, dtype=torch.float64))


@pytest.mark.parametrize("dtype", FLOATING)
def test_fixed_writes_every_floating_dtype_without_rounding(dtype):
    """The least, the largest and ordinary numbers of every floating dtype are written exactly."""
    limits = torch.finfo(dtype)
    values = torch.tensor([limits.smallest_normal, limits.max, limits.min, limits.eps, 0.1, 257.0], dtype=dtype)
    assert [Fraction(value) for value in values.tolist()] == written(values)


@given(st.lists(INT64))
@example([-(2**63), 2**63 - 1, 2**53 + 1])
def test_fixed_writes_every_int64_without_rounding(values):
    """Integers beyond the 2^53 of a float64 are written exactly as well."""
    assert values == written(torch.tensor(values, dtype=torch.int64))


@given(st.lists(ANY_FLOAT), st.randoms(use_true_random=False))
@example([1e300, 1.0, -1e300, 1e-300], random.Random(0))  # noqa: S311  it shuffles
def test_exact_sum_is_the_sum_of_fractions_in_any_order(values, shuffler):
    """1e300 + 1 - 1e300 + 1e-300 is 1 + 1e-300, and so is every permutation of it."""
    expected = sum(map(Fraction, values), Fraction(0))
    shuffler.shuffle(values)
    assert expected == exact_sum(torch.tensor(values, dtype=torch.float64))


def test_exact_sum_goes_on_beyond_int64():
    """Four counts of 2^62 are 2^64, not 0."""
    assert 2**64 == exact_sum(torch.full((4,), 2**62))


@given(st.lists(st.floats(-(2.0**14), 2.0**14), min_size=1))
@example([0.5 * 2.0**-40, 1.5 * 2.0**-40, -2.5 * 2.0**-40])  # ties
@example([2.0**13, math.nextafter(2.0**13, 0.0), math.nextafter(2.0**13, math.inf)])
def test_weights_are_rounded_to_the_nearest_multiple_ties_to_even(values):
    """on_grid(w) is the multiple of 2^-40 nearest to w; of two, the even one."""
    expected = [Fraction(round(Fraction(value) * 2**40), 2**40) for value in values]
    assert expected == [Fraction(one) for one in on_grid(torch.tensor(values, dtype=torch.float64)).tolist()]


@pytest.mark.parametrize("value", [2.0**13, 1e18, 1e300, 1.7976931348623157e308, math.inf])
def test_large_weights_are_on_the_grid_already(value):
    """Weights whose product with 2^40 is beyond float64 come back as they are."""
    assert value == on_grid(torch.tensor([value], dtype=torch.float64)).item()


def test_a_weight_that_is_nan_stays_nan():
    """NaN is no multiple of anything and is not turned into one."""
    assert on_grid(torch.tensor([math.nan])).isnan().all()


@given(st.fractions(), st.integers(-1200, 1200))
@example(Fraction(1), 1023)
@example(Fraction(1), -1074)
@example(Fraction(1), -1075)
@example(Fraction(3), -1075)
def test_nearest_is_the_nearest_float64(number, exponent):
    """No float64 is closer to the fraction; beyond the largest float64 it is inf of its sign."""
    number *= Fraction(2) ** exponent
    actual = nearest(number)
    if math.isinf(actual):
        assert abs(number) > Fraction(2) ** 1024 - Fraction(2) ** 969
        assert (actual > 0) == (number > 0)
    else:
        assert_nearest(actual, number)


def assert_nearest(actual: float, exact: Fraction) -> None:
    """Assert that neither neighbour of a float64 is closer to the exact number."""
    distance = abs(Fraction(actual) - exact)
    for neighbour in (math.nextafter(actual, -math.inf), math.nextafter(actual, math.inf)):
        if math.isfinite(neighbour):
            assert distance <= abs(Fraction(neighbour) - exact)


@given(st.fractions(min_value=0))
@example(Fraction(0))
@example(Fraction(1, 3))
@example(Fraction(2) ** 4000)
def test_the_root_of_a_square_is_exact(number):
    """Where the root is rational, it is that rational."""
    assert number == root(number**2)


@given(st.fractions(min_value=0), st.integers(-2100, 2040))
@example(Fraction(2), 0)
@example(Fraction(2**53 + 1) ** 2 + 1, 0)  # a root just above the middle of two float64
@example(Fraction(2**53 + 1) ** 2 - 1, 0)  # and one just below
def test_the_nearest_float64_to_a_root(square, exponent):
    """nearest(root(x)) is the float64 nearest to √x, as 1,500 decimals of it say."""
    square *= Fraction(2) ** exponent
    with localcontext() as context:
        context.prec = 1500
        expected = (Decimal(square.numerator) / Decimal(square.denominator)).sqrt()
    assert float(expected) == nearest(root(square))
