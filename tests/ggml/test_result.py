"""Results are ggml's to the last bit with compat, and without it exact over rows for any cut."""

from __future__ import annotations

import json
import math
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from augend import Accuracy, Mean, Tally
from augend.errors import ContractError, TallyError
from augend.ggml._parameters import Loss
from augend.ggml._result import _FOLDED_ROWS, Result

CASES = json.loads((Path(__file__).parents[1] / "golden" / "ggml" / "result_stats.json").read_text())["cases"]
COMPATS = ("ggml", "prism")
TOTALS = st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=30)


def same(expected: float, actual: float) -> bool:
    """Compare bits, but any NaN with any."""
    return expected == actual or (math.isnan(expected) and math.isnan(actual))


def ggml_result(case: dict, compat: str) -> Result:
    """Record the batches of an oracle case; the hits all come with the first ones."""
    result, losses = Result(compat=compat), [float(loss) for loss in case["batch_losses"]]
    kind, hits = Loss.MEAN if case["loss_per_datapoint"] else Loss.SUM, case["ncorrect"]
    for loss in losses:
        rows = case["ndata"] // len(losses)
        correct = None if case["ncorrect"] < 0 else min(hits, rows)
        result.record(rows=rows, loss=loss, period=case["opt_period"], loss_kind=kind, correct=correct)
        hits -= correct or 0
    return result


def cut(values: list, sizes: list[int]) -> list[list]:
    """Cut values into parts of such sizes, over and over."""
    parts, place = [], 0
    while place < len(values):
        size = sizes[len(parts) % len(sizes)]
        parts.append(values[place : place + size])
        place += size
    return parts


def recorded(totals: list[float], sizes: list[int], kind: Loss, counts: list[int] | None = None) -> Result:
    """Record rows in batches of such sizes; a row is right where its total is positive."""
    result = Result()
    counts = [1] * len(totals) if counts is None else counts
    for part, part_counts in zip(cut(totals, sizes), cut(counts, sizes), strict=True):
        total = torch.tensor(part, dtype=torch.float64, requires_grad=True)
        hits = (total > 0).to(torch.int64)
        result.record(
            rows=len(part),
            loss=math.nan,
            period=len(part),
            loss_kind=kind,
            tally=Tally(total * 1, torch.tensor(part_counts)),
            predictions=hits,
            correct=int(hits.sum()),
        )
    return result


@pytest.mark.parametrize("compat", COMPATS)
@pytest.mark.parametrize("case", CASES)
def test_statistics_of_ggml(case: dict, compat: str) -> None:
    """Losses, accuracies and their errors are ggml's float64 to the last bit, also where they are NaN or inf."""
    result = ggml_result(case, compat)
    loss, accuracy = result.loss(), result.accuracy()
    expected = [float(case[name]) for name in ("loss", "loss_unc", "accuracy", "accuracy_unc")]
    actual = [loss.value, loss.error, accuracy.value, accuracy.error]
    assert all(map(same, expected, actual)), (expected, actual)
    assert case["ndata"] == result.count == loss.count == accuracy.count


@pytest.mark.parametrize("compat", COMPATS)
@given(seed=st.integers(0, 1000), per_datapoint=st.booleans(), period=st.integers(1, 7))
def test_sums_are_made_one_after_another(compat: str, seed: int, per_datapoint: bool, period: int) -> None:
    """Many losses are summed as ggml's loop does: float32 products and squares, float64 sums in order."""
    losses = np.exp(np.random.default_rng(seed).normal(0, 8, 500)).astype(
        np.float32
    )  # whose sum needs more than 53 bits
    result, kind = Result(compat=compat), Loss.MEAN if per_datapoint else Loss.SUM
    total = squares = np.float64(0)
    for loss in losses:
        result.record(rows=2, loss=float(loss), period=period, loss_kind=kind)
        scaled = loss * np.float32(period) if per_datapoint else loss
        total, squares = total + np.float64(scaled), squares + np.float64(scaled * scaled)
    mean = total / 500
    variance = squares / 500 - mean * mean
    error = math.sqrt(variance / 499 if per_datapoint else variance * 500 / 499)
    assert (mean if per_datapoint else total, error) == (result.loss().value, result.loss().error)


