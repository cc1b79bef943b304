"""The norm against exact arithmetic: its bound, its range, its independence of grouping."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from augend._numerics import NORM_RELATIVE_ERROR, norm, root

ANY_FLOAT = st.floats(allow_nan=False, allow_infinity=False)
LARGEST = torch.finfo(torch.float64).max


def square_sum(tensors: list[Tensor]) -> Fraction:
    """Return the exact sum of squares."""
    return sum((Fraction(one) ** 2 for tensor in tensors for one in tensor.reshape(-1).tolist()), Fraction(0))


def assert_within(actual: float, square: Fraction) -> None:
    """Assert the bound of ``norm``: relative, and half of the least subnormal where float64 has no more bits."""
    exact = root(square)  # within 2^-64, far below the bound
    if math.isinf(actual):
        assert exact * (1 + Fraction(NORM_RELATIVE_ERROR)) > LARGEST
    else:
        assert abs(Fraction(actual) - exact) <= exact * Fraction(NORM_RELATIVE_ERROR) + Fraction(1, 2**1075)


@given(st.lists(st.lists(ANY_FLOAT)))
@example([[5e-324, 1e300], [], [1e-300]])
@example([[5e-324] * 3])
@example([[LARGEST, LARGEST]])
@example([[1.2e154], [1.2e154]])  # squares that float64 holds, and their sum not
@example([[2.0**-450, 2.0**-449]])  # about where a second pass begins
@example([[2.0**-460], [2.0**511.5]])
def test_norm_is_within_its_bound_on_any_floats(parts):
    """Whatever the magnitudes and the grouping, the relative error is at most NORM_RELATIVE_ERROR."""
    tensors = [torch.tensor(part, dtype=torch.float64) for part in parts]
    assert_within(norm(tensors), square_sum(tensors))


@pytest.mark.parametrize("seed", range(3))
def test_norm_is_within_its_bound_on_wide_float32(seed):
    """Float32 elements over sixty binades, more than one chunk of them."""
    generator = torch.Generator().manual_seed(seed)
    elements = 2**18 + 2**12 + 17
    wide = torch.randn(elements, generator=generator) * torch.exp2(torch.randn(elements, generator=generator) * 20)
    integers = (wide.to(torch.float64) * 2.0**300).tolist()  # exact, and integers: a float32 ends at 2^-149
    assert_within(norm([wide]), Fraction(sum(int(one) ** 2 for one in integers), 2**600))


@pytest.mark.parametrize("value", [1.0001, 0.7, 1 / 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_norm_of_a_large_constant_tensor(value, dtype):
    """Constant tensors, whose rounding errors all have one sign, keep the bound."""
    elements = 5_000_003
    tensor = torch.full((elements,), value, dtype=dtype)
    assert_within(norm([tensor]), Fraction(tensor[0].item()) ** 2 * elements)


def test_norm_of_thirty_million_elements():
    """30 million float32 elements: relative error at most 1e-12, far inside it in fact."""
    elements = torch.randint(-4096, 4096, (30_000_000,), generator=torch.Generator().manual_seed(0), dtype=torch.int16)
    square = sum(int(part.to(torch.int64).square().sum()) for part in elements.split(2**20))
    assert NORM_RELATIVE_ERROR <= 1e-12
    assert_within(norm([elements.to(torch.float32)]), Fraction(square))


@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        ([1e30] * 5, torch.float32),
        ([1e-30] * 5, torch.float32),
        ([1e30, 1e-30], torch.float32),
        ([1e300] * 5, torch.float64),
        ([1e-300] * 5, torch.float64),
        ([1e300, 1e-300], torch.float64),
        ([5e-324], torch.float64),
        ([60000.0, 6e-8], torch.float16),
        ([3e38, 1e-38], torch.bfloat16),
    ],
)
def test_no_magnitude_overflows_or_vanishes(values, dtype):
    """The norm of the very large, the very small and both is right, in every dtype."""
    tensor = torch.tensor(values, dtype=dtype)
    actual = norm([tensor])
    assert 0 < actual < math.inf
    assert_within(actual, square_sum([tensor]))


def test_norm_beyond_float64_is_inf():
    """A norm that float64 cannot hold is inf, like every number beyond it."""
    assert math.inf == norm([torch.full((2,), LARGEST, dtype=torch.float64)])


@pytest.mark.parametrize("tensors", [[], [torch.empty(0)], [torch.zeros(3)], [torch.zeros(2), torch.empty(0, 4)]])
def test_norm_of_nothing_and_of_zeros_is_zero(tensors):
    """No tensors, no elements, only zeros: 0.0."""
    assert norm(tensors) == 0.0


def test_norm_says_inf_and_nan():
    """An infinite element makes it inf, a NaN makes it NaN, also beside an inf or a sum that overflows."""
    assert math.inf == norm([torch.tensor([1.0, -math.inf])])
    assert math.isnan(norm([torch.tensor([1.0, math.nan])]))
    assert math.isnan(norm([torch.tensor([math.inf]), torch.tensor([math.nan])]))
    assert math.isnan(norm([torch.full((4,), 1e300, dtype=torch.float64), torch.tensor([math.nan])]))


def test_norm_takes_any_layout_and_a_generator():
    """Transposed, strided and expanded tensors count their logical elements; an iterator is read once, whole."""
    square = torch.arange(12.0).reshape(3, 4)
    tensors = [square.T, square[:, ::2], torch.tensor(2.0).expand(5), torch.tensor(3.0, requires_grad=True)]
    assert_within(norm(iter(tensors)), square_sum(tensors))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm_does_not_depend_on_the_grouping_beyond_its_bound(dtype):
    """The same elements in 1, 2 and 7 tensors, or in pipeline stages of 16-bit numbers: the same within the bound."""
    whole = torch.randn(20_011, generator=torch.Generator().manual_seed(0)).to(dtype)
    square = square_sum([whole])
    for groups in (1, 2, 7):
        assert_within(norm(whole.tensor_split(groups)), square)


def test_many_small_tensors_beside_a_large_one_are_not_lost():
    """Squares of 2^-54, twelve thousand of them, are each lost in a float64 sum that holds 1, and together are not."""
    small = torch.full((12_000,), 2.0**-27, dtype=torch.float64)
    assert 12_000 * 2.0**-54 / 2 > NORM_RELATIVE_ERROR  # what losing them would cost
    assert_within(norm([torch.ones(1), *small.split(1)]), 1 + Fraction(12_000, 2**54))


def test_norm_leaves_its_tensors_alone():
    """Neither pass writes to what it reads."""
    tensor = torch.tensor([1e300, -2e300], dtype=torch.float64)
    before = tensor.clone()
    norm([tensor])
    assert torch.equal(before, tensor)


@given(st.lists(st.lists(ANY_FLOAT, max_size=5), min_size=1, max_size=4))
@example([[], []])
@example([[1e-200], [1e200]])
@example([[math.inf], [0.0]])
def test_the_norm_of_several_processes_is_that_of_one(parts: list[list[float]]) -> None:
    """Each process sees its own elements and everybody's numbers, and all of them find the norm of all elements."""
    tensors = [torch.tensor(part, dtype=torch.float64) for part in parts]
    found, calls = norms_of_ranks(tensors)
    assert [found[0]] * len(parts) == found
    assert 2 >= calls
    if all(math.isfinite(one) for part in parts for one in part):
        assert_within(found[0], square_sum(tensors))
    else:
        assert math.inf == found[0]


def norms_of_ranks(tensors: list[Tensor]) -> tuple[list[float], int]:
    """Return what each rank finds, all at once in threads that gather each other's numbers, and how often they do."""
    told: list[list[Sequence[float]]] = []
    together = threading.Barrier(len(tensors))

    def find(rank: int) -> float:
        rounds = iter(range(9))

        def gather(numbers: Sequence[float]) -> Sequence[Sequence[float]]:
            index = next(rounds)
            if together.wait(60) == 0:
                told.append([()] * len(tensors))
            together.wait(60)
            told[index][rank] = numbers
            together.wait(60)
            return told[index]

        return norm([tensors[rank]], gather)

    with ThreadPoolExecutor(len(tensors)) as executor:
        return list(executor.map(find, range(len(tensors)))), len(told)
