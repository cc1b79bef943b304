"""A ggml graph's module is a module like any other: sharded, replicated and fitted, to the same bits."""

from __future__ import annotations

import functools
import warnings

import pytest
import torch
from placed import PLACES
from ranks import Ranks
from torch import nn
from torch.distributed.tensor import DTensor

import augend
from augend.data import Microbatch
from augend.ggml import Graph

ROWS, WIDTH, HIDDEN, CLASSES = 22, 5, 7, 3  # of which no two ranks have equal parts
Trained = tuple[dict[str, str], list[tuple[float, float]]]


def network() -> nn.Module:
    """Return ggml's network for digits, small: two layers with ReLU, of declared batches of four rows."""
    graph = Graph()
    x = graph.tensor((WIDTH, 4), name="x")
    drawn = torch.Generator().manual_seed(0)
    parameters = [
        graph.tensor(shape, parameter=True, name=name)
        for name, shape in (
            ("fc1.weight", (WIDTH, HIDDEN)),
            ("fc1.bias", (HIDDEN,)),
            ("fc2.weight", (HIDDEN, CLASSES)),
            ("fc2.bias", (CLASSES,)),
        )
    ]
    for one in parameters:
        graph.set_values(one, torch.randn(one.torch_shape, generator=drawn))
    hidden = graph.relu(graph.add(graph.mul_mat(parameters[0], x), parameters[1]))
    return graph.module(x, graph.add(graph.mul_mat(parameters[2], hidden), parameters[3]))


def data() -> dict[str, torch.Tensor]:
    """Return rows to learn from."""
    drawn = torch.Generator().manual_seed(1)
    inputs = torch.randn(ROWS, WIDTH, generator=drawn)
    return {"inputs": inputs, "labels": inputs[:, :CLASSES].argmax(dim=1)}


def loss(model: nn.Module, microbatch: Microbatch) -> augend.Tally:
    """Compare the classes; the micro-batches have three rows, where the graph declared four."""
    return augend.losses.cross_entropy(model(microbatch["inputs"]), microbatch["labels"])


def trained(place: str) -> Trained:
    """Fit the network exactly, and return what became of it, and the losses of the steps."""
    there = PLACES[place](network(), ())
    grads = there.grads(dtype="exact")
    optimizer = torch.optim.AdamW(there.model.parameters(), lr=0.1)
    rows = there.batches(data(), batch_size=8, microbatch_size=3, epochs=2, seed=3)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*fillers that are computed")
        history = augend.fit(there.model, rows, loss=loss, optimizer=optimizer, accumulator=grads, max_norm=1.0)
    return grads.digests(), [(step.loss.value, step.loss.error) for step in history.steps]


@functools.cache
def alone() -> Trained:
    """Return what one process makes of it."""
    return trained("alone")


@pytest.mark.parametrize("place", ["replicated", "fsdp", "hsdp of 2 replicas"])
def test_a_graph_is_fitted_on_ranks_to_the_same_bits(ranks2: Ranks, place: str) -> None:
    """Weights, losses and error bars of a sharded or replicated graph are those of one process."""
    assert [alone()] * 2 == ranks2.run(trained, place)


def sharded_names() -> list[str]:
    """Return the parameters of a sharded graph that are DTensors."""
    module = PLACES["fsdp"](network(), ()).model
    return sorted(name for name, one in module.named_parameters() if isinstance(one, DTensor))


def test_every_parameter_of_a_graph_is_sharded(ranks2: Ranks) -> None:
    """``fully_shard`` finds the parameters of a graph under their dotted names, all of them."""
    names = ["fc1.bias", "fc1.weight", "fc2.bias", "fc2.weight"]
    assert [names, names] == ranks2.run(sharded_names)
