"""Graphs that are built anew for each evaluation: ggml then never clears its gradients; augend does."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from ggml_runs import HALF_ULP, KINDS, Model, drive, optimizer_of, oracle, weight_of

from augend.ggml import SGD, AdamW, Graph, Loss, Optimizer, Parameters

CASES = oracle("dynamic_graph_accumulators")["cases"]
IDS = [f"{case['graphs']}-{case['optimizer']}-{case['opt_period']}" for case in CASES]
STATIC = [case for case in CASES if case["graphs"] == "static"]
TRUE = 0.5  # the gradient of every evaluation: the sum of two inputs of 0.25


def product() -> Model:
    """y = x * w, with w = 1."""
    graph = Graph()
    inputs = graph.tensor((1, 2), name="x")
    weight = graph.tensor((1,), parameter=True, name="w")
    graph.set_values(weight, [1.0])
    return Model(graph, inputs, graph.mul(inputs, weight), {"w": weight})


def made(case: dict[str, Any], compat: str | None = None) -> tuple[Model, Optimizer]:
    """Build a model and its optimizer."""
    model = product()
    parameters = Parameters(adamw=AdamW(), sgd=SGD(alpha=1.0))
    kind = KINDS[case["optimizer"]]
    return model, optimizer_of(model, Loss.SUM, kind, period=case["opt_period"], parameters=parameters, compat=compat)


def rebuilt(case: dict[str, Any]) -> list[dict[str, float]]:
    """Evaluate six times, each time in a new graph with a new optimizer that takes over the state."""
    model, optimizer = made(case)
    evaluations = []
    for _ in case["evals"]:
        before = weight_of(model)
        drive(optimizer, [0.25, 0.25])
        evaluations.append(
            {
                "dw": weight_of(model) - before,
                "iter_after": optimizer.iteration,
                "grad_acc": float(optimizer.gradient(model.parameters["w"])),
            }
        )
        weights, state = model.graph.state_dict(), optimizer.state_dict()
        model, optimizer = made(case)
        model.graph.load_state_dict(weights)
        optimizer.load_state_dict(state)
    return evaluations


@pytest.mark.parametrize("case", STATIC, ids=[f"period-{one['opt_period']}" for one in STATIC])
@pytest.mark.parametrize("compat", [None, "ggml", "prism"], ids=["default", "ggml", "prism"])
def test_static_graphs_move_by_the_true_gradient(case: dict[str, Any], compat: str | None) -> None:
    """A graph that is kept moves by exactly what ggml's static graphs move, in every mode."""
    model, optimizer = made(case, compat)
    for step in case["evals"]:
        before = weight_of(model)
        drive(optimizer, [0.25, 0.25])
        assert step["dw"] == weight_of(model) - before
        assert step["iter_after"] == optimizer.iteration
        if "grad_acc" in step:
            assert step["grad_acc"] == float(optimizer.gradient(model.parameters["w"]))


@pytest.mark.parametrize("case", STATIC, ids=[f"period-{one['opt_period']}" for one in STATIC])
def test_a_graph_built_anew_moves_as_one_that_is_kept(case: dict[str, Any]) -> None:
    """Rebuilding the graph for each evaluation changes nothing: ggml's static numbers, also within a window."""
    for step, actual in zip(case["evals"], rebuilt(case), strict=True):
        assert step["dw"] == actual["dw"]
        assert step["iter_after"] == actual["iter_after"]
        assert step.get("grad_acc", TRUE) == actual["grad_acc"]


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_rebuilt_graphs_use_the_gradients_of_their_own_window(case: dict[str, Any]) -> None:
    """At every period the accumulator holds 0.5 for each evaluation of its window, and none of the window before."""
    period = case["opt_period"]
    expected = [TRUE * (place % period + 1) for place in range(len(case["evals"]))]
    assert expected == [one["grad_acc"] for one in rebuilt(case)]


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_ggmls_dynamic_steps_are_sums_of_all_past_gradients(case: dict[str, Any]) -> None:
    """Recorded from ggml: dynamic accumulators hold all gradients since the start, static ones those of the window."""
    window = len(case["evals"]) if case["graphs"] == "dynamic" else case["opt_period"]
    for place, step in enumerate(case["evals"]):
        held = TRUE * (place % window + 1)
        assert held == step.get("grad_acc", held)
        if case["optimizer"] == "sgd":
            steps = (place + 1) % case["opt_period"] == 0
            assert (-held if steps else 0.0) == step["dw"]


def test_ggmls_dynamic_adamw_is_adamw_of_those_sums() -> None:
    """The moves recorded from ggml are AdamW's with gradients 0.5, 1.0, 1.5, ...; augend's are with 0.5 each time."""
    (case,) = (one for one in CASES if one["optimizer"] == "adamw")
    recorded = [step["dw"] for step in case["evals"]]
    # A move is read off as the difference of two weights up to 4: half a unit in the last place of each.
    bound = 2 * 4 * HALF_ULP
    sums = moves([TRUE * (place + 1) for place in range(6)])
    assert bound >= float(np.abs(np.subtract(recorded, sums)).max())
    own = [one["dw"] for one in rebuilt(case)]
    assert bound >= float(np.abs(np.subtract(own, moves([TRUE] * 6))).max())
    assert 2e-5 < float(np.abs(np.subtract(recorded, own)).max())


def moves(gradients: list[float]) -> list[float]:
    """How AdamW's defaults move a weight, in float64, for a sequence of gradients (Loshchilov and Hutter 2019)."""
    first = second = 0.0
    steps = []
    for place, gradient in enumerate(gradients, start=1):
        first = 0.9 * first + 0.1 * gradient
        second = 0.999 * second + 0.001 * gradient**2
        steps.append(-1e-3 * (first / (1 - 0.9**place)) / ((second / (1 - 0.999**place)) ** 0.5 + 1e-8))
    return steps


def test_adamw_state_survives_a_rebuilt_graph() -> None:
    """Moments and the update's number move over to the new graph: the weights are those of one kept graph, bitwise."""
    case = {"optimizer": "adamw", "opt_period": 2, "evals": [None] * 7}
    model, optimizer = made(case)
    kept = []
    for _ in case["evals"]:
        before = weight_of(model)
        drive(optimizer, [0.25, 0.25])
        kept.append(weight_of(model) - before)
    assert kept == [one["dw"] for one in rebuilt(case)]
