"""What is refused, by augend's own errors and before anything has changed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from augend.errors import AugendError, ContractError, SplitError, StateError
from augend.ggml import Build, Dataset, Fit, Graph, Loss, Optimizer, Parameters, Random, Training, epoch, fit
from augend.ggml._rules import rules_of

HUGE = 10**400
DENSE = torch.ones(3, 2)


def little(**options: Any) -> tuple[Graph, Training]:
    """Return three rows of two, a weight for each column, and their sum as the loss."""
    graph = Graph()
    x = graph.tensor((2, 3), name="x")
    weight = graph.tensor((2,), parameter=True, name="weight")
    return graph, Training(**{"inputs": x, "outputs": graph.mul(x, weight), "loss": Loss.SUM, "period": 2, **options})


NO_NODES: dict[str, Callable[[Graph, Any], object]] = {
    "tensor of a half": lambda graph, _: graph.tensor(2.5),
    "tensor of None": lambda graph, _: graph.tensor(None),
    "tensor of a flag": lambda graph, _: graph.tensor(True),
    "scale beyond float64": lambda graph, x: graph.scale(x, HUGE),
    "scale beyond float32": lambda graph, x: graph.scale(x, 1e39),
    "scale by text": lambda graph, x: graph.scale(x, "1.5"),
    "scale by a complex number": lambda graph, x: graph.scale(x, 1j),
    "norm with text": lambda graph, x: graph.norm(x, eps="x"),
    "norm with a negative eps": lambda graph, x: graph.rms_norm(x, eps=-1e-6),
    "reshape to a number": lambda graph, x: graph.reshape(x, 6),
    "reshape to halves": lambda graph, x: graph.reshape(x, (1.5, 4)),
    "permute by None": lambda graph, x: graph.permute(x, None),
    "pool with one number": lambda graph, x: graph.pool_2d(x, kernel=2),
    "pool of no kind": lambda graph, x: graph.pool_2d(x, kind="min", kernel=(1, 1)),
    "add of a tensor": lambda graph, x: graph.add(x, DENSE),
    "name of bytes": lambda graph, _: graph.tensor(1, name=b"x"),
    "name of half a character": lambda graph, _: graph.tensor(1, name="\ud800"),
}


@pytest.mark.parametrize("call", NO_NODES.values(), ids=list(NO_NODES))
def test_what_is_no_node(call: Callable[[Graph, Any], object]) -> None:
    """Arguments of another type or out of range are ContractErrors, and make no node."""
    graph, training = little()
    before = graph.nodes
    with pytest.raises(ContractError):
        call(graph, training.inputs)
    assert before == graph.nodes


@pytest.mark.parametrize(
    "values",
    [
        None,
        "abc",
        [[1], [1, 2]],
        [HUGE] * 6,
        [1e300] * 6,
        torch.ones(2, 3),
        torch.ones(3, 2, device="meta"),
        torch.ones(3, 2).to_sparse(),
        torch.ones(3, 2, dtype=torch.complex64),
    ],
    ids=["none", "text", "ragged", "huge", "large", "transposed", "meta", "sparse", "complex"],
)
def test_what_are_no_values(values: object) -> None:
    """What is no array of the leaf's own shape and dtype is refused; the leaf is as it was."""
    graph, training = little()
    graph.set_values(training.inputs, DENSE)
    with pytest.raises(ContractError):
        graph.set_values(training.inputs, values)
    assert torch.equal(DENSE, graph.values(training.inputs))


@pytest.mark.parametrize("values", [[2**40 + 1, 0], [2**31, 0], [0.5, 0.0]], ids=["wraps", "just", "half"])
def test_row_numbers_do_not_wrap(values: list[float]) -> None:
    """A number that int32 cannot hold would look up another row: it is refused."""
    graph = Graph()
    ids = graph.tensor(2, dtype=torch.int32)
    with pytest.raises(ContractError):
        graph.set_values(ids, values)


def test_values_in_a_row_or_without_ones_in_front() -> None:
    """Values may come all in a row, as in the port, or without the ones in front of their shape."""
    graph = Graph()
    leaf = graph.tensor((2, 3, 1))
    for values in (range(6), torch.arange(6), torch.arange(6).reshape(3, 2), torch.arange(6).reshape(1, 3, 2)):
        graph.set_values(leaf, list(values) if isinstance(values, range) else values)
        assert torch.equal(torch.arange(6.0).reshape(1, 3, 2), graph.values(leaf))


