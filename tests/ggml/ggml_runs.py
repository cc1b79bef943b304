"""What the tests of augend.ggml share: the numbers of a real ggml, the models they were made with, and how to drive."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from augend.ggml import SGD, AdamW, Fit, Graph, Kind, Limits, Loss, Node, Optimizer, Parameters, Result, Training

GOLDEN = Path(__file__).parents[1] / "golden" / "ggml"
HALF_ULP = 2.0**-24  # of 1 in float32: what one rounding of a value up to 1 may lose

LOSSES = {
    "mean": Loss.MEAN,
    "sum": Loss.SUM,
    "cross_entropy": Loss.CROSS_ENTROPY,
    "mean_squared_error": Loss.MEAN_SQUARED_ERROR,
}
KINDS = {"adamw": Kind.ADAMW, "sgd": Kind.SGD}


@functools.cache
def oracle(name: str) -> dict[str, Any]:
    """Read one file of a real ggml's numbers."""
    return json.loads((GOLDEN / f"{name}.json").read_text(encoding="utf-8"))


def floats(values: Sequence[float | str]) -> Tensor:
    """Read decimals with nine digits back as the float32 that they were; "nan" and "inf" are words there."""
    return torch.from_numpy(np.array([float(value) for value in values], dtype=np.float64).astype(np.float32))


def parameters_of(hyper: Mapping[str, Mapping[str, float]]) -> Parameters:
    """Make the parameters of an oracle's ``hyper``."""
    return Parameters(adamw=AdamW(**hyper["adamw"]), sgd=SGD(**hyper["sgd"]))


@dataclass(frozen=True)
class Model:
    """A graph with its two ends and its parameters by name."""

    graph: Graph
    inputs: Node
    outputs: Node
    parameters: dict[str, Node]

    def values(self) -> dict[str, Tensor]:
        """All parameters, flat."""
        return {name: self.graph.values(node).flatten() for name, node in self.parameters.items()}


def affine(graph: Graph, x: Node, w: Node, b: Node) -> Node:
    """Return scale(x * w + b, 0.5), element by element."""
    return graph.scale(graph.add(graph.mul(x, w), b), 0.5)


def linear(graph: Graph, x: Node, w: Node, b: Node) -> Node:
    """Return w @ x + b."""
    return graph.add(graph.mul_mat(w, x), b)


def mlp(graph: Graph, x: Node, w1: Node, b1: Node, w2: Node, b2: Node) -> Node:
    """Return two layers with a ReLU in between."""
    return linear(graph, graph.relu(linear(graph, x, w1, b1)), w2, b2)


FORWARDS: dict[str, Callable[..., Node]] = {"scale(": affine, "add(mu": linear, "fc2(re": mlp}


def model_of(description: Mapping[str, Any], rows: int | None = None) -> Model:
    """Build an oracle's model, for its own number of rows or another, with its initial weights."""
    graph = Graph()
    rows = description["batch_physical"] if rows is None else rows
    inputs = graph.tensor((description["n_in"], rows), name="x")
    parameters = {}
    for parameter in description["params"]:
        shape = [size for size in parameter["ne"] if size > 1]
        node = graph.tensor(shape, parameter=True, name=parameter["name"])
        graph.set_values(node, floats(parameter["values"]))
        parameters[parameter["name"]] = node
    outputs = FORWARDS[description["desc"].removeprefix("out = ")[:6]](graph, inputs, *parameters.values())
    return Model(graph, inputs, outputs, parameters)


def training_of(model: Model, loss: Loss, kind: Kind = Kind.SGD, **others: Any) -> Training:
    """Say how a model is trained."""
    return Training(inputs=model.inputs, outputs=model.outputs, loss=loss, kind=kind, **others)


def options_of(epochs: int, logical_batch: int, validation_split: Any = 0.0, parameters: Any = None) -> Fit:
    """Say how often and in which batches."""
    return Fit(epochs=epochs, logical_batch=logical_batch, validation_split=validation_split, parameters=parameters)


def optimizer_of(
    model: Model,
    loss: Loss,
    kind: Kind = Kind.SGD,
    *,
    period: int = 1,
    parameters: Any = None,
    compat: Any = None,
    **others: Any,
) -> Optimizer:
    """Make an optimizer for a model."""
    parameters = Parameters() if parameters is None else parameters
    training = training_of(model, loss, kind, period=period, parameters=parameters, **others)
    return Optimizer(model.graph, training, compat=compat)


def drive(
    optimizer: Optimizer,
    x: Any,
    y: Any = None,
    *,
    backward: bool = True,
    result: Result | None = None,
    **others: Any,
) -> float:
    """Allocate, write inputs and labels, evaluate: one physical batch."""
    optimizer.allocate(backward)
    optimizer.graph.set_values(optimizer.training.inputs, x)
    if y is not None:
        labels = optimizer.labels_tensor
        assert labels is not None
        optimizer.graph.set_values(labels, y)
    return optimizer.evaluate(result, **others)


def same(expected: Mapping[str, Tensor], actual: Mapping[str, Tensor]) -> bool:
    """Whether two sets of tensors have the same bits (a NaN is the same as a NaN)."""
    return expected.keys() == actual.keys() and all(
        torch.equal(torch.nan_to_num(expected[name], nan=7e33), torch.nan_to_num(actual[name], nan=7e33))
        for name in expected
    )


def farthest(expected: Mapping[str, Tensor], actual: Mapping[str, Tensor], *, relative: bool = False) -> float:
    """The largest difference of any element, in float64; relative to elements larger than 1, where that is wanted."""
    assert expected.keys() == actual.keys()
    largest = 0.0
    for name, one in expected.items():
        off = (one.double().flatten() - actual[name].double().flatten()).abs()
        scale = one.double().flatten().abs().clamp(min=1.0) if relative else torch.ones_like(off)
        largest = max(largest, float((off / scale).max()))
    return largest


W0 = 3.0
UPSTREAM_ROWS = [float(row) for row in range(6)]


def upstream(rows: int = 1, limits: Limits | None = None) -> Model:
    """The model of ggml's own tests: one weight of 3, added to each datapoint."""
    graph = Graph() if limits is None else Graph(limits=limits)
    inputs = graph.tensor((1, rows), name="inputs")
    weight = graph.tensor((1,), parameter=True, name="weight")
    graph.set_values(weight, [W0])
    outputs = graph.add(inputs, weight)
    return Model(graph, inputs, outputs, {"weight": weight})


def weight_of(model: Model) -> float:
    """The one weight of ``upstream``."""
    (values,) = model.values().values()
    return float(values)


SIGN_STEPS = Parameters(adamw=AdamW(alpha=1.0, beta1=0.0, beta2=0.0, eps=0.0, wd=0.0), sgd=SGD(alpha=1.0, wd=0.0))
"""What ggml's own tests use: AdamW moves by the sign of the gradient, SGD by the gradient."""
