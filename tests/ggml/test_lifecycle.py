"""Allocate and evaluate against a real ggml, its quirks included, and what the default does instead."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ggml_runs import (
    HALF_ULP,
    KINDS,
    LOSSES,
    SIGN_STEPS,
    Model,
    drive,
    farthest,
    floats,
    model_of,
    optimizer_of,
    oracle,
    parameters_of,
    same,
    upstream,
    weight_of,
)
from torch import Tensor

from augend.errors import ContractError, StateError
from augend.ggml import AdamW, Graph, Kind, Loss, Optimizer, Parameters

RECORD = oracle("lifecycle")
SCENARIOS = [pytest.param(scenario, id=scenario["scenario"].split(":")[0][:48]) for scenario in RECORD["scenarios"]]
# The affine model without exp: the same bits. The loss is a sum of 6 terms, in float64 in ggml.
BITWISE = 0.0


def start(scenario: dict[str, Any], compat: str | None) -> tuple[Model, Optimizer]:
    """Build a scenario's model and optimizer."""
    model = model_of(scenario["model"])
    optimizer = optimizer_of(
        model,
        LOSSES[scenario["loss_type"]],
        KINDS[scenario["optimizer"]],
        period=scenario["opt_period"],
        parameters=parameters_of(RECORD["hyper"]),
        compat=compat,
    )
    return model, optimizer


def take(optimizer: Optimizer, step: dict[str, Any]) -> None:
    """Repeat one recorded step: a reset, or an evaluation with or without gradients."""
    if "op" in step:
        optimizer.reset(step["op"] == "reset_optimizer")
        return
    y = floats(step["y"]) if "y" in step else None
    drive(optimizer, floats(step["x"]), y, backward=step["backward"])


def gradients(optimizer: Optimizer, model: Model) -> dict[str, Tensor]:
    """All gradients, flat."""
    return {name: optimizer.gradient(node).flatten() for name, node in model.parameters.items()}


def moments(optimizer: Optimizer, model: Model) -> dict[str, Tensor]:
    """First and second moments under one name each; none for SGD."""
    if optimizer.kind is Kind.SGD:
        return {}
    both = {name: optimizer.moments(node) for name, node in model.parameters.items()}
    return {f"{which}.{name}": pair[at].flatten() for at, which in enumerate("mv") for name, pair in both.items()}


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_every_step_is_ggmls_in_compat(scenario: dict[str, Any]) -> None:
    """Places, losses, accumulators (stale ones too), weights and moments are ggml's, bit for bit, after every step."""
    model, optimizer = start(scenario, "ggml")
    weights = model.values()
    for step in scenario["steps"]:
        take(optimizer, step)
        assert (step["opt_i_after"], step["iter_after"]) == (optimizer.index, optimizer.iteration)
        if "loss" in step:
            assert BITWISE == farthest({"": floats([step["loss"]])}, {"": model.graph.values(optimizer.loss_tensor)})
        if "grad_acc" in step:
            expected = {name: floats(values) for name, values in step["grad_acc"].items()}
            assert BITWISE == farthest(expected, gradients(optimizer, model))
        if "weights" in step:
            weights = {name: floats(values) for name, values in step["weights"].items()}
        if "m" in step:
            expected = {f"{key}.{name}": floats(values) for key in "mv" for name, values in step[key].items()}
            assert BITWISE == farthest(expected, moments(optimizer, model))
        assert same(weights, model.values())


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_forward_evaluations_leave_no_trace_by_default(scenario: dict[str, Any]) -> None:
    """Without its forward evaluations a scenario ends with the same bits: weights, moments, gradients and places."""
    ends = []
    for forwards in (True, False):
        model, optimizer = start(scenario, None)
        for step in scenario["steps"]:
            if forwards or step.get("backward", True):
                take(optimizer, step)
        state = {**model.values(), **gradients(optimizer, model), **moments(optimizer, model)}
        ends.append((state, optimizer.index, optimizer.iteration))
    assert same(ends[0][0], ends[1][0])
    assert ends[0][1:] == ends[1][1:]


def test_ggml_itself_loses_what_forward_evaluations_displace() -> None:
    """The recorded window with a forward evaluation in it has three gradients in ggml, and four by default."""
    scenario = RECORD["scenarios"][2]
    steps = scenario["steps"]
    assert [True, False, True, True] == [step["backward"] for step in steps[:4]]
    _, optimizer = start(scenario, None)
    for step in steps[:4]:
        take(optimizer, step)
    assert (3, 1) == (optimizer.index, optimizer.iteration)  # the window waits for its fourth gradient
    assert 2 == steps[3]["iter_after"]