@pytest.mark.parametrize("compat", [None, *COMPATS])
def test_nothing_recorded(compat) -> None:
    """An empty result has ggml's loss of 0 ± NaN, and no accuracy."""
    result = Result(compat=compat)
    assert 0 == result.loss().value
    assert math.isnan(result.loss().error)
    assert math.isnan(result.accuracy().value)
    assert math.isnan(result.accuracy().error)
    assert 0 == result.count == result.loss().count == len(result.predictions())
    assert torch.int32 == result.predictions().dtype
    assert compat == result.compat


@given(totals=TOTALS, sizes=st.lists(st.integers(1, 9), min_size=1, max_size=3), kind=st.sampled_from(list(Loss)))
def test_any_cut_gives_the_same_numbers(totals: list[float], sizes: list[int], kind: Loss) -> None:
    """Loss, accuracy and both errors do not depend on the batches, to the last bit."""
    result, whole = recorded(totals, sizes, kind), recorded(totals, [len(totals)], kind)
    for expected, actual in ((whole.loss(), result.loss()), (whole.accuracy(), result.accuracy())):
        assert same(expected.value, actual.value)
        assert same(expected.error, actual.error)
        assert expected.count == actual.count
    assert torch.equal(whole.predictions(), result.predictions())


@given(totals=TOTALS, data=st.data())
def test_a_mean_is_that_of_the_metrics(totals: list[float], data) -> None:
    """Loss and accuracy are those of ``augend.Mean`` and ``augend.Accuracy`` over the same rows."""
    counts = data.draw(st.lists(st.integers(1, 9), min_size=len(totals), max_size=len(totals)))
    result, mean, accuracy = recorded(totals, [4], Loss.MEAN_SQUARED_ERROR, counts), Mean(), Accuracy()
    total = torch.tensor(totals, dtype=torch.float64)
    mean.update(Tally(total, torch.tensor(counts)))
    accuracy.update_tally(Tally((total > 0).to(torch.float32), torch.ones(len(totals), dtype=torch.int64)))
    for expected, actual in ((mean.compute(), result.loss()), (accuracy.compute(), result.accuracy())):
        assert same(expected.value, actual.value)
        assert same(expected.error, actual.error)
        assert (expected.count, expected.low) == (actual.count, actual.low) or math.isnan(expected.low)


@given(totals=TOTALS, size=st.integers(1, 9), count=st.integers(0, 5))
def test_a_sum_is_nearest_to_the_exact_sum(totals: list[float], size: int, count: int) -> None:
    """The value of a SUM is the exact sum rounded once, its error √N·s, whatever the rows count.

    The error goes through three roundings, of s²/N's root, of √ and of the product: 4 · 2^-53 bounds them.
    """
    loss = recorded(totals, [size], Loss.SUM, [count] * len(totals)).loss()
    exact = [Fraction(total) for total in totals]
    assert float(sum(exact)) == loss.value
    assert len(totals) == loss.count
    if len(totals) == 1:
        assert math.isnan(loss.error)
        return
    mean = sum(exact) / len(exact)
    square = len(exact) * sum((one - mean) ** 2 for one in exact) / (len(exact) - 1)
    assert abs(Fraction(loss.error) ** 2 - square) <= 2 * 4 * Fraction(1, 2**53) * square


def test_the_sum_of_ggmls_own_test() -> None:
    """Six rows of 3 to 8 are 33, ± sqrt(6 · 3.5) as a sum of six; ggml's own answer, sqrt(3.5), is that of one."""
    loss = recorded([3, 4, 5, 6, 7, 8], [2], Loss.SUM).loss()
    assert 33 == loss.value
    assert math.isclose(math.sqrt(21), loss.error, rel_tol=4 * 2**-53)
    result = Result(compat="ggml")
    for value in range(3, 9):
        result.record(rows=1, loss=value, period=1, loss_kind=Loss.SUM)
    assert (33, 1.87082869338697) == (result.loss().value, result.loss().error)


