"""The Rust port's own tests and behaviours: its first test, its bounds, its names, its step nodes, its results."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from ggml_runs import SIGN_STEPS, Model, drive, optimizer_of, upstream, weight_of

from augend.errors import ContractError, StateError
from augend.ggml import SGD, Dataset, Graph, Kind, Limits, Loss, Node, Parameters, Random, Result, epoch

SIDES = [None, "ggml", "prism"]
every_side = pytest.mark.parametrize("compat", SIDES, ids=["default", "ggml", "prism"])


def small() -> Graph:
    """A graph with the port's bounds."""
    return Graph(limits=Limits.prism())


@every_side
def test_two_passes_make_one_update(compat: str | None) -> None:
    """The port's first test: two passes over [[1, 2], [3, 4]] leave w = [0.5, 0] and b = -0.5; one pass nothing."""
    graph = small()
    inputs = graph.tensor([2, 2], name="input")
    weight = graph.tensor([2], parameter=True, name="weight")
    bias = graph.tensor([1], parameter=True, name="bias")
    graph.set_values(weight, [1.0, 1.0])
    outputs = graph.add(graph.mul(inputs, weight), bias)
    model = Model(graph, inputs, outputs, {"weight": weight, "bias": bias})
    parameters = Parameters(sgd=SGD(alpha=0.1, wd=0.0))
    optimizer = optimizer_of(model, Loss.MEAN_SQUARED_ERROR, period=2, parameters=parameters, compat=compat)
    losses = []
    expected = [([1.0, 1.0], [0.0]), ([0.5, 0.0], [-0.5])]
    for weights, biases in expected:
        losses.append(drive(optimizer, [[1.0, 2.0], [3.0, 4.0]]))  # labels stay 0
        assert weights == graph.values(weight).tolist()
        assert biases == graph.values(bias).tolist()
    assert [3.75, 3.75] == losses == [float(graph.values(optimizer.loss_tensor))] * 2
    assert [5.0, 10.0] == optimizer.gradient(weight).tolist()
    assert [5.0] == optimizer.gradient(bias).tolist()


@every_side
def test_the_result_of_the_two_passes(compat: str | None) -> None:
    """The stored loss is half of each pass's mean; the result has the mean itself, 7.5, on all sides."""
    graph = small()
    inputs = graph.tensor([2, 2])
    weight = graph.tensor([2], parameter=True)
    graph.set_values(weight, [1.0, 1.0])
    model = Model(graph, inputs, graph.mul(inputs, weight), {"weight": weight})
    optimizer = optimizer_of(model, Loss.MEAN_SQUARED_ERROR, period=2, compat=compat)
    result = Result(compat=compat)
    for _ in range(2):
        drive(optimizer, [[1.0, 2.0], [3.0, 4.0]], backward=False, result=result)
    assert (4, 7.5) == (result.count, result.loss().value)


BAD_SHAPES = [[], [1, 1, 1, 1, 1], [0], [4, 0], [-1], [65_537], [513, 512], [2**62, 2**62]]


@pytest.mark.parametrize("shape", BAD_SHAPES, ids=[str(shape) for shape in BAD_SHAPES])
def test_shapes_out_of_bounds(shape: list[int]) -> None:
    """Ranks of 1 to 4, dimensions of 1 to 65,536, 262,144 elements: beyond is an error, before any memory is spent."""
    with pytest.raises(ContractError):
        small().tensor(shape)


@pytest.mark.parametrize("shape", [[65_536], [512, 512], [1, 1, 1, 1], [64, 64, 8, 8]], ids=str)
def test_shapes_at_the_bounds(shape: list[int]) -> None:
    """The largest shapes are made, and hold zeros."""
    graph = small()
    node = graph.tensor(shape)
    assert tuple(shape) + (1,) * (4 - len(shape)) == tuple(graph.shape(node))
    values = graph.values(node)
    assert tuple(reversed(shape)) == tuple(values.shape)
    assert not values.any()


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        ("", ""),
        ("x" * 63, "x" * 63),
        ("x" * 64, "x" * 63),
        ("x" * 128, "x" * 63),
        ("é" * 31 + "x", "é" * 31 + "x"),
        ("x" + "é" * 40, "x" + "é" * 31),
    ],
    ids=["none", "fits", "cut", "longest", "accents", "cut-between"],
)
def test_names_are_kept_to_63_bytes(name: str, kept: str) -> None:
    """A name of up to 128 bytes of UTF-8 is taken, and cut to 63 bytes, of leaves and of operations."""
    graph = small()
    leaf = graph.tensor([1], name=name)
    assert kept == leaf.name
    assert kept == graph.scale(leaf, 2.0, name=name).name


