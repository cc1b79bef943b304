"""Pages that have a row for each item of somebody else's software: their tables, and what is wrong with them.

A row has the item, augend's name for it, which must exist, what differs, and the tests that show it, which must exist.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib
import inspect
import json
import re
import types
import typing
from pathlib import Path

import augend

ROOT = Path(__file__).parent.parent


def items_of(name: str) -> list[str]:
    """Return the names of a list of items in ``golden``."""
    return [one["name"] for one in json.loads((ROOT / "tests" / "golden" / name).read_text("utf-8"))["items"]]


# ------------------------------------------------------------------ the page


def table_rows(page: str, header: list[str]) -> list[list[str]]:
    """Return the cells of the rows of every table that has a header."""
    found, inside = [], False
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")] if line.startswith("|") else []
        inside = cells == header or (inside and bool(cells))
        if inside and cells != header and set("".join(cells)) - set("- :"):
            found.append(cells)
    return found


def spans(cell: str) -> list[str]:
    """Return what stands in a cell as code."""
    return re.findall(r"`([^`]+)`", cell)


def problems(page: str, items: list[str], header: list[str]) -> list[str]:
    """Return what is wrong with a page: an item without a row, a row without an item, a name or test that is none."""
    found, seen = [], []
    for row in table_rows(page, header):
        if len(row) != len(header) or len(spans(row[0])) != 1 or not row[2]:
            found.append(f"not a row of an item: {row}")
            continue
        (item,) = spans(row[0])
        seen.append(item)
        names, tests = spans(row[1]), spans(row[3])
        if not names or not tests:
            found.append(f"{item} names no object or no test")
        found += [f"{item}: {fault}" for name in names if (fault := fault_of_name(name))]
        found += [f"{item}: there is no test {test}" for test in tests if not is_test(test)]
    found += [f"{item} has no row" for item in items if item not in seen]
    found += [f"{item} is no item" for item in seen if item not in items]
    found += [f"{item} has {seen.count(item)} rows" for item in sorted(set(seen)) if seen.count(item) > 1]
    return found


def is_test(where: str) -> bool:
    """Tell whether ``path::name`` is a test function."""
    path, _, name = where.partition("::")
    return name.startswith("test_") and name in functions_of(path)


@functools.cache
def functions_of(path: str) -> frozenset[str]:
    """Return the names of the functions at the top of a file of tests; none if there is no such file."""
    if not path.startswith("tests/") or not (ROOT / path).is_file():
        return frozenset()
    tree = ast.parse((ROOT / path).read_text("utf-8"))
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef))


# ------------------------------------------------------------------ names


@dataclasses.dataclass(frozen=True)
class Value:
    """An object that exists only at run time: what is known of it is its type."""

    kind: object


def fault_of_name(name: str) -> str | None:
    """Return why an expression such as ``augend.Accumulator.finish(empty="one").count`` names nothing, or None."""
    try:
        resolved(ast.parse(name, mode="eval").body)
    except (LookupError, SyntaxError, ImportError) as error:
        return f"`{name}` does not exist: {error}"
    return None


def resolved(node: ast.expr) -> object:
    """Return what an expression stands for, running nothing: a module, class or function, or the type of a value.

    Raises:
        LookupError: There is no such attribute, keyword argument or value of one.
    """
    match node:
        case ast.Name(id="augend"):
            return augend
        case ast.Attribute(value=value, attr=attribute):
            return attribute_of(resolved(value), attribute)
        case ast.Call(func=function, args=[], keywords=keywords):
            return value_of_call(resolved(function), keywords)
        case _:
            raise LookupError(f"{ast.unparse(node)} is no chain of augend's attributes and calls")


def attribute_of(owner: object, name: str) -> object:
    """Return what an attribute of a module, of a class, or of a value of that class is."""
    if isinstance(owner, types.ModuleType):
        return getattr(owner, name) if name in dir(owner) else importlib.import_module(f"{owner.__name__}.{name}")
    kind = owner.kind if isinstance(owner, Value) else owner
    if not isinstance(kind, type):
        raise LookupError(f"{kind} has no attributes to look into")
    if dataclasses.is_dataclass(kind) and name in {field.name for field in dataclasses.fields(kind)}:
        return Value(typing.get_type_hints(kind)[name])
    try:
        found = inspect.getattr_static(kind, name)
    except AttributeError as error:
        raise LookupError(str(error)) from error
    if isinstance(found, property):
        return Value(typing.get_type_hints(found.fget)["return"])
    return found.__func__ if isinstance(found, classmethod | staticmethod) else found


def value_of_call(function: object, keywords: list[ast.keyword]) -> Value:
    """Return what a call gives, after checking its keyword arguments, and their values where only some words are."""
    if not isinstance(function, type | types.FunctionType):
        raise LookupError(f"{function} cannot be called")
    hints = typing.get_type_hints(function.__init__ if isinstance(function, type) else function)
    allowed = inspect.signature(function).parameters
    for keyword in keywords:
        if keyword.arg not in allowed:
            raise LookupError(f"{function.__name__} takes no {keyword.arg}=")
        words = typing.get_args(hints[keyword.arg]) if typing.get_origin(hints[keyword.arg]) is typing.Literal else ()
        if words and ast.literal_eval(keyword.value) not in words:
            raise LookupError(f"{keyword.arg}= is one of {words}")
    return Value(function if isinstance(function, type) else hints["return"])