def test_a_misaligned_evaluation_leaks_into_the_next_step_in_compat_alone() -> None:
    """ggml's second update uses three gradients, one of them of before the evaluation; augend's uses its own two."""
    scenario = RECORD["scenarios"][1]
    for compat, expected in (("ggml", 3), (None, 2)):
        model, optimizer = start(scenario, compat)
        own = []
        for step in scenario["steps"]:
            before = model.values()
            take(optimizer, step)
            if step["backward"]:
                own.append(alone(scenario, before, step))
        used = own[-3:] if compat else own[2:4]
        assert expected == len(used)
        if compat:
            summed = {name: torch.stack([one[name] for one in used]).double().sum(dim=0) for name in used[0]}
            # Two roundings of values up to 1/2 in the float32 sum of three.
            assert 2 * HALF_ULP >= farthest(summed, gradients(optimizer, model))


def alone(scenario: dict[str, Any], weights: dict[str, Tensor], step: dict[str, Any]) -> dict[str, Tensor]:
    """The gradient of one evaluation, taken by a fresh optimizer."""
    model, optimizer = start(scenario, "ggml")
    for name, node in model.parameters.items():
        model.graph.set_values(node, weights[name])
    take(optimizer, step)
    return gradients(optimizer, model)


@pytest.mark.parametrize("compat", [None, "ggml", "prism"], ids=["default", "ggml", "prism"])
def test_calls_out_of_order_are_errors_and_change_nothing(compat: str | None) -> None:
    """Two allocations without an evaluation, or an evaluation without one, raise; the run goes on as if not called."""
    model = upstream()
    optimizer = optimizer_of(model, Loss.SUM, parameters=SIGN_STEPS, compat=compat)
    with pytest.raises(StateError):
        optimizer.evaluate()
    optimizer.allocate(True)
    with pytest.raises(StateError):
        optimizer.allocate(True)
    model.graph.set_values(model.inputs, [0.0])
    assert 3.0 == optimizer.evaluate()
    assert 2.0 == weight_of(model)
    with pytest.raises(StateError):
        optimizer.evaluate()


@pytest.mark.parametrize("compat", [None, "ggml", "prism"], ids=["default", "ggml", "prism"])
def test_gradients_stay_readable_until_the_next_backward_pass(compat: str | None) -> None:
    """After a step the gradient is what the step used; the next window begins from zero."""
    model = upstream()
    optimizer = optimizer_of(model, Loss.SUM, parameters=SIGN_STEPS, compat=compat, period=2)
    seen = []
    for _ in range(4):
        drive(optimizer, [1.0])
        seen.append(float(optimizer.gradient(model.parameters["weight"])))
    assert [1.0, 2.0, 1.0, 2.0] == seen
    assert -1.0 == weight_of(model)


@pytest.mark.parametrize("compat", [None, "ggml", "prism"], ids=["default", "ggml", "prism"])
def test_reset_clears_gradients_and_with_true_the_moments(compat: str | None) -> None:
    """A reset zeroes gradients; with True also both moments and the update's number; weights stay."""
    model = upstream()
    parameters = Parameters(adamw=AdamW(alpha=0.5))
    optimizer = optimizer_of(model, Loss.SUM, Kind.ADAMW, parameters=parameters, compat=compat, period=2)
    weight = model.parameters["weight"]
    for _ in range(3):
        drive(optimizer, [1.0])
    before = weight_of(model), optimizer.iteration, [float(moment) for moment in optimizer.moments(weight)]
    optimizer.reset()
    assert before == (weight_of(model), optimizer.iteration, [float(moment) for moment in optimizer.moments(weight)])
    assert 0.0 == float(optimizer.gradient(weight))
    optimizer.reset(True)
    assert (before[0], 1, [0.0, 0.0]) == (
        weight_of(model),
        optimizer.iteration,
        [float(moment) for moment in optimizer.moments(weight)],
    )


def test_a_window_that_lost_gradients_to_a_reset_is_divided_by_what_is_left() -> None:
    """By default the mean is over what was counted: a reset in the window does not shrink the step, as in ggml."""
    steps = {}
    for compat in (None, "ggml"):
        model = upstream()
        optimizer = optimizer_of(model, Loss.MEAN, parameters=SIGN_STEPS, compat=compat, period=2)
        drive(optimizer, [1.0])
        optimizer.reset()
        while optimizer.iteration == 1:
            drive(optimizer, [1.0])
        steps[compat] = 3.0 - weight_of(model)
    assert {None: 1.0, "ggml": 0.5} == steps


