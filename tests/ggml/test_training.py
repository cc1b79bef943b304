"""Whole training runs against a real ggml: three models, four losses, two algorithms, three windows."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from ggml_runs import (
    HALF_ULP,
    KINDS,
    LOSSES,
    Model,
    drive,
    farthest,
    floats,
    model_of,
    optimizer_of,
    oracle,
    parameters_of,
    same,
)
from torch import Tensor

from augend.ggml import Kind, Loss, Optimizer, Result

MODELS = ("affine", "linear", "mlp")
RUNS = [
    pytest.param(model, index, id=f"{model}-{run['loss_type']}-{run['optimizer']}-{run['opt_period']}")
    for model in MODELS
    for index, run in enumerate(oracle(f"train_{model}")["runs"])
]
# Where the gradient can be looked at: in compat not for a window of one physical batch.
SHOWN = [
    pytest.param(*run.values, compat, id=f"{run.id}-{compat or 'default'}")
    for run in RUNS
    for compat in (None, "ggml")
    if compat is None or not run.id.endswith("-1")
]
# Eight evaluations of values up to 2, each with a handful of roundings; what is promised for whole runs is 1e-6.
WHOLE_RUN = 16 * HALF_ULP
# No exp in them (each library has its own), so that plain float32 has the same bits.
ELEMENTWISE = [run for run in RUNS if run.id.startswith("affine") and "entropy" not in run.id]


@dataclass
class Trace:
    """What augend computed, evaluation by evaluation, in the words of the oracle."""

    losses: list[Tensor] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    weights: list[dict[str, Tensor]] = field(default_factory=list)
    moments: list[list[dict[str, Tensor]]] = field(default_factory=list)
    predictions: list[list[int] | None] = field(default_factory=list)
    correct: list[int | None] = field(default_factory=list)
    places: list[tuple[int, int]] = field(default_factory=list)
    result: Result | None = None


def gradients_of(optimizer: Optimizer, model: Model, compat: str | None) -> dict[str, Tensor]:
    """All gradients, flat; none where ggml has none."""
    if optimizer.period == 1 and compat is not None:
        return {}
    return {name: optimizer.gradient(node).flatten() for name, node in model.parameters.items()}


def moments_of(optimizer: Optimizer, model: Model) -> list[dict[str, Tensor]]:
    """First and second moments, flat; an empty list for SGD."""
    if optimizer.kind is Kind.SGD:
        return []
    both = {name: optimizer.moments(node) for name, node in model.parameters.items()}
    return [{name: pair[which].flatten() for name, pair in both.items()} for which in (0, 1)]


@functools.cache
def traced(name: str, index: int, compat: str | None) -> Trace:
    """Repeat one run of an oracle."""
    record = oracle(f"train_{name}")
    run = record["runs"][index]
    model = model_of(record["model"])
    loss = LOSSES[run["loss_type"]]
    optimizer = optimizer_of(
        model,
        loss,
        KINDS[run["optimizer"]],
        period=run["opt_period"],
        parameters=parameters_of(record["hyper"]),
        compat=compat,
    )
    trace = Trace(result=Result(compat=compat))
    for batch, step in zip(record["batches"], run["evals"], strict=True):
        labels = {Loss.CROSS_ENTROPY: "y_onehot", Loss.MEAN_SQUARED_ERROR: "y_regression"}.get(loss)
        y = None if labels is None else floats(batch[labels])
        drive(optimizer, floats(batch["x"]), y, backward=step["backward"], result=trace.result)
        trace.losses.append(model.graph.values(optimizer.loss_tensor).flatten())
        predictions = optimizer.predictions()
        trace.predictions.append(None if predictions is None else predictions.tolist())
        trace.correct.append(optimizer.correct())
        trace.gradients.append(gradients_of(optimizer, model, compat))
        trace.weights.append(model.values())
        trace.moments.append(moments_of(optimizer, model))
        trace.places.append((optimizer.index, optimizer.iteration))
    return trace


def evaluations(name: str, index: int) -> list[dict[str, Any]]:
    """The recorded evaluations of one run."""
    return oracle(f"train_{name}")["runs"][index]["evals"]


def read(record: dict[str, list[float]]) -> dict[str, Tensor]:
    """Read recorded tensors."""
    return {name: floats(values) for name, values in record.items()}


def distances(name: str, index: int, compat: str | None, *, after_steps: bool) -> dict[str, float]:
    """The farthest that losses, gradients, weights and moments of a whole run are from ggml's, relative beyond 1."""
    trace = traced(name, index, compat)
    far: dict[str, float] = {}

    def see(what: str, expected: dict[str, Tensor], actual: dict[str, Tensor]) -> None:
        far[what] = max(far.get(what, 0.0), farthest(expected, actual, relative=True))

    for place, step in enumerate(evaluations(name, index)):
        see("loss", {"loss": floats([step["loss"]])}, {"loss": trace.losses[place]})
        gradients = step.get("grad_acc", step.get("grad"))
        if trace.gradients[place] and (step["graph"] == "opt" or not after_steps):
            see("gradient", read(gradients), trace.gradients[place])
        if step["graph"] == "opt":
            see("weight", read(step["weights"]), trace.weights[place])
            for which, moments in zip("mv", trace.moments[place], strict=False):
                see(which, read(step[which]), moments)
    return far


@pytest.mark.parametrize(("name", "index"), RUNS)
def test_a_whole_run_is_ggmls(name: str, index: int) -> None:
    """In compat, losses, accumulators, weights and moments stay within 1e-6 of ggml's after every evaluation."""
    far = distances(name, index, "ggml", after_steps=False)
    assert {"loss", "weight"} <= far.keys()
    assert WHOLE_RUN < 1e-6
    assert {} == {what: distance for what, distance in far.items() if distance > WHOLE_RUN}


