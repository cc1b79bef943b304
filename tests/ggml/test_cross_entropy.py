"""Cross entropy at its edges against a real ggml: ties, infinities, NaN and labels that do not sum to 1."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from ggml_runs import HALF_ULP, Model, drive, floats, optimizer_of, oracle
from torch import Tensor

from augend.ggml import SGD, Graph, Loss, Optimizer, Parameters, Result

CASES = oracle("cross_entropy_edge")["cases"]
NAMES = ["sharp", "ties", "huge", "soft", "unnormalised", "none", "nan", "inf", "wide", "flat"]
EDGES = [pytest.param(case, id=f"{NAMES[place // 2]}-{case['opt_period']}") for place, case in enumerate(CASES)]
STEP = Parameters(sgd=SGD(alpha=0.05, wd=0.01))
ROWS, CLASSES = 2, 5


def logits_model(logits: Tensor) -> Model:
    """A graph whose outputs are its one parameter, to which inputs of zero are added."""
    graph = Graph()
    inputs = graph.tensor((CLASSES, ROWS), name="zeros")
    parameter = graph.tensor((CLASSES, ROWS), parameter=True, name="logits")
    graph.set_values(parameter, logits)
    return Model(graph, inputs, graph.add(parameter, inputs), {"logits": parameter})


def evaluated(case: dict[str, Any], compat: str | None) -> tuple[Model, Optimizer, Result]:
    """Repeat the one evaluation of a case."""
    model = logits_model(floats(case["logits"]))
    optimizer = optimizer_of(model, Loss.CROSS_ENTROPY, period=case["opt_period"], parameters=STEP, compat=compat)
    result = Result(compat=compat)
    drive(optimizer, torch.zeros(ROWS, CLASSES), floats(case["labels"]), result=result)
    return model, optimizer, result


def agree(expected: Tensor, actual: Tensor, bound: float) -> bool:
    """Whether two tensors agree within a bound relative to each element, or that bound; NaN by NaN, inf by inf."""
    expected, actual = expected.flatten().double(), actual.flatten().double()
    special = ~torch.isfinite(expected)
    if not torch.equal(expected[special].nan_to_num(9.0), actual[special].nan_to_num(9.0)):
        return False
    off = (expected - actual)[~special].abs()
    return bool((off <= bound * expected[~special].abs().clamp(min=1.0)).all())


@pytest.mark.parametrize("case", EDGES)
def test_edges_are_ggmls_in_compat(case: dict[str, Any]) -> None:
    """Loss, gradient, weights, predictions and counts are ggml's, its NaN and its last of ties included."""
    model, optimizer, result = evaluated(case, "ggml")
    expected = case["eval"]
    # A logit's exp, sum, log and two products: some eight roundings of values that are relative to the largest.
    bound = 8 * HALF_ULP
    assert agree(floats([expected["loss"]]), model.graph.values(optimizer.loss_tensor), bound)
    predictions = optimizer.predictions()
    assert predictions is not None
    assert expected["pred"] == predictions.tolist()
    assert expected["ncorrect"] == optimizer.correct()
    assert expected["pred"] == result.predictions().tolist()
    if "grad_acc" in expected:
        actual = optimizer.gradient(model.parameters["logits"])
        assert agree(floats(expected["grad_acc"]["logits"]), actual, bound)
    else:
        assert agree(floats(expected["weights"]["logits"]), model.values()["logits"], bound)


def derivative(case: dict[str, Any]) -> Tensor:
    """The true gradient in float64: softmax * sum(label) - label, over rows and window."""
    logits, labels = (floats(case[key]).double().reshape(ROWS, CLASSES) for key in ("logits", "labels"))
    return (torch.softmax(logits, 1) * labels.sum(1, keepdim=True) - labels) / ROWS


