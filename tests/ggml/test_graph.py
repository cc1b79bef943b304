"""Graph and GraphModule: what is built, what is read and written, and an ordinary module of it."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from ggml_runs import Model, drive, model_of, optimizer_of, oracle, upstream

import augend
from augend.errors import ContractError, StateError
from augend.ggml import Graph, GraphModule, Kind, Loss, Node

MLP = oracle("train_mlp")["model"]


def test_shapes_are_reversed_in_torch() -> None:
    """ggml's [784, 500] is torch's [500, 784]; both are said, and the rank is what was given."""
    graph = Graph()
    node = graph.tensor((784, 500), parameter=True, name="fc1.weight")
    assert (784, 500, 1, 1) == graph.shape(node) == node.shape
    assert (500, 784) == tuple(graph.values(node).shape) == node.torch_shape
    assert (2, 0, ()) == (node.rank, node.index, node.inputs)
    assert ("", True, torch.float32) == (node.operation, node.parameter, node.dtype)
    assert "fc1.weight" in repr(node)
    assert "784" in repr(node)
    assert (1, 4) == (graph.tensor(5).rank, graph.tensor((1, 1, 1, 1)).rank)


def test_a_graph_knows_its_nodes_in_order() -> None:
    """Nodes are listed as they were made, with their operations and inputs, and say what they are."""
    graph = Graph()
    x = graph.tensor(2, name="x")
    twice = graph.scale(x, 2.0, name="twice")
    both = graph.add(twice, x)
    assert (x, twice, both) == graph.nodes
    assert [0, 1, 2] == [node.index for node in graph.nodes]
    assert ("scale", (x,), 2.0) == (twice.operation, twice.inputs, twice.settings["factor"])
    assert "scale" in repr(twice)
    assert "3 nodes" in repr(graph)


def test_what_an_optimizer_adds_goes_with_it() -> None:
    """The leaves for loss and labels are the optimizer's: the graph does not list them, nor keep them alive."""
    model = upstream()
    before = model.graph.nodes
    optimizer = optimizer_of(model, Loss.MEAN_SQUARED_ERROR)
    labels = optimizer.labels_tensor
    assert labels is not None
    model.graph.set_values(labels, [3.0])
    assert [3.0] == model.graph.values(labels).flatten().tolist()
    assert before == model.graph.nodes
    del optimizer, labels
    gc.collect()
    assert before == model.graph.nodes


def test_evaluated_values_have_the_shapes_that_computed_ones_have() -> None:
    """After an evaluation an operation's values read as after compute: ggml's dimensions reversed, without more."""
    model = model_of(MLP)
    optimizer = optimizer_of(model, Loss.SUM)
    drive(optimizer, torch.ones(3, 4), backward=False)
    evaluated = model.graph.values(model.outputs)
    model.graph.compute(model.outputs)
    assert (3, 3) == tuple(evaluated.shape)
    assert torch.equal(model.graph.values(model.outputs), evaluated)


def test_values_of_an_evaluation_do_not_move_with_the_update() -> None:
    """What an operation was computed to is kept, also where it is a view of a weight that was updated since."""
    graph = Graph()
    inputs = graph.tensor((2, 1))
    weight = graph.tensor((2,), parameter=True)
    graph.set_values(weight, [1.0, 2.0])
    reshaped = graph.reshape(weight, (2, 1))
    outputs = graph.add(reshaped, inputs)
    optimizer = optimizer_of(Model(graph, inputs, outputs, {"w": weight}), Loss.SUM)
    drive(optimizer, [0.0, 0.0])
    assert [1.0, 2.0] == graph.values(reshaped).flatten().tolist()
    assert [1.0, 2.0] != graph.values(weight).tolist()


@pytest.mark.parametrize("rows", [1, 2, 3, 7])
def test_a_module_takes_any_number_of_rows(rows: int) -> None:
    """The module of a graph for three rows computes one and seven just as well, as a layer of torch does."""
    model = model_of(MLP)
    module = model.graph.module(model.inputs, model.outputs)
    assert isinstance(module, GraphModule)
    data = torch.randn(rows, 4)
    weights = {name: value.detach() for name, value in module.state_dict().items()}
    hidden = torch.relu(torch.nn.functional.linear(data, weights["fc1.weight"], weights["fc1.bias"]))
    expected = torch.nn.functional.linear(hidden, weights["fc2.weight"], weights["fc2.bias"])
    # Two layers of sums of 4 and 5 terms of size up to 1, and a bias each, in whatever order.
    torch.testing.assert_close(expected, module(data), rtol=0, atol=2 * 6 * 6 * 2.0**-24)


