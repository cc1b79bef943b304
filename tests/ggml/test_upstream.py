"""ggml's own tests of its optimizer, restated: six datapoints, one weight of 3, and integers for answers."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from ggml_runs import (
    HALF_ULP,
    SIGN_STEPS,
    UPSTREAM_ROWS,
    W0,
    Model,
    drive,
    optimizer_of,
    options_of,
    training_of,
    upstream,
    weight_of,
)

from augend.ggml import Dataset, Kind, Loss, Optimizer, Random, Result, epoch, fit

ULP = 2.0**-52  # of 1 in float64
POINTS = len(UPSTREAM_ROWS)
SIDES = [None, "ggml", "prism"]
SIDE_IDS = ["default", "ggml", "prism"]
every_side = pytest.mark.parametrize("compat", SIDES, ids=SIDE_IDS)
every_kind = pytest.mark.parametrize("kind", list(Kind), ids=[kind.value for kind in Kind])


def points(compat: Any, shard: int = 1) -> Dataset:
    """The six datapoints 0 to 5."""
    return Dataset(np.array(UPSTREAM_ROWS, dtype=np.float32).reshape(POINTS, 1), shard=shard, compat=compat)


def made(compat: Any, kind: Kind, loss: Loss = Loss.SUM, *, rows: int = 1, period: int = 1) -> tuple[Model, Optimizer]:
    """The model and its optimizer, with steps by the sign of the gradient or by the gradient, which is 1."""
    model = upstream(rows)
    return model, optimizer_of(model, loss, kind, period=period, parameters=SIGN_STEPS, compat=compat)


COMBINATIONS = [(shard, batch) for shard in range(1, POINTS + 1) for batch in range(shard, POINTS + 1, shard)]


@every_side
@pytest.mark.parametrize(("shard", "batch"), COMBINATIONS, ids=[f"{shard}-{batch}" for shard, batch in COMBINATIONS])
@pytest.mark.parametrize("shuffled", [False, True], ids=["in-order", "shuffled"])
def test_batches_cover_the_data(compat: str | None, shard: int, batch: int, shuffled: bool) -> None:
    """Every datapoint comes exactly once, with its own label, in whole shards; in order if nothing was shuffled."""
    data = np.array([[16 * row + column for column in range(2)] for row in range(POINTS)], dtype=np.float32)
    dataset = Dataset(data, 16 * data[:, :1], shard=shard, compat=compat)
    if shuffled:
        dataset.shuffle(Random())
    rows: list[int] = []
    for index in range(dataset.batches(batch)):
        part, labels = dataset.batch(batch, index)
        assert labels is not None
        assert (part[:, 1] == part[:, 0] + 1).all()
        assert (labels[:, 0] == 16 * part[:, 0]).all()
        rows += [int(value) // 16 for value in part[:, 0]]
    if compat is None or POINTS % batch == 0:
        reached = POINTS if compat is None else POINTS // shard * shard
        assert list(range(reached)) == sorted(rows)
    assert len(rows) == len(set(rows))
    starts = [row for row in rows if row % shard == 0]
    assert rows == [row for start in starts for row in range(start, min(start + shard, POINTS))]
    if not shuffled:
        assert rows == sorted(rows)


@every_side
@every_kind
def test_gradients_accumulate(compat: str | None, kind: Kind) -> None:
    """In a window that never ends the gradient after k evaluations is k."""
    model, optimizer = made(compat, kind, period=999_999)
    history = []
    for row in UPSTREAM_ROWS:
        drive(optimizer, [row])
        history.append(float(optimizer.gradient(model.parameters["weight"])))
    assert [1.0, 2.0, 3.0, 4.0, 5.0, 6.0] == history
    assert W0 == weight_of(model)


def statistics(result: Result) -> list[float]:
    """Count, loss, its error, accuracy and its error."""
    loss, accuracy = result.loss(), result.accuracy()
    return [float(result.count), loss.value, loss.error, accuracy.value, accuracy.error]


@every_side
def test_results_begin_empty(compat: str | None) -> None:
    """Before anything was evaluated there are 0 datapoints with a loss of 0, and everything else is NaN."""
    expected = [0.0, 0.0, math.nan, math.nan, math.nan]
    assert np.array_equal(expected, statistics(Result(compat=compat)), equal_nan=True)


@every_side
@every_kind
def test_forward_evaluations_count_and_leave_the_weight(compat: str | None, kind: Kind) -> None:
    """Six forward evaluations: 33 ± sqrt(3.5) as ggml has it, ± sqrt(21) as the error of a sum of six is; w stays 3."""
    model, optimizer = made(compat, kind)
    result = Result(compat=compat)
    for row in UPSTREAM_ROWS:
        drive(optimizer, [row], backward=False, result=result)
    count, loss, error, *rest = statistics(result)
    assert (6.0, 33.0) == (count, loss)
    assert error == pytest.approx(math.sqrt(21.0 if compat is None else 3.5), rel=4 * ULP)  # a few roundings of float64
    assert all(map(math.isnan, rest))
    assert W0 == weight_of(model)


@every_side
@every_kind
def test_training_after_a_reset(compat: str | None, kind: Kind) -> None:
    """After ten updates, the weight put back and a reset, six evaluations end at w = 3 - 6, with a loss of 18 ± 0."""
    model, optimizer = made(compat, kind)
    result = Result(compat=compat)
    for _ in range(10):
        drive(optimizer, [0.0], result=result)
    assert W0 - 10 == weight_of(model)
    model.graph.set_values(model.parameters["weight"], [W0])
    optimizer.reset()
    result.reset()
    for row in UPSTREAM_ROWS:
        drive(optimizer, [row], result=result)
    assert -3.0 == weight_of(model)
    assert [6.0, 18.0, 0.0] == statistics(result)[:3]


@every_side
@every_kind
def test_an_epoch_by_hand_is_a_fit(compat: str | None, kind: Kind) -> None:
    """One epoch with a shuffle before it leaves the bits of a fit of one epoch."""
    model, optimizer = made(compat, kind)
    dataset = points(compat)
    optimizer.shuffle(dataset)  # once for the validation part, which is empty, and once for the epoch
    optimizer.shuffle(dataset)
    epoch(optimizer, dataset)
    other = upstream()
    training = training_of(other, Loss.SUM, kind, parameters=SIGN_STEPS)
    fitted = points(compat)
    history = fit(other.graph, training, fitted, options_of(1, 1, 0.0), compat=compat)
    assert weight_of(model) == weight_of(other) == -3.0
    assert dataset.permutation == fitted.permutation
    assert 1 == len(history.epochs)


@every_side
@every_kind
def test_the_two_parts_of_an_epoch(compat: str | None, kind: Kind) -> None:
    """Four rows train and two evaluate: w = 3 - 4 * epoch, 28 - 16 * epoch ± 0, and 15 - 8 * epoch ± sqrt(0.5)."""
    model, optimizer = made(compat, kind)
    dataset = points(compat)
    for number in range(1, 5):
        train, evaluate = Result(compat=compat), Result(compat=compat)
        epoch(optimizer, dataset, split=4, train=train, evaluate=evaluate)
        assert W0 - 4 * number == weight_of(model)
        assert [4.0, 28.0 - 16 * number, 0.0] == statistics(train)[:3]
        # Two rows, one apart: s = sqrt(1/2), which ggml gives; the error of their sum is sqrt(2) * s.
        count, loss, error = statistics(evaluate)[:3]
        assert (2.0, 15.0 - 8 * number) == (count, loss)
        assert error == pytest.approx(1.0 if compat is None else math.sqrt(0.5), rel=4 * ULP)


@every_side
@every_kind
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("loss", [Loss.SUM, Loss.MEAN], ids=["sum", "mean"])
def test_windows_of_six(compat: str | None, kind: Kind, rows: int, loss: Loss) -> None:
    """Six rows are one update, in physical batches of 1 or 2: gradients 1 to 6 (or /6), w = 3 - epoch, 39 - 6 * epoch.

    That is for AdamW, which moves by the sign of the gradient; SGD moves by the gradient, which is 6 for a sum.
    """
    period = POINTS // rows
    model, optimizer = made(compat, kind, loss, rows=rows, period=period)
    dataset = points(compat)
    parts = 1.0 if loss is Loss.SUM else 6.0
    move = 6.0 if kind is Kind.SGD and loss is Loss.SUM else 1.0
    for number in range(1, 5):
        result = Result(compat=compat)
        history: list[float] = []

        def see(event: Any, history: list[float] = history) -> None:
            history.append(float(event.optimizer.gradient(model.parameters["weight"])))

        epoch(optimizer, dataset, train=result, on_train=see)
        wholes = [rows * (place + 1) / parts for place in range(period)]
        # Up to six additions of a sixth, of which no float32 is exact, and one update a window.
        assert 6 * HALF_ULP >= max(abs(one - other) for one, other in zip(wholes, history, strict=True))
        assert 4 * 2 * HALF_ULP * 4 >= abs(W0 - move * number - weight_of(model))
        count, value, *_ = statistics(result)
        assert 6.0 == count
        assert 6 * 36 * 4 * HALF_ULP >= abs((33.0 - 6 * move * (number - 1)) / parts - value)


def test_all_combinations_are_there() -> None:
    """The table of shards and batches is ggml's: every shard up to 6, every multiple of it up to 6."""
    assert 14 == len(COMBINATIONS)
    assert set(COMBINATIONS) == {
        (shard, batch) for shard, batch in itertools.product(range(1, 7), repeat=2) if batch % shard == 0
    }
