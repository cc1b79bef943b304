"""The header of a GGUF file, walked before anything trusts it: what is announced must be there."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final, final

from augend.errors import GGUFError

_MAGIC: Final = b"GGUF"
_VERSIONS: Final = (2, 3)
_STRING: Final = 8
_ARRAY: Final = 9
_UINT32: Final = 4
# Bytes of a value of each type of metadata that has a fixed size.
_SCALARS: Final = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
# Bytes of an element of each type of tensor that a graph can take: F32, F16, BF16.
_ELEMENTS: Final = {0: 4, 1: 2, 30: 2}
_ALIGNMENT_KEY: Final = b"general.alignment"
_ALIGNMENT: Final = 32
# The reader makes an object of each value. A vocabulary with its merges has half as many.
_VALUES: Final = 2**20
_LONGEST_KEY: Final = 2**16
_LONGEST_NAME: Final = 63
_DIMENSIONS: Final = 4


@final
@dataclass(slots=True)
class _Cursor:
    """A place in a file whose size is known; nothing is read or skipped that is not there."""

    file: BinaryIO
    path: Path
    size: int
    offset: int = 0
    values: int = 0

    def refuse(self, what: str) -> GGUFError:
        """Return the error that says what is wrong with the file."""
        return GGUFError(f"{self.path} is no GGUF file that can be trusted: {what}")

    def skip(self, count: int, what: str) -> None:
        """Go on by a number of bytes."""
        if count > self.size - self.offset:
            raise self.refuse(
                f"{what} needs {count:,} bytes at byte {self.offset:,}, and the file ends at byte {self.size:,}; "
                "it was cut off or changed"
            )
        self.offset += count

    def take(self, count: int, what: str) -> bytes:
        """Read a number of bytes."""
        start = self.offset
        self.skip(count, what)
        self.file.seek(start)
        data = self.file.read(count)
        if len(data) != count:
            raise self.refuse(f"{what} could not be read whole at byte {start:,}; the file was cut off meanwhile")
        return data

    def number(self, layout: str, what: str) -> int:
        """Read a whole number."""
        value: int
        (value,) = struct.unpack(f"<{layout}", self.take(struct.calcsize(layout), what))
        return value

    def text(self, longest: int, what: str) -> bytes:
        """Read a name with its length before it."""
        length = self.number("Q", f"the length of {what}")
        if length > longest:
            raise self.refuse(f"{what} has {length:,} bytes; at most {longest:,} are a name")
        return self.take(length, what)

    def count(self, values: int) -> None:
        """Count values of metadata."""
        self.values += values
        if self.values > _VALUES:
            raise self.refuse(f"it announces more than {_VALUES:,} tensors and values of metadata")


def check_header(path: Path) -> None:
    """Check that a GGUF file is what it announces: tensors that a graph can take, in ggml's order, and no more.

    Reads the header alone, and never more memory than a name takes.

    Raises:
        GGUFError: It is something else, was cut off, or announces what is not there.
        OSError: It cannot be read.
    """
    with path.open("rb") as file:
        cursor = _Cursor(file, path, path.stat().st_size)
        if (magic := cursor.take(4, "the mark GGUF")) != _MAGIC:
            raise cursor.refuse(f"it begins with {magic!r} and not with {_MAGIC!r}")
        if (version := cursor.number("I", "the version")) not in _VERSIONS:
            raise cursor.refuse(
                f"version {version} in this machine's byte order; versions {' and '.join(map(str, _VERSIONS))} are read"
            )
        tensors = cursor.number("Q", "the number of tensors")
        pairs = cursor.number("Q", "the number of keys")
        alignment = _ALIGNMENT
        for _ in range(pairs):
            alignment = _pair(cursor, alignment)
        spans = [_tensor(cursor) for _ in range(tensors)]
        _check_places(cursor, alignment, spans)


def _pair(cursor: _Cursor, alignment: int) -> int:
    """Walk over a key and its value; returns the alignment, which is another one after the key of that name."""
    cursor.count(1)
    key = cursor.text(_LONGEST_KEY, "a key of metadata")
    kind = cursor.number("I", f"the type of key {_shown(key)}")
    what = f"the value of key {_shown(key)}"
    if key != _ALIGNMENT_KEY:
        _value(cursor, kind, what)
        return alignment
    if kind != _UINT32:
        raise cursor.refuse(f"{what} is of type {kind}; an alignment is of type {_UINT32}")
    found = cursor.number("I", what)
    if found == 0 or found & (found - 1):
        raise cursor.refuse(f"the alignment is {found}; it must be a power of two")
    return found


def _value(cursor: _Cursor, kind: int, what: str) -> None:
    """Walk over a value, a list of values too."""
    if kind != _ARRAY:
        _values(cursor, kind, 1, what)
        return
    of = cursor.number("I", f"the type of {what}")
    count = cursor.number("Q", f"the length of {what}")
    _values(cursor, of, count, what)


def _values(cursor: _Cursor, kind: int, count: int, what: str) -> None:
    """Walk over values of one type, one after the other."""
    cursor.count(count)
    if kind == _STRING:
        for _ in range(count):
            cursor.skip(cursor.number("Q", f"the length of {what}"), what)
    elif kind in _SCALARS:
        cursor.skip(count * _SCALARS[kind], what)
    else:
        raise cursor.refuse(f"{what} is of type {kind}, which does not exist or is a list of lists")


def _tensor(cursor: _Cursor) -> tuple[bytes, int, int]:
    """Walk over what is said of a tensor; returns its name, its size in bytes and its offset."""
    cursor.count(1)
    name = cursor.text(_LONGEST_NAME, "the name of a tensor")
    what = f"tensor {_shown(name)}"
    if not 1 <= (rank := cursor.number("I", f"the rank of {what}")) <= _DIMENSIONS:
        raise cursor.refuse(f"{what} has {rank:,} dimensions; 1 to {_DIMENSIONS} are possible")
    dimensions = struct.unpack(f"<{rank}Q", cursor.take(8 * rank, f"the shape of {what}"))
    if 0 in dimensions:
        raise cursor.refuse(f"{what} has the shape {list(dimensions)}; no dimension may be 0")
    kind = cursor.number("I", f"the type of {what}")
    if kind not in _ELEMENTS:
        raise cursor.refuse(f"{what} is of type {kind}; F32 (0), F16 (1) and BF16 (30) can be read")
    return name, math.prod(dimensions) * _ELEMENTS[kind], cursor.number("Q", f"the offset of {what}")


def _check_places(cursor: _Cursor, alignment: int, spans: Sequence[tuple[bytes, int, int]]) -> None:
    """Check that tensors lie one after the other, as ggml writes them and wants them, and fill the rest of the file."""
    start = _padded(cursor.offset, alignment)
    expected = 0
    for name, size, offset in spans:
        what = f"tensor {_shown(name)}"
        if offset != expected:
            raise cursor.refuse(f"{what} is said to be at byte {offset:,} of the data; its place is byte {expected:,}")
        cursor.offset = start + offset
        cursor.skip(size, what)
        expected += _padded(size, alignment)
    if cursor.size > start + expected:
        raise cursor.refuse(f"{cursor.size - start - expected:,} bytes follow where its tensors end")


def _padded(size: int, alignment: int) -> int:
    return -(-size // alignment) * alignment


def _shown(name: bytes) -> str:
    return repr(name.decode("utf-8", "backslashreplace"))
