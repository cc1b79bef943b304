"""GGUF files of graphs: the weights that ggml's own examples write and read."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, final

from torch import Tensor

from augend.errors import ContractError, GGUFError
from augend.ggml._graph import Graph
from augend.ggml._nodes import Node
from augend.gguf import Value, read, write

_LONGEST_NAME: Final = 63  # bytes: ggml has no room for more


@final
@dataclass(frozen=True, eq=False, slots=True)
class Weights:
    """What a GGUF file of a graph holds.

    Args:
        architecture: What ``general.architecture`` says, such as ``mnist-fc``.
        tensors: float32 tensors in torch's shapes, ggml's reversed, by name, in the order of the file. F16 and BF16
            were widened, which is exact; quantised ones are what the package `gguf` makes of them.
    """

    architecture: str
    tensors: Mapping[str, Tensor]


def save(path: str | os.PathLike[str], graph: Graph, *, architecture: str) -> None:
    """Write the parameters of a graph to a GGUF file, as ggml's MNIST example does: whole, or not at all.

    The file gets its name when all of it is on disk; until then what had that name is untouched.

    Args:
        path: Of the file.
        graph: Whose parameters, all of them, are written as F32 under the names that they have in its state dict.
        architecture: The value of ``general.architecture``, the file's only key.

    Raises:
        ContractError: The graph has no parameter, or a name or the architecture is none that ggml can read.
        GGUFError: The package ``gguf`` is missing, or the file cannot be written.

    Example:
        >>> graph = augend.ggml.Graph()
        >>> weight = graph.tensor((3, 2), parameter=True, name="fc.weight")
        >>> augend.ggml.save("model.gguf", graph, architecture="mnist-fc")
        >>> augend.ggml.load("model.gguf").tensors["fc.weight"].shape
        torch.Size([2, 3])
    """
    if not architecture or "\0" in architecture:
        raise ContractError(f"architecture must be a word such as 'mnist-fc'; got {architecture!r}")
    metadata = {"general.architecture": Value.of("string", architecture)}
    write(path, metadata, {name: _tensor(graph, node) for name, node in _named(graph).items()})


def load(path: str | os.PathLike[str]) -> Weights:
    """Read the tensors of a GGUF file.

    All it announces is checked against its size before anything else is read.

    Args:
        path: Of the file.

    Returns:
        Its architecture and its tensors.

    Raises:
        GGUFError: The package ``gguf`` is missing, or the file cannot be read, is cut off, damaged or hostile, or holds
            whole numbers.
    """
    header, tensors = read(path)
    return Weights(header.architecture, tensors)


def load_into(path: str | os.PathLike[str], graph: Graph, *, architecture: str | None = None) -> None:
    """Give a graph the weights of a GGUF file: all of them, or none.

    Args:
        path: Of the file.
        graph: Whose parameters are set. Names and shapes must be those of the file.
        architecture: What ``general.architecture`` must say; None takes any.

    Raises:
        ContractError: The graph has no parameter, or a name that no file can have.
        GGUFError: As for ``load``; or the file is of another architecture, lacks a parameter, has a tensor more, or has
            one of another shape. The graph is unchanged.
    """
    named = _named(graph)
    weights = load(path)
    if architecture not in {None, weights.architecture}:
        raise GGUFError(f"{path} is of architecture {weights.architecture!r}; expected {architecture!r}")
    differences = [
        *(f"parameter {name!r} is missing in the file" for name in named if name not in weights.tensors),
        *(f"tensor {name!r} is no parameter of the graph" for name in weights.tensors if name not in named),
        *(
            f"tensor {name!r} has the shape {list(_dimensions(tensor))}, and the parameter {list(named[name].shape)}"
            for name, tensor in weights.tensors.items()
            if name in named and _dimensions(tensor) != named[name].shape
        ),
    ]
    if differences:
        raise GGUFError(f"{path} does not fit the graph: {'; '.join(differences)}")
    for name, node in named.items():
        graph.set_values(node, weights.tensors[name])


def _named(graph: Graph) -> dict[str, Node]:
    """Return the parameters of a graph by name, if ggml can read their names."""
    found = graph.parameters()
    if not found:
        raise ContractError("the graph has no parameter; there is nothing to write or to read")
    for name, node in found.items():
        if len(name.encode()) > _LONGEST_NAME:
            raise ContractError(f"{node!r} has a name of more than {_LONGEST_NAME} bytes, which ggml cannot read")
    return found


def _tensor(graph: Graph, node: Node) -> Tensor:
    """Return a parameter's values as ggml counts dimensions: without those of size 1 at the end of its order."""
    shape = list(node.shape)
    while len(shape) > 1 and shape[-1] == 1:
        shape.pop()
    return graph.values(node).detach().reshape(shape[::-1])


def _dimensions(tensor: Tensor) -> tuple[int, ...]:
    """Return a shape as a graph has it: four dimensions, the fastest first."""
    return (*reversed(tensor.shape), 1, 1, 1, 1)[:4]
