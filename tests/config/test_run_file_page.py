"""docs/run-file.md has every key of a run file, with its type, default and meaning."""

from __future__ import annotations

import json
from dataclasses import MISSING, fields
from pathlib import Path
from types import UnionType
from typing import Literal, Union, get_args, get_origin, get_type_hints

import pytest

from augend._config._schema import TABLES, RunFile, table_of

PAGE = Path(__file__).parents[2] / "docs" / "run-file.md"
DEPENDS = {"epochs": "`1`, or none with `steps`", "microbatch_size": "`8`, or `batch_size`"}  # filled in by read


def type_of(hint: object) -> str:
    """Say an annotation's type in the words of TOML."""
    if get_origin(hint) in {Union, UnionType}:
        return type_of(get_args(hint)[0])
    if get_origin(hint) is Literal:
        return " or ".join(f'`"{choice}"`' for choice in get_args(hint))
    if get_origin(hint) is tuple:
        return f"list of {type_of(get_args(hint)[0])}s"
    inner = getattr(hint, "__origin__", hint)
    return type_of(inner) if inner is not hint else {int: "integer", float: "number", str: "text"}[hint]


def default_of(key: str, default: object) -> str:
    """Show a default as it would be written."""
    if default is MISSING:
        return "required"
    if key in DEPENDS:
        return DEPENDS[key]
    if isinstance(default, tuple):
        return f"`{json.dumps(default)}`"
    return "none" if default is None else f'`"{default}"`' if isinstance(default, str) else f"`{default}`"


def rows_of(table: type) -> list[str]:
    """Write the line that the page must have for each key of a table."""
    hints = get_type_hints(table, include_extras=True)
    return [
        f"| `{field.name}` | {type_of(hints[field.name])} | {default_of(field.name, field.default)} "
        f"| {hints[field.name].__metadata__[-1].description} |"
        for field in fields(table)
        if field.name != "arguments" and table_of(hints[field.name]) is None
    ]


def section(name: str) -> str:
    """Return what the page says between a heading and the next one."""
    _, found, rest = PAGE.read_text(encoding="utf-8").partition(f"\n## {name}\n")
    assert found, f"docs/run-file.md has no section {name!r}"
    return rest.partition("\n## ")[0]


@pytest.mark.parametrize("table", [RunFile, *TABLES], ids=lambda table: table.__name__)
def test_the_page_has_every_key_and_no_other(table):
    """Each section's table is exactly that of the dataclass: no key missing, none invented, no default outdated."""
    name = "The run" if table is RunFile else f"`[{table.__name__.lower()}]`"
    shown = [line for line in section(name).splitlines() if line.startswith("| `")]
    assert rows_of(table) == shown
