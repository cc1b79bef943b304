"""Details that no other test would miss: each was found by changing the code and seeing nothing fail."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from augend.errors import ContractError
from augend.ggml import (
    AdamW,
    Dataset,
    Fit,
    Graph,
    Kind,
    Limits,
    Loss,
    Node,
    Optimizer,
    Parameters,
    Progress,
    Training,
    epoch,
    fit,
)

PHYSICAL = 2


def of_loss(loss: Loss, compat: str | None, dimensions: tuple[int, ...]) -> tuple[Graph, Node, Optimizer]:
    """Return an optimizer whose outputs are its inputs times a weight, repeated to so many dimensions."""
    graph = Graph()
    x = graph.tensor((2, PHYSICAL))
    weight = graph.tensor(2, parameter=True, name="w")
    graph.set_values(weight, [2.0, -1.0])
    outputs = graph.mul(x, weight)
    if len(dimensions) > PHYSICAL:
        outputs = graph.repeat(outputs, graph.tensor(dimensions))
    training = Training(inputs=x, outputs=outputs, loss=loss, kind=Kind.SGD, period=2)
    return graph, weight, Optimizer(graph, training, compat=compat)


@pytest.mark.parametrize("dimensions", [(2, 2), (2, 2, 4), (2, 2, 2, 4)], ids=str)
@pytest.mark.parametrize("loss", [Loss.MEAN, Loss.SUM, Loss.MEAN_SQUARED_ERROR], ids=lambda loss: loss.name)
def test_losses_and_gradients_in_a_window_are_ggmls(loss: Loss, dimensions: tuple[int, ...]) -> None:
    """In the middle of a window the default's loss and gradient are what ggml holds, also for outputs of four dims.

    All numbers are small and all divisors powers of two, so that both ways of dividing are exact.
    """
    seen = []
    for compat in ("ggml", None):
        graph, weight, optimizer = of_loss(loss, compat, dimensions)
        graph.set_values(optimizer.training.inputs, [[1.0, 2.0], [3.0, -4.0]])
        optimizer.allocate(backward=True)
        value = optimizer.evaluate()
        seen.append((value, optimizer.gradient(weight).tolist()))
    assert seen[0] == seen[1]
    assert any(seen[0][1])


def test_gradients_of_a_cross_entropy_in_a_window() -> None:
    """The same for cross entropy, within the roundings of one softmax: a row of two elements, and one division."""
    seen = []
    for compat in ("ggml", None):
        graph, weight, optimizer = of_loss(Loss.CROSS_ENTROPY, compat, (2, 2))
        graph.set_values(optimizer.training.inputs, [[1.0, 2.0], [3.0, -4.0]])
        graph.set_values(optimizer.labels_tensor, [[1.0, 0.0], [0.0, 1.0]])
        optimizer.allocate(backward=True)
        optimizer.evaluate()
        seen.append(optimizer.gradient(weight))
    assert (seen[0] - seen[1]).abs().max() <= 16 * 2.0**-24 * 4


def test_a_row_without_numbers_is_not_right() -> None:
    """Where logits and labels both are NaN, nothing was predicted and nothing is right."""
    graph, _, optimizer = of_loss(Loss.CROSS_ENTROPY, None, (2, 2))
    graph.set_values(optimizer.training.inputs, [[math.nan, 1.0], [1.0, 0.0]])
    graph.set_values(optimizer.labels_tensor, [[math.nan, 1.0], [1.0, 0.0]])
    optimizer.allocate(backward=False)
    optimizer.evaluate()
    assert ([-1, 0], 1) == (optimizer.predictions().tolist(), optimizer.correct())


def test_a_product_of_one_row_is_a_row() -> None:
    """The product of a matrix and one datapoint is a matrix of one row in torch."""
    graph = Graph()
    product = graph.mul_mat(graph.tensor((3, 2)), graph.tensor((3, 1)))
    graph.compute(product)
    assert (1, 2) == graph.values(product).shape


def test_results_are_as_limited_as_leaves() -> None:
    """An operation whose result would be too large is refused when it is built."""
    graph = Graph(limits=Limits(dimension=4, elements=8))
    with pytest.raises(ContractError, match="8 elements"):
        graph.mul_mat(graph.tensor((1, 4)), graph.tensor((1, 4)))


def test_a_step_on_a_step_makes_two() -> None:
    """A step is an alias of its weight, and can be that of another step."""
    graph = Graph()
    weight, gradient, numbers = graph.tensor(1, parameter=True), graph.tensor(1), graph.tensor(2)
    graph.set_values(gradient, [1.0])
    graph.set_values(numbers, [0.5, 0.0])
    twice = graph.opt_step_sgd(graph.opt_step_sgd(weight, gradient, numbers), gradient, numbers)
    graph.compute(twice)
    assert [-1.0] == graph.values(weight).tolist() == graph.values(twice).tolist()


def test_one_datapoint_has_its_own_length() -> None:
    """An input of one dimension takes as many elements as it has: they are no rows."""
    graph = Graph()
    x, w = graph.tensor(3), graph.tensor(1, parameter=True)
    module = graph.module(x, graph.mul(x, w))
    assert (3,) == module(torch.ones(3)).shape
    with pytest.raises(ContractError, match=r"\[3\]"):
        module(torch.ones(4))


def worse_and_worse() -> Iterator[Parameters]:
    """Yield rates that make every epoch after the second worse."""
    for alpha in (0.01, 0.02, 1e2, 1e3, 1e4, 1e5):
        yield Parameters(adamw=AdamW(alpha=alpha))


def run(directory: Path, stop_after: int | None = None) -> list[float]:
    """Fit with patience, saved after each batch; interrupted after so many batches if asked. Returns the weights."""
    graph = Graph()
    x, weight = graph.tensor((2, PHYSICAL)), graph.tensor((2, 1), parameter=True, name="w")
    training = Training(inputs=x, outputs=graph.mul_mat(weight, x), loss=Loss.MEAN_SQUARED_ERROR)
    data = torch.randn(16, 2, generator=torch.Generator().manual_seed(0))
    calls = [0]

    def interrupt(_: Progress) -> None:
        calls[0] += 1
        if calls[0] == stop_after:
            raise KeyboardInterrupt

    options = Fit(epochs=6, logical_batch=4, validation_split=0.25, parameters=list(worse_and_worse()), patience=3)
    dataset = Dataset(data, data.sum(dim=1))
    fit(graph, training, dataset, options, checkpoint=directory, every_seconds=0.0, on_train=interrupt)
    return graph.values(weight).flatten().tolist()


@pytest.mark.parametrize("batch", [14, 20, 27])
def test_the_best_weights_outlive_an_interruption(tmp_path: Path, batch: int) -> None:
    """Interrupted after its best epoch, a fit with patience still ends with the weights of that epoch."""
    expected = run(tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "cut", batch)
    assert expected == run(tmp_path / "cut")


def test_a_data_set_of_row_numbers() -> None:
    """Datapoints may be the rows that ``get_rows`` looks up: each learns where it is, and no other row moves."""
    graph = Graph()
    ids = graph.tensor((1, PHYSICAL), dtype=torch.int32)
    table = graph.tensor((1, 5), parameter=True, name="table")
    outputs = graph.get_rows(table, graph.reshape(ids, (PHYSICAL,)))
    parameters = Parameters(sgd=[1.0, 0.0])
    training = Training(inputs=ids, outputs=outputs, loss=Loss.SUM, kind=Kind.SGD, parameters=parameters)
    epoch(Optimizer(graph, training), Dataset([3.0, 0.0, 3.0]))
    assert [[-1.0], [0.0], [0.0], [-2.0], [0.0]] == graph.values(table).tolist()
