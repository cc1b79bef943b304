"""A whole fit against ggml_opt_fit: the same rows, start and schedule give the same losses and weights."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from ggml_process import Ggml

from augend.ggml import Compat, Dataset, Fit, Graph, History, Kind, Loss, Parameters, Training, fit

EPOCHS, ROWS, PHYSICAL, SPLIT = 5, 96, 8, 0.25
WIDTHS = (16, 12, 4)
LOSSES = {Loss.CROSS_ENTROPY: 2, Loss.MEAN_SQUARED_ERROR: 3}
KINDS = {Kind.ADAMW: 0, Kind.SGD: 1}
# At most 5 · 9 updates of about a hundredth each, from gradients of at most 16 + 32 · 4 roundings on each side, make
# 45 · 0.01 · 2 · 144 · 2^-24 = 7.7e-6, and losses of order one follow the weights.
BOUND = 1e-5


def problem() -> dict[str, Any]:
    """Draw rows, labels and a start; the labels are one-hot, which both losses take."""
    random = np.random.default_rng(6)
    return {
        "data": random.standard_normal((ROWS, WIDTHS[0]), np.float32),
        "labels": np.eye(WIDTHS[-1], dtype=np.float32)[random.integers(0, WIDTHS[-1], ROWS)],
        "weights": [
            array
            for inner, outer in itertools.pairwise(WIDTHS)
            for array in (
                np.float32(0.25) * random.standard_normal((outer, inner), np.float32),
                np.float32(0.1) * random.standard_normal(outer, np.float32),
            )
        ],
    }


def schedule() -> list[Parameters]:
    """Return other numbers for each epoch, of both optimizers."""
    return [
        Parameters(adamw=[0.01 / epoch, 0.9, 0.99, 1e-8, 0.1], sgd=[0.05 / epoch, 0.01])
        for epoch in range(1, EPOCHS + 1)
    ]


def numbers(parameters: Parameters) -> list[float]:
    """Return the seven numbers as ggml has them."""
    adamw, sgd = parameters.adamw, parameters.sgd
    return [adamw.alpha, adamw.beta1, adamw.beta2, adamw.eps, adamw.wd, sgd.alpha, sgd.wd]


def theirs(ggml: Ggml, loss: Loss, kind: Kind, period: int) -> dict[str, Any]:
    """Train with ggml."""
    request = problem() | {
        "loss": LOSSES[loss],
        "kind": KINDS[kind],
        "physical": PHYSICAL,
        "logical": period * PHYSICAL,
        "split": SPLIT,
        "schedule": [numbers(each) for each in schedule()],
    }
    (answer,) = ggml.ask("train", [request])
    return answer


def ours(loss: Loss, kind: Kind, period: int, compat: Compat | None) -> tuple[History, list[np.ndarray]]:
    """Train with augend."""
    given, graph = problem(), Graph()
    inputs = outputs = graph.tensor((WIDTHS[0], PHYSICAL))
    trained = []
    for layer in range(0, len(given["weights"]), 2):
        matrix, bias = given["weights"][layer : layer + 2]
        trained += [
            graph.tensor(each.shape[::-1], parameter=True, name=f"{layer}.{each.ndim}") for each in (matrix, bias)
        ]
        graph.set_values(trained[-2], torch.from_numpy(matrix))
        graph.set_values(trained[-1], torch.from_numpy(bias))
        hidden = graph.relu(outputs) if layer else outputs
        outputs = graph.add(graph.mul_mat(trained[-2], hidden), trained[-1])
    training = Training(inputs=inputs, outputs=outputs, loss=loss, kind=kind)
    options = Fit(epochs=EPOCHS, logical_batch=period * PHYSICAL, validation_split=SPLIT, parameters=schedule())
    history = fit(graph, training, Dataset(given["data"], given["labels"], compat=compat), options, compat=compat)
    return history, [graph.values(each).numpy() for each in trained]


@pytest.mark.parametrize("compat", ["ggml", None])
@pytest.mark.parametrize("period", [1, 2, 4])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("loss", LOSSES)
def test_a_fit_is_that_of_ggml(ggml: Ggml, loss: Loss, kind: Kind, period: int, compat: Compat | None) -> None:
    """Losses, accuracies and weights are those of ggml_opt_fit, by its rules and, where it has no fault, by ours."""
    expected = theirs(ggml, loss, kind, period)
    history, weights = ours(loss, kind, period, compat)
    assert EPOCHS == len(history.epochs)
    for epoch, losses, accuracies in zip(history.epochs, expected["losses"], expected["accuracies"], strict=True):
        for actual, (value, deviation) in zip((epoch.loss, epoch.validation_loss), losses, strict=True):
            assert abs(value - actual.value) <= BOUND
            # By default an error bar is that of the rows, not of the batches.
            assert compat is None or abs(deviation - actual.error) <= BOUND
        for actual, (value, _) in zip((epoch.accuracy, epoch.validation_accuracy), accuracies, strict=True):
            assert np.array_equal(value, actual.value, equal_nan=True)
    for start, mine, other in zip(problem()["weights"], weights, expected["weights"], strict=True):
        assert np.abs(other - start).max() > 100 * BOUND
        assert np.abs(other - mine).max() <= BOUND


def test_the_losses_are_those_that_ggml_hides(ggml: Ggml) -> None:
    """ggml_opt_fit tells no losses; those compared are of its calls by hand, which give the same weights, bitwise."""
    for kind in KINDS:
        answer = theirs(ggml, Loss.CROSS_ENTROPY, kind, 2)
        assert all(
            np.array_equal(fitted, other) for fitted, other in zip(answer["fit"], answer["weights"], strict=True)
        )