@pytest.mark.parametrize(("name", "index"), RUNS)
def test_the_default_trains_as_ggml_does(name: str, index: int) -> None:
    """Where ggml is right (labels sum to 1, whole windows), the default takes the same steps, but for roundings."""
    far = distances(name, index, None, after_steps=True)
    assert {"loss", "weight", "gradient"} <= far.keys()
    assert {} == {what: distance for what, distance in far.items() if distance > WHOLE_RUN}


@pytest.mark.parametrize(("name", "index"), ELEMENTWISE)
def test_elementwise_runs_are_ggmls_bit_for_bit(name: str, index: int) -> None:
    """The affine model needs neither exp nor long sums: losses, gradients, weights and moments have ggml's own bits."""
    assert {0.0} == set(distances(name, index, "ggml", after_steps=False).values())


@pytest.mark.parametrize(("name", "index"), RUNS)
def test_the_life_cycle_is_ggmls(name: str, index: int) -> None:
    """The place in the window and the number of the next update are ggml's after every evaluation, in both modes."""
    expected = [(step["opt_i_after"], step["iter_after"]) for step in evaluations(name, index)]
    assert expected == traced(name, index, "ggml").places
    assert expected == traced(name, index, None).places


@pytest.mark.parametrize(("name", "index"), RUNS)
@pytest.mark.parametrize("compat", ["ggml", None], ids=["ggml", "default"])
def test_predictions_and_counts_are_ggmls(name: str, index: int, compat: str | None) -> None:
    """Predicted classes and how many are right are ggml's for cross entropy, and absent for other losses."""
    trace = traced(name, index, compat)
    assert [step.get("pred") for step in evaluations(name, index)] == trace.predictions
    assert [step.get("ncorrect") for step in evaluations(name, index)] == trace.correct


def near(expected: Any, actual: float, bound: float) -> bool:
    """Whether a recorded statistic is met, NaN by NaN."""
    expected = float(expected)
    return np.isnan(expected) == np.isnan(actual) and (np.isnan(actual) or abs(expected - actual) <= bound)


@pytest.mark.parametrize(("name", "index"), RUNS)
def test_statistics_of_a_run_are_ggmls(name: str, index: int) -> None:
    """In compat the result of all eight evaluations has ggml's loss and accuracy, both with its error bars."""
    run = oracle(f"train_{name}")["runs"][index]
    result = traced(name, index, "ggml").result
    assert result is not None
    assert run["result"]["ndata"] == result.count
    loss, accuracy = result.loss(), result.accuracy()
    period = run["opt_period"]  # what was stored is multiplied by it again
    assert near(run["result"]["loss"], loss.value, 8 * period * WHOLE_RUN)
    # The variance is a difference of numbers up to 4, each off by 2 * 2 * WHOLE_RUN; and |√a - √b| <= √|a - b|.
    assert near(run["result"]["loss_unc"], loss.error, (8 * period * 8 * WHOLE_RUN) ** 0.5)
    assert near(run["result"]["accuracy"], accuracy.value, 0.0)
    assert near(run["result"]["accuracy_unc"], accuracy.error, 0.0)


@pytest.mark.parametrize(("name", "index", "compat"), SHOWN)
def test_each_step_is_the_published_formula_in_float32(name: str, index: int, compat: str | None) -> None:
    """Given its own gradient, every step has the bits of numpy's float32 in the order that the specification gives."""
    record = oracle(f"train_{name}")
    run = record["runs"][index]
    trace = traced(name, index, compat)
    weights = model_of(record["model"]).values()
    moments = [{name: torch.zeros_like(value) for name, value in weights.items()} for _ in range(2)]
    for place, step in enumerate(run["evals"]):
        if step["graph"] != "opt":
            assert same(weights, trace.weights[place])
            continue
        hyper = {key: np.float32(value) for key, value in record["hyper"][run["optimizer"]].items()}
        gradients = trace.gradients[place]
        if run["optimizer"] == "sgd":
            weights = {key: sgd(weights[key], gradients[key], hyper) for key in weights}
        else:
            factors = [np.float32(factor) for factor in step["step_params"][5:]]
            stepped = {
                key: adamw(weights[key], gradients[key], *(one[key] for one in moments), hyper, factors)
                for key in weights
            }
            weights, *moments = ({key: values[which] for key, values in stepped.items()} for which in range(3))
            assert all(same(one, other) for one, other in zip(moments, trace.moments[place], strict=True))
        assert same(weights, trace.weights[place])


def sgd(weight: Tensor, gradient: Tensor, hyper: dict[str, np.float32]) -> Tensor:
    """Take one step, as specified."""
    w, g = weight.numpy(), gradient.numpy()
    return torch.from_numpy(w * (np.float32(1) - hyper["alpha"] * hyper["wd"]) - hyper["alpha"] * g)


def adamw(
    weight: Tensor,
    gradient: Tensor,
    first: Tensor,
    second: Tensor,
    hyper: dict[str, np.float32],
    factors: list[np.float32],
) -> list[Tensor]:
    """Take one step, as specified: the new weight and both new moments."""
    w, g, m, v = (tensor.numpy() for tensor in (weight, gradient, first, second))
    one, alpha = np.float32(1), hyper["alpha"]
    m = m * hyper["beta1"] + g * (one - hyper["beta1"])
    v = v * hyper["beta2"] + (g * g) * (one - hyper["beta2"])
    move = (alpha * (m * factors[0])) / (np.sqrt(v * factors[1]) + hyper["eps"])
    return [torch.from_numpy(array) for array in (w * (one - alpha * hyper["wd"]) - move, m, v)]
