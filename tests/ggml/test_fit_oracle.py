"""fit against a real ggml: permutations, losses, weights, schedules and splits; and what the default does better."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from ggml_runs import (
    HALF_ULP,
    KINDS,
    LOSSES,
    Model,
    farthest,
    floats,
    model_of,
    options_of,
    oracle,
    same,
    training_of,
    upstream,
)
from torch import Tensor

from augend.errors import SplitError
from augend.ggml import SGD, AdamW, Dataset, History, Moment, Parameters, Progress, fit

RECORD = oracle("fit")
CASES = [
    pytest.param(
        case,
        id=f"{case['loss_type']}-{case['optimizer']}-{case['ndata']}-{case['nbatch_logical']}-{case['nbatch_physical']}",
    )
    for case in RECORD["cases"]
]
TWICE = RECORD["cases"][1]
TABLE = RECORD["split_table_ndata_logical_val_idatasplit"]
# Up to 20 steps, each of values up to 1 with a rounding or two that differ: what is promised for whole runs is 1e-6.
WHOLE_RUN = 16 * HALF_ULP


@dataclass
class Log:
    """What was seen of one fit."""

    permutations: list[list[int]] = field(default_factory=list)
    losses: dict[bool, list[list[float]]] = field(default_factory=lambda: {True: [], False: []})
    counts: dict[bool, list[int]] = field(default_factory=lambda: {True: [], False: []})
    predictions: dict[bool, list[list[int]]] = field(default_factory=lambda: {True: [], False: []})
    weights: list[dict[str, Tensor]] = field(default_factory=list)
    asked: list[Moment] = field(default_factory=list)
    rows: dict[bool, list[set[float]]] = field(default_factory=lambda: {True: [], False: []})
    history: History | None = None


def schedule(asked: list[Moment]) -> Any:
    """The oracle's schedule, which logs when it was asked."""

    def at(moment: Moment) -> Parameters:
        asked.append(moment)
        epoch = np.float32(moment.epoch)
        adamw = AdamW(alpha=float(np.float32(0.05) / epoch), wd=0.01)
        return Parameters(adamw=adamw, sgd=SGD(alpha=float(np.float32(0.2) / epoch), wd=0.001))

    return at


def dataset_of(case: dict[str, Any], compat: str | None) -> Dataset:
    """The data of one case."""
    data = floats(case["data"]).reshape(case["ndata"], -1)
    labels = floats(case["labels"]).reshape(case["ndata"], -1) if case["labels"] else None
    return Dataset(data, labels, shard=case["ndata_shard"], compat=compat)


def fitted(case: dict[str, Any], model: Model, dataset: Dataset, compat: str | None, split: float) -> Log:
    """Fit once, and log everything that a callback can see."""
    log = Log()

    def see(event: Progress) -> bool | None:
        if event.batch == 1:
            log.losses[event.train].append([])
            log.counts[event.train].append(0)
            log.predictions[event.train].append([])
            log.rows[event.train].append(set())
            if event.train:
                log.permutations.append(list(event.dataset.permutation))
                log.weights.append({})
        optimizer = event.optimizer
        log.losses[event.train][-1].append(float(model.graph.values(optimizer.loss_tensor)))
        log.rows[event.train][-1].update(model.graph.values(model.inputs)[:, 0].tolist())
        log.counts[event.train][-1] = event.result.count
        log.predictions[event.train][-1] = event.result.predictions().tolist()
        log.weights[-1] = model.values()
        return None

    training = training_of(model, LOSSES[case["loss_type"]], KINDS[case["optimizer"]])
    options = options_of(case["nepoch"], case["nbatch_logical"], split, schedule(log.asked))
    log.history = fit(model.graph, training, dataset, options, compat=compat, on_train=see, on_evaluate=see)
    return log


def written(split: float) -> float:
    """What a user writes; the nine digits of an oracle are those of a float32."""
    return float(f"{split:.3g}")


def fits_of(case: dict[str, Any], compat: str | None, split: float | None = None) -> list[Log]:
    """Repeat all fits of one case on one data set and one set of weights."""
    split = case["val_split"] if split is None else split
    model, dataset = model_of(case["model"], case["nbatch_physical"]), dataset_of(case, compat)
    return [fitted(case, model, dataset, compat, split) for _ in case["fits"]]