def test_a_modules_parameters_are_the_graphs_own() -> None:
    """They have their dotted names and their shapes in torch, and what changes one changes the other."""
    model = model_of(MLP)
    module = model.graph.module(model.inputs, model.outputs)
    expected = {"fc1.weight": (5, 4), "fc1.bias": (5,), "fc2.weight": (3, 5), "fc2.bias": (3,)}
    assert expected == {name: tuple(one.shape) for name, one in module.named_parameters()}
    assert expected == {name: tuple(one.shape) for name, one in model.graph.state_dict().items()}
    assert expected.keys() == model.graph.parameters(model.outputs).keys()
    with torch.no_grad():
        module.get_parameter("fc1.bias").fill_(7.0)
    assert [7.0] * 5 == model.graph.values(model.parameters["fc1.bias"]).tolist()
    model.graph.set_values(model.parameters["fc1.bias"], torch.arange(5.0))
    assert [0.0, 1.0, 2.0, 3.0, 4.0] == module.get_parameter("fc1.bias").tolist()


def test_a_module_trains_with_augends_own_accumulator() -> None:
    """The module of a graph is a module like any: two cuts of a batch give one gradient."""
    model = model_of(MLP)
    module = model.graph.module(model.inputs, model.outputs)
    data, target = torch.randn(6, 4), torch.randn(6, 3)
    gradients = []
    for size in (6, 2):
        grads = augend.Accumulator(module)
        for x, y in zip(data.split(size), target.split(size), strict=True):
            grads.backward(augend.losses.mse(module(x), y))
        gradients.append(grads.finish_mean().gradients)
    for name, gradient in gradients[0].items():
        # 18 terms, each a product of a few numbers of size up to 4, in another order.
        torch.testing.assert_close(gradient, gradients[1][name], rtol=0, atol=18 * 16 * 2.0**-24)


def test_a_module_of_several_outputs_and_inputs() -> None:
    """Several inputs are arguments in order, several outputs a tuple; a leaf that is neither is a constant."""
    graph = Graph()
    x, y, c = graph.tensor((2, 3)), graph.tensor((2, 3)), graph.tensor((2,))
    graph.set_values(c, [10.0, 20.0])
    module = graph.module([x, y], [graph.add(x, y), graph.mul(x, c)])
    ones = torch.ones(1, 2)
    total, product = module(ones, 2 * ones)
    assert [[3.0, 3.0]] == total.tolist()
    assert [[10.0, 20.0]] == product.tolist()
    graph.set_values(c, [1.0, 2.0])
    assert [[1.0, 2.0]] == module(ones, ones)[1].tolist()
    assert [] == list(module.parameters())


def test_a_module_says_what_it_takes() -> None:
    """A wrong number of inputs, another width, another rank or whole numbers for fractions are errors by name."""
    model = model_of(MLP)
    module = model.graph.module(model.inputs, model.outputs)
    for inputs in ((), (torch.ones(2, 4), torch.ones(2, 4)), (torch.ones(2, 5),), (torch.ones(4),)):
        with pytest.raises(ContractError):
            module(*inputs)
    with pytest.raises(ContractError, match="float"):
        module(torch.ones(2, 4, dtype=torch.int64))


@pytest.mark.parametrize("which", ["operation", "parameter", "other", "nothing"])
def test_only_leaves_are_inputs(which: str) -> None:
    """An operation, a parameter, a node of another graph, or none at all cannot be the input of a module."""
    model, other = upstream(), upstream()
    nodes: dict[str, Any] = {
        "operation": model.outputs,
        "parameter": model.parameters["weight"],
        "other": other.inputs,
        "nothing": None,
    }
    with pytest.raises(ContractError):
        model.graph.module([nodes[which]], model.outputs)


def test_rows_are_looked_up_by_whole_numbers() -> None:
    """int32 leaves take whole numbers alone; they index rows, and gradients go to the rows that were looked up."""
    graph = Graph()
    ids = graph.tensor((3,), dtype=torch.int32, name="ids")
    table = graph.tensor((2, 4), parameter=True, name="table")
    graph.set_values(table, torch.arange(8.0))
    looked_up = graph.get_rows(table, ids)
    with pytest.raises(ContractError):
        graph.set_values(ids, [0.5, 1.0, 2.0])
    graph.set_values(ids, [3, 0, 3])
    graph.compute(looked_up)
    assert [[6.0, 7.0], [0.0, 1.0], [6.0, 7.0]] == graph.values(looked_up).tolist()
    module = graph.module(ids, looked_up)
    module(torch.tensor([3, 0, 3])).sum().backward()
    gradient = module.get_parameter("table").grad
    assert gradient is not None
    assert [[1.0, 1.0], [0.0, 0.0], [0.0, 0.0], [2.0, 2.0]] == gradient.tolist()
    graph.set_values(ids, [4, 0, 0])
    with pytest.raises(ContractError):
        graph.compute(looked_up)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.bfloat16], ids=str)
