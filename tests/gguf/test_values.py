"""Values of metadata: of every type, to bytes and back."""

from __future__ import annotations

import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import gguf
from augend.errors import ContractError
from augend.gguf import Value

WIDTHS = {"8": 8, "16": 16, "32": 32, "64": 64}
SCALARS: dict[str, st.SearchStrategy[Any]] = {
    **{f"uint{name}": st.integers(0, 2**bits - 1) for name, bits in WIDTHS.items()},
    **{f"int{name}": st.integers(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) for name, bits in WIDTHS.items()},
    "float32": st.floats(width=32, allow_nan=False),
    "float64": st.floats(allow_nan=False),
    "bool": st.booleans(),
    "string": st.text(st.characters(codec="utf-8")),
}


@given(data=st.data(), kind=st.sampled_from(sorted(SCALARS)))
def test_values_come_back(data: st.DataObject, kind: str) -> None:
    """A value of any type, alone or in a list, is the same Python object after it was bytes."""
    value = data.draw(SCALARS[kind])
    values = data.draw(st.lists(SCALARS[kind], max_size=5))
    assert value == Value.of(kind, value).value
    assert type(value) is type(Value.of(kind, value).value)
    assert values == Value.of(f"array[{kind}]", values).value


@given(data=st.data(), kind=st.sampled_from(sorted(SCALARS)))
def test_bytes_are_those_of_the_package(data: st.DataObject, kind: str) -> None:
    """The bytes are those that the writer of the package gguf puts after the type."""
    writer = gguf.GGUFWriter(None, "any")
    code = gguf.GGUFValueType[kind.upper()]
    value = data.draw(SCALARS[kind])
    values = data.draw(st.lists(SCALARS[kind], min_size=1, max_size=5))
    assert writer._pack_val(value, code, add_vtype=False) == Value.of(kind, value).raw
    listed = writer._pack_val(values, gguf.GGUFValueType.ARRAY, add_vtype=False, sub_type=code)
    assert listed == Value.of(f"array[{kind}]", values).raw


@pytest.mark.parametrize(
    ("kind", "value", "words"),
    [
        ("int128", 1, "no type 'int128'"),
        ("array[array[int8]]", [[1]], r"no type 'array\[array\[int8\]\]'"),
        ("uint8", 256, "of type uint8 cannot be 256"),
        ("uint8", -1, "of type uint8 cannot be -1"),
        ("int32", 1.5, "of type int32 cannot be 1.5"),
        ("int32", [1], r"of type int32 cannot be \[1\]"),
        ("array[int32]", 1, r"of type array\[int32\] cannot be 1"),
        ("array[string]", "ab", r"of type array\[string\] cannot be 'ab'"),
        ("string", 1, "of type string cannot be 1"),
        ("string", "\ud800", "surrogates not allowed"),
        ("float32", 1e300, "of type float32 cannot be"),
    ],
)
def test_what_does_not_fit_is_refused(kind: str, value: object, words: str) -> None:
    """A value that its type cannot hold is an error that names both."""
    with pytest.raises(ContractError, match=words):
        Value.of(kind, value)


def test_bytes_are_kept_as_they_are() -> None:
    """A signalling nan, which arithmetic would quieten, and a truth of 2 keep their bits in ``raw``."""
    raw = struct.pack("<I", 0x7F800001)
    assert raw == Value("float32", raw).raw
    assert Value("bool", b"\2").value is True
