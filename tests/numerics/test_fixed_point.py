"""Fixed point: which grid a magnitude has, what a number becomes on it, and that no sum wraps or knows an order."""

from __future__ import annotations

import math
import random
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import reference
from augend._numerics._fixed_point import (
    Addend,
    add_fixed_,
    fits,
    headroom,
    largest,
    mean_of_fixed,
    scale_of,
    write_fixed,
)

TINY = 2.0**-149
MOST = 2.0**128 - 2.0**104
ANY = st.floats(allow_nan=False, allow_infinity=False, width=32)
POSITIVE = st.one_of(st.floats(TINY, MOST, width=32), st.integers(1, 2**23).map(lambda n: n * TINY))
HEAD = st.integers(0, 20)
SCALES = st.integers(-100, 190)
FLOATING = [torch.float32, torch.float16, torch.bfloat16]


def added(values: list[float], scale: int, dtype: torch.dtype = torch.float32) -> list[int]:
    """Return what values are on a grid."""
    total = torch.zeros(len(values), dtype=torch.int64)
    add_fixed_(total, torch.tensor(values, dtype=dtype), scale)
    return total.tolist()


# ------------------------------------------------------------------ the grid


@given(st.integers(1, 2**20))
@example(1)
@example(2)
@example(2**16)
@example(2**16 + 1)
def test_headroom_is_the_least_that_holds_the_addends(addends: int) -> None:
    """L = ceil(log2(addends)): 2^L addends are enough, and half of them are not."""
    bits = headroom(addends)
    assert reference.head_bits(addends) == bits
    assert 2 ** (bits - 1) < addends <= 2**bits


@given(POSITIVE, HEAD)
@example(TINY, 16)
@example(MOST, 16)
@example(MOST, 20)
@example(1.0, 0)
@example(math.nextafter(1.0, 0.0), 0)
def test_the_scale_leaves_twelve_bits_above_the_largest(size: float, head: int) -> None:
    """2^e > size >= 2^(e-1) for every positive float32, subnormal ones too, and k = 62 - L - 12 - e."""
    scale = scale_of(size, head)
    steps = Fraction(size) * Fraction(2) ** scale
    assert 2 ** (62 - head - 12 - 1) <= steps < 2 ** (62 - head - 12)
    assert 62 - head - 12 - reference.exponent_above(size) == scale


@given(POSITIVE, POSITIVE, HEAD)
@example(2.0**13, 1.0, 16)  # e = 1: exactly at the limit
@example(float(np.nextafter(np.float32(2.0**13), np.float32(math.inf))), 1.0, 16)
@example(2.0**-10, 0.75, 16)  # e = 0: the grid is 2^-24 of it
@example(float(np.nextafter(np.float32(2.0**-10), np.float32(0.0))), 0.75, 16)
@example(TINY, TINY, 20)
@example(MOST, MOST, 20)
@example(TINY, MOST, 20)
def test_a_magnitude_fits_a_grid_between_two_bounds(size: float, before: float, head: int) -> None:
    """Size fits if, and only if, it is at most 2^(62 - L) steps and a step is at most 2^-24 of it."""
    scale = scale_of(before, head)
    step = Fraction(2) ** -scale
    expected = Fraction(size) <= step * 2 ** (62 - head) and step <= Fraction(size) / 2**24
    assert expected == fits(size, scale, head)


@given(POSITIVE, HEAD)
def test_a_scale_fits_what_it_was_made_of_and_zero_fits_all(size: float, head: int) -> None:
    """What a scale was made of fits it, also 2^12 times as large or 2^(25 - L) times smaller; zeros fit any."""
    scale = scale_of(size, head)
    assert fits(size, scale, head)
    assert fits(size * 2.0**12, scale, head)
    assert fits(size * 2.0 ** (head - 25), scale, head)
    assert not fits(size * 2.0 ** (head - 28), scale, head)
    assert not fits(size * 2.0**14, scale, head)
    assert fits(0.0, scale, head)


# ------------------------------------------------------------------ the largest


