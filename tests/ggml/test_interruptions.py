"""Fits that are ended, interrupted, or gone on with as another fit; copies of graphs."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from augend.errors import ContractError, StateError
from augend.ggml import (
    AdamW,
    Dataset,
    Fit,
    Graph,
    History,
    Kind,
    Loss,
    Optimizer,
    Parameters,
    Progress,
    Training,
    epoch,
    fit,
)
from augend.ggml._course import Course, Plan

ROWS, PHYSICAL = 32, 2


class Interrupted(Exception):  # noqa: N818  it is no error, it is what a test does
    """Ends a fit from outside."""


def build(physical: int = PHYSICAL) -> tuple[Graph, Training]:
    """Return a line to fit."""
    graph = Graph()
    x = graph.tensor((3, physical), name="x")
    weight, bias = (graph.tensor(shape, parameter=True, name=name) for shape, name in (((3, 2), "w"), (2, "b")))
    outputs = graph.add(graph.mul_mat(weight, x), bias)
    parameters = Parameters(adamw=AdamW(alpha=0.05))
    return graph, Training(inputs=x, outputs=outputs, loss=Loss.MEAN_SQUARED_ERROR, parameters=parameters)


def rows() -> Dataset:
    """Return rows of it."""
    data = torch.randn(ROWS, 3, generator=torch.Generator().manual_seed(0))
    return Dataset(data, data[:, :2] - data[:, 1:])


def fitted(
    directory: Path | None = None,
    *,
    physical: int = PHYSICAL,
    on_train: Any = None,
    on_evaluate: Any = None,
    **options: Any,
) -> tuple[Graph, History]:
    """Fit for some epochs, saved after each physical batch."""
    graph, training = build(physical)
    plan = {"epochs": 3, "logical_batch": 8, "validation_split": 0.25, **options}
    history = fit(
        graph,
        training,
        rows(),
        Fit(**plan),
        on_train=on_train,
        on_evaluate=on_evaluate,
        checkpoint=directory,
        every_seconds=0.0,
    )
    return graph, history


def stop_at(count: int, *, by_raising: bool) -> Any:
    """Return a callback that ends the fit at its so-manieth call."""
    calls = [0]

    def callback(_: Progress) -> bool:
        calls[0] += 1
        if by_raising and calls[0] == count:
            raise Interrupted
        return calls[0] == count

    return callback


def weights(graph: Graph) -> list[float]:
    """Return all parameters as numbers."""
    return [one for tensor in graph.state_dict().values() for one in tensor.flatten().tolist()]


@pytest.mark.parametrize("batch", [1, 2, 4, 5, 13, 30])
def test_a_callback_ends_a_fit_with_its_window(batch: int) -> None:
    """``True`` ends the fit with the update of the open window: no gradient is left, and the history says so."""
    graph, history = fitted(on_train=stop_at(batch, by_raising=False))
    done = -(-batch // 12)
    assert f"a callback ended it in epoch {done}" == history.stopped
    assert [3] * (done - 1) + [-(-((batch - 1) % 12 + 1) // 4)] == [
        one.iteration - before.iteration if before else one.iteration
        for before, one in zip([None, *history.epochs], history.epochs, strict=False)
    ]
    assert 16 == history.epochs[-1].validation_loss.count  # eight rows of two elements
    assert any(weights(graph))


def test_a_callback_of_the_validation_ends_the_fit() -> None:
    """``True`` ends the part at once, and the fit."""
    _, history = fitted(on_evaluate=stop_at(2, by_raising=False))
    assert ("a callback ended it in epoch 1", 8) == (history.stopped, history.epochs[0].validation_loss.count)


def test_a_part_ends_with_its_window() -> None:
    """``epoch`` by hand: a training part that is ended in a window goes on to the window's update."""
    graph, training = build()
    optimizer = Optimizer(graph, Training(**{**fields_of(training), "period": 4}))
    epoch(optimizer, rows(), on_train=stop_at(2, by_raising=False))
    assert (2, 0) == (optimizer.iteration, optimizer.index)