def test_a_sum_that_no_mean_gives_back() -> None:
    """1 + 48 · 0 over 49 rows is 1; 49 times its rounded mean would be 0.9999999999999999."""
    assert 1 != 1 / 49 * 49
    assert 1 == recorded([1.0] + [0.0] * 48, [7], Loss.SUM).loss().value


def test_identical_losses_have_no_error() -> None:
    """Where ggml's one-pass variance gives 1.4e-5 or NaN, the error is 0."""
    for value in (0.1, 0.7):
        loss = recorded([value] * 7, [1], Loss.MEAN).loss()
        assert (value, 0.0) == (loss.value, loss.error)


@pytest.mark.parametrize("compat", [None, *COMPATS])
def test_one_batch_without_hits_hides_the_accuracy(compat) -> None:
    """It is NaN until reset, as in ggml."""
    result = Result(compat=compat)

    def record(correct: int | None) -> None:
        tally = Tally(torch.ones(2), torch.ones(2))
        result.record(rows=2, loss=1.0, period=1, loss_kind=Loss.CROSS_ENTROPY, tally=tally, correct=correct)

    record(2)
    assert 1 == result.accuracy().value
    record(None)
    record(2)
    assert math.isnan(result.accuracy().value)
    assert 6 == result.accuracy().count == result.count
    result.reset()
    assert 0 == result.count
    record(1)
    assert 0.5 == result.accuracy().value


@given(batches=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), min_size=1, max_size=9))
def test_an_accuracy_may_be_asked_for_at_any_time(batches: list[tuple[int, int]]) -> None:
    """Asking after every batch, or once at the end, gives the same bits."""
    asked, silent = Result(), Result()
    for rows, hits in batches:
        tally, correct = Tally(torch.ones(rows), torch.ones(rows)), min(rows, hits)
        for one in (asked, silent):
            one.record(rows=rows, loss=0.0, period=1, loss_kind=Loss.CROSS_ENTROPY, tally=tally, correct=correct)
        asked.accuracy()
    assert silent.accuracy().value == asked.accuracy().value
    assert same(silent.accuracy().error, asked.accuracy().error)


def test_predictions_keep_their_order() -> None:
    """They come as they were evaluated, and are copies."""
    result, first = Result(), torch.tensor([3, 1])
    for predictions in (first, torch.tensor([2], dtype=torch.int32)):
        rows = len(predictions)
        tally = Tally(torch.ones(rows), torch.ones(rows))
        result.record(rows=rows, loss=1.0, period=1, loss_kind=Loss.CROSS_ENTROPY, tally=tally, predictions=predictions)
    first.fill_(9)
    assert torch.equal(torch.tensor([3, 1, 2], dtype=torch.int32), result.predictions())