def test_the_gradient_of_what_is_no_parameter_is_an_error() -> None:
    """Inputs, outputs and other graphs' nodes have no accumulator and no moments."""
    model, other = upstream(), upstream()
    optimizer = optimizer_of(model, Loss.SUM, Kind.ADAMW, period=2)
    for node in (model.inputs, model.outputs, other.parameters["weight"]):
        with pytest.raises(ContractError):
            optimizer.gradient(node)
        with pytest.raises(ContractError):
            optimizer.moments(node)


def test_a_short_last_window_steps_when_told_to() -> None:
    """``last`` ends the window early, with the mean over what it has; in compat it is refused."""
    model = upstream()
    optimizer = optimizer_of(model, Loss.MEAN, parameters=SIGN_STEPS, period=4)
    drive(optimizer, [1.0])
    optimizer.allocate(True, last=True)
    model.graph.set_values(model.inputs, [2.0])
    optimizer.evaluate()
    assert (0, 2) == (optimizer.index, optimizer.iteration)
    assert 2.0 == weight_of(model)
    with pytest.raises((ContractError, StateError)):
        optimizer_of(upstream(), Loss.MEAN, period=4, compat="ggml").allocate(True, last=True)


def test_sgd_has_no_moments() -> None:
    """Only AdamW has moments to look at."""
    model = upstream()
    with pytest.raises(ContractError, match="moments"):
        optimizer_of(model, Loss.SUM).moments(model.parameters["weight"])


@pytest.mark.parametrize(("rows", "compat"), [(0, None), (4, None), (2, "ggml"), (2, "prism")])
def test_as_many_rows_as_there_are(rows: int, compat: str | None) -> None:
    """A short batch has one to all rows, and in compat there is none: an error, after which all rows are evaluated."""
    model = upstream(rows=3)
    optimizer = optimizer_of(model, Loss.SUM, compat=compat)
    optimizer.allocate(True)
    with pytest.raises(ContractError, match="rows"):
        optimizer.evaluate(rows=rows)
    assert 9.0 == optimizer.evaluate(rows=3)


def test_a_state_is_saved_between_evaluations() -> None:
    """Between allocate and evaluate there is no state to save."""
    optimizer = optimizer_of(upstream(), Loss.SUM)
    optimizer.allocate(True)
    with pytest.raises(StateError):
        optimizer.state_dict()


@pytest.mark.parametrize("key", ["kind", "loss", "period", "compat", "moments", "weight"])
def test_a_state_of_another_optimizer_is_refused(key: str) -> None:
    """A state is of one algorithm, loss, window, side and set of parameters; another is an error, and nothing moves."""
    model = upstream()
    settings: dict[str, Any] = {"loss": Loss.SUM, "kind": Kind.ADAMW, "period": 2, "compat": None}
    optimizer = optimizer_of(model, **settings)
    drive(optimizer, [1.0])
    others = {"kind": Kind.SGD, "loss": Loss.MEAN, "period": 3, "compat": "ggml"}
    state = optimizer_of(upstream(), **{**settings, **({key: others[key]} if key in others else {})}).state_dict()
    if key == "moments":
        state["moments"] = {"weight": {"m": torch.zeros(2), "v": torch.zeros(2)}}
    if key == "weight":
        state["moments"] = {"other": state["moments"]["weight"]}
    before = optimizer.gradient(model.parameters["weight"]), optimizer.index
    with pytest.raises(ContractError):
        optimizer.load_state_dict(state)
    assert before == (optimizer.gradient(model.parameters["weight"]), optimizer.index)


@pytest.mark.parametrize("compat", ["gguf", "", 1], ids=repr)
def test_sides_that_there_are(compat: Any) -> None:
    """ggml and prism are the sides; another word is an error."""
    with pytest.raises(ContractError, match="compat"):
        optimizer_of(upstream(), Loss.SUM, compat=compat)


def test_a_classification_is_a_matrix() -> None:
    """Cross entropy takes classes and rows; outputs of more dimensions are an error where the optimizer is made."""
    graph = Graph()
    inputs = graph.tensor((3, 2, 2))
    weight = graph.tensor((3,), parameter=True)
    with pytest.raises(ContractError, match="dimensions"):
        optimizer_of(Model(graph, inputs, graph.add(inputs, weight), {"w": weight}), Loss.CROSS_ENTROPY)


def test_without_a_last_place_there_is_no_step() -> None:
    """A window of 999,999 batches only adds: the gradient after k evaluations is k, the weight stays."""
    model = upstream()
    optimizer = optimizer_of(model, Loss.SUM, parameters=SIGN_STEPS, period=999_999, compat="ggml")
    for count in range(1, 7):
        drive(optimizer, [1.0])
        assert float(count) == float(optimizer.gradient(model.parameters["weight"]))
    assert (3.0, 6, 1) == (weight_of(model), optimizer.index, optimizer.iteration)
