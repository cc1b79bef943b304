"""fit and epoch beyond ggml: history, early stopping, schedules, checkpoints, and callbacks that end a part."""

from __future__ import annotations

import functools
import io
import math
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ggml_runs import Model, floats, model_of, optimizer_of, options_of, oracle, same, training_of, upstream, weight_of
from hypothesis import given
from hypothesis import strategies as st

from augend.errors import CheckpointError, ContractError, NonFiniteError, SplitError
from augend.ggml import (
    SGD,
    AdamW,
    Dataset,
    Fit,
    History,
    Kind,
    Loss,
    Moment,
    Parameters,
    Progress,
    Random,
    Result,
    epoch,
    fit,
)

MLP = oracle("train_mlp")["model"]


def column(rows: int, compat: Any = None) -> Dataset:
    """Datapoints 0, 1, 2, ... of width 1."""
    return Dataset(np.arange(rows, dtype=np.float32).reshape(rows, 1), compat=compat)


def classes(rows: int = 26, shard: int = 1) -> Dataset:
    """A data set for the classifier, of a number of rows that nothing divides."""
    generator = torch.Generator().manual_seed(8)
    data = torch.randn(rows, 4, generator=generator)
    return Dataset(data, torch.eye(3)[data[:, :3].argmax(1)], shard=shard)


def fitted(model: Model, dataset: Dataset, options: Fit, **others: Any) -> History:
    """Fit the classifier with AdamW."""
    parameters = Parameters(adamw=AdamW(alpha=0.05))
    training = training_of(model, Loss.CROSS_ENTROPY, Kind.ADAMW, parameters=parameters)
    return fit(model.graph, training, dataset, options, **others)


def test_a_fit_learns_and_tells() -> None:
    """The history has one record an epoch, with falling losses, counts of rows, updates, seconds, and why it ended."""
    history = fitted(model_of(MLP, 4), classes(), options_of(6, 8, 0.25))
    assert [1, 2, 3, 4, 5, 6] == [one.number for one in history.epochs]
    assert [16] * 6 == [one.loss.count for one in history.epochs]  # two logical batches fit into 3/4 of 26 rows
    assert [10] * 6 == [one.validation_loss.count for one in history.epochs]
    assert [2, 4, 6, 8, 10, 12] == [one.iteration for one in history.epochs]
    assert history.epochs[-1].loss.value < history.epochs[0].loss.value
    assert all(one.seconds > 0 for one in history.epochs)
    assert 0.0 <= history.epochs[-1].validation_accuracy.value <= 1.0
    assert "6" in history.stopped
    assert history.best in history.epochs
    assert "6 epochs" in str(history)
    assert "validation loss" in str(history)


def test_without_a_split_the_training_loss_is_watched() -> None:
    """A fit that holds nothing out has no validation, counts every row, and its best epoch is by the training loss."""
    history = fitted(model_of(MLP, 4), classes(), options_of(3, 8))
    assert [26] * 3 == [one.loss.count for one in history.epochs]
    assert [0] * 3 == [one.validation_loss.count for one in history.epochs]
    best = min(history.epochs, key=lambda one: one.loss.value)
    assert best == history.best
    assert "validation" not in str(history)


@pytest.mark.parametrize(
    ("split", "trained"),
    [("0.05", 19), (0.05, 19), (Fraction(1, 20), 19), (0.0, 20), (0.3, 14), (Fraction(1, 3), 13), (0, 20)],
    ids=str,
)
def test_splits_are_what_is_written(split: Any, trained: int) -> None:
    """A fraction may be a decimal, its text, or exact; what is held out is rounded up to whole logical batches."""
    seen: dict[bool, int] = {}

    def see(event: Progress) -> None:
        seen[event.train] = event.result.count

    model = upstream()
    options = options_of(1, 1, split)
    fit(model.graph, training_of(model, Loss.SUM), column(20), options, on_train=see, on_evaluate=see)
    assert trained == seen[True]
    assert 20 - trained == seen.get(False, 0)