def fields_of(training: Training) -> dict[str, Any]:
    """Return the arguments of a training."""
    return {name: getattr(training, name) for name in ("inputs", "outputs", "loss", "kind", "parameters")}


@pytest.mark.parametrize("at", [1, 3, 7])
def test_an_ended_part_that_is_interrupted_stays_ended(tmp_path: Path, at: int) -> None:
    """Ended by a callback, then stopped in the validation: what goes on trains on no more rows, to the same bits."""

    def enough(event: Progress) -> bool:
        return event.batch == at

    expected = fitted(on_train=enough)
    with pytest.raises(Interrupted):
        fitted(tmp_path, on_train=enough, on_evaluate=stop_at(2, by_raising=True))
    graph, history = fitted(tmp_path, on_train=enough)
    assert weights(expected[0]) == weights(graph)
    assert expected[1].stopped == history.stopped
    assert [one.loss for one in expected[1].epochs] == [one.loss for one in history.epochs]


@pytest.mark.parametrize(
    "other",
    [
        {"validation_split": 0.0},
        {"validation_split": 0.5},
        {"physical": 4, "logical_batch": 16},
        {"physical": 1, "logical_batch": 4},
        {"patience": 2},
    ],
    ids=["all rows", "other rows", "larger batches", "smaller batches", "patience"],
)
def test_another_fit_does_not_go_on(tmp_path: Path, other: dict[str, Any]) -> None:
    """A fit that would train on other rows, cut them otherwise or keep other weights is refused by name."""
    with pytest.raises(Interrupted):
        fitted(tmp_path, on_train=stop_at(7, by_raising=True))
    with pytest.raises(ContractError):
        fitted(tmp_path, **other)
    graph, _ = fitted(tmp_path)
    assert weights(fitted()[0]) == weights(graph)


def test_more_epochs_may_be_asked_for(tmp_path: Path) -> None:
    """A fit that is over goes on where more epochs are wanted, as if they had been wanted at once."""
    fitted(tmp_path, epochs=2)
    graph, history = fitted(tmp_path, epochs=3)
    assert weights(fitted()[0]) == weights(graph)
    assert 3 == len(history.epochs)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *[(key, None) for key in ("plan", "batch", "ended", "epochs", "train", "best", "seconds", "version")],
        ("batch", -1),
        ("batch", 10**9),
        ("epochs", [{}]),
        ("epochs", ["x"]),
        ("seconds", "x"),
        ("seconds", -1.0),
        ("best", {"w": torch.zeros(1), "b": torch.zeros(2)}),
        ("best", {"w": 1}),
    ],
    ids=str,
)
def test_a_damaged_course_is_not_loaded(key: str, value: object) -> None:
    """A state with one wrong entry is refused, and the course is where it was."""
    graph, _ = build()
    plan = Plan(rows=ROWS, split=24, logical=8, physical=2, keeps_best=True)
    course = Course(graph, plan, 3, 2, None)
    course.end_epoch(3)
    course.batch = 5
    state = course.state_dict()
    with pytest.raises(ContractError):
        course.load_state_dict({**state, key: value})
    after = course.state_dict()
    assert (5, 1) == (after["batch"], len(after["epochs"]))
    course.load_state_dict(state)


# ---------------------------------------------------------------------- graphs


@pytest.mark.parametrize(
    "copied",
    [copy.deepcopy, lambda graph: pickle.loads(pickle.dumps(graph))],  # noqa: S301  it is our own
    ids=["copy", "pickle"],
)
def test_a_graph_can_be_copied(copied: Any) -> None:
    """A copy has the values, and shares nothing."""
    graph, _ = build()
    graph.set_values(graph.parameters()["w"], torch.ones(2, 3))
    other = copied(graph)
    other.set_values(other.parameters()["w"], torch.zeros(2, 3))
    assert [1.0] * 6 + [0.0] * 2 == weights(graph)
    assert [0.0] * 8 == weights(other)
    other.compute(other.nodes[-1])
    assert (2, 2) == other.values(other.nodes[-1]).shape