@pytest.mark.parametrize("case", CASES)
def test_fits_are_ggmls(case: dict[str, Any]) -> None:
    """In compat each epoch has ggml's permutation and predictions exactly, its losses and weights within 1e-6."""
    logs = fits_of(case, "ggml")
    for log, epochs in zip(logs, case["fits"], strict=True):
        assert [epoch["permutation"] for epoch in epochs] == log.permutations
        for place, epoch in enumerate(epochs):
            for train, part in ((True, epoch["train"]), (False, epoch["val"])):
                if part["ndata"] == 0:
                    assert [] == log.losses[train]
                    continue
                assert part["ndata"] == log.counts[train][place]
                losses = floats(log.losses[train][place])
                assert WHOLE_RUN >= farthest({"": floats(part["batch_losses"])}, {"": losses})
                assert part["pred"] == log.predictions[train][place]
            weights = {name: floats(values) for name, values in epoch["weights"].items()}
            assert WHOLE_RUN >= farthest(weights, log.weights[place])
    final = {name: floats(values) for name, values in case["final_weights"].items()}
    assert WHOLE_RUN >= farthest(final, logs[-1].weights[-1])


@pytest.mark.parametrize("case", CASES)
def test_schedules_are_asked_as_ggml_asks(case: dict[str, Any]) -> None:
    """A schedule is asked once for each update, with the epoch from 1 and the number of the update from 1."""
    logs = fits_of(case, "ggml")
    assert case["get_opt_pars_epoch_log"] == [moment.epoch for log in logs for moment in log.asked]
    for log in logs:
        assert list(range(1, len(log.asked) + 1)) == [moment.iteration for moment in log.asked]


@pytest.mark.parametrize("case", CASES)
def test_the_history_has_ggmls_numbers(case: dict[str, Any]) -> None:
    """What ggml prints and forgets is returned: number, update, losses and accuracies with error bars, both parts."""
    for log, epochs in zip(fits_of(case, "ggml"), case["fits"], strict=True):
        assert log.history is not None
        assert [epoch["epoch"] for epoch in epochs] == [epoch.number for epoch in log.history.epochs]
        assert [epoch["iter_after"] - 1 for epoch in epochs] == [epoch.iteration for epoch in log.history.epochs]
        for expected, epoch in zip(epochs, log.history.epochs, strict=True):
            check_part(case, expected["train"], epoch.loss, epoch.accuracy)
            if expected["val"]["ndata"]:
                check_part(case, expected["val"], epoch.validation_loss, epoch.validation_accuracy)
            else:
                assert 0 == epoch.validation_loss.count
                assert math.isnan(epoch.validation_accuracy.value)


def check_part(case: dict[str, Any], expected: dict[str, Any], loss: Any, accuracy: Any) -> None:
    """Check one part of an epoch against ggml's statistics."""
    off = case["opt_period"] * WHOLE_RUN  # what was stored is multiplied by the period again
    assert abs(expected["loss"] - loss.value) <= off
    # A variance of numbers of up to 2 is off by 8 times what they are off; and |√a - √b| <= √|a - b|.
    assert_close(float(expected["loss_unc"]), loss.error, math.sqrt(8 * off))
    assert_close(float(expected["accuracy"]), accuracy.value, 0.0)
    assert_close(float(expected["accuracy_unc"]), accuracy.error, 0.0)


def assert_close(expected: float, actual: float, bound: float) -> None:
    """Assert equality within a bound, NaN by NaN."""
    assert math.isnan(expected) == math.isnan(actual)
    assert math.isnan(actual) or abs(expected - actual) <= bound


@pytest.mark.parametrize("case", CASES)
def test_the_default_learns_the_same_from_the_same_rows(case: dict[str, Any]) -> None:
    """The first fit of the default sees the rows that ggml's sees, in ggml's order, and ends with its weights."""
    log, *_ = fits_of(case, None, written(case["val_split"]))
    assert [epoch["permutation"] for epoch in case["fits"][0]] == log.permutations
    for place, epoch in enumerate(case["fits"][0]):
        weights = {name: floats(values) for name, values in epoch["weights"].items()}
        assert WHOLE_RUN >= farthest(weights, log.weights[place])