@given(
    rows=st.integers(min_value=1, max_value=40),
    logical=st.integers(min_value=1, max_value=9),
    thousandths=st.integers(min_value=1, max_value=999),
)
def test_at_least_the_part_that_was_asked_for_is_held_out(rows: int, logical: int, thousandths: int) -> None:
    """Whole logical batches train, no row too many of them: one more would take of what is to be held out."""
    split, seen = Fraction(thousandths, 1000), {True: 0, False: 0}

    def see(event: Progress) -> None:
        seen[event.train] = event.result.count

    model = upstream(rows=logical)
    options = options_of(1, logical, str(thousandths / 1000))
    call = functools.partial(fit, model.graph, training_of(model, Loss.SUM), column(rows), options)
    if (1 - split) * rows < logical:
        with pytest.raises(SplitError):
            call(on_train=see, on_evaluate=see)
        return
    call(on_train=see, on_evaluate=see)
    assert rows == seen[True] + seen[False]
    assert 0 == seen[True] % logical
    assert split * rows <= seen[False] < split * rows + logical


@pytest.mark.parametrize("split", ["a tenth", None, -0.1, 1, 1.5, math.nan, "1/0"], ids=repr)
def test_splits_that_are_none(split: Any) -> None:
    """What is no number from 0 to less than 1 is a SplitError that says what came."""
    model = upstream()
    with pytest.raises(SplitError, match="validation_split"):
        fit(model.graph, training_of(model, Loss.SUM), column(4), options_of(1, 1, split))


@pytest.mark.parametrize(
    "options",
    [
        Fit(epochs=0, logical_batch=1),
        Fit(epochs=1, logical_batch=0),
        Fit(epochs=True, logical_batch=1),
        Fit(epochs=1, logical_batch=1, patience=0),
        Fit(epochs=2, logical_batch=1, parameters=[Parameters()]),
        Fit(epochs=1, logical_batch=1, parameters=[Parameters(sgd=SGD(alpha=-1.0))]),
    ],
    ids=["epochs", "batch", "bool", "patience", "too-few", "negative"],
)
def test_options_out_of_bounds(options: Fit) -> None:
    """Every option is checked before anything happens."""
    model, dataset = upstream(), column(4)
    with pytest.raises(ContractError):
        fit(model.graph, training_of(model, Loss.SUM), dataset, options)
    assert 3.0 == weight_of(model)
    assert (0, 1, 2, 3) == dataset.permutation


def test_parameters_of_the_training_are_used_without_a_schedule() -> None:
    """Without parameters of its own a fit uses those that the training has, also where they are a function."""
    asked: list[Moment] = []

    def schedule(moment: Moment) -> Parameters:
        asked.append(moment)
        return Parameters(sgd=SGD(alpha=0.5))

    for parameters in (Parameters(sgd=SGD(alpha=0.5)), schedule):
        model = upstream()
        fit(model.graph, training_of(model, Loss.SUM, parameters=parameters), column(2), options_of(2, 1))
        assert 1.0 == weight_of(model)
    assert [Moment(1, 1), Moment(1, 2), Moment(2, 3), Moment(2, 4)] == asked


def test_patience_stops_and_restores_the_best() -> None:
    """After so many epochs without a better one a fit ends, with the weights of the best, and says so."""
    model = upstream()
    weights = []

    def see(event: Progress) -> None:
        weights.append(weight_of(model))

    # The loss is (x + w)² of x = 0: the rate turns after two epochs, and the weight climbs again.
    rates = [0.25, 0.25, 3.0, 3.0, 3.0, 3.0]
    parameters = [Parameters(sgd=SGD(alpha=rate)) for rate in rates]
    dataset = Dataset(np.zeros((1, 1), dtype=np.float32), np.zeros((1, 1), dtype=np.float32))
    options = Fit(epochs=6, logical_batch=1, parameters=parameters, patience=2)
    history = fit(model.graph, training_of(model, Loss.MEAN_SQUARED_ERROR), dataset, options, on_train=see)
    losses = [one.loss.value for one in history.epochs]
    assert [9.0, 2.25, 0.5625] == losses[:3]  # of before each update
    assert 5 == len(losses)
    assert history.best == history.epochs[2]
    assert "3" in history.stopped
    assert weights[2] == weight_of(model)


def test_a_loss_that_is_no_number_has_no_best() -> None:
    """Where every loss is NaN there is no best epoch, and patience ends the fit all the same."""
    model = upstream()
    dataset = Dataset(np.full((1, 1), math.nan, dtype=np.float32), compat="ggml")
    options = Fit(epochs=9, logical_batch=1, patience=2)
    history = fit(model.graph, training_of(model, Loss.SUM), dataset, options, compat="ggml")
    assert history.best is None
    assert 2 == len(history.epochs)


