"""Small exact numbers that the usual mean of means, narrow sums and late scaling get wrong."""

from __future__ import annotations

import itertools

import pytest
import torch

import augend
from augend.losses import causal_lm


class Scalar(torch.nn.Module):
    """One weight w; a row with input x has the loss sum w * x, so its gradient is x."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros((), dtype=dtype))

    def tally(self, *rows: tuple[float, float]) -> augend.Tally:
        """Return the tally of rows of (gradient, count)."""
        slopes, counts = zip(*rows, strict=True)
        return augend.Tally(self.w * torch.tensor(slopes, dtype=self.w.dtype), torch.tensor(counts))


def mean_gradient(*microbatches: tuple[float, float], dtype: torch.dtype = torch.float32, **options: object) -> float:
    """Return the mean gradient over micro-batches of one row (gradient sum, count)."""
    model = Scalar(dtype)
    grads = augend.Accumulator(model, **options)
    for one in microbatches:
        grads.backward(model.tally(one))
    return float(grads.finish_mean().gradients["w"])


def test_unequal_counts_give_the_mean_of_the_whole() -> None:
    """(3, 1) and (8, 4) give 11/5 = 2.2, the float32 nearest to it; the mean of means would be 2.5."""
    assert float(torch.tensor(2.2)) == mean_gradient((3, 1), (8, 4))


def test_a_batch_cut_in_two_is_the_batch() -> None:
    """(4, 2) whole and (2, 1) + (2, 1) both give 2.0; a sum of means would give 4.0."""
    assert 2.0 == mean_gradient((4, 2)) == mean_gradient((2, 1), (2, 1))


def test_a_short_tail_is_divided_by_its_own_count() -> None:
    """A last window of one micro-batch (6, 3) gives 2.0, not 6 over the usual number of micro-batches."""
    assert 2.0 == mean_gradient((6, 3))


def test_an_empty_microbatch_changes_nothing() -> None:
    """(0, 0) beside (6, 3) gives 2.0: no 0/0, and no part in the denominator."""
    assert 2.0 == mean_gradient((0, 0), (6, 3)) == mean_gradient((6, 3), (0, 0))


def test_the_count_of_a_causal_loss_is_what_was_scored() -> None:
    """Two rows of five labels score four each: a loss sum of 16 has the mean 2.0, not 16/10."""
    logits = torch.zeros(2, 5, 3, requires_grad=True)
    tally = causal_lm(logits, torch.ones(2, 5, dtype=torch.int64))
    assert [4, 4] == tally.count.tolist()
    even = augend.Tally(torch.full((2,), 8.0) + 0 * tally.total, tally.count)
    assert 2.0 == float(even.mean().detach())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("first", "others", "expected"), [(256.0, [1.0], 257.0), (1024.0, [0.125] * 8, 1025.0), (2048.0, [1.0] * 3, 2051.0)]
)
def test_sums_are_kept_in_the_work_dtype(
    dtype: torch.dtype, first: float, others: list[float], expected: float
) -> None:
    """16-bit parameters have float32 sums: 256 + 1 = 257 and 1024 + 8 x 0.125 = 1025, which 16 bits cannot hold."""
    model = Scalar(dtype)
    grads = augend.Accumulator(model)
    for gradient in (first, *others):
        grads.backward(model.tally((gradient, 1)))
    assert (torch.float32, expected) == (grads.pending["w"].dtype, float(grads.pending["w"]))


def test_a_thousand_ones() -> None:
    """A bfloat16 sum of ones stops at 256; ours reaches 1000."""
    model = Scalar(torch.bfloat16)
    grads = augend.Accumulator(model)
    for _ in range(1000):
        grads.backward(model.tally((1.0, 1)))
    assert 1000.0 == float(grads.pending["w"])


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("max_norm", [None, 0.125])
def test_a_loss_scale_does_not_change_the_update(dtype: str, max_norm: float | None) -> None:
    """Scale 65536 and none give the same norm, gradient and weights, clipped or not: clipping is after unscaling."""
    outcomes = []
    for scale in (1.0, 65536.0):
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 2)
        grads = augend.Accumulator(model, dtype=dtype, loss_scale=scale)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
        for rows in (2, 5):
            total = (model(torch.randn(rows, 3)) ** 2).sum(dim=1)  # [rows]
            grads.backward(augend.Tally(total, torch.full((rows,), 2)))
        done = grads.step(optimizer, max_norm=max_norm)
        outcomes.append((done.norm, done.scale, model.weight.tolist(), model.bias.tolist()))
    assert outcomes[0] == outcomes[1]


def test_an_untouched_norm_under_a_loss_scale() -> None:
    """True gradient [0.3, 0.4] under scale 65536 and max_norm 1: norm 0.5 and scale 1, not clipped to nothing."""
    model = torch.nn.Linear(2, 1, bias=False)
    grads = augend.Accumulator(model, loss_scale=65536.0)
    grads.backward(augend.Tally(model(torch.tensor([[0.3, 0.4]])).sum(dim=1), torch.tensor([1])))
    done = grads.finish(max_norm=1.0)
    assert (1.0, 0.3, 0.4) == (done.scale, *(round(float(x), 7) for x in model.weight.grad.flatten()))
    assert abs(done.norm - 0.5) <= 2**-24  # both inputs were rounded to float32 once


@pytest.mark.parametrize("cut", [[[0, 1]], [[0], [1]], [[1], [0]], [[0], [], [1]]])
def test_an_auxiliary_term_keeps_its_strength_for_every_cut(cut: list[list[int]]) -> None:
    """Main (3, 1), (8, 4) and an auxiliary term of mean 1.0 and weight 0.5 give 2.2 + 0.5 = 2.7 however split."""
    model = Scalar()
    main, auxiliary = [(3.0, 1), (8.0, 4)], [(1.0, 1), (1.0, 1)]
    grads = augend.Accumulator(model, terms=("main", "balance"))
    for rows in cut:
        one = {"main": [main[r] for r in rows] or [(0.0, 0)], "balance": [auxiliary[r] for r in rows] or [(0.0, 0)]}
        grads.backward({term: model.tally(*values) for term, values in one.items()})
    done = grads.finish(term_weights={"balance": 0.5})
    assert float(torch.tensor(2.2) + torch.tensor(0.5)) == float(model.w.grad)
    assert (5, 2) == (done.count, done.losses["balance"].count)


def test_a_window_belongs_to_its_own_count() -> None:
    """Two windows (4, 2) and (6, 3) are each 2.0: nobody divides by the total of both."""
    model = Scalar()
    grads = augend.Accumulator(model)
    for one in ((4, 2), (6, 3)):
        grads.backward(model.tally(one))
        assert 2.0 == float(grads.finish_mean().gradients["w"])


def test_clipping_happens_once_after_the_sum() -> None:
    """[2, 0] then [0, 2] with max_norm 1 give [0.7071, 0.7071]; clipping each part would give another direction."""
    model = torch.nn.Linear(2, 1, bias=False)
    grads = augend.Accumulator(model)
    for x in ([2.0, 0.0], [0.0, 2.0]):
        grads.backward(augend.Tally(model(torch.tensor([x])).sum(dim=1), torch.tensor([1])))
    grads.finish(max_norm=1.0)
    first, second = model.weight.grad.flatten().tolist()
    assert first == second
    assert abs(first - 0.5**0.5) <= 3 * 2**-24  # the factor and the quotient are rounded to float32


def test_any_order_of_exact_sums() -> None:
    """Gradients that float32 adds exactly give one result for all orders of the micro-batches."""
    parts = [(3, 1), (8, 4), (5, 2), (0, 0)]
    assert 1 == len({mean_gradient(*order) for order in itertools.permutations(parts)})


def test_a_long_sum_of_losses_keeps_its_small_rows() -> None:
    """A total of 1e8 and a thousand of 1.0 report 100001000 over 1001 items; float32 would stay at 1e8."""
    model = Scalar()
    grads = augend.Accumulator(model)
    grads.backward(augend.Tally(model.w + torch.tensor([1e8]), torch.tensor([1])))
    for _ in range(1000):
        grads.backward(augend.Tally(model.w + torch.tensor([1.0]), torch.tensor([1])))
    assert 100001000 / 1001 == grads.finish().loss.value
