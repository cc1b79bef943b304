"""ggml's regression test: a line through 201 noisy points, a hundred epochs, against a real ggml and the answer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ggml_runs import HALF_ULP, KINDS, Model, floats, options_of, oracle, parameters_of, training_of

from augend.ggml import Dataset, Graph, Loss, Progress, fit

CASES = oracle("regression")["cases"]
IDS = [case["optimizer"] for case in CASES]
POINTS = 201


def line(rows: int, case: dict[str, Any]) -> Model:
    """y = a * x + b."""
    graph = Graph()
    x = graph.tensor((1, rows), name="x")
    slope = graph.tensor((1,), parameter=True, name="a")
    offset = graph.tensor((1,), parameter=True, name="b")
    graph.set_values(slope, [float(case["a0"])])
    graph.set_values(offset, [float(case["b0"])])
    return Model(graph, x, graph.add(graph.mul(x, slope), offset), {"a": slope, "b": offset})


def fitted(case: dict[str, Any], compat: str | None, rows: int = POINTS) -> dict[str, list[float]]:
    """Fit for a hundred epochs of one update each; after every epoch what the oracle recorded."""
    model = line(rows, case)
    trace: dict[str, list[float]] = {"a": [], "b": [], "loss": []}

    def see(event: Progress) -> None:
        if event.batch == event.batches:
            for name, values in model.values().items():
                trace[name].append(float(values))

    dataset = Dataset(floats(case["x"]).reshape(-1, 1), floats(case["y"]).reshape(-1, 1), shard=1, compat=compat)
    kind = KINDS[case["optimizer"]]
    training = training_of(model, Loss.MEAN_SQUARED_ERROR, kind)
    epochs = len(case["loss_per_epoch"])
    options = options_of(epochs, POINTS, 0.0, [parameters_of(case["hyper"])] * epochs)
    history = fit(model.graph, training, dataset, options, compat=compat, on_train=see)
    trace["loss"] = [epoch.loss.value for epoch in history.epochs]
    return trace


@pytest.mark.parametrize("case", CASES, ids=IDS)
@pytest.mark.parametrize("compat", [None, "ggml"], ids=["default", "ggml"])
def test_the_whole_path_is_ggmls(case: dict[str, Any], compat: str | None) -> None:
    """Slope, offset and loss after each of a hundred updates are ggml's, in both modes."""
    trace = fitted(case, compat)
    # Each update rounds a weight of up to 4 once (4 half units), and may round differently each time: 100 of them.
    # The gradient is a float32 sum of 201 terms of up to 100; both pull the line back, so that nothing grows.
    weights = 100 * 4 * HALF_ULP
    for name in "ab":
        recorded = floats(case[f"{name}_after_epoch"])
        assert weights >= float((recorded - floats(trace[name])).abs().max())
    # A loss is a mean of squares: relative to itself it is off by twice the residual's error over the residual.
    losses = floats(case["loss_per_epoch"]).double()
    off = (losses - torch.tensor(trace["loss"], dtype=torch.float64)).abs()
    assert bool((off <= 2 * 100 * weights * losses.sqrt() + (100 * weights) ** 2 + POINTS * HALF_ULP * losses).all())


def test_the_line_is_found() -> None:
    """ggml's own claim: AdamW finds a = 1.2 and b = 3.4 within 1e-2, in every mode."""
    (case,) = (one for one in CASES if one["optimizer"] == "adamw")
    for compat in (None, "ggml", "prism"):
        trace = fitted(case, compat)
        assert abs(1.2 - trace["a"][-1]) < 1e-2
        assert abs(3.4 - trace["b"][-1]) < 1e-2


def test_the_line_is_the_same_from_any_physical_batch() -> None:
    """201 points are 1 * 201 or 3 * 67: the same hundred updates."""
    (case,) = (one for one in CASES if one["optimizer"] == "sgd")
    whole = fitted(case, None)
    cut = fitted(case, None, rows=67)
    for name in "ab":
        # 100 updates, each of a weight of up to 4 that may be rounded the other way.
        assert abs(whole[name][-1] - cut[name][-1]) <= 100 * 4 * HALF_ULP