def test_moments_of_a_step_are_leaves() -> None:
    """Moments that are results of operations, or one another, would be lost: they are refused."""
    graph = Graph()
    w = graph.tensor(2, parameter=True)
    g, m, v, p = (graph.tensor(size) for size in (2, 2, 2, 7))
    for moments in ((graph.scale(m, 1.0), v), (m, m), (w, v), (m, graph.scale(v, 1.0))):
        with pytest.raises(ContractError, match="must be leaves"):
            graph.opt_step_adamw(w, g, *moments, p)
    graph.opt_step_adamw(w, g, m, v, p)


def test_rows_that_stand_in_the_graph() -> None:
    """Where a constant has the declared rows, a short batch would be repeated to them: it is refused."""
    graph = Graph()
    x, one, w = graph.tensor((1, 4)), graph.tensor((1, 4)), graph.tensor(1, parameter=True)
    optimizer = Optimizer(graph, Training(inputs=x, outputs=graph.mul(graph.sub(one, x), w), loss=Loss.SUM))
    with pytest.raises(ContractError, match="2 of 4 rows went in, and 4 of 4 came out"):
        epoch(optimizer, Dataset(torch.ones(6, 1)))


def test_a_parameter_without_gradients_is_told() -> None:
    """Of a parameter whose values do not reach the outputs it is said, once, that it is not trained."""
    graph = Graph()
    x, w, like = graph.tensor((2, 1)), graph.tensor(1, parameter=True), graph.tensor(2, parameter=True, name="like")
    outputs = graph.mul(x, graph.repeat(w, like))
    optimizer = Optimizer(graph, Training(inputs=x, outputs=outputs, loss=Loss.SUM, kind=Kind.SGD))
    with pytest.warns(UserWarning, match="no gradient came to like"):
        epoch(optimizer, Dataset(torch.ones(1, 2)))
    epoch(optimizer, Dataset(torch.ones(1, 2)))
    assert [0.0, 0.0] == optimizer.gradient(like).tolist()


def test_training_under_no_grad() -> None:
    """An optimizer that is used where gradients are off trains nevertheless, as ggml knows no such mode."""
    graph, training = build()
    with torch.no_grad():
        epoch(Optimizer(graph, training), rows())
    assert any(weights(graph))


def test_a_fit_that_is_refused_leaves_the_data_set_alone() -> None:
    """Labels that do not fit are found before anything is divided, so that the next fit may divide otherwise."""
    graph, training = build()
    dataset = Dataset(torch.randn(ROWS, 3), torch.randn(ROWS, 1))
    with pytest.raises(ContractError, match="labels must be"):
        fit(graph, training, dataset, Fit(epochs=1, logical_batch=8, validation_split=0.25))
    assert tuple(range(ROWS)) == dataset.permutation
    dataset.check_division(ROWS)


def test_activations_of_one_batch_are_kept() -> None:
    """What operations came to is there after an evaluation, and gone after a fit."""
    graph, training = build()
    optimizer = Optimizer(graph, training)
    optimizer.allocate(backward=False)
    optimizer.evaluate()
    assert (PHYSICAL, 2) == graph.values(training.outputs).shape
    fit(graph, training, rows(), Fit(epochs=1, logical_batch=8))
    with pytest.raises(StateError, match="not computed yet"):
        graph.values(training.outputs)


def test_inputs_must_be_used() -> None:
    """Inputs that nothing is made of are a mistake."""
    graph, training = build()
    other = graph.tensor((3, PHYSICAL))
    with pytest.raises(ContractError, match="would not be used"):
        Optimizer(graph, Training(inputs=other, outputs=training.outputs, loss=training.loss))