@given(st.lists(ANY, min_size=1))
@example([-0.0])
@example([-TINY, TINY])
@example([-MOST, 1.0])
def test_the_largest_is_a_magnitude(values: list[float]) -> None:
    """The largest magnitude of finite numbers, whatever their signs, in float64."""
    found = largest(torch.tensor(values))
    assert (torch.float64, ()) == (found.dtype, tuple(found.shape))
    assert max(map(abs, values)) == found.item()


@given(st.lists(ANY), st.lists(ANY), st.sampled_from([math.nan, math.inf, -math.inf]))
def test_the_largest_tells_of_inf_and_nan(before: list[float], behind: list[float], bad: float) -> None:
    """One inf or nan among any numbers is found, and nan is told from inf."""
    found = largest(torch.tensor([*before, bad, *behind])).item()
    assert not math.isfinite(found)
    assert math.isnan(bad) == math.isnan(found)
    assert math.isnan(largest(torch.tensor([math.inf, *before, math.nan])).item())


@pytest.mark.parametrize("dtype", FLOATING)
def test_the_largest_of_every_dtype_and_shape(dtype: torch.dtype) -> None:
    """0-d, transposed and long tensors of every dtype that a gradient may have."""
    ends = torch.finfo(dtype)
    assert ends.max == largest(torch.tensor([ends.min, ends.tiny], dtype=dtype)).item()
    assert 3.0 == largest(torch.tensor(-3.0, dtype=dtype)).item()
    long = torch.zeros(3, 50_001, dtype=dtype)
    long[2, 50_000] = -7.0
    assert 7.0 == largest(long.T).item()
    assert math.isnan(largest(torch.full((9,), math.nan, dtype=dtype)).item())


def test_the_largest_needs_no_gradient() -> None:
    """A value with a graph is read without growing it."""
    assert not largest(torch.ones(2, requires_grad=True) * 3).requires_grad


# ------------------------------------------------------------------ numbers on the grid


@given(st.lists(ANY, min_size=1, max_size=5), SCALES)
@example([0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 0.25, 0.75], 0)  # ties to even
@example([TINY, -3 * TINY, 2.0**-126], 148)
@example([TINY], 182)
@example([MOST, -MOST], -94)
def test_a_number_becomes_the_nearest_multiple_ties_to_even(values: list[float], scale: int) -> None:
    """Any finite float32 below the limit: rounded as rational arithmetic does; nothing else is lost."""
    within = [one if abs(Fraction(one)) * Fraction(2) ** scale <= 2**62 else 0.0 for one in values]
    assert [reference.rounded_to(scale, one) for one in within] == added(within, scale)


@given(st.integers(-(2**24), 2**24), st.integers(-149, 60), st.integers(0, 37))
@example(2**24 - 1, -149, 0)
@example(1, -149, 37)
def test_what_has_its_last_place_above_the_grid_is_exact(mantissa: int, exponent: int, above: int) -> None:
    """ulp(g) >= 2^-k: the integer times the step is the number itself."""
    value = math.ldexp(mantissa, exponent)
    scale = above - exponent
    (steps,) = added([value], scale)
    assert Fraction(value) == steps * Fraction(2) ** -scale


@given(ANY, SCALES)
def test_what_has_places_below_the_grid_is_off_by_half_a_step_at_most(value: float, scale: int) -> None:
    """|g - q·2^-k| <= 2^-(k+1) for everything that fits."""
    if abs(Fraction(value)) * Fraction(2) ** scale <= 2**62:
        (steps,) = added([value], scale)
        assert abs(Fraction(value) - steps * Fraction(2) ** -scale) <= Fraction(2) ** -(scale + 1)


@given(st.lists(st.tuples(ANY, ANY), min_size=1, max_size=12), st.randoms(use_true_random=False))
@example([(2.0**99, 1.0), (1.0, 2.0**-99), (-(2.0**99), 2.0**99), (2.0**-99, 2.0**-99)], random.Random(0))  # noqa: S311  it shuffles
def test_a_sum_knows_no_order(parts: list[tuple[float, float]], shuffler: random.Random) -> None:
    """Any order of the addends: the same integers, which are those of rational arithmetic."""
    size = max(abs(x) for part in parts for x in part) or 1.0
    scale = scale_of(size, headroom(len(parts)))
    expected = [sum(reference.rounded_to(scale, part[at]) for part in parts) for at in range(2)]
    shuffler.shuffle(parts)
    total = torch.zeros(2, dtype=torch.int64)
    for part in parts:
        add_fixed_(total, torch.tensor(part), scale)
    assert expected == total.tolist()