def test_a_second_fit_of_ggml_trains_on_rows_that_the_first_validated() -> None:
    """The fault, as recorded from ggml and repeated in compat: the permutation stays, the generator starts again."""
    tail = TWICE["idata_split"]
    first, second = ([epoch["permutation"] for epoch in epochs] for epochs in TWICE["fits"])
    leaked = set(first[0][tail:]) & set(second[0][:tail])
    assert len(leaked) == 8
    logs = fits_of(TWICE, "ggml")
    assert first + second == logs[0].permutations + logs[1].permutations


def test_a_second_fit_keeps_the_validation_rows_out_of_training() -> None:
    """By default no fit on a data set ever trains on a row that another one validated."""
    logs = fits_of(TWICE, None)
    assert 2 == len(logs)
    trained = set().union(*itertools.chain.from_iterable(log.rows[True] for log in logs))
    validated = set().union(*itertools.chain.from_iterable(log.rows[False] for log in logs))
    assert TWICE["ndata"] == len(trained) + len(validated)
    assert set() == trained & validated


def test_another_split_of_the_same_data_is_an_error_until_the_first_is_forgotten() -> None:
    """A second fit with another validation part would train on rows held out before: it says so, by name."""
    model, dataset = model_of(TWICE["model"], TWICE["nbatch_physical"]), dataset_of(TWICE, None)
    fitted(TWICE, model, dataset, None, 0.2)
    with pytest.raises(SplitError, match="forget_division"):
        fitted(TWICE, model, dataset, None, 0.5)
    dataset.forget_division()
    fitted(TWICE, model, dataset, None, 0.5)


class Enough(Exception):  # noqa: N818  # no error: the first batch has told what there is to know
    """Ends a fit from outside."""


def rows_trained(rows: int, logical: int, split: float, compat: str | None) -> int:
    """How many rows a fit gives to training, read off its first batch."""
    trained = 0

    def tell(event: Progress) -> None:
        nonlocal trained
        trained = event.batches * logical if event.train else rows - event.batches * logical
        raise Enough

    model = upstream(rows=logical)
    dataset = Dataset(np.zeros((rows, 1), dtype=np.float32), shard=logical, compat=compat)
    options = options_of(1, logical, split)
    with pytest.raises(Enough):
        fit(
            model.graph,
            training_of(model, LOSSES["sum"]),
            dataset,
            options,
            compat=compat,
            on_train=tell,
            on_evaluate=tell,
        )
    return trained


@pytest.mark.parametrize("rows", sorted({row[0] for row in TABLE}))
def test_splits_are_ggmls_in_compat(rows: int) -> None:
    """All tabulated splits are cut off in float32, as ggml cuts them, also where nothing is left to train on."""
    table = [row for row in TABLE if row[0] == rows]
    assert [row[3] for row in table] == [rows_trained(*row[:3], compat="ggml") for row in table]


@pytest.mark.parametrize("rows", sorted({row[0] for row in TABLE if row[0] <= 1000}))
def test_splits_are_exact_by_default(rows: int) -> None:
    """A fraction means what is written: 0.1 of ten batches is one; and a split that leaves no training is an error."""
    for _, logical, recorded, _ in (row for row in TABLE if row[0] == rows):
        split = written(recorded)
        batches = math.floor((1 - Fraction(str(split))) * (rows // logical))
        if batches:
            assert batches * logical == rows_trained(rows, logical, split, None)
        else:
            with pytest.raises(SplitError):
                rows_trained(rows, logical, split, None)


def test_tabulated_splits_need_float32() -> None:
    """The table tells the two apart: 64 of its 297 splits are others when the fraction is taken as it is."""
    differing = sum(math.floor((1 - Fraction(row[2])) * (row[0] // row[1])) * row[1] != row[3] for row in TABLE)
    assert (297, 64) == (len(TABLE), differing)


def test_the_log_of_one_fit_is_repeatable() -> None:
    """Two fits from the same start have the same bits, in weights, losses and permutations."""
    case = RECORD["cases"][0]
    (one,), (other,) = fits_of(case, None), fits_of(case, None)
    assert one.permutations == other.permutations
    assert one.losses == other.losses
    assert all(same(*both) for both in zip(one.weights, other.weights, strict=True))
