"""Write a run file. tomllib only reads, and the tables here are flat: forty lines serve instead of a dependency."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from datetime import date, time
from typing import Final

from augend._config._schema import RunFile

_ESCAPES: Final = {"\\": "\\\\", '"': '\\"', "\b": "\\b", "\t": "\\t", "\n": "\\n", "\f": "\\f", "\r": "\\r"}


def to_toml(run: RunFile) -> str:
    """Return the run file that reads back as ``run``: every key that is not absent, the tables after the rest."""
    plain: dict[str, object] = {}
    tables = ""
    for name, value in asdict(run).items():
        if isinstance(value, dict):
            arguments = value.pop("arguments", {})
            tables += _section(name, {**value, **arguments})
        else:
            plain[name] = value
    return dump(_present(plain)) + tables


def dump(table: Mapping[str, object]) -> str:
    """Return ``key = value`` lines for one table of TOML values: what ``tomllib.loads`` reads back as that table."""
    return "".join(f"{_key(name)} = {_value(value)}\n" for name, value in table.items())


def _section(name: str, table: Mapping[str, object]) -> str:
    lines = dump(_present(table))
    return f"\n[{name}]\n{lines}" if lines else ""


def _present(table: Mapping[str, object]) -> dict[str, object]:
    return {name: value for name, value in table.items() if value is not None}


def _key(name: str) -> str:
    bare = name.isascii() and name.replace("_", "a").replace("-", "a").isalnum()
    return name if bare else _string(name)


def _value(value: object) -> str:
    if isinstance(value, str):
        return _string(value)
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_key(name)} = {_value(item)}" for name, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_value(item) for item in value) + "]"
    if isinstance(value, date | time):  # a datetime is a date
        return value.isoformat()
    return repr(value)  # int and float: Python's shortest exact spelling is TOML's too, also of inf and nan


def _string(text: str) -> str:
    return '"' + "".join(_ESCAPES.get(char) or _plain(char) for char in text) + '"'


def _plain(char: str) -> str:
    return f"\\u{ord(char):04x}" if ord(char) < ord(" ") or char == "\x7f" else char