@pytest.mark.parametrize("size", [TINY, 1.0, float(np.nextafter(np.float32(2.0), np.float32(0.0))), 2.0**116, 3e34])
@pytest.mark.parametrize("head", [0, 1, 7, 12])
def test_as_many_addends_as_promised_never_wrap(size: float, head: int) -> None:
    """2^L addends, every one at the limit of 2^12 · 2^e: the sum is 2^62 steps, of either sign, and did not wrap."""
    scale = scale_of(size, head)
    limit = math.ldexp(1.0, 12 + math.frexp(size)[1])
    limit = min(limit, MOST)
    assert fits(limit, scale, head)
    addend = torch.tensor([limit, -limit])
    total = torch.zeros(2, dtype=torch.int64)
    for _ in range(2**head):
        add_fixed_(total, addend, scale)
    expected = 2**head * reference.rounded_to(scale, limit)
    assert [expected, -expected] == total.tolist()
    assert expected <= 2**62


@given(HEAD, POSITIVE)
@example(20, TINY)
@example(20, MOST)
@example(0, 1.0)
def test_the_last_addend_of_the_most_does_not_wrap(head: int, size: float) -> None:
    """A sum of 2^L - 1 addends at the limit takes one more: 2^62 steps at most, half of what an int64 has."""
    scale = scale_of(size, head)
    limit = min(math.ldexp(1.0, 62 - head - scale), MOST)
    assert fits(limit, scale, head)
    steps = reference.rounded_to(scale, limit)
    total = torch.tensor([(2**head - 1) * steps, -(2**head - 1) * steps])
    add_fixed_(total, torch.tensor([limit, -limit]), scale)
    assert [2**head * steps, -(2**head) * steps] == total.tolist()
    assert abs(2**head * steps) <= 2**62


@pytest.mark.parametrize("dtype", FLOATING)
def test_layouts_and_lengths_change_nothing(dtype: torch.dtype) -> None:
    """Sums and addends of any dense layout, longer than a chunk, expanded or with gaps: element by element the same."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(7, 30_011, generator=generator).to(dtype)
    integers = [[reference.rounded_to(20, x) for x in row] for row in values[:, :40].tolist()]
    plain = torch.zeros(7, 30_011, dtype=torch.int64)
    add_fixed_(plain, values, 20)
    assert integers == plain[:, :40].tolist()
    assert torch.equal((values.double() * 2.0**20).round().long(), plain)
    for total, given_values in (
        (torch.zeros(30_011, 7, dtype=torch.int64).T, values),
        (torch.zeros(7, 30_011, dtype=torch.int64), values.T.contiguous().T),
        (torch.zeros(7, 30_011, dtype=torch.int64), torch.stack([values, values], dim=2)[..., 0]),
        (torch.zeros(30_011, 7, dtype=torch.int64).T, values.T.contiguous().T),
    ):
        add_fixed_(total, given_values, 20)
        assert torch.equal(plain, total)
    scalar = torch.tensor(5)
    add_fixed_(scalar, torch.tensor(1.25, dtype=dtype), 2)
    assert 10 == scalar.item()
    spread = torch.ones(3, 2, dtype=torch.int64)
    add_fixed_(spread, torch.tensor([0.5, 1.0], dtype=dtype).expand(3, 2), 1)
    assert [[2, 3]] * 3 == spread.tolist()


def test_adding_leaves_the_addend_and_its_graph_alone() -> None:
    """What is added is read, with or without a graph."""
    values = torch.tensor([1.3, -2.7], requires_grad=True)
    total = torch.zeros(2, dtype=torch.int64)
    add_fixed_(total, values * 1, 10)
    assert not total.requires_grad
    assert torch.equal(torch.tensor([1.3, -2.7]), values.detach())


@pytest.mark.parametrize("shape", [(1, 5), (3, 4), (2, 70_000), (70_000, 2), (0, 3), (3, 0)])
def test_writing_is_adding_to_zero(shape: tuple[int, int]) -> None:
    """A result of any strides, with columns of somebody else's beside it, takes the same integers; those are left."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    expected = torch.zeros(shape, dtype=torch.int64)
    add_fixed_(expected, values, 30)
    wide = torch.full((shape[0], shape[1] + 2), 99)
    write_fixed(wide[:, 1:-1], values, 30)
    assert torch.equal(expected, wide[:, 1:-1])
    assert (wide[:, [0, -1]] == 99).all()
    turned = torch.empty(shape[::-1], dtype=torch.int64).T
    write_fixed(turned, values.T.contiguous().T, 30)
    assert torch.equal(expected, turned)


