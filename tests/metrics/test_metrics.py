"""Mean, Perplexity and Accuracy: their numbers, and what they refuse."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from augend import Accuracy, Mean, Perplexity, Tally
from augend.errors import TallyError


def values(tally: list[float], counts: list[int] | None = None) -> Tally:
    """Make a tally of totals over counts, or over one item each."""
    return Tally(torch.tensor(tally, dtype=torch.float64), torch.tensor(counts or [1] * len(tally)))


# Faults of other systems


def test_a_short_last_batch_is_not_over_weighted():
    """Eight items of loss 1, then two of loss 6, in batches of 8, 5, 3 or 1: 2.0 ± 0.67, never 3.5."""
    losses = [1.0] * 8 + [6.0] * 2
    for size in (10, 8, 5, 3, 1):
        mean = Mean()
        for start in range(0, 10, size):
            mean.update(values(losses[start : start + size]))
        assert (2.0, 2 / 3, 10) == (mean.compute().value, mean.compute().error, mean.compute().count)


def test_evaluation_is_no_mean_of_batch_means():
    """(2, 1) and (90, 9) are 92/10 = 9.2, never 6."""
    mean = Mean()
    mean.update(values([2.0], [1]))
    mean.update(values([90.0], [9]))
    assert mean.compute().value == 9.2


@pytest.mark.parametrize("cuts", [1, 2, 4])
def test_a_constant_loss_is_logged_as_it_is(cuts):
    """A constant loss of 2.0 is 2.0 for every number of cuts, neither multiplied nor divided by it."""
    mean = Mean()
    for _ in range(cuts):
        mean.update(values([2.0] * 4))
    assert mean.compute().value == 2.0


def test_a_mean_is_not_kept_in_float32():
    """1e8 and a thousand times 1.0, one update each: the total is 100001000."""
    mean = Mean()
    mean.update(Tally(torch.tensor([1e8]), torch.tensor([1])))
    for _ in range(1000):
        mean.update(Tally(torch.ones(1), torch.tensor([0])))
    assert mean.compute().value == 100_001_000


# Perplexity


def test_perplexity_is_the_exponential_of_the_mean():
    """The value is exp(mean), the error value·error, the interval exp of the mean's."""
    perplexity, mean = Perplexity(), Mean()
    for metric in (perplexity, mean):
        metric.update(values([2.5, 6.0, 3.0], [2, 3, 1]))
    plain, actual = mean.compute(), perplexity.compute()
    assert (math.exp(plain.value), math.exp(plain.value) * plain.error) == (actual.value, actual.error)
    assert (math.exp(plain.low), math.exp(plain.high), 6) == (actual.low, actual.high, actual.count)


def test_a_perplexity_beyond_float64_is_inf():
    """A mean of 1000 nats is inf and not an OverflowError; nothing counted is NaN."""
    perplexity = Perplexity()
    assert math.isnan(perplexity.compute().value)
    perplexity.update(values([1000.0, 1001.0]))
    assert math.inf == perplexity.compute().value


# Accuracy


@given(
    st.integers(0, 4).flatmap(
        lambda rows: st.tuples(
            st.lists(st.lists(st.sampled_from([-1.0, 0.0, 1.0]), min_size=6, max_size=6), min_size=rows, max_size=rows),
            st.lists(st.lists(st.sampled_from([-100, 0, 1, 2]), min_size=2, max_size=2), min_size=rows, max_size=rows),
        )
    ),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
)
def test_a_hit_is_the_first_largest_logit(data, dtype):
    """Of equal logits the first is the prediction; ignored labels do not count. Checked against a plain loop."""
    rows, labels = data
    hits = items = 0
    for logits, row in zip(rows, labels, strict=True):
        for item, label in enumerate(row):
            three = logits[3 * item : 3 * item + 3]
            items += label != -100
            hits += label == three.index(max(three))
    accuracy = Accuracy()
    accuracy.update(torch.tensor(rows, dtype=dtype).reshape(-1, 2, 3), torch.tensor(labels).reshape(-1, 2).long())
    estimate = accuracy.compute()
    assert items == estimate.count
    assert (repr(hits / items) if items else "nan") == repr(estimate.value)


def test_accuracy_keeps_the_rows_as_units():
    """Logits of several items a row give the tally of hits and items of each row."""
    logits = torch.eye(2)[torch.tensor([[0, 0, 0], [1, 1, 1]])]  # [rows, items, classes]
    accuracy, expected = Accuracy(), Accuracy()
    accuracy.update(logits, torch.tensor([[0, 1, -100], [1, 1, 1]]))
    expected.update_tally(values([1.0, 3.0], [2, 3]))
    assert expected.state_dict() == accuracy.state_dict()