def test_a_gradient_that_is_no_number_ends_a_fit_with_its_place() -> None:
    """By default nothing is updated with NaN: the fit ends with an error, and the weight is what it was."""
    model = model_of(MLP, 2)
    before = model.values()
    data = torch.ones(4, 4)
    data[1, 1] = math.nan
    dataset = Dataset(data, torch.eye(3)[[0, 1, 2, 0]])
    with pytest.raises(NonFiniteError, match="fc"):
        fitted(model, dataset, options_of(1, 4))
    assert same(before, model.values())


@pytest.mark.parametrize("train", [True, False], ids=["train", "evaluate"])
def test_a_callback_can_end_its_part(train: bool) -> None:
    """True ends the part at once; other answers, such as a count, do not."""
    model = upstream()
    optimizer = optimizer_of(model, Loss.SUM)
    seen = {True: 0, False: 0}

    def stop(event: Progress) -> bool:
        seen[event.train] += 1
        return event.batch == 2

    def go(event: Progress) -> int:
        seen[event.train] += 1
        return 1

    on_train, on_evaluate = (stop, go) if train else (go, stop)
    epoch(optimizer, column(8), split=4, on_train=on_train, on_evaluate=on_evaluate)
    assert {train: 2, not train: 4} == seen


def test_callbacks_see_where_they_are() -> None:
    """An event tells part, batch from 1, batches, result so far, optimizer, data set, and when the part began."""
    model = upstream(rows=2)
    optimizer, dataset = optimizer_of(model, Loss.SUM), column(7)
    train, evaluate = Result(), Result()
    events: list[Progress] = []
    counts = []

    def see(event: Progress) -> None:
        events.append(event)
        counts.append(event.result.count)

    epoch(optimizer, dataset, split=4, train=train, evaluate=evaluate, on_train=see, on_evaluate=see)
    assert [(True, 1, 2), (True, 2, 2), (False, 1, 2), (False, 2, 2)] == [
        (one.train, one.batch, one.batches) for one in events
    ]
    assert [2, 4, 2, 3] == counts
    assert all(one.optimizer is optimizer and one.dataset is dataset for one in events)
    assert [train, train, evaluate, evaluate] == [one.result for one in events]
    assert events[0].started == events[1].started <= events[2].started


def test_results_of_an_epoch_go_on() -> None:
    """An epoch does not reset the results that it is given: two epochs count every row twice."""
    optimizer, result = optimizer_of(upstream(), Loss.SUM), Result()
    for _ in range(2):
        epoch(optimizer, column(3), train=result)
    assert 6 == result.count


def test_another_generator_gives_another_order() -> None:
    """The shuffles of a fit come from the generator that it is given; 5489 is the one that it makes."""
    orders = []
    for random in (None, Random(), Random(1)):
        dataset = column(32)
        model = upstream()
        fit(model.graph, training_of(model, Loss.SUM), dataset, options_of(1, 4), random=random)
        orders.append(dataset.permutation)
    assert orders[0] == orders[1] != orders[2]


def test_the_progress_line_is_written_where_it_is_asked_for() -> None:
    """A stream gets lines of both parts of each epoch; without one nothing is printed."""
    stream = io.StringIO()
    fitted(model_of(MLP, 4), classes(), options_of(2, 8, 0.25), progress=stream)
    written = stream.getvalue()
    assert 2 == written.count("train: [")
    assert 2 == written.count("val:   [")
    assert "data=0000016" in written


def test_printing_nothing_is_the_default(capsys: pytest.CaptureFixture[str]) -> None:
    """A fit without a stream is silent."""
    fitted(model_of(MLP, 4), classes(), options_of(1, 8, 0.25))
    assert ("", "") == capsys.readouterr()


class Stop(Exception):  # noqa: N818  # what stands for a run that is killed
    """Ends a fit from outside."""


@pytest.mark.parametrize("compat", [None, "ggml", "prism"], ids=["default", "ggml", "prism"])
@pytest.mark.parametrize("stop", [1, 6, 7])
def test_a_fit_goes_on_where_it_was_stopped(tmp_path: Path, compat: Any, stop: int) -> None:
    """Stopped after any physical batch and started again, a fit ends with the bits of one that was not stopped."""
    dataset_rows = 24  # 4 logical batches train, 2 are held out, in physical ones of 2
    options = options_of(3, 4, 0.3)

    def made() -> tuple[Model, Dataset]:
        full = classes(dataset_rows)
        return model_of(MLP, 2), Dataset(full.data, full.labels, compat=compat)

    model, dataset = made()
    whole = fitted(model, dataset, options, compat=compat)
    seen = 0

    def killed(event: Progress) -> None:
        nonlocal seen
        seen += 1
        if seen == stop + 1:
            raise Stop

    other, rows = made()
    with pytest.raises(Stop):
        fitted(other, rows, options, compat=compat, checkpoint=tmp_path, every_seconds=0.0, on_train=killed)
    other, rows = made()
    resumed = fitted(other, rows, options, compat=compat, checkpoint=tmp_path, every_seconds=0.0)
    assert same(model.values(), other.values())
    assert dataset.permutation == rows.permutation
    for one, two in zip(whole.epochs, resumed.epochs, strict=True):
        assert repr((one.number, one.loss, one.accuracy, one.iteration)) == repr(
            (two.number, two.loss, two.accuracy, two.iteration)
        )
        assert repr((one.validation_loss, one.validation_accuracy)) == repr(
            (two.validation_loss, two.validation_accuracy)
        )


