"""A place in a file whose size is known: nothing is read, skipped or allocated that is not there."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final, final

from augend.errors import GGUFError

_ZEROS: Final = 2**16  # that are read at once


@final
@dataclass(slots=True)
class Cursor:
    """Where the next byte of a header is read."""

    file: BinaryIO
    path: Path
    size: int
    offset: int = 0

    def refuse(self, what: str) -> GGUFError:
        """Return the error that says what is wrong with the file."""
        return GGUFError(f"{self.path} is no GGUF file that can be trusted: {what}")

    def require(self, count: int, what: str) -> None:
        """Check that a number of bytes is there."""
        if count > self.size - self.offset:
            raise self.refuse(
                f"{what} needs {count:,} bytes at byte {self.offset:,}, and the file ends at byte {self.size:,}; "
                "it was cut off or changed"
            )

    def take(self, count: int, what: str) -> bytes:
        """Read a number of bytes."""
        self.require(count, what)
        data = self.file.read(count)
        if len(data) != count:
            raise self.refuse(f"{what} could not be read whole at byte {self.offset:,}; the file was cut off meanwhile")
        self.offset += count
        return data

    def jump(self, offset: int) -> None:
        """Go on at another place."""
        self.file.seek(offset)
        self.offset = offset

    def zeros(self, count: int, what: str) -> None:
        """Read a number of bytes, all of which must be zero."""
        for start in range(0, count, _ZEROS):
            if self.take(min(_ZEROS, count - start), what).strip(b"\0"):
                raise self.refuse(f"{what} is not zeros; bytes were lost or added")

    def number(self, layout: str, what: str) -> int:
        """Read a whole number."""
        value: int
        (value,) = struct.unpack(f"<{layout}", self.take(struct.calcsize(layout), what))
        return value

    def name(self, longest: int, what: str) -> str:
        """Read a name with its length before it."""
        length = self.number("Q", f"the length of {what}")
        if length > longest:
            raise self.refuse(f"{what} has {length:,} bytes; at most {longest:,} are a name")
        return self.decoded(self.take(length, what), what)

    def decoded(self, data: bytes, what: str) -> str:
        """Return bytes of the file as a text."""
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            raise self.refuse(f"{what}, {data[:80]!r}, is no UTF-8") from error
