"""A GGUF file from its parts: whole, or not at all."""

from __future__ import annotations

import contextlib
import os
import secrets
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, Final, final

import torch
from torch import Tensor

from augend.errors import ContractError, GGUFError
from augend.gguf._header import (
    ALIGNMENT,
    ARCHITECTURE,
    DIMENSIONS,
    LONGEST_KEY,
    LONGEST_NAME,
    MAGIC,
    Header,
    alignment_of,
    padded,
    read_header,
)
from augend.gguf._metadata import ARRAY_CODE, CODES, STRING, Value, element_of, text_bytes
from augend.gguf._package import package
from augend.gguf._tensors import bytes_of, encoded

_VERSION: Final = 3


@final
@dataclass(frozen=True, slots=True)
class Part:
    """A tensor to be written, which is made when its turn comes."""

    name: str
    shape: tuple[int, ...]
    type: str
    make: Callable[[], Tensor]


def write(path: str | os.PathLike[str], metadata: Mapping[str, Value], tensors: Mapping[str, Tensor]) -> Header:
    """Write a GGUF file of any architecture, with float32 tensors: whole, or not at all.

    The file gets its name when all of it is on disk; until then what had that name is untouched.

    Args:
        path: Of the file.
        metadata: By key, in the order to be written; ``general.architecture`` must be there.
        tensors: By name, in the order to be written; of any floating dtype, on any device.

    Returns:
        The header of the file, read back before the file got its name.

    Raises:
        ContractError: A key, a name, a shape or a dtype is none that such a file can have.
        GGUFError: The package `gguf` is missing, or the file cannot be written.

    Example:
        >>> metadata = {"general.architecture": augend.gguf.Value.of("string", "mine")}
        >>> augend.gguf.write("mine.gguf", metadata, {"weight": torch.ones(2, 3)}).tensors["weight"].shape
        (2, 3)
    """
    for name, tensor in tensors.items():
        check_tensor(name, tensor)
    return write_parts(
        Path(path),
        metadata,
        [Part(name, tuple(tensor.shape), "F32", lambda t=tensor: t) for name, tensor in tensors.items()],  # type: ignore[misc]  # a default binds
    )


def check_tensor(name: str, tensor: Tensor) -> None:
    """Refuse what is no ordinary tensor of floating-point numbers in memory.

    Raises:
        ContractError: It is none.
    """
    if type(tensor) not in {Tensor, torch.nn.Parameter} or tensor.is_meta or tensor.layout is not torch.strided:
        kind = "on the meta device" if tensor.is_meta else f"a {tensor.layout} {type(tensor).__name__}"
        raise ContractError(f"{name} is {kind}; expected an ordinary dense tensor in memory: make it one first")
    if not tensor.is_floating_point():
        raise ContractError(f"{name} has dtype {tensor.dtype}; expected floating-point numbers")


def write_parts(target: Path, metadata: Mapping[str, Value], parts: Sequence[Part]) -> Header:
    """Write a file whose tensors are made one after the other.

    Raises:
        ContractError: As for ``write``.
        GGUFError: As for ``write``.
    """
    package()
    _check(metadata, parts)
    try:
        with _replacing(target) as (unfinished, file):
            _write(file, metadata, parts)
            file.flush()
            header = read_header(unfinished)
    except OSError as error:
        raise GGUFError(f"{target} cannot be written: {error}") from error
    return replace(header, path=target)


def _check(metadata: Mapping[str, Value], parts: Sequence[Part]) -> None:
    """Refuse what no reader would take."""
    architecture = metadata.get(ARCHITECTURE)
    if architecture is None or architecture.type != STRING or not architecture.value:
        raise ContractError(f"metadata must say in {ARCHITECTURE} what the file is: a text such as 'llama'")
    alignment = metadata.get(ALIGNMENT, Value.of("uint32", 32))
    if alignment.type != "uint32" or int.from_bytes(alignment.raw, "little").bit_count() != 1:
        raise ContractError(f"{ALIGNMENT} must be a power of two of type uint32; got {alignment}")
    for key in metadata:
        if not 1 <= len(key.encode()) <= LONGEST_KEY:
            raise ContractError(f"key {key[:80]!r} must have 1 to {LONGEST_KEY:,} bytes")
    for part in parts:
        if not 1 <= len(part.name.encode()) <= LONGEST_NAME or "\0" in part.name:
            raise ContractError(
                f"{part.name!r} must have 1 to {LONGEST_NAME} bytes, none 0, to be ggml's name of a tensor"
            )
        if not 1 <= len(part.shape) <= DIMENSIONS or 0 in part.shape:
            raise ContractError(
                f"{part.name} has the shape {list(part.shape)}; expected 1 to {DIMENSIONS} dimensions, none of them 0"
            )


def _write(file: BinaryIO, metadata: Mapping[str, Value], parts: Sequence[Part]) -> None:
    """Write header and tensors."""
    alignment = alignment_of(metadata)
    file.write(MAGIC + struct.pack("<IQQ", _VERSION, len(parts), len(metadata)))
    for key, value in metadata.items():
        of, is_array = element_of(value.type)
        file.write(text_bytes(key) + struct.pack("<I", ARRAY_CODE if is_array else CODES[of]) + value.raw)
    offset = 0
    for part in parts:
        code = package().GGMLQuantizationType[part.type].value
        shape = struct.pack(f"<I{len(part.shape)}Q", len(part.shape), *reversed(part.shape))
        file.write(text_bytes(part.name) + shape + struct.pack("<IQ", code, offset))
        offset += padded(bytes_of(part.shape, part.type), alignment)
    for part in parts:
        _fill(file, alignment)
        file.writelines(encoded(part.make(), part.type))
    _fill(file, alignment)


def _fill(file: BinaryIO, alignment: int) -> None:
    """Write zeros up to the next multiple of the alignment."""
    file.write(bytes(-file.tell() % alignment))


@contextlib.contextmanager
def _replacing(target: Path) -> Iterator[tuple[Path, BinaryIO]]:
    """Give a file to write; what it holds at the end replaces the target at once, and nothing does on an error."""
    unfinished = target.with_name(f".{secrets.token_hex(8)}.unfinished")
    handle = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    try:
        with open(handle, "wb") as file:  # noqa: PTH123  a handle, not a path
            yield unfinished, file
            file.flush()
            os.fsync(handle)
        unfinished.replace(target)
    finally:
        unfinished.unlink(missing_ok=True)
    directory = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