def test_a_finished_fit_is_not_made_again(tmp_path: Path) -> None:
    """A fit whose checkpoint is complete returns its history, and trains no more."""
    options = options_of(2, 8, 0.25)
    model = model_of(MLP, 4)
    first = fitted(model, classes(), options, checkpoint=tmp_path)
    again = model_of(MLP, 4)
    calls: list[Progress] = []
    second = fitted(again, classes(), options, checkpoint=tmp_path, on_train=calls.append)
    assert [] == calls
    assert repr(first.epochs) == repr(second.epochs)
    assert same(model.values(), again.values())


def test_a_checkpoint_of_another_fit_is_refused(tmp_path: Path) -> None:
    """Another optimizer, window or data set does not go on from a checkpoint, and says what differs."""
    fitted(model_of(MLP, 4), classes(), options_of(1, 8, 0.25), checkpoint=tmp_path)
    for model, dataset, options in (
        (model_of(MLP, 2), classes(), options_of(1, 8, 0.25)),  # another window
        (model_of(MLP, 4), classes(25), options_of(1, 8, 0.25)),  # other rows
    ):
        with pytest.raises((ContractError, CheckpointError)):
            fitted(model, dataset, options, checkpoint=tmp_path)


def test_best_weights_of_another_graph_are_refused(tmp_path: Path) -> None:
    """The best weights that patience keeps are of one graph: another one refuses the checkpoint, and nothing moves."""
    patient = Fit(epochs=1, logical_batch=8, patience=1)
    fitted(model_of(MLP, 4), classes(), patient, checkpoint=tmp_path)
    model = model_of({**MLP, "params": [{**one, "name": f"other.{at}"} for at, one in enumerate(MLP["params"])]}, 4)
    before = model.values()
    with pytest.raises((ContractError, CheckpointError)):
        fitted(model, classes(), patient, checkpoint=tmp_path)
    assert same(before, model.values())


@pytest.mark.parametrize(("one", "other"), [(None, "ggml"), ("ggml", "prism"), ("prism", None)])
def test_data_and_fit_go_by_the_same_rules(one: Any, other: Any) -> None:
    """A data set that was made for one side does not go into an optimizer or a fit of another."""
    model = upstream()
    with pytest.raises(ContractError, match="compat"):
        fit(model.graph, training_of(model, Loss.SUM), column(4, one), options_of(1, 1), compat=other)
    with pytest.raises(ContractError, match="compat"):
        epoch(optimizer_of(model, Loss.SUM, compat=other), column(4, one))
    assert 3.0 == weight_of(model)


def test_the_whole_fit_in_ggmls_way_and_by_hand() -> None:
    """A fit is an Optimizer, a shuffle, and an epoch with shuffled training rows at a time: the same bits by hand."""
    for compat in (None, "ggml", "prism"):
        case = oracle("fit")["cases"][0]
        ends = []
        for by_hand in (False, True):
            model = model_of(case["model"], 4)
            data, labels = floats(case["data"]).reshape(48, -1), floats(case["labels"]).reshape(48, -1)
            dataset = Dataset(data, labels, shard=2, compat=compat)
            if by_hand:
                optimizer = optimizer_of(model, Loss.CROSS_ENTROPY, Kind.ADAMW, period=2, compat=compat)
                optimizer.shuffle(dataset)
                for _ in range(3):
                    optimizer.shuffle(dataset, 32)
                    epoch(optimizer, dataset, split=32)
            else:
                training = training_of(model, Loss.CROSS_ENTROPY, Kind.ADAMW)
                fit(model.graph, training, dataset, options_of(3, 8, 0.25), compat=compat)
            ends.append((model.values(), dataset.permutation))
        assert same(ends[0][0], ends[1][0])
        assert ends[0][1] == ends[1][1]
