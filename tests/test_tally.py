"""Tally: what it accepts, what it refuses, and its arithmetic."""

from __future__ import annotations

import pytest
import torch

from augend import Tally
from augend.errors import TallyError


def test_the_mean_is_that_of_all_items():
    """(3, 1) and (8, 4) give 11/5 = 2.2, and not 2.5 as a mean of means."""
    tally = Tally(torch.tensor([3.0, 8.0], dtype=torch.float64), torch.tensor([1, 4]))
    assert tally.mean().item() == 11 / 5


def test_sum_is_one_row():
    """sum() keeps total and count apart, in one row."""
    one = Tally(torch.tensor([3.0, 8.0]), torch.tensor([1, 4])).sum()
    assert torch.equal(torch.tensor([11.0]), one.total)
    assert torch.equal(torch.tensor([5]), one.count)


def test_addition_is_row_by_row():
    """Two kinds of items of the same rows are added row by row; zeros are the neutral element."""
    both = Tally(torch.tensor([1.0, 2.0]), torch.tensor([1, 2])) + Tally(torch.tensor([3.0, 4.0]), torch.tensor([0, 5]))
    assert torch.equal(torch.tensor([4.0, 6.0]), both.total)
    assert torch.equal(torch.tensor([1, 7]), both.count)
    same = both + Tally.zeros(2)
    assert torch.equal(both.total, same.total)
    assert torch.equal(both.count, same.count)


def test_the_gradient_of_a_total_goes_through():
    """Total stays differentiable through sum() and addition."""
    total = torch.tensor([1.0, 2.0], requires_grad=True)
    (Tally(total, torch.ones(2)) + Tally.zeros(2)).sum().total.backward()
    assert torch.equal(torch.ones(2), total.grad)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool])
def test_integer_counts_are_held_as_int64(dtype):
    """Narrow and boolean counts cannot overflow later."""
    assert Tally(torch.ones(2), torch.ones(2, dtype=dtype)).count.dtype == torch.int64


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_weights_are_held_as_float64(dtype):
    """Fractional counts are widened and keep their value; totals keep their dtype."""
    weights = torch.tensor([0.1, 3.0], dtype=dtype)
    tally = Tally(torch.ones(2, dtype=dtype), weights)
    assert torch.equal(weights.double(), tally.count)
    assert (torch.float64, dtype) == (tally.count.dtype, tally.total.dtype)


def test_weights_add_up_without_rounding():
    """257 weights of 1 in bfloat16, which has no 257, sum to 257."""
    ones = torch.ones(257, dtype=torch.bfloat16)
    assert 257 == Tally(ones, ones).sum().count.item()


def test_integer_and_floating_counts_add_exactly():
    """2^24 + 1 items, which float32 has not, plus one weight of 1 are 2^24 + 2, from either side."""
    items, weights = Tally(torch.ones(1), torch.tensor([2**24 + 1])), Tally(torch.ones(1), torch.ones(1))
    assert 2**24 + 2 == (items + weights).count.item() == (weights + items).count.item()


def test_a_sum_over_unknown_rows_is_allowed():
    """A 0-d tally is one of unknown rows, with a mean."""
    assert Tally(torch.tensor(6.0), torch.tensor(3)).mean().item() == 2.0


@pytest.mark.parametrize(
    ("total", "count", "named"),
    [
        (1.0, torch.ones(1), "float and Tensor"),
        (torch.ones(1), 1, "Tensor and int"),
        (torch.ones(1, dtype=torch.int64), torch.ones(1), "total must be float32"),
        (torch.ones(1, dtype=torch.complex64), torch.ones(1), "total must be float32"),
        (torch.ones(2, 3), torch.ones(2, 3), r"\[2, 3\]"),
        (torch.ones(2), torch.ones(3), r"total \[2\] and count \[3\]"),
        (torch.ones(2), torch.tensor(2), r"count \[\]"),
        (torch.ones(2), torch.ones(2, requires_grad=True), "detach"),
        (torch.ones(2), torch.ones(2, device="meta"), "one device"),
        (torch.ones(2), torch.ones(2, dtype=torch.complex64), "integers or real weights"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(total, count, named):
    """Types, shapes, graphs and devices that do not fit are named."""
    with pytest.raises(TallyError, match=named):
        Tally(total, count)


def test_tallies_of_other_rows_are_not_added():
    """Rows are matched by position, so their numbers must agree; nothing is broadcast."""
    with pytest.raises(TallyError, match=r"\[2\] and \[1\]"):
        Tally.zeros(2) + Tally.zeros(1)
    with pytest.raises(TypeError):
        Tally.zeros(2) + 1.0