def test_rows_are_copied_and_read_in_blocks() -> None:
    """A tally may be overwritten after it was recorded; many rows are read before anybody asks."""
    result, total = Result(), torch.ones(_FOLDED_ROWS // 2)
    for value in (1.0, 2.0, 4.0):
        total.fill_(value)
        tally = Tally(total, torch.ones(len(total), dtype=torch.int64))
        result.record(rows=len(total), loss=0.0, period=1, loss_kind=Loss.MEAN, tally=tally)
    assert 7 / 3 == result.loss().value
    assert 1.5 * _FOLDED_ROWS == result.loss().count


def test_the_rows_that_wait_are_bounded() -> None:
    """Before a result is read at the end, no more rows wait in it than are read at once."""
    result = Result()
    for _ in range(9):
        rows = _FOLDED_ROWS // 4
        tally = Tally(torch.zeros(rows), torch.ones(rows))
        result.record(rows=rows, loss=0.0, period=1, loss_kind=Loss.MEAN, tally=tally)
    assert 1 == len(result._waiting)


@pytest.mark.parametrize("compat", [None, *COMPATS])
@given(first=TOTALS, second=TOTALS, known=st.booleans())
def test_appended_batches_are_recorded_batches(compat, first: list[float], second: list[float], known: bool) -> None:
    """A result that took over another's batches is one that recorded them all; the other is left as it was."""
    parts = []
    for totals in (first, second, first + second):
        result = Result(compat=compat)
        for total in totals:
            tally = Tally(torch.tensor([total]), torch.ones(1))
            hit = int(total > 0)
            result.record(
                rows=1,
                loss=total,
                period=2,
                loss_kind=Loss.MEAN,
                tally=tally,
                predictions=torch.tensor([hit]),
                correct=hit if known else None,
            )
        parts.append(result)
    result, other, whole = parts
    empty, before = Result(compat=compat), other.loss()
    empty.append(result)
    empty.append(other)
    result.append(other)
    result.append(Result(compat=compat))
    for one in (result, empty):
        for expected, actual in ((whole.loss(), one.loss()), (whole.accuracy(), one.accuracy())):
            assert same(expected.value, actual.value)
            assert same(expected.error, actual.error)
        assert whole.count == one.count
        assert torch.equal(whole.predictions(), one.predictions())
    assert same(before.value, other.loss().value)
    assert len(second) == other.count


@pytest.mark.parametrize("compat", [None, *COMPATS])
@pytest.mark.parametrize("batches", [0, 3])
def test_a_saved_result_goes_on(compat, batches: int) -> None:
    """A loaded result has the numbers of the saved one, and takes further batches alike."""
    result, other = Result(compat=compat), Result(compat=compat)

    def record(one: Result, value: float) -> None:
        one.record(
            rows=2,
            loss=float(np.float32(value)),
            period=2,
            loss_kind=Loss.CROSS_ENTROPY,
            tally=Tally(torch.tensor([value, value / 2]), torch.ones(2)),
            predictions=torch.tensor([0, 1]),
            correct=1,
        )

    for batch in range(batches):
        record(result, batch + 0.1)
    record(other, 9.0)
    other.load_state_dict(result.state_dict())
    for one in (result, other):
        record(one, 0.7)
    for expected, actual in ((result.loss(), other.loss()), (result.accuracy(), other.accuracy())):
        assert expected.value == actual.value
        assert same(expected.error, actual.error)
    assert torch.equal(result.predictions(), other.predictions())
    assert 2 * batches + 2 == result.count == other.count


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "version 2; here it is 1"),
        ({"more": 1}, "with the keys"),
        ({"compat": None}, "compat None; here it is 'ggml'"),
        ({"kind": "hinge"}, "unknown loss"),
        ({"kind": None}, "empty in one part"),
        ({"count": 0}, "do not fit|empty in one part"),
        ({"count": 5}, "do not fit"),
        ({"correct": 7}, "do not fit"),
        ({"count": -1}, "from 0 on"),
        ({"period": 1.0}, "from 0 on"),
        ({"batch_rows": True}, "from 0 on"),
        ({"period": None}, "from 0 on"),
        ({"losses": [1.0, 1.0, 1.0]}, "float32"),
        ({"losses": torch.ones(3, dtype=torch.float64)}, "float32"),
        ({"predictions": torch.ones(3)}, "int32"),
        ({"predictions": torch.ones(3, 1, dtype=torch.int32)}, "int32"),
        ({"mean": {}}, "metric"),
    ],
)
def test_a_damaged_state_changes_nothing(change: dict, message: str) -> None:
    """A state that is none, or of another kind of result, is refused."""
    result = Result(compat="ggml")
    for _ in range(3):
        result.record(rows=2, loss=1.0, period=1, loss_kind=Loss.MEAN, correct=1)
    before = result.loss(), result.accuracy()
    with pytest.raises(ContractError, match=message):
        result.load_state_dict({**result.state_dict(), **change})
    assert before == (result.loss(), result.accuracy())