@pytest.mark.parametrize(
    "name",
    ["x" * 129, "é" * 65, "a\0b", "\0", "é" * 40, "x" * 61 + "€" + "x"],
    ids=["long", "long-in-bytes", "nul", "only-nul", "cut-inside-2", "cut-inside-3"],
)
def test_names_out_of_bounds(name: str) -> None:
    """Longer names, NUL, and names that 63 bytes would cut inside a character are errors, and add nothing."""
    graph = small()
    leaf = graph.tensor([1])
    before = len(graph.nodes)
    with pytest.raises(ContractError):
        graph.tensor([1], name=name)
    with pytest.raises(ContractError):
        graph.scale(leaf, 2.0, name=name)
    assert before == len(graph.nodes)


@pytest.mark.parametrize("factor", [math.nan, math.inf, -math.inf, 1e39], ids=["nan", "inf", "-inf", "float64"])
def test_factors_must_be_finite(factor: float) -> None:
    """A factor that is not finite in float32 is an error."""
    graph = small()
    with pytest.raises(ContractError, match="finite"):
        graph.scale(graph.tensor([1]), factor)


def test_unknown_identities() -> None:
    """A node of another graph is known to none of a graph's methods, nor is what is no node at all."""
    graph, other = small(), small()
    own, stranger = graph.tensor([2]), other.tensor([2])
    nothing: Any = 0
    for node in (stranger, nothing):
        for call in (
            lambda node=node: graph.add(own, node),
            lambda node=node: graph.scale(node, 1.0),
            lambda node=node: graph.values(node),
            lambda node=node: graph.set_values(node, [0.0, 0.0]),
            lambda node=node: graph.shape(node),
            lambda node=node: graph.supports(node),
            lambda node=node: graph.compute(node),
            lambda node=node: graph.module([node], graph.scale(own, 1.0)),
            lambda node=node: optimizer_of(Model(graph, own, node, {}), Loss.SUM),
            lambda node=node: optimizer_of(Model(graph, node, graph.scale(own, 1.0), {}), Loss.SUM),
        ):
            with pytest.raises(ContractError):
                call()


def test_arity_is_that_of_the_call() -> None:
    """Each operation is a method of its own: a wrong number of inputs cannot be written."""
    graph = small()
    one = graph.tensor([1])
    add: Any = graph.add
    for arguments in ((one,), (one, one, one)):
        with pytest.raises(TypeError):
            add(*arguments)


@pytest.mark.parametrize(
    ("a", "b"),
    [([2], [3]), ([2, 3], [2, 2]), ([1, 3], [2]), ([4], [3])],
    ids=["widths", "rows", "second-larger", "no-multiple"],
)
def test_shapes_that_do_not_broadcast(a: list[int], b: list[int]) -> None:
    """The second is repeated into the first, never the other way round."""
    graph = small()
    first, second = graph.tensor(a), graph.tensor(b)
    for operation in (graph.add, graph.mul):
        with pytest.raises(ContractError):
            operation(first, second)


def test_broadcasting_repeats() -> None:
    """The second is repeated as often as it fits, not only from 1, and its gradient is the sum over the repetitions."""
    graph = small()
    inputs = graph.tensor([4, 1])
    weight = graph.tensor([2], parameter=True)
    graph.set_values(weight, [10.0, 20.0])
    model = Model(graph, inputs, graph.mul(inputs, weight), {"w": weight})
    optimizer = optimizer_of(model, Loss.SUM, period=2)
    assert 10.0 + 40.0 + 30.0 + 80.0 == drive(optimizer, [1.0, 2.0, 3.0, 4.0])
    assert [10.0, 40.0, 30.0, 80.0] == graph.values(model.outputs).flatten().tolist()
    assert [4.0, 6.0] == optimizer.gradient(weight).tolist()


