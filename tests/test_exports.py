"""The public names: complete, sorted, the same for Python and for type checkers, found without waiting for torch."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import augend

PACKAGE = Path(augend.__file__).parent
PUBLIC_MODULES = sorted(name for name in augend.__all__ if name not in augend._HOMES)
DOORS = sorted(
    ".".join(("augend", *path.parent.relative_to(PACKAGE).parts))
    for path in PACKAGE.rglob("__init__.py")
    if path.parent != PACKAGE
)


def source_of(module: str) -> ast.Module:
    """Parse a module of the package without importing it."""
    path = PACKAGE.joinpath(*module.split(".")[1:])
    return ast.parse((path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text("utf-8"))


def public_names(module: str) -> set[str]:
    """Return what a module defines without an underscore; for a door, what it takes from its own rooms too."""
    names: set[str] = set()
    for node in source_of(module).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names.update(target.id for target in node.targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
        elif isinstance(node, ast.TypeAlias if sys.version_info >= (3, 12) else ()):
            names.add(node.name.id)
        elif isinstance(node, ast.ImportFrom) and node.module.startswith(module):
            names.update(alias.asname or alias.name for alias in node.names)
    return {name for name in names if not name.startswith("_")}


def declared_names(module: str) -> list[str]:
    """Return ``__all__`` as it is written; empty where there is none."""
    for node in source_of(module).body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets):
            return ast.literal_eval(node.value)
    return []


def in_order(names: set[str]) -> list[str]:
    """Sort as the linter does: constants, then classes, then functions."""
    return sorted(names, key=lambda name: (not name.isupper(), name[0].islower(), name))


@pytest.mark.parametrize("module", sorted({*DOORS, *(f"augend.{name}" for name in PUBLIC_MODULES)}))
def test_all_is_what_is_public(module: str) -> None:
    """``__all__`` of every public module, and of every door of a room, is the sorted list of its public names."""
    assert in_order(public_names(module)) == declared_names(module)


def test_front_door_is_sorted() -> None:
    """``augend.__all__`` is sorted, and ``dir`` shows all of it."""
    assert sorted(set(augend.__all__)) == augend.__all__
    assert set(augend.__all__) <= set(dir(augend))


def test_front_door_has_a_home_for_every_name() -> None:
    """Every name with a home is public, and what has none is a module."""
    assert set(augend._HOMES) <= set(augend.__all__)
    assert [
        "data",
        "errors",
        "ggml",
        "gguf",
        "losses",
        "metrics",
        "models",
        "optim",
        "schedules",
        "sources",
        "testing",
    ] == PUBLIC_MODULES


def test_stub_says_what_the_front_door_does() -> None:
    """The stub that type checkers read has the same names from the same homes, and the same ``__all__``."""
    stub = ast.parse((PACKAGE / "__init__.pyi").read_text("utf-8"))
    homes = {
        alias.asname: node.module for node in stub.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    declared = [ast.literal_eval(node.value) for node in stub.body if isinstance(node, ast.Assign)]
    assert {name: augend._HOMES.get(name, "augend") for name in augend.__all__} == homes
    assert [augend.__all__] == declared


@pytest.mark.parametrize("name", augend.__all__)
def test_front_door_finds(name: str) -> None:
    """Every name of the front door is found, and is the one of its home."""
    home = augend._HOMES.get(name)
    expected = getattr(importlib.import_module(home), name) if home else importlib.import_module(f"augend.{name}")
    assert expected is getattr(augend, name)


def test_unknown_name_is_an_attribute_error() -> None:
    """A name that is not public is refused as by any module, so ``from augend import`` fails as usual."""
    with pytest.raises(AttributeError, match="module 'augend' has no attribute 'Akkumulator'"):
        augend.Akkumulator  # noqa: B018  reading it is the test


@pytest.mark.parametrize(
    "command", [["-c", "import augend; dir(augend)"], ["-m", "augend", "--help"], ["-m", "augend", "fit", "--help"]]
)
def test_torch_is_not_imported_before_work_starts(command: list[str]) -> None:
    """``import augend`` and ``augend --help`` do not import torch: Python's own list of imports has none."""
    done = subprocess.run([sys.executable, "-X", "importtime", *command], capture_output=True, text=True, check=False)
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert 0 == done.returncode, done.stderr[-500:]
    assert "augend" in imported
    assert not {"torch", "numpy"} & imported
