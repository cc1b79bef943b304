"""The list of what ggml-opt declares, against the header that comes with ggml's libraries."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
from pathlib import Path

import pytest

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "ggml_opt_items.json").read_text("utf-8"))
pytestmark = pytest.mark.usefixtures("ggml")  # which skips where there is none


def header() -> bytes:
    """Read the header."""
    return (Path(importlib.util.find_spec("libggml").submodule_search_locations[0]) / "include/ggml-opt.h").read_bytes()


def code() -> str:
    """Return the header without its comments."""
    return re.sub(r"//.*", "", header().decode())


def fields(body: str) -> list[str]:
    """Return the names of a structure's fields, those of structures inside it with their owner."""
    inner = {name: fields(inside) for inside, name in re.findall(r"struct \{(.*?)\} (\w+);", body, re.DOTALL)}
    outer = re.findall(r"(\w+);", re.sub(r"\{.*?\}", "", body, flags=re.DOTALL))
    return [path for name in outer for path in (name, *(f"{name}.{one}" for one in inner.get(name, [])))]


def test_the_list_is_of_this_header() -> None:
    """The header is the one that the list was made from."""
    assert GOLDEN["provenance"]["sha256_of_the_header"] == hashlib.sha256(header()).hexdigest()


def test_every_name_of_the_header_is_in_the_list() -> None:
    """Each word of the header that begins with ggml_opt_, and each field of its structures, is an item, and no more."""
    words = set(re.findall(r"\bggml_opt_\w+|\bGGML_OPT_\w+", code()))
    structures = re.findall(r"^    struct (\w+) \{(.*?)^    \};", code(), re.DOTALL | re.MULTILINE)
    assert ["ggml_opt_optimizer_params", "ggml_opt_params"] == [name for name, _ in structures]
    words |= {f"{name}.{field}" for name, body in structures for field in fields(body)}
    names = [one["name"] for one in GOLDEN["items"]]
    assert len(names) == len(set(names))
    assert words == set(names)


def test_every_function_is_told_from_the_rest() -> None:
    """What the header exports are the functions of the list, in its order."""
    exported = re.findall(r"GGML_API\s[^(;]*?(\w+)\s*\(", code())
    assert exported == [one["name"] for one in GOLDEN["items"] if one["kind"] == "function"]