BATCH = {"rows": 2, "loss": 1.0, "period": 2, "loss_kind": Loss.MEAN, "correct": 1}
ROWS = {"tally": Tally(torch.ones(2), torch.ones(2))}


@pytest.mark.parametrize(
    ("compat", "change", "message"),
    [
        (None, {"rows": 0}, "at least 1 row"),
        (None, {"period": 0}, "at least 1 row"),
        (None, {"correct": 3}, "from 0 to 2 can be right; got 3"),
        (None, {"correct": -1}, "got -1"),
        (None, {"predictions": torch.zeros(3)}, r"\[2\], one a row; got \[3\]"),
        (None, {"tally": None}, "tally of its 2 rows; got none"),
        (None, {"tally": Tally(torch.ones(3), torch.ones(3))}, r"tally of its 2 rows; got \[3\]"),
        (None, {"loss_kind": Loss.SUM}, "one kind of loss"),
        (None, {"loss_kind": Loss.CROSS_ENTROPY}, "one kind of loss"),
        ("ggml", {"rows": 1}, "same rows"),
        ("prism", {"period": 1}, "same rows"),
        ("ggml", {"loss_kind": Loss.SUM}, "same rows"),
    ],
)
def test_batches_that_do_not_fit(compat, change: dict, message: str) -> None:
    """A batch that contradicts itself or those before it is refused, and nothing is added."""
    result = Result(compat=compat)
    result.record(**BATCH, **ROWS)
    with pytest.raises(ContractError, match=message):
        result.record(**{**BATCH, **ROWS, **change})
    assert 2 == result.count
    assert (1, 0.5) == (result.loss().value / (2 if compat else 1), result.accuracy().value)


def test_by_default_batches_and_periods_may_vary() -> None:
    """Sizes and periods change with a short last batch; that is no mistake."""
    result = Result()
    result.record(**BATCH, **ROWS)
    tally = Tally(torch.full((1,), 4.0), torch.ones(1))
    result.record(rows=1, loss=4.0, period=1, loss_kind=Loss.MEAN, tally=tally, correct=1)
    assert 2 == result.loss().value
    assert 2 / 3 == result.accuracy().value


@pytest.mark.parametrize("compat", COMPATS)
def test_ggml_does_not_tell_means_apart(compat) -> None:
    """With compat a mean may follow any other mean, as ggml keeps only whether it is one."""
    result = Result(compat=compat)
    for kind in (Loss.MEAN, Loss.CROSS_ENTROPY, Loss.MEAN_SQUARED_ERROR):
        result.record(**{**BATCH, "loss_kind": kind})
    assert 2 == result.loss().value


def test_what_cannot_be_appended() -> None:
    """A result takes no batches of itself, of other numbers, of another loss, nor what is no result."""
    result, other = Result(), Result()
    result.record(**BATCH, **ROWS)
    other.record(**{**BATCH, **ROWS, "loss_kind": Loss.SUM})
    for one in (result, other, Result(compat="ggml"), None):
        with pytest.raises(ContractError, match=r"with compat None|one kind of loss"):
            result.append(one)
    ggml, prism = Result(compat="ggml"), Result(compat="ggml")
    ggml.record(**BATCH)
    prism.record(**{**BATCH, "period": 1})
    with pytest.raises(ContractError, match="same rows, period"):
        ggml.append(prism)
    assert 2 == result.count == ggml.count


def test_a_tally_of_negative_weight_is_found() -> None:
    """A count below zero, which no row can have, is an error of the tally when the loss is asked for."""
    result = Result()
    result.record(**BATCH, tally=Tally(torch.ones(2), torch.tensor([1, -1])))
    with pytest.raises(TallyError, match="not negative"):
        result.loss()
