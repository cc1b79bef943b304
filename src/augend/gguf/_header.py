"""The header of a GGUF file, checked before anything trusts it: what is announced must be there."""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import BinaryIO, Final, final

from augend.errors import GGUFError
from augend.gguf._cursor import Cursor
from augend.gguf._metadata import ARRAY_CODE, CODES, LAYOUTS, STRING, Value
from augend.gguf._package import package

MAGIC: Final = b"GGUF"
ARCHITECTURE: Final = "general.architecture"
ALIGNMENT: Final = "general.alignment"
DEFAULT_ALIGNMENT: Final = 32
LONGEST_KEY: Final = 2**16 - 1
LONGEST_NAME: Final = 63  # bytes: ggml has no room for more
DIMENSIONS: Final = 4
_VERSIONS: Final = (2, 3)
_TYPES: Final = {code: name for name, code in CODES.items()}
# Bounds on memory: a header is kept whole. The largest vocabularies have a million values in 20 MB.
_TENSORS: Final = 2**20
_VALUES: Final = 2**23
_METADATA_BYTES: Final = 2**28


@final
@dataclass(frozen=True, slots=True)
class TensorInfo:
    """What a header says of a tensor.

    Args:
        name: Of the tensor.
        shape: In torch's order, the reverse of ggml's.
        type: How ggml calls it, such as ``F32`` or ``Q4_1``.
        offset: Of its first byte in the file.
        bytes: How many it has there.
    """

    name: str
    shape: tuple[int, ...]
    type: str
    offset: int
    bytes: int


@final
@dataclass(frozen=True, slots=True)
class Header:
    """What a GGUF file says of itself.

    Args:
        path: Of the file.
        version: Of the format.
        metadata: All of it, by key, in the order of the file.
        tensors: What is said of each, by name, in the order of the file.
    """

    path: Path
    version: int
    metadata: Mapping[str, Value]
    tensors: Mapping[str, TensorInfo]

    @property
    def architecture(self) -> str:
        """What ``general.architecture`` says, such as ``llama``."""
        return str(self.metadata[ARCHITECTURE].value)

    @property
    def alignment(self) -> int:
        """Tensors begin at multiples of this many bytes."""
        return alignment_of(self.metadata)

    @property
    def parameters(self) -> int:
        """How many numbers the tensors hold together."""
        return sum(math.prod(info.shape) for info in self.tensors.values())


def read_header(path: str | os.PathLike[str]) -> Header:
    """Read the header of a GGUF file, and check that the rest is there.

    Nothing is allocated because a number in the file says so; all numbers are checked against the file's size first.

    Args:
        path: Of a file of version 2 or 3 in little-endian byte order, as all of ggml's.

    Returns:
        Its metadata and what it says of its tensors.

    Raises:
        GGUFError: The package `gguf` is missing, or the file cannot be read, was cut off, damaged or made up: it
            announces what is not there, names a key or a tensor twice, or its tensors lie elsewhere than ggml puts
            them, one after the other up to the end of the file.

    Example:
        >>> metadata = {"general.architecture": augend.gguf.Value.of("string", "llama")}
        >>> header = augend.gguf.write("small.gguf", metadata, {})
        >>> augend.gguf.read_header("small.gguf").architecture
        'llama'
    """
    source = Path(path)
    with opened(source) as file:
        return header_of(file, source)


def opened(path: Path) -> BinaryIO:
    """Open a file.

    Raises:
        GGUFError: It is none, or cannot be opened.
    """
    if not path.is_file():  # a pipe would be waited for
        raise GGUFError(f"{path} is no file; expected a GGUF file")
    try:
        file = path.open("rb")
    except OSError as error:
        raise GGUFError(f"{path} cannot be read: {error}") from error
    return file


def header_of(file: BinaryIO, path: Path) -> Header:
    """Read the header of an open file; what follows in it are the tensors.

    Raises:
        GGUFError: As for ``read_header``.
    """
    try:
        return _header(Cursor(file, path, os.fstat(file.fileno()).st_size))
    except OSError as error:
        raise GGUFError(f"{path} cannot be read: {error}") from error


def alignment_of(metadata: Mapping[str, Value]) -> int:
    """Return the alignment that metadata asks for."""
    return int.from_bytes(metadata[ALIGNMENT].raw, "little") if ALIGNMENT in metadata else DEFAULT_ALIGNMENT