# ------------------------------------------------------------------ the mean

TOTALS = st.integers(-(2**62), 2**62)
DIVISORS = st.one_of(st.integers(1, 2**53).map(float), st.floats(2.0**-60, 2.0**60))


@given(st.lists(TOTALS, min_size=1, max_size=4), SCALES, DIVISORS)
@example([2**53 + 1, -(2**53) - 1, 2**62 - 1], 0, 3.0)  # integers that float64 rounds
@example([1, -1, 3], 149, 2.0)  # halves of the least float32: ties to even
def test_the_mean_is_a_quotient_in_float64_rounded_once_to_float32(
    totals: list[int], scale: int, divisor: float
) -> None:
    """Float32 of (float64(total) · 2^-k / divisor), bit for bit, and within 2^-24 + 2^-52 and half a subnormal of it.

    The integer's rounding and the division's are 2^-53 each; the last is 2^-24, or 2^-150 among subnormal numbers.
    """
    found = mean_of_fixed([Addend(torch.tensor(totals), scale, divisor, 1.0)])
    assert torch.float32 == found.dtype
    assert [reference.mean_on(scale, one, Fraction(divisor)) for one in totals] == found.tolist()
    for one, mean in zip(totals, found.tolist(), strict=True):
        exact = one * Fraction(2) ** -scale / Fraction(divisor)
        if math.isfinite(mean):
            assert abs(Fraction(mean) - exact) <= abs(exact) * (Fraction(1, 2**24) + Fraction(1, 2**52)) + TINY / 2
        else:
            assert abs(exact) > MOST


@given(st.lists(st.tuples(TOTALS, st.integers(0, 150), DIVISORS, st.floats(-8, 8)), min_size=1, max_size=4))
def test_several_terms_are_added_in_float64_in_their_order(terms: list[tuple[int, int, float, float]]) -> None:
    """Σ weight · (total · 2^-k / divisor), each step rounded to float64 as Python rounds it, and once to float32."""
    expected = None
    for total, scale, divisor, weight in terms:
        one = float(total) * 2.0**-scale / divisor * weight
        expected = one if expected is None else expected + one
    found = mean_of_fixed([Addend(torch.tensor([t]), k, divisor, weight) for t, k, divisor, weight in terms])
    with np.errstate(over="ignore"):
        assert repr(float(np.float32(expected))) == repr(found.item())


def test_the_mean_has_the_layout_of_its_sum() -> None:
    """Transposed sums, longer than a chunk, give transposed means; the other terms may lie otherwise."""
    totals = torch.randint(-(2**40), 2**40, (70_001, 3), generator=torch.Generator().manual_seed(2))
    flat = mean_of_fixed([Addend(totals, 35, 7.0, 1.0), Addend(totals, 30, 5.0, 0.5)])
    turned = mean_of_fixed([Addend(totals.T.contiguous().T, 35, 7.0, 1.0), Addend(totals, 30, 5.0, 0.5)])
    assert (1, 70_001) == turned.stride()
    assert (3, 1) == flat.stride()
    assert torch.equal(flat, turned)
    assert 1.25 == mean_of_fixed([Addend(torch.tensor(5), 1, 2.0, 1.0)]).item()


def test_a_mean_does_not_touch_its_sums() -> None:
    """The sums are read."""
    totals = torch.tensor([3, -5])
    mean_of_fixed([Addend(totals, 1, 2.0, 2.0)])
    assert [3, -5] == totals.tolist()
