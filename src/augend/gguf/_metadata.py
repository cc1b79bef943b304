"""Values of metadata, kept as their bytes in the file, so that they can be written back unchanged."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias, final

from augend.errors import ContractError

Scalar: TypeAlias = bool | int | float | str

STRING: Final = "string"
# The letter that ``struct`` has for each type of fixed size.
LAYOUTS: Final = {
    "uint8": "B",
    "int8": "b",
    "uint16": "H",
    "int16": "h",
    "uint32": "I",
    "int32": "i",
    "float32": "f",
    "bool": "?",
    "uint64": "Q",
    "int64": "q",
    "float64": "d",
}
ARRAY_CODE: Final = 9
CODES: Final = {
    "uint8": 0,
    "int8": 1,
    "uint16": 2,
    "int16": 3,
    "uint32": 4,
    "int32": 5,
    "float32": 6,
    "bool": 7,
    STRING: 8,
    "uint64": 10,
    "int64": 11,
    "float64": 12,
}
_LENGTH: Final = struct.Struct("<Q")
_ARRAY: Final = re.compile(r"array\[(\w+)\]")
_ARRAY_HEAD: Final = struct.Struct("<IQ")


@final
@dataclass(frozen=True, slots=True)
class Value:
    """One value of a GGUF file's metadata, with its type.

    Args:
        type: ``uint8``, ``int8``, ``uint16``, ``int16``, ``uint32``, ``int32``, ``uint64``, ``int64``, ``float32``,
            ``float64``, ``bool``, ``string``, or a list of one of them, such as ``array[string]``.
        raw: Its bytes in the file, after those of the type.

    Example:
        >>> augend.gguf.Value.of("array[int32]", [3, 1]).value
        [3, 1]
    """

    type: str
    raw: bytes

    @classmethod
    def of(cls, type: str, value: Scalar | Sequence[Scalar]) -> Value:  # noqa: A002  as the field is called
        """Make a value.

        Args:
            type: As of the class.
            value: One that fits the type.

        Returns:
            The value.

        Raises:
            ContractError: There is no such type, or the value does not fit it.
        """
        of, is_array = element_of(type)
        if of not in CODES:
            raise ContractError(f"metadata has no type {type!r}; types are {', '.join(CODES)} and array[...] of them")
        if is_array != (isinstance(value, Sequence) and not isinstance(value, str)):
            raise ContractError(f"a value of type {type} cannot be {value!r}")
        values: Sequence[Scalar] = value if is_array else [value]  # type: ignore[assignment,list-item]  # told by is_array
        try:
            raw = b"".join(map(text_bytes, values)) if of == STRING else _packed(of, values)  # type: ignore[arg-type]  # of one type
        except (struct.error, OverflowError, AttributeError, UnicodeEncodeError) as error:
            raise ContractError(f"a value of type {type} cannot be {_short(value)}: {error}") from error
        return cls(type, _ARRAY_HEAD.pack(CODES[of], len(values)) + raw if is_array else raw)

    @property
    def value(self) -> Scalar | list[Scalar]:
        """The value as Python has it: a number, a truth value, a text, or a list of them."""
        of, is_array = element_of(self.type)
        if not is_array:
            return next(_values(of, self.raw, 1))
        _, count = _ARRAY_HEAD.unpack_from(self.raw)
        return list(_values(of, self.raw[_ARRAY_HEAD.size :], count))


def element_of(type: str) -> tuple[str, bool]:  # noqa: A002  as the field is called
    """Return the type of the elements, and whether it is of a list."""
    found = _ARRAY.fullmatch(type)
    return (found[1], True) if found else (type, False)


def text_bytes(text: str) -> bytes:
    """Return a text as a file has it: its length before it."""
    data = text.encode()
    return _LENGTH.pack(len(data)) + data


def _packed(of: str, values: Sequence[bool | float]) -> bytes:
    return struct.pack(f"<{len(values)}{LAYOUTS[of]}", *values)


def _values(of: str, raw: bytes, count: int) -> Iterator[Scalar]:
    """Decode values that lie one after the other."""
    if of != STRING:
        yield from struct.unpack_from(f"<{count}{LAYOUTS[of]}", raw)
        return
    offset = 0
    for _ in range(count):
        (length,) = _LENGTH.unpack_from(raw, offset)
        offset += _LENGTH.size + length
        yield raw[offset - length : offset].decode()


def _short(value: object) -> str:
    return repr(value)[:80]