def padded(size: int, alignment: int) -> int:
    """Return the next multiple of the alignment."""
    return -(-size // alignment) * alignment


def _header(cursor: Cursor) -> Header:
    if (magic := cursor.take(4, "the mark GGUF")) != MAGIC:
        raise cursor.refuse(f"it begins with {magic!r} and not with {MAGIC!r}")
    if (version := cursor.number("I", "the version")) not in _VERSIONS:
        raise cursor.refuse(
            f"version {version} in this machine's byte order; versions {' and '.join(map(str, _VERSIONS))} are read"
        )
    tensors = cursor.number("Q", "the number of tensors")
    if tensors > _TENSORS:
        raise cursor.refuse(f"it announces {tensors:,} tensors; at most {_TENSORS:,} are read")
    metadata = _metadata(cursor, cursor.number("Q", "the number of keys"))
    _check_metadata(cursor, metadata)
    infos = _tensors(cursor, tensors, alignment_of(metadata))
    return Header(cursor.path, version, MappingProxyType(metadata), MappingProxyType(infos))


def _metadata(cursor: Cursor, pairs: int) -> dict[str, Value]:
    """Read keys and values."""
    found: dict[str, Value] = {}
    start = cursor.offset
    counted = 0
    for _ in range(pairs):
        key = cursor.name(LONGEST_KEY, "a key of metadata")
        if key in found:
            raise cursor.refuse(f"key {key!r} is there twice")
        what = f"the value of key {key!r}"
        found[key], count = _value(cursor, cursor.number("I", f"the type of key {key!r}"), what)
        counted += count
        if counted > _VALUES or cursor.offset - start > _METADATA_BYTES:
            raise cursor.refuse(
                f"its metadata has more than {_VALUES:,} values or {_METADATA_BYTES:,} bytes at key {key!r}"
            )
    return found


def _value(cursor: Cursor, code: int, what: str) -> tuple[Value, int]:
    """Read a value; returns it and how many elements it has."""
    if code != ARRAY_CODE:
        name = _type(cursor, code, what)
        return Value(name, _elements(cursor, name, 1, what)), 1
    head = cursor.take(12, f"the length of {what}")
    of, count = struct.unpack("<IQ", head)
    name = _type(cursor, of, what)
    return Value(f"array[{name}]", head + _elements(cursor, name, count, what)), count


def _type(cursor: Cursor, code: int, what: str) -> str:
    if code not in _TYPES:
        raise cursor.refuse(f"{what} is of type {code}, which does not exist or is a list of lists")
    return _TYPES[code]


def _elements(cursor: Cursor, name: str, count: int, what: str) -> bytes:
    """Read elements of one type that lie one after the other, as bytes."""
    if count > _VALUES:
        raise cursor.refuse(f"{what} has {count:,} elements; at most {_VALUES:,} are read")
    if name != STRING:
        size = count * struct.calcsize(LAYOUTS[name])
        return cursor.take(size, what)
    cursor.require(8 * count, what)
    parts: list[bytes] = []
    begin = cursor.offset
    for _ in range(count):
        parts.append(length := cursor.take(8, what))
        parts.append(cursor.take(int.from_bytes(length, "little"), what))
        cursor.decoded(parts[-1], what)
        if cursor.offset - begin > _METADATA_BYTES:
            raise cursor.refuse(f"{what} has more than {_METADATA_BYTES:,} bytes")
    return b"".join(parts)


def _check_metadata(cursor: Cursor, metadata: Mapping[str, Value]) -> None:
    """Check the two keys that every reader needs."""
    alignment = metadata.get(ALIGNMENT)
    if alignment is not None and alignment.type != "uint32":
        raise cursor.refuse(f"{ALIGNMENT} is of type {alignment.type}; it must be uint32")
    if (value := alignment_of(metadata)).bit_count() != 1:
        raise cursor.refuse(f"{ALIGNMENT} is {value}; it must be a power of two")
    architecture = metadata.get(ARCHITECTURE)
    if architecture is None or architecture.type != STRING or not architecture.value:
        raise cursor.refuse(f"it does not say in {ARCHITECTURE} what it is; expected a word such as 'llama'")


def _tensors(cursor: Cursor, count: int, alignment: int) -> dict[str, TensorInfo]:
    """Read what is said of tensors, and check that they lie one after the other and fill the rest of the file."""
    gguf = package()
    infos: dict[str, TensorInfo] = {}
    expected = 0
    for _ in range(count):
        info = _tensor(cursor, gguf.GGMLQuantizationType, gguf.GGML_QUANT_SIZES)
        what = f"tensor {info.name!r}"
        if info.name in infos:
            raise cursor.refuse(f"{what} is there twice")
        if info.offset != expected:
            raise cursor.refuse(
                f"{what} is said to be at byte {info.offset:,} of the data; its place is byte {expected:,}"
            )
        infos[info.name] = info
        expected += padded(info.bytes, alignment)
    start = padded(cursor.offset, alignment)
    for info in infos.values():
        what = f"tensor {info.name!r}"
        cursor.zeros(min(start + info.offset, cursor.size) - cursor.offset, f"the padding before {what}")
        cursor.require(info.bytes, what)
        cursor.jump(start + info.offset + info.bytes)
    if cursor.size > start + expected:
        raise cursor.refuse(f"{cursor.size - start - expected:,} bytes follow where its tensors end")
    cursor.zeros(cursor.size - cursor.offset, "the padding at the end")
    return {
        name: TensorInfo(name, info.shape, info.type, start + info.offset, info.bytes) for name, info in infos.items()
    }


def _tensor(cursor: Cursor, types: type, sizes: Mapping[object, tuple[int, int]]) -> TensorInfo:
    """Read what is said of a tensor; its offset is still the one among the tensors."""
    name = cursor.name(LONGEST_NAME, "the name of a tensor")
    what = f"tensor {name!r}"
    if not 1 <= (rank := cursor.number("I", f"the rank of {what}")) <= DIMENSIONS:
        raise cursor.refuse(f"{what} has {rank:,} dimensions; 1 to {DIMENSIONS} are possible")
    dimensions = struct.unpack(f"<{rank}Q", cursor.take(8 * rank, f"the shape of {what}"))
    if 0 in dimensions:
        raise cursor.refuse(f"{what} has the shape {list(dimensions)}; no dimension may be 0")
    code = cursor.number("I", f"the type of {what}")
    try:
        kind = types(code)
    except ValueError as error:
        raise cursor.refuse(f"{what} is of type {code}, which the package gguf does not know") from error
    elements, size = sizes[kind]
    if dimensions[0] % elements:
        raise cursor.refuse(f"{what} has rows of {dimensions[0]:,}; {kind.name} has blocks of {elements:,}")
    total = math.prod(dimensions) // elements * size
    return TensorInfo(name, dimensions[::-1], kind.name, cursor.number("Q", f"the offset of {what}"), total)