def test_the_default_takes_the_true_gradient() -> None:
    """The default differentiates the loss it reports; ggml's is that only where labels sum to 1."""
    far: dict[str | None, float] = {}
    for case in CASES:
        if case["opt_period"] != 1 or not torch.isfinite(floats(case["logits"])).all():
            continue
        for compat in (None, "ggml"):
            twin = {**case, "opt_period": 1 if compat is None else 4}
            model, optimizer, _ = evaluated(twin, compat)
            actual = optimizer.gradient(model.parameters["logits"]).double() * twin["opt_period"]
            far[compat] = max(far.get(compat, 0.0), float((derivative(case) - actual).abs().max()))
    # Softmax (exp, sum, quotient: up to 6 roundings), times the sum of labels (up to 2), less a label, over rows.
    assert far[None] <= 16 * HALF_ULP
    assert far["ggml"] > 0.4


def test_a_probability_of_zero_is_no_loss_where_the_label_is_zero() -> None:
    """A logit of -inf whose label is 0 adds 0 by default: the loss is finite; in ggml 0 · inf makes it NaN."""
    logits = torch.tensor([[-math.inf, 0.0, 0.0, 0.0, 0.0], [0.0, 1.0, 2.0, 3.0, 4.0]])
    labels = torch.tensor([[0.0, 1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0, 1.0]])
    case = {"logits": logits.flatten().tolist(), "labels": labels.flatten().tolist(), "opt_period": 1}
    expected = math.log(4) + math.log(sum(math.exp(place - 4) for place in range(5)))
    model, optimizer, _ = evaluated(case, None)
    assert abs(expected / 2 - float(model.graph.values(optimizer.loss_tensor))) <= 8 * HALF_ULP
    gradient = optimizer.gradient(model.parameters["logits"])
    assert 0.0 == float(gradient[0, 0])
    assert bool(torch.isfinite(gradient).all())
    model, optimizer, _ = evaluated(case, "ggml")
    assert math.isnan(float(model.graph.values(optimizer.loss_tensor)))


@pytest.mark.parametrize(
    ("row", "first", "last"),
    [
        ([3.0, 3.0, 1.0, 3.0, 0.0], 0, 3),
        ([0.0, 1.0, 1.0, 0.0, 1.0], 1, 4),
        ([0.0, 0.0, 0.0, 0.0, 0.0], 0, 4),
        ([1.0, 2.0, 5.0, 0.0, -1.0], 2, 2),
    ],
    ids=["three", "two", "all", "none"],
)
def test_of_equal_logits_the_first_is_predicted(row: list[float], first: int, last: int) -> None:
    """The default and the Rust port predict the first of the largest, ggml the last."""
    labels = np.eye(CLASSES, dtype=np.float32)[[first, first]]
    for compat, expected in ((None, first), ("prism", first), ("ggml", last)):
        case = {"logits": row * 2, "labels": labels.flatten().tolist(), "opt_period": 1}
        _, optimizer, _ = evaluated(case, compat)
        predictions = optimizer.predictions()
        assert predictions is not None
        assert [expected] * ROWS == predictions.tolist()
        assert (ROWS if expected == first else 0) == optimizer.correct()


@pytest.mark.parametrize("place", range(CLASSES))
def test_a_row_with_a_nan_is_never_right(place: int) -> None:
    """By default a row with a NaN counts as wrong, whatever its label; ggml may count it as right."""
    logits = torch.arange(2.0 * CLASSES).reshape(ROWS, CLASSES)
    logits[0, place] = math.nan
    for label in range(CLASSES):
        labels = torch.eye(CLASSES)[[label, CLASSES - 1]]
        case = {"logits": logits.flatten().tolist(), "labels": labels.flatten().tolist(), "opt_period": 4}
        _, optimizer, result = evaluated(case, None)
        assert 1 == optimizer.correct()
        assert 0.5 == result.accuracy().value


def test_the_row_losses_of_a_result_are_cross_entropies() -> None:
    """The default's mean and error bar are over rows, from each row's own loss."""
    case = next(case for case in CASES if case["opt_period"] == 1)
    _, _, result = evaluated(case, None)
    logits, labels = (floats(case[key]).double().reshape(ROWS, CLASSES) for key in ("logits", "labels"))
    rows = -(torch.log_softmax(logits, 1) * labels).sum(1)
    loss = result.loss()
    assert ROWS == result.count
    assert abs(float(rows.mean()) - loss.value) <= 8 * HALF_ULP * float(rows.max())
    assert abs(float(rows.std()) / math.sqrt(ROWS) - loss.error) <= 16 * HALF_ULP * float(rows.max())