def test_values_are_independent_copies() -> None:
    """What was read does not change with the graph, nor the graph with it; what was written does not either."""
    graph = small()
    node = graph.tensor([2], parameter=True)
    given = torch.tensor([1.0, 2.0])
    graph.set_values(node, given)
    given[0] = 9.0
    read = graph.values(node)
    read[1] = 9.0
    assert [1.0, 2.0] == graph.values(node).tolist()
    for wrong in ([1.0], [1.0, 2.0, 3.0]):
        with pytest.raises(ContractError):
            graph.set_values(node, wrong)
    assert [1.0, 2.0] == graph.values(node).tolist()


def test_an_operation_has_no_values_before_it_was_computed() -> None:
    """The values of an operation are those of its last computation; before the first there are none."""
    graph = small()
    node = graph.tensor([2])
    twice = graph.scale(node, 2.0)
    with pytest.raises(StateError):
        graph.values(twice)
    graph.set_values(node, [1.0, 2.0])
    graph.compute(twice)
    assert [2.0, 4.0] == graph.values(twice).tolist()


def sgd_step(graph: Graph) -> tuple[Node, Node, Node, Node]:
    """A weight of 1, its gradient of 2, a rate of 0.25, and the step."""
    weight, gradient, numbers = graph.tensor([2], parameter=True), graph.tensor([2]), graph.tensor([2])
    graph.set_values(weight, [1.0, -1.0])
    graph.set_values(gradient, [2.0, 4.0])
    graph.set_values(numbers, [0.25, 0.5])
    return weight, gradient, numbers, graph.opt_step_sgd(weight, gradient, numbers)


def test_a_step_is_an_alias_of_its_weight() -> None:
    """Computing a step updates the weight in place; step and weight always read the same, however they are written."""
    graph = small()
    weight, _, _, step = sgd_step(graph)
    assert graph.shape(weight) == graph.shape(step)
    assert [1.0, -1.0] == graph.values(step).tolist()
    graph.compute(step)
    assert [1.0 * 0.875 - 0.5, -1.0 * 0.875 - 1.0] == graph.values(weight).tolist() == graph.values(step).tolist()
    graph.compute(step)
    expected = [0.375 * 0.875 - 0.5, -1.875 * 0.875 - 1.0]
    assert expected == graph.values(weight).tolist() == graph.values(step).tolist()
    graph.set_values(step, [5.0, 6.0])
    assert [5.0, 6.0] == graph.values(weight).tolist()


def test_a_step_of_adamw_is_one() -> None:
    """The primitive updates weight and both moments, and reads the seven numbers from a tensor."""
    graph = small()
    weight = graph.tensor([1], parameter=True)
    gradient, m, v, numbers = (graph.tensor([size]) for size in (1, 1, 1, 7))
    graph.set_values(weight, [1.0])
    graph.set_values(gradient, [2.0])
    graph.set_values(numbers, [0.5, 0.5, 0.75, 0.0, 0.25, 2.0, 4.0])
    step = graph.opt_step_adamw(weight, gradient, m, v, numbers)
    graph.compute(step)
    assert [1.0] == graph.values(m).tolist()
    assert [1.0] == graph.values(v).tolist()
    assert [1.0 * 0.875 - 0.5 * 2.0 / 2.0] == graph.values(step).tolist() == graph.values(weight).tolist()


def test_a_step_does_not_differentiate() -> None:
    """A step inside of what is trained is an error where the optimizer is made; outside of it, it is welcome."""
    graph = small()
    weight, _, _, step = sgd_step(graph)
    inputs = graph.tensor([2, 1])
    with pytest.raises(ContractError):
        optimizer_of(Model(graph, inputs, graph.add(inputs, step), {}), Loss.SUM)
    optimizer_of(Model(graph, inputs, graph.add(inputs, weight), {}), Loss.SUM)
    assert not graph.supports(step, backward=True)
    assert graph.supports(step)


def test_steps_take_tensors_that_fit() -> None:
    """Gradients and moments have the weight's shape, and the numbers are 7 or 2."""
    graph = small()
    weight, two, three, seven = (graph.tensor([size], parameter=size == 2) for size in (2, 2, 3, 7))
    leaf = graph.tensor([2])
    for wrong in ((weight, three, two), (weight, two, three), (leaf, two, two)):
        with pytest.raises(ContractError):
            graph.opt_step_sgd(*wrong)
    for wrong in ((weight, three, two, two, seven), (weight, two, two, three, seven), (weight, two, two, two, three)):
        with pytest.raises(ContractError):
            graph.opt_step_adamw(*wrong)