def test_tensors_are_float32_or_int32(dtype: torch.dtype) -> None:
    """Other dtypes, and parameters of whole numbers, are errors; and so are whole numbers where an operation adds."""
    with pytest.raises(ContractError, match="float32"):
        Graph().tensor(1, dtype=dtype)
    graph = Graph()
    with pytest.raises(ContractError):
        graph.tensor(1, dtype=torch.int32, parameter=True)
    with pytest.raises(ContractError):
        graph.add(graph.tensor(1), graph.tensor(1, dtype=torch.int32))


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("a", "a"), "two parameters"),
        (("fc", "fc.weight"), "inside"),
        (("fc..weight", "b"), "dots"),
        ((".a", "b"), "dots"),
        (("forward", "b"), "rename"),
        (("half.weight", "b"), "rename"),
        (("fc.training", "b"), "rename"),
    ],
    ids=["twice", "inside", "empty", "leading", "method", "owner", "attribute"],
)
def test_names_that_no_state_dict_can_have(names: tuple[str, str], message: str) -> None:
    """Names that collide with each other or with a module's own are errors that name them, when a module is made."""
    graph = Graph()
    one, other = (graph.tensor(1, parameter=True, name=name) for name in names)
    with pytest.raises(ContractError, match=message):
        graph.module([], graph.add(one, other))


def test_parameters_without_names_have_numbers() -> None:
    """An unnamed parameter is called after its place in the graph."""
    graph = Graph()
    graph.tensor(1)
    node = graph.tensor(1, parameter=True)
    assert {"tensor_1": node} == graph.parameters()


def test_state_dicts_are_checked_before_anything_is_written() -> None:
    """Missing and unknown names and other shapes are errors, and change nothing."""
    model = model_of(MLP)
    before = {name: value.clone() for name, value in model.graph.state_dict().items()}
    zeros = {name: torch.zeros_like(value) for name, value in before.items()}
    for wrong in (
        {name: value for name, value in zeros.items() if name != "fc2.bias"},
        {**zeros, "fc3.bias": torch.zeros(3)},
        {**zeros, "fc2.bias": torch.zeros(4)},
    ):
        with pytest.raises(ContractError, match="fc"):
            model.graph.load_state_dict(wrong)
    after = model.graph.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    model.graph.load_state_dict(zeros)
    assert not any(value.any() for value in model.graph.state_dict().values())


def test_only_leaves_have_values_of_their_own() -> None:
    """An operation's values cannot be written: they are computed."""
    model = upstream()
    with pytest.raises(ContractError, match="operation"):
        model.graph.set_values(model.outputs, [1.0])
    with pytest.raises(StateError, match="compute"):
        model.graph.values(model.outputs)


@pytest.mark.parametrize(
    "values", [[1.0, 2.0], [], torch.ones(1, dtype=torch.complex64)], ids=["many", "none", "complex"]
)
def test_values_that_do_not_fit(values: object) -> None:
    """Another number of elements, or numbers that are none of the leaf's, are errors."""
    graph = Graph()
    node = graph.tensor(1)
    with pytest.raises(ContractError, match="1 numbers|real numbers"):
        graph.set_values(node, values)


@pytest.mark.parametrize("size", [1.0, "2", True, None], ids=repr)
def test_dimensions_are_whole_numbers(size: Any) -> None:
    """A dimension is an int: what only looks like one is an error."""
    with pytest.raises(ContractError):
        Graph().tensor((size, 1))


def test_names_are_text() -> None:
    """A name is a str that UTF-8 can write."""
    graph = Graph()
    wrong: Any = b"name"
    for name in (wrong, "\ud800"):
        with pytest.raises(ContractError):
            graph.tensor(1, name=name)


def test_supports_tells_what_can_be_done() -> None:
    """Every node can be computed; gradients go through floats, and not through whole numbers."""
    graph = Graph()
    ids, table = graph.tensor(2, dtype=torch.int32), graph.tensor((2, 3))
    rows = graph.get_rows(table, ids)
    nodes: list[Node] = [ids, table, rows]
    assert [True] * 3 == [graph.supports(node) for node in nodes]
    assert [False, True, True] == [graph.supports(node, backward=True) for node in nodes]


def test_shared_parts_are_computed_once_and_differentiate_as_a_sum() -> None:
    """A node that is used twice has one value, and its gradient is the sum over both uses."""
    graph = Graph()
    inputs = graph.tensor((1, 1))
    weight = graph.tensor(1, parameter=True)
    graph.set_values(weight, [3.0])
    shared = graph.mul(inputs, weight)
    model = Model(graph, inputs, graph.mul(shared, shared), {"w": weight})
    optimizer = optimizer_of(model, Loss.SUM, Kind.SGD, period=2)
    assert 36.0 == drive(optimizer, [2.0])
    assert 2 * 6.0 * 2.0 == float(optimizer.gradient(weight))


def test_a_deep_graph_is_no_deep_recursion() -> None:
    """Five thousand operations in a row are computed."""
    graph = Graph()
    node = graph.tensor(1)
    graph.set_values(node, [1.0])
    for _ in range(5000):
        node = graph.scale(node, 1.0)
    graph.compute(node)
    assert [1.0] == graph.values(node).tolist()
