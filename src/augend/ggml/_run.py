"""Running a graph: which nodes in which order, and each node's value from those of its inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final

import torch
from torch import Tensor

from augend.errors import ContractError
from augend.ggml._nodes import Node
from augend.ggml._operations import OPERATIONS
from augend.ggml._steps import step_adamw_, step_sgd_

STEPS: Final = ("opt_step_adamw", "opt_step_sgd")
DIMENSIONS: Final = 4
_INTEGERS: Final = (torch.int32, torch.int64)


def order_of(outputs: Iterable[Node]) -> list[Node]:
    """Return all that the outputs are made of, and they themselves, inputs first; each once, in ggml's order."""
    found: dict[Node, None] = {}
    waiting = [(node, False) for node in reversed(list(outputs))]
    while waiting:
        node, seen = waiting.pop()
        if node in found:
            continue
        if seen or not node.inputs:
            found[node] = None
            continue
        waiting.append((node, True))
        waiting += [(one, False) for one in reversed(node.inputs)]
    return list(found)


def check_differentiable(order: Sequence[Node]) -> None:
    """Refuse a graph that would update its weights while it is differentiated.

    Raises:
        ContractError: There is a step among its nodes.
    """
    for node in order:
        if node.operation in STEPS:
            raise ContractError(
                f"{node!r} updates its weight, and cannot stand in a graph that is differentiated: compute it apart, "
                "with graph.compute"
            )


def weight_of(node: Node) -> Node:
    """Return the leaf that a node is an alias of: itself, but for a step the weight that it updates."""
    while node.operation in STEPS:
        node = node.inputs[0]
    return node


def run(order: Sequence[Node], leaf: Callable[[Node], Tensor]) -> dict[Node, Tensor]:
    """Compute every node in order.

    Args:
        order: Inputs before what is made of them.
        leaf: The value of a leaf, ``[ne3, ne2, ne1, ne0]``; that of a weight shares its storage.

    Returns:
        The value of each node, ``[ne3, ne2, ne1, ne0]``.
    """
    values: dict[Node, Tensor] = {}
    for node in order:
        if not node.operation:
            values[node] = leaf(node)
            continue
        inputs = [values[one] for one in node.inputs]
        values[node] = _step(node, inputs) if node.operation in STEPS else _operate(node, inputs)
    return values


def _operate(node: Node, inputs: Sequence[Tensor]) -> Tensor:
    return OPERATIONS[node.operation].run(inputs, node.settings)


def _step(node: Node, inputs: Sequence[Tensor]) -> Tensor:
    vector = tuple(inputs[-1].reshape(-1).tolist())
    if node.operation == "opt_step_adamw":
        weight, gradient, m, v, _ = inputs
        step_adamw_(weight, gradient, m, v, vector)
    else:
        weight, gradient, _ = inputs
        step_sgd_(weight, gradient, vector)
    return weight


def widened(tensor: Tensor) -> Tensor:
    """Return a tensor with the four dimensions of a graph: ``[ne3, ne2, ne1, ne0]``."""
    return tensor.reshape((1,) * (DIMENSIONS - tensor.dim()) + tuple(tensor.shape))


def narrowed(tensor: Tensor, rank: int) -> Tensor:
    """Return a tensor of four dimensions with as many as its node has in torch."""
    return tensor.reshape(tensor.shape[DIMENSIONS - rank :])


def same_rows(node: Node, tensor: Tensor) -> Tensor:
    """Check that a tensor can be the value of an input: its shape, but for the number of rows.

    Raises:
        ContractError: It cannot.
    """
    if not isinstance(tensor, Tensor):
        raise ContractError(f"input {node!r} takes a tensor; got {type(tensor).__name__}")
    expected = node.torch_shape
    kind = "an integer" if node.dtype == torch.int32 else "a floating"
    fits = tensor.is_floating_point() if node.dtype == torch.float32 else tensor.dtype in _INTEGERS
    batched = len(expected) > 1
    if tensor.dim() != len(expected) or tensor.shape[batched:] != expected[batched:] or not fits:
        shape = ", ".join([*["rows"][:batched], *map(str, expected[batched:])])
        raise ContractError(
            f"input {node!r} takes {kind} tensor [{shape}] (its shape in ggml reversed); got {tensor.dtype} "
            f"{list(tensor.shape)}"
        )
    return tensor