def test_the_datasets_bounds() -> None:
    """Width 1 to 64, labels 0 to 64, 1 to 4,096 rows, and shards of 1 to all rows."""
    limits = Limits.prism()
    largest = Dataset(np.zeros((4096, 64), dtype=np.float32), np.zeros((4096, 64), dtype=np.float32), limits=limits)
    assert (4096, 64, 64, 4096) == (largest.count, largest.width, largest.label_width, largest.shards)
    for rows, width, shard in ((4097, 1, 1), (1, 65, 1), (0, 1, 1), (1, 0, 1), (3, 1, 4), (3, 1, 0)):
        with pytest.raises(ContractError):
            Dataset(np.zeros((rows, width), dtype=np.float32), shard=shard, limits=limits)


def test_the_permutation_has_complete_shards() -> None:
    """In the port's way, seven rows in shards of three are two shards; the count is seven all the same."""
    dataset = Dataset(np.zeros((7, 1), dtype=np.float32), shard=3, compat="prism")
    assert (7, 2, (0, 1)) == (dataset.count, dataset.shards, dataset.permutation)
    with pytest.raises(ContractError):
        dataset.batch(3, 2)


def test_the_optimizers_stream_of_random_numbers_is_its_own() -> None:
    """Each optimizer begins with 5489, keeps its place between shuffles, and takes another generator if it is given."""
    orders = []
    for _ in range(2):
        optimizer = optimizer_of(upstream(), Loss.SUM)
        dataset = Dataset(np.zeros((12, 1), dtype=np.float32))
        optimizer.shuffle(dataset)
        optimizer.shuffle(dataset, 8)
        orders.append(dataset.permutation)
    assert orders[0] == orders[1]
    random, twin = Random(), Dataset(np.zeros((12, 1), dtype=np.float32))
    twin.shuffle(random)
    twin.shuffle(random, 8)
    assert orders[0] == twin.permutation
    assert random.state_dict().keys() == optimizer.random.state_dict().keys()


@every_side
def test_results_merge(compat: str | None) -> None:
    """Appending keeps the order, an empty result adds nothing, and into an empty one it is a copy."""
    parts = []
    for rows in ([0.0, 1.0], [2.0, 3.0, 4.0]):
        model = upstream()
        optimizer = optimizer_of(model, Loss.SUM, compat=compat)
        result = Result(compat=compat)
        for row in rows:
            drive(optimizer, [row], backward=False, result=result)
        parts.append(result)
    empty = Result(compat=compat)
    empty.append(parts[0])
    empty.append(Result(compat=compat))
    assert (2, 3.0 + 4.0) == (empty.count, empty.loss().value)
    empty.append(parts[1])
    assert (5, 3.0 + 4.0 + 5.0 + 6.0 + 7.0) == (empty.count, empty.loss().value)
    assert 2 == parts[0].count  # a copy
    empty.reset()
    assert (0, 0.0) == (empty.count, empty.loss().value)
    assert math.isnan(empty.loss().error)


@every_side
def test_a_result_is_optional(compat: str | None) -> None:
    """Without a result nothing is recorded, and the weight moves all the same."""
    model = upstream()
    optimizer = optimizer_of(model, Loss.SUM, parameters=SIGN_STEPS, compat=compat)
    epoch(optimizer, Dataset(np.zeros((4, 1), dtype=np.float32), compat=compat), split=3)
    assert 0.0 == weight_of(model)


@every_side
def test_what_an_optimizer_says_of_itself(compat: str | None) -> None:
    """Kind, period, loss tensor and labels tensor are those it was made with; labels have the outputs' shape."""
    model = upstream(rows=2)
    optimizer = optimizer_of(model, Loss.MEAN_SQUARED_ERROR, Kind.ADAMW, period=3, compat=compat)
    assert (Kind.ADAMW, 3, 1, 0) == (optimizer.kind, optimizer.period, optimizer.iteration, optimizer.index)
    labels = optimizer.labels_tensor
    assert labels is not None
    assert model.graph.shape(model.outputs) == model.graph.shape(labels)
    assert (1, 1, 1, 1) == tuple(model.graph.shape(optimizer.loss_tensor))
    assert optimizer_of(upstream(), Loss.MEAN, compat=compat).labels_tensor is None