@pytest.mark.parametrize(
    "options",
    [
        {"build": 30},
        {"build": "UPDATE"},
        {"loss": "sum"},
        {"kind": "adamw"},
        {"parameters": 3},
        {"parameters": None},
        {"parameters": [Parameters()]},
        {"period": 2.0},
        {"period": True},
        {"period": 1_000_001},
    ],
    ids=str,
)
def test_what_is_no_training(options: dict[str, Any]) -> None:
    """A training that would gather gradients for ever, or fail at its first update, is refused at once."""
    graph, training = little(**options)
    with pytest.raises(ContractError):
        Optimizer(graph, training)


@pytest.mark.parametrize("build", [Build.FORWARD, Build.GRADIENT], ids=lambda build: build.name)
def test_a_fit_makes_updates(build: Build) -> None:
    """A fit with a training that is built for less is refused before anything is shuffled."""
    graph, training = little(build=build)
    dataset = Dataset(torch.randn(12, 2))
    with pytest.raises(ContractError, match="built for less"):
        fit(graph, training, dataset, Fit(epochs=2, logical_batch=6))
    assert tuple(range(12)) == dataset.permutation


@pytest.mark.parametrize(
    "arguments",
    [
        {"split": "3"},
        {"split": 6.0},
        {"split": 4},
        {"split": -3},
        {"split": 15},
        {"start": -1},
        {"start": 2.0},
        {"start": 5},
    ],
    ids=str,
)
def test_what_is_no_part_of_an_epoch(arguments: dict[str, Any]) -> None:
    """Splits and starts that are no whole physical batches of the data set are refused before anything is evaluated."""
    graph, training = little()
    optimizer = Optimizer(graph, training)
    with pytest.raises(ContractError):
        epoch(optimizer, Dataset(torch.ones(12, 2)), **arguments)
    assert (1, 0) == (optimizer.iteration, optimizer.index)


@pytest.mark.parametrize("rows", [1.0, True, 0, 4, "1"], ids=repr)
def test_what_are_no_rows(rows: object) -> None:
    """``evaluate`` of so many rows is refused, and can be asked again."""
    graph, training = little()
    optimizer = Optimizer(graph, training)
    optimizer.allocate(backward=True)
    with pytest.raises(ContractError):
        optimizer.evaluate(rows=rows)
    optimizer.evaluate(rows=1)


@pytest.mark.parametrize("compat", ["ggml", "prism"])
def test_a_split_that_is_one_in_float32(compat: str) -> None:
    """Where the split is taken in float32, it must be below 1 there: else nothing would be trained on."""
    graph, training = little()
    dataset = Dataset(torch.ones(12, 2), compat=compat)
    with pytest.raises(SplitError, match="less than 1 in float32"):
        fit(graph, training, dataset, Fit(epochs=1, logical_batch=6, validation_split=0.99999999), compat=compat)


@pytest.mark.parametrize("compat", [["ggml"], "GGML", 0, {}], ids=repr)
def test_there_are_three_sides(compat: object) -> None:
    """Another side is a ContractError, whatever its type."""
    with pytest.raises(ContractError, match="compat must be"):
        rules_of(compat)


def test_a_module_takes_tensors() -> None:
    """Lists are refused by name."""
    graph, training = little()
    with pytest.raises(ContractError, match="takes a tensor; got list"):
        graph.module(training.inputs, training.outputs)([[1.0, 2.0]])


# ---------------------------------------------------------------------- states


def changed(state: dict[str, Any], path: str, value: object) -> dict[str, Any]:
    """Return a state with one entry replaced, or left out if the value is ``...``."""
    other = copy.deepcopy(state)
    *owners, last = path.split(".")
    owner = other
    for one in owners:
        owner = owner[one]
    if value is ...:
        del owner[last]
    else:
        owner[last] = value
    return other


