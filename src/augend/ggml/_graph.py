"""Graph: a static training graph that is built by calls, and the values of its tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from augend.errors import ContractError, StateError
from augend.ggml._builder import Builder
from augend.ggml._given import floats, integers
from augend.ggml._limits import Limits
from augend.ggml._module import GraphModule
from augend.ggml._names import by_name, kept_name
from augend.ggml._nodes import Node, Shape
from augend.ggml._operations import OPERATIONS, rank_of
from augend.ggml._run import DIMENSIONS, STEPS, check_differentiable, narrowed, order_of, run, weight_of, widened

_MOVES: Final = ("reshape", "permute", "cont")  # which compute nothing, and take row numbers, too
_VECTORS: Final = {"opt_step_adamw": 7, "opt_step_sgd": 2}


@final
class Graph(Builder):
    """A static graph of float32 tensors (and int32 ones, for ``get_rows``), with ggml's shapes and broadcasting.

    Its values are on the CPU. On another device, and in another dtype, a graph is trained as its module: made of a copy
    (``copy.deepcopy``) of the graph where the graph itself shall stay as it is.

    The calls make nodes; nothing is computed by them. ``module`` makes an ordinary ``nn.Module`` of it, which shares
    its parameters, so that everything that trains modules trains graphs; ``Optimizer`` and ``fit`` train it as
    ggml-opt does.

    Args:
        limits: How large tensors may be and how long names.

    Example:
        >>> graph = augend.ggml.Graph()
        >>> x = graph.tensor((2, 3), name="x")  # three rows of two
        >>> w = graph.tensor((2,), parameter=True, name="w")
        >>> graph.set_values(x, [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
        >>> graph.set_values(w, [10.0, 1.0])
        >>> y = graph.mul(x, w)  # w is repeated for each row
        >>> graph.compute(y)
        >>> graph.values(y)
        tensor([[10.,  2.],
                [30.,  4.],
                [50.,  6.]])
        >>> graph.module(x, y)(torch.ones(1, 2))
        tensor([[10.,  1.]], grad_fn=<...>)
    """

    def __init__(self, *, limits: Limits | None = None) -> None:
        self.limits = Limits() if limits is None else limits
        self._nodes: list[Node] = []
        # Weak, so that what an optimizer adds to the graph goes with it. None: an operation that was not computed yet.
        self._values: WeakKeyDictionary[Node, Tensor | None] = WeakKeyDictionary()
        self._made = 0

    def __getstate__(self) -> dict[str, Any]:
        values = [(node, self._values[node]) for node in self._values]
        return {"limits": self.limits, "nodes": self._nodes, "values": values, "made": self._made}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.limits, self._nodes, self._made = state["limits"], state["nodes"], state["made"]
        self._values = WeakKeyDictionary(state["values"])

    def __repr__(self) -> str:
        return f"<Graph of {len(self._nodes)} nodes, {len(self.parameters())} of them parameters>"

    @property
    def nodes(self) -> tuple[Node, ...]:
        """All nodes, in the order in which they were made."""
        return tuple(self._nodes)

    def parameters(self, *outputs: Node) -> dict[str, Node]:
        """Return the trained leaves by name: those that ``outputs`` are made of, or all.

        Raises:
            ContractError: Two have one name.
        """
        found = order_of(map(self._known, outputs)) if outputs else self._nodes
        return by_name(node for node in found if node.parameter)

    # ------------------------------------------------------------------ building

    def tensor(
        self,
        shape: int | Sequence[int],
        *,
        parameter: bool = False,
        name: str = "",
        dtype: torch.dtype = torch.float32,
    ) -> Node:
        """Add a leaf of zeros.

        Args:
            shape: One to four dimensions in ggml's order, the fastest first: ``(784, 500)`` is torch's [500, 784].
            parameter: Whether it is trained.
            name: For people, state dicts and files.
            dtype: torch.float32, or torch.int32 for what ``get_rows`` looks up.

        Raises:
            ContractError: The shape, the name or the dtype is not allowed; see ``Limits``.
        """
        node = self._leaf(shape, parameter=parameter, name=name, dtype=dtype)
        self._nodes.append(node)
        return node

    def scratch(self, shape: Sequence[int], name: str) -> Node:
        """Add a leaf of zeros that the graph forgets when nobody holds its node any more."""
        return self._leaf(shape, parameter=False, name=name, dtype=torch.float32)

    def _leaf(self, shape: int | Sequence[int], *, parameter: bool, name: str, dtype: torch.dtype) -> Node:
        whole, rank = self._checked(shape)
        if dtype not in (torch.float32, torch.int32) or (parameter and dtype != torch.float32):
            raise ContractError(f"a parameter must be torch.float32, another tensor that or torch.int32; got {dtype}")
        node = Node(
            index=self._made,
            shape=whole,
            rank=rank,
            name=kept_name(name, self.limits),
            operation="",
            inputs=(),
            settings={},
            parameter=parameter,
            dtype=dtype,
        )
        values = torch.zeros(node.torch_shape, dtype=dtype, device="cpu")
        self._values[node] = nn.Parameter(values) if parameter else values
        self._made += 1
        return node

    def _operate(self, operation: str, inputs: Sequence[Node], name: str, settings: Mapping[str, Any]) -> Node:
        for node in inputs:
            self._known(node)
        kept = kept_name(name, self.limits)
        if operation in STEPS:
            shape = _step_shape(operation, inputs)
        else:
            _check_types(operation, inputs)
            shape = OPERATIONS[operation].shape([one.shape for one in inputs], settings)
        self._checked(shape)
        rank = inputs[0].rank if operation in STEPS else self._rank(operation, inputs, shape, settings)
        node = Node(
            index=self._made,
            shape=shape,
            rank=rank,
            name=kept,
            operation=operation,
            inputs=tuple(inputs),
            settings=settings,
            parameter=False,
            dtype=inputs[0].dtype,
        )
        self._nodes.append(node)
        self._values[node] = None
        self._made += 1
        return node

    @staticmethod
    def _rank(operation: str, inputs: Sequence[Node], shape: Shape, settings: Mapping[str, Any]) -> int:
        """Return how many dimensions the values have in torch: one row of two stays a row where its input was one."""
        if operation == "reshape":
            return len(settings["shape"])
        if operation == "sum":
            return 1
        return max(rank_of(shape), inputs[-1].rank if operation == "mul_mat" else inputs[0].rank)

    def _checked(self, shape: int | Sequence[int]) -> tuple[Shape, int]:
        """Return a shape of four dimensions, and how many were given.

        Raises:
            ContractError: There are none or more than four, or they are not positive, or too large.
        """
        given = (shape,) if isinstance(shape, int) else tuple(shape) if isinstance(shape, Iterable) else ()
        limit = self.limits.dimension
        if not 1 <= len(given) <= DIMENSIONS or not all(type(one) is int and 1 <= one <= limit for one in given):
            raise ContractError(
                f"a shape has one to four dimensions, each a whole number from 1 to {limit}, the fastest first; got "
                f"{shape!r}"
            )
        elements = 1
        for one in given:
            elements *= one
        if elements > self.limits.elements:
            raise ContractError(f"a tensor may have {self.limits.elements} elements; {list(given)} has {elements}")
        ne0, ne1, ne2, ne3 = (*given, 1, 1, 1)[:DIMENSIONS]
        return (ne0, ne1, ne2, ne3), len(given)

    def _known(self, node: Node) -> Node:
        if not isinstance(node, Node):
            raise ContractError(f"expected a node of this graph; got {type(node).__name__}")
        if node not in self._values:
            raise ContractError(f"{node!r} is of another graph; nodes are known only to the graph that made them")
        return node

    # -------------------------------------------------------------------- values

    def shape(self, node: Node) -> Shape:
        """Return the four dimensions of a node in ggml's order.

        Raises:
            ContractError: The node is of another graph.
        """
        return self._known(node).shape

    def supports(self, node: Node, *, backward: bool = False) -> bool:
        """Tell whether a node can be computed, or differentiated.

        Args:
            node: Of this graph.
            backward: Whether gradients shall go through it: not through whole numbers, and not through the steps.
        """
        self._known(node)
        if not backward:
            return not node.operation or node.operation in STEPS or node.operation in OPERATIONS
        return node.dtype == torch.float32 and not any(one.operation in STEPS for one in order_of([node]))

    def storage(self, node: Node) -> Tensor:
        """Return the tensor that holds the values of a leaf itself, not a copy; a parameter's is its nn.Parameter.

        Raises:
            ContractError: The node is of another graph, or no leaf.
        """
        leaf = weight_of(self._known(node))
        values = self._values[leaf]
        if leaf.operation or values is None:
            raise ContractError(f"{node!r} is made by an operation, and has no values of its own")
        return values

    def values(self, node: Node) -> Tensor:
        """Return an independent copy of a node's values; those of an operation are what was computed last.

        Returns:
            In torch's order, the declared dimensions reversed; the result of an operation as it was computed, hence
            with as many rows as ran through it.

        Raises:
            ContractError: The node is of another graph.
            StateError: It was not computed yet.
        """
        values = self._values[weight_of(self._known(node))]
        if values is None:
            raise StateError(f"{node!r} was not computed yet: call graph.compute(node), or evaluate an optimizer")
        return values.detach().clone()

    def set_values(self, node: Node, values: object) -> None:
        """Replace the values of a leaf, without changing its shape or who shares it; of a step, those of its weight.

        Args:
            node: Of this graph.
            values: A tensor, an array or nested lists in torch's order, of the shape that ``values`` returns (ones at
                its front may be missing), or all in one row.

        Raises:
            ContractError: The node is no leaf or of another graph, or the values are not so many numbers of its dtype.
        """
        storage = self.storage(node)
        what = f"the values of {node!r}"
        given = floats(what, values) if storage.is_floating_point() else integers(what, values)
        if given.shape != (storage.numel(),) and _padded(given) != _padded(storage):
            raise ContractError(
                f"{node!r} takes {list(storage.shape)}, its shape in ggml reversed, or {storage.numel()} numbers in a "
                f"row; got {list(given.shape)}"
            )
        with torch.no_grad():
            storage.copy_(given.reshape(storage.shape))

    def drop_computed(self) -> None:
        """Forget what operations came to, so that their memory is free."""
        for node in self._nodes:
            if node.operation:
                self._values[node] = None

    def keep(self, results: Mapping[Node, Tensor]) -> None:
        """Note what the operations of a run came to, ``[ne3, ne2, ne1, ne0]`` each.

        What shares its storage with a leaf is copied, as that will change.
        """
        leaves = {value.untyped_storage().data_ptr() for node, value in results.items() if not node.operation}
        for node, value in results.items():
            if node.operation and node.operation not in STEPS:
                own = value.clone() if value.untyped_storage().data_ptr() in leaves else value
                self._values[node] = narrowed(own.detach(), node.rank)

    # ------------------------------------------------------------------- running

    def compute(self, *nodes: Node) -> None:
        """Compute nodes and all that they are made of; what was a step updates its weight, in place.

        Raises:
            ContractError: A node is of another graph, or numbers do not fit, such as ids that name no row.
        """
        order = order_of(map(self._known, nodes))
        with torch.no_grad():
            self.keep(run(order, lambda leaf: widened(self.storage(leaf))))

    def module(self, inputs: Node | Sequence[Node], outputs: Node | Sequence[Node]) -> GraphModule:
        """Return a module that computes the outputs from the inputs, with the graph's own parameters.

        Args:
            inputs: Leaves that are given at each call; no parameters.
            outputs: What is returned: one tensor for one node, a tuple for several.

        Raises:
            ContractError: A node is of another graph, an input is no leaf or a parameter, a name is used twice, or a
                step stands among what the outputs are made of.
        """
        given = [inputs] if isinstance(inputs, Node) else list(inputs)
        wanted = outputs if isinstance(outputs, Node) else tuple(map(self._known, outputs))
        order = order_of([self._known(wanted)] if isinstance(wanted, Node) else wanted)
        check_differentiable(order)
        for node in given:
            if self._known(node).operation or node.parameter:
                raise ContractError(f"the input {node!r} of a module must be a leaf that is not trained")
        leaves = {node: self.storage(node) for node in order if not node.operation and node not in given}
        return GraphModule(order, given, wanted, leaves)

    # --------------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Tensor]:
        """Return the parameters by name, sharing their storage; as that of the module."""
        return {name: self.storage(node).detach() for name, node in self.parameters().items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Replace the values of all parameters.

        Raises:
            ContractError: A name is missing or unknown, a shape is another, or what is there is no numbers. Nothing was
                changed.
        """
        nodes = self.parameters()
        if not isinstance(state, Mapping):
            raise ContractError(f"the state of a graph is a mapping of tensors by name; got {type(state).__name__}")
        check_names(state, nodes)
        given = {name: floats(name, state[name]) for name in nodes}
        for name, node in nodes.items():
            if given[name].shape != node.torch_shape:
                raise ContractError(f"{name!r} is {list(node.torch_shape)} here; got {list(given[name].shape)}")
        for name, node in nodes.items():
            self.set_values(node, given[name])


def _padded(tensor: Tensor) -> tuple[int, ...]:
    """Return a shape with ones in front, so that it has as many dimensions as a graph."""
    return (1,) * (DIMENSIONS - tensor.dim()) + tuple(tensor.shape)


def check_names(given: Iterable[str], expected: Iterable[str]) -> None:
    """Compare names.

    Raises:
        ContractError: One is missing or unknown.
    """
    missing, unknown = sorted({*expected} - {*given}), sorted({*given} - {*expected})
    if missing or unknown:
        raise ContractError(
            f"the tensors that were given are not the parameters of the graph: missing {missing}, unknown {unknown}"
        )


def _check_types(operation: str, inputs: Sequence[Node]) -> None:
    if operation in _MOVES:
        return
    for place, node in enumerate(inputs):
        wanted = torch.int32 if operation == "get_rows" and place == 1 else torch.float32
        if node.dtype != wanted:
            raise ContractError(f"input {place} of {operation} must be {wanted}; {node!r} is {node.dtype}")


def _step_shape(operation: str, inputs: Sequence[Node]) -> Shape:
    weight, *others, vector = inputs
    if not weight_of(weight).parameter:
        raise ContractError(f"{operation} updates a parameter; {weight!r} is none")
    _check_types(operation, inputs)
    owned = [weight_of(weight), *others[1:]]
    if len({*owned}) < len(owned) or any(one.operation for one in owned):
        raise ContractError(
            f"{operation} changes weight, m and v in place: they must be leaves, no two the same; got {owned}"
        )
    for other in others:
        if other.shape != weight.shape:
            raise ContractError(f"{operation} needs tensors of the shape of {weight!r}; got {other!r}")
    if vector.shape != (_VECTORS[operation], 1, 1, 1):
        raise ContractError(f"{operation} takes a tensor of {_VECTORS[operation]} parameters; got {vector!r}")
    return weight.shape
