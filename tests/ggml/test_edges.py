"""Edges of the training loop: inputs of other ranks, results that do not fit, unused parameters, all rows at once."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from ggml_runs import SIGN_STEPS, Model, drive, optimizer_of, options_of, training_of, upstream, weight_of

from augend.errors import ContractError, NonFiniteError, SplitError
from augend.ggml import SGD, Dataset, Graph, Loss, Optimizer, Parameters, Progress, Result, epoch, fit

SIDES = [None, "ggml", "prism"]
every_side = pytest.mark.parametrize("compat", SIDES, ids=["default", "ggml", "prism"])


def scaled(shape: tuple[int, ...]) -> Model:
    """y = x * w for inputs of any shape, with w = 1 for each column."""
    graph = Graph()
    inputs = graph.tensor(shape, name="x")
    weight = graph.tensor(shape[:1], parameter=True, name="w")
    graph.set_values(weight, torch.ones(shape[0]))
    return Model(graph, inputs, graph.mul(inputs, weight), {"w": weight})


@pytest.mark.parametrize("shape", [(3, 2), (3, 2, 1), (3, 2, 1, 1)], ids=str)
@pytest.mark.parametrize("loss", list(Loss), ids=[loss.value for loss in Loss])
def test_ranks_of_inputs_change_nothing(shape: tuple[int, ...], loss: Loss) -> None:
    """Ones at the end of a shape are no dimensions to ggml: a short last batch counts as often as it has rows."""
    data = torch.tensor([[1.0, 2.0, 4.0], [8.0, -1.0, 0.5], [2.0, 2.0, 1.0], [0.0, 1.0, 3.0], [5.0, 0.0, 1.0]])
    dataset = Dataset(data, torch.eye(3)[[0, 1, 2, 0, 1]] if loss.has_labels else None)
    ends = []
    for declared in ((3, 2), shape):
        model, result = scaled(declared), Result()
        epoch(optimizer_of(model, loss, period=2), dataset, split=4, train=result)
        epoch(optimizer_of(model, loss, period=2), dataset, train=result)
        ends.append((model.values()["w"].tolist(), result.count, result.loss()))
    assert 4 + 5 == ends[0][1]
    assert ends[0] == ends[1]


@every_side
@pytest.mark.parametrize("loss", list(Loss), ids=[loss.value for loss in Loss])
def test_one_datapoint_may_be_a_vector(compat: str | None, loss: Loss) -> None:
    """Inputs that were declared with one dimension are a physical batch of one row, as [width, 1] is."""
    data = torch.tensor([[1.0, 2.0, 4.0], [8.0, -1.0, 0.5]])
    dataset = Dataset(data, torch.eye(3)[[0, 1]] if loss.has_labels else None, compat=compat)
    ends = []
    for declared in ((3, 1), (3,)):
        model, result = scaled(declared), Result(compat=compat)
        epoch(optimizer_of(model, loss, compat=compat), dataset, train=result)
        ends.append((model.values()["w"].tolist(), result.count, result.loss()))
    assert 2 == ends[0][1]
    assert repr(ends[0]) == repr(ends[1])


@every_side
@pytest.mark.parametrize("period", [1, 2])
def test_a_result_that_does_not_fit_leaves_the_window_whole(compat: str | None, period: int) -> None:
    """A result of another loss is an error, after which the optimizer is where it was, or cleanly one place further."""
    model = upstream()
    optimizer = optimizer_of(model, Loss.SUM, period=period, parameters=SIGN_STEPS, compat=compat)
    other = Result(compat=compat)
    drive(optimizer_of(upstream(), Loss.MEAN, compat=compat), [1.0], result=other)
    for _ in range(period - 1):
        drive(optimizer, [1.0])
    with pytest.raises(ContractError):
        drive(optimizer, [1.0], result=other)
    assert 1 == other.count
    updates = optimizer.iteration - 1
    assert 3.0 - period * updates == weight_of(model)
    assert (0 if updates else period - 1) == optimizer.index
    if not updates:
        optimizer.evaluate()
    for _ in range(period):
        drive(optimizer, [1.0])
    assert (3.0 - 2 * period, 0, 3) == (weight_of(model), optimizer.index, optimizer.iteration)


@every_side
def test_a_parameter_that_nothing_flows_through_stays(compat: str | None) -> None:
    """A parameter of which only the shape is used has a gradient of zero; by default its name is told, once."""
    graph = Graph()
    inputs = graph.tensor((2, 1))
    weight = graph.tensor((1,), parameter=True, name="w")
    shape = graph.tensor((2,), parameter=True, name="like")
    graph.set_values(shape, [5.0, 6.0])
    model = Model(graph, inputs, graph.add(inputs, graph.repeat(weight, shape)), {"w": weight, "like": shape})
    optimizer = optimizer_of(model, Loss.SUM, period=2, parameters=Parameters(sgd=SGD(alpha=1.0)), compat=compat)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(4):
            drive(optimizer, [1.0, 2.0])
            assert [0.0, 0.0] == optimizer.gradient(shape).tolist()
    assert [5.0, 6.0] == graph.values(shape).tolist()
    assert [-8.0] == graph.values(weight).tolist()
    assert (1 if compat is None else 0) == len(told)
    assert all("like" in str(one.message) for one in told)


def test_all_rows_at_once_are_more_than_were_chosen_for_training() -> None:
    """A fit whose one batch is the whole data set trains on no row that was held out before: it is a SplitError."""
    dataset = Dataset(torch.arange(10.0).reshape(10, 1))
    model = upstream()
    fit(model.graph, training_of(model, Loss.SUM), dataset, options_of(1, 1, 0.2))
    other = upstream(rows=10)
    seen: list[Progress] = []
    with pytest.raises(SplitError, match="forget_division"):
        fit(other.graph, training_of(other, Loss.SUM), dataset, options_of(1, 10), on_train=seen.append)
    assert [] == seen
    dataset.forget_division()
    fit(other.graph, training_of(other, Loss.SUM), dataset, options_of(1, 10), on_train=seen.append)
    assert 1 == len(seen)


def blown_up(compat: Any) -> tuple[Model, Optimizer]:
    """A window of two that has its first gradient, and a weight that is infinite."""
    model = scaled((1, 1))
    optimizer = optimizer_of(model, Loss.MEAN_SQUARED_ERROR, period=2, parameters=SIGN_STEPS, compat=compat)
    drive(optimizer, [1.0], [0.0])
    model.graph.set_values(model.parameters["w"], [math.inf])
    return model, optimizer


def test_an_infinite_gradient_updates_nothing_and_a_reset_goes_on() -> None:
    """By default a window with an infinity raises; after a reset and a good weight, training goes on from its start."""
    model, optimizer = blown_up(None)
    with pytest.raises(NonFiniteError):
        drive(optimizer, [1.0], [0.0])
    assert (math.inf, 1) == (float(model.values()["w"]), optimizer.iteration)
    optimizer.reset()
    model.graph.set_values(model.parameters["w"], [1.0])
    for _ in range(2):
        drive(optimizer, [1.0], [0.0])
    assert (-1.0, 2, 0) == (float(model.values()["w"]), optimizer.iteration, optimizer.index)


@pytest.mark.parametrize("compat", ["ggml", "prism"])
def test_an_infinite_gradient_is_used_in_compat(compat: str) -> None:
    """ggml and its port look at no gradient: the weight is lost."""
    model, optimizer = blown_up(compat)
    drive(optimizer, [1.0], [0.0])
    assert not math.isfinite(float(model.values()["w"]))
    assert 2 == optimizer.iteration


def test_optimizers_share_a_graph() -> None:
    """Two optimizers of one graph move the same weights, each with its own window, moments and place."""
    model = upstream()
    one, other = (optimizer_of(model, Loss.SUM, period=period, parameters=SIGN_STEPS) for period in (2, 3))
    for optimizer in (one, other, other, one, other):
        drive(optimizer, [0.0])
    assert 3.0 - 2.0 - 3.0 == weight_of(model)
    assert (2, 2) == (one.iteration, other.iteration)


@every_side
@pytest.mark.parametrize("stop", [1, 2, 3, 4])
def test_a_part_ends_with_the_update_of_its_window(compat: str | None, stop: int) -> None:
    """A callback that says stop in a window of two lets it be completed: no gradient waits for the next epoch."""
    model = upstream()
    optimizer = optimizer_of(model, Loss.SUM, period=2, parameters=SIGN_STEPS, compat=compat)
    dataset = Dataset(torch.zeros(8, 1), compat=compat)
    seen: list[int] = []

    def at(event: Progress) -> bool:
        seen.append(event.batch)
        return event.batch == stop

    epoch(optimizer, dataset, on_train=at)
    batches = stop + stop % 2
    assert list(range(1, batches + 1)) == seen
    assert (0, 1 + batches // 2, 3.0 - batches) == (optimizer.index, optimizer.iteration, weight_of(model))


def test_a_callback_ends_a_fit() -> None:
    """True ends the fit itself, after the validation of its epoch, and the history says that it was a callback."""
    model = upstream()
    dataset = Dataset(torch.arange(10.0).reshape(10, 1))
    parts: list[bool] = []

    def at(event: Progress) -> bool:
        parts.append(event.train)
        return event.train and event.batch == 3

    training = training_of(model, Loss.SUM, parameters=SIGN_STEPS)
    history = fit(model.graph, training, dataset, options_of(5, 1, 0.2), on_train=at, on_evaluate=at)
    assert [True] * 3 + [False] * 2 == parts
    assert 0.0 == weight_of(model)
    assert [(1, 3, 3, 2)] == [
        (one.number, one.iteration, one.loss.count, one.validation_loss.count) for one in history.epochs
    ]
    assert "callback" in history.stopped


def test_both_callbacks_can_end_their_parts() -> None:
    """A validation part is ended by its own callback, also where the training part before it ended the fit."""
    model = upstream()
    seen: list[tuple[bool, int]] = []

    def at(event: Progress) -> bool:
        seen.append((event.train, event.batch))
        return event.batch == (1 if event.train else 2)

    dataset = Dataset(torch.arange(10.0).reshape(10, 1))
    fit(model.graph, training_of(model, Loss.SUM), dataset, options_of(3, 1, 0.5), on_train=at, on_evaluate=at)
    assert [(True, 1), (False, 1), (False, 2)] == seen