def test_eighty_of_a_hundred_predictions():
    """80 right of 100 print as 0.8000 ± 0.0402."""
    accuracy = Accuracy()
    accuracy.update(torch.tensor([[1.0, 0.0]]).expand(100, 2), torch.tensor([0] * 80 + [1] * 20))
    assert str(accuracy.compute()) == "0.8000 ± 0.0402"


def test_another_label_may_be_ignored():
    """ignore_index is any integer, also one that is a class."""
    accuracy = Accuracy()
    accuracy.update(torch.eye(3), torch.tensor([0, 1, 0]), ignore_index=0)
    assert (1.0, 1) == (accuracy.compute().value, accuracy.compute().count)


def test_a_nan_among_the_logits_is_no_prediction():
    """A model that says NaN has no accuracy; NaN in an ignored item is nobody's business."""
    logits = torch.tensor([[0.0, 1.0], [math.nan, 1.0]])
    ignoring, counting = Accuracy(), Accuracy()
    ignoring.update(logits, torch.tensor([1, -100]))
    counting.update(logits, torch.tensor([1, 1]))
    assert ignoring.compute().value == 1.0
    assert math.isnan(counting.compute().value)


@pytest.mark.parametrize("shape", [(0, 3), (2, 0), (0, 0, 4)])
def test_no_rows_and_no_items_are_fine(shape):
    """Empty micro-batches and rows without items count nothing."""
    accuracy = Accuracy()
    accuracy.update(torch.zeros(*shape, 5), torch.zeros(shape, dtype=torch.int64))
    assert accuracy.compute().count == 0


@pytest.mark.parametrize(
    ("logits", "labels", "named"),
    [
        (torch.zeros(2, 3), torch.zeros(3, dtype=torch.int64), r"\[2, 3\] and \[3\]"),
        (torch.zeros(3), torch.tensor(1), r"\[3\] and \[\]"),
        (torch.zeros(2, 0), torch.zeros(2, dtype=torch.int64), r"\[2, 0\]"),
        (torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2, dtype=torch.int64), "logits must be floating"),
        (torch.zeros(2, 3), torch.zeros(2), "labels integers"),
        (torch.zeros(2, 3), torch.zeros(2, dtype=torch.bool), "labels integers"),
        (torch.zeros(2, 3), torch.tensor([0, 3]), "from 0 to 2 or -100; got 3"),
        (torch.zeros(2, 3), torch.tensor([-1, 0]), "from 0 to 2 or -100; got -1"),
    ],
)
def test_predictions_that_do_not_fit_are_refused(logits, labels, named):
    """Shapes, dtypes and labels that are no class are named, and nothing is added."""
    accuracy = Accuracy()
    with pytest.raises(TallyError, match=named):
        accuracy.update(logits, labels)
    assert Accuracy().state_dict() == accuracy.state_dict()


@pytest.mark.parametrize("hits", [-1.0, 3.0, math.inf])
def test_more_hits_than_items_are_refused(hits):
    """A row's hits are from 0 to its items."""
    with pytest.raises(TallyError, match=f"got {hits} hits of 2 in row 1"):
        Accuracy().update_tally(values([1.0, hits], [1, 2]))


@given(st.lists(st.floats(0, 1e6), min_size=2))
@example([1 / 3, 0.1])
def test_all_right_is_one_for_any_weights(weights):
    """Weighted hits are rounded like the weights, so that all right is exactly 1."""
    accuracy = Accuracy()
    accuracy.update_tally(Tally(torch.tensor(weights, dtype=torch.float64), torch.tensor(weights, dtype=torch.float64)))
    assert accuracy.compute().value == 1.0 or accuracy.compute().count == 0


def test_an_estimate_of_a_metric_is_plain():
    """Every field of an Estimate is a plain number."""
    accuracy = Accuracy()
    accuracy.update(torch.eye(3), torch.arange(3))
    assert all(type(number) in (int, float) for number in dataclasses.astuple(accuracy.compute()))


def test_updates_keep_no_graph():
    """Totals with a graph are read, and the graph can be freed."""
    mean = Mean()
    total = torch.ones(2, requires_grad=True) * 2
    mean.update(Tally(total, torch.ones(2)))
    logits = torch.eye(2, requires_grad=True)
    Accuracy().update(logits, torch.arange(2))
    Accuracy().update_tally(Tally(total / 2, torch.ones(2)))
    assert mean.compute().value == 2.0