DAMAGE = [
    *[
        (key, ...)
        for key in ("version", "kind", "epoch", "iteration", "index", "mode", "random", "gradients", "moments")
    ],
    ("extra", 1),
    ("version", 2),
    ("kind", "SGD"),
    ("loss", "MEAN"),
    ("period", 3),
    ("compat", "ggml"),
    *[("epoch", value) for value in (-1, "x", None, 1.0, True)],
    *[("iteration", value) for value in (0, -3, "x", 1.5, True)],
    *[("index", value) for value in (2, -1, "x")],
    ("mode", "X"),
    ("mode", []),
    ("random", {}),
    ("random", None),
    ("random.used", 625),
    ("gradients", {}),
    ("gradients", "x"),
    ("moments", None),
    ("moments", {}),
    ("moments.weight", {"m": torch.zeros(2)}),
    ("moments.weight.m", "x"),
    ("moments.weight.m", torch.zeros(3)),
    ("moments.weight.m", torch.zeros(2, dtype=torch.float64)),
    ("moments.weight.m", torch.zeros(2, device="meta")),
    ("moments.weight.v", torch.tensor([0.0, -1.0])),
]


def equal(one: object, other: object) -> bool:
    """Compare states to the bit."""
    if isinstance(one, dict):
        return isinstance(other, dict) and one.keys() == other.keys() and all(equal(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    return torch.equal(one, other) if isinstance(one, Tensor) else one == other or one != one  # noqa: PLR0124  a NaN


@pytest.mark.parametrize(("path", "value"), DAMAGE, ids=[f"{i}-{path}" for i, (path, _) in enumerate(DAMAGE)])
def test_a_damaged_optimizer_is_not_loaded(path: str, value: object) -> None:
    """A state with one wrong entry is refused, and the optimizer is as it was: numbers, window, moments, generator."""
    graph, training = little()
    optimizer = Optimizer(graph, training)
    for _ in range(3):  # an update, and a window that is open
        optimizer.allocate(backward=True)
        graph.set_values(training.inputs, DENSE)
        optimizer.evaluate()
    before = optimizer.state_dict()
    with pytest.raises((ContractError, StateError)):
        optimizer.load_state_dict(changed(before, path, value))
    assert equal(before, optimizer.state_dict())


@pytest.mark.parametrize("state", [None, [], "x"], ids=repr)
@pytest.mark.parametrize("kind", ["graph", "optimizer"])
def test_what_is_no_state(kind: str, state: object) -> None:
    """What is no mapping is a ContractError."""
    graph, training = little()
    with pytest.raises(ContractError):
        (graph if kind == "graph" else Optimizer(graph, training)).load_state_dict(state)


@pytest.mark.parametrize(
    "second",
    [
        torch.ones(3),
        torch.ones(1, dtype=torch.complex64),
        torch.ones(1, device="meta"),
        torch.ones(1).to_sparse(),
        torch.tensor([1e300], dtype=torch.float64),
        "x",
        None,
    ],
    ids=["shape", "complex", "meta", "sparse", "large", "text", "none"],
)
def test_a_graph_is_loaded_whole_or_not_at_all(second: object) -> None:
    """Where the second tensor cannot be taken, the first was not, either."""
    graph = Graph()
    graph.tensor(1, parameter=True, name="a")
    graph.tensor(1, parameter=True, name="b")
    with pytest.raises(ContractError):
        graph.load_state_dict({"a": torch.ones(1), "b": second})
    assert [0.0, 0.0] == [tensor.item() for tensor in graph.state_dict().values()]


@pytest.mark.parametrize(
    "draw", [lambda one: one.bounded(2.5), lambda one: one.shuffle([1, 2], 2.0)], ids=["bounded", "shuffle"]
)
def test_draws_are_whole(draw: Callable[[Random], object]) -> None:
    """A generator draws whole numbers below whole numbers."""
    with pytest.raises(AugendError):
        draw(Random())


@pytest.mark.parametrize(
    "data",
    [torch.eye(3).to_sparse(), torch.ones(3, 2, device="meta"), [[HUGE]], [[1e300]]],
    ids=["sparse", "meta", "huge", "large"],
)
def test_what_are_no_datapoints(data: object) -> None:
    """Data that float32 cannot hold, or that are not there, are refused."""
    with pytest.raises(ContractError):
        Dataset(data)
