"""GGUF files of graphs: the weights that ggml's own examples write and read."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Final, final

import numpy as np
import torch
from torch import Tensor

from augend.errors import ContractError, GGUFError
from augend.ggml._graph import Graph
from augend.ggml._header import check_header
from augend.ggml._nodes import Node

_ARCHITECTURE: Final = "general.architecture"
_LONGEST_NAME: Final = 63  # bytes: ggml has no room for more


@final
@dataclass(frozen=True, eq=False, slots=True)
class Weights:
    """What a GGUF file of a graph holds.

    Args:
        architecture: What ``general.architecture`` says, such as ``mnist-fc``.
        tensors: float32 tensors in torch's shapes, ggml's reversed, by name, in the order of the file. F16 and BF16
            were widened, which is exact.
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
    target = Path(path)
    package = _package()
    if not architecture or "\0" in architecture:
        raise ContractError(f"architecture must be a word such as 'mnist-fc'; got {architecture!r}")
    arrays = {name: _array(graph, node) for name, node in _named(graph).items()}
    try:
        with _replacing(target) as file:
            _write(package, file, architecture, arrays)
    except OSError as error:
        raise GGUFError(f"{target} cannot be written: {error}") from error


def load(path: str | os.PathLike[str]) -> Weights:
    """Read a GGUF file of float tensors.

    All it announces is checked against its size before anything else is read.

    Args:
        path: Of the file.

    Returns:
        Its architecture and its tensors.

    Raises:
        GGUFError: The package ``gguf`` is missing, or the file cannot be read, is cut off, damaged or hostile, or holds
            quantised tensors or whole numbers.
    """
    source = Path(path)
    package = _package()
    if not source.is_file():
        raise GGUFError(f"{source} is no file; expected a GGUF file")
    try:
        check_header(source)
        architecture, tensors = _read(package, source)
    except OSError as error:
        raise GGUFError(f"{source} cannot be read: {error}") from error
    return Weights(architecture, tensors)


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


def _package() -> Any:
    """Return the package that knows the format."""
    try:
        return import_module("gguf")
    except ImportError as error:
        raise GGUFError(
            "GGUF files need the package gguf, which is not installed: pip install 'augend[ggml]'"
        ) from error


def _named(graph: Graph) -> dict[str, Node]:
    """Return the parameters of a graph by name, if ggml can read their names."""
    found = graph.parameters()
    if not found:
        raise ContractError("the graph has no parameter; there is nothing to write or to read")
    for name, node in found.items():
        if len(name.encode()) > _LONGEST_NAME:
            raise ContractError(f"{node!r} has a name of more than {_LONGEST_NAME} bytes, which ggml cannot read")
    return found


def _array(graph: Graph, node: Node) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Return a parameter's values as ggml counts dimensions: without those of size 1 at the end of its order."""
    shape = list(node.shape)
    while len(shape) > 1 and shape[-1] == 1:
        shape.pop()
    values = graph.values(node).detach().cpu().numpy()
    return np.ascontiguousarray(values, dtype=np.float32).reshape(shape[::-1])


def _write(package: Any, path: Path, architecture: str, arrays: Mapping[str, np.ndarray[Any, Any]]) -> None:
    """Write a GGUF file over one that is there and empty."""
    writer = package.GGUFWriter(path, architecture)
    for name, array in arrays.items():
        writer.add_tensor(name, array)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()


@contextlib.contextmanager
def _replacing(target: Path) -> Iterator[Path]:
    """Give a file to write; what it holds at the end replaces the target at once, and nothing does on an error."""
    unfinished = target.with_name(f".{secrets.token_hex(8)}.unfinished")
    os.close(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666))
    try:
        yield unfinished
        _fsync(unfinished, os.O_RDONLY)
        unfinished.replace(target)
    finally:
        unfinished.unlink(missing_ok=True)
    _fsync(target.parent, os.O_RDONLY | os.O_DIRECTORY)


def _fsync(path: Path, flags: int) -> None:
    """Wait until a file, or the names in a directory, are on disk."""
    handle = os.open(path, flags | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _read(package: Any, path: Path) -> tuple[str, dict[str, Tensor]]:
    """Read a file whose header was checked, since the package's reader trusts it."""
    try:
        reader = package.GGUFReader(path)
        field = reader.get_field(_ARCHITECTURE)
        architecture = None if field is None else field.contents()
    except (LookupError, ValueError) as error:  # a name or a key twice, or one that is no UTF-8
        raise GGUFError(f"{path} is no GGUF file that can be trusted: {error}") from error
    if not isinstance(architecture, str):
        raise GGUFError(f"{path} does not say in {_ARCHITECTURE} what it is; expected a word such as 'mnist-fc'")
    return architecture, {one.name: _tensor(package, one) for one in reader.tensors}


def _tensor(package: Any, read: Any) -> Tensor:
    """Return a copy of a tensor of the file, in float32."""
    values = torch.from_numpy(np.array(read.data))
    if read.tensor_type == package.GGMLQuantizationType.BF16:
        values = values.view(torch.bfloat16)  # the reader gives the bytes
    return values.float()


def _dimensions(tensor: Tensor) -> tuple[int, ...]:
    """Return a shape as a graph has it: four dimensions, the fastest first."""
    return (*reversed(tensor.shape), 1, 1, 1, 1)[:4]
