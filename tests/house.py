"""The rules of the house, as functions from a source tree to its offences: who may import whom, and who may do what."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

LAYERS = {
    **dict.fromkeys(["errors", "_tally", "_numerics", "_kernels"], 0),
    **dict.fromkeys(["_group", "_placement"], 1),
    **dict.fromkeys(["losses", "schedules", "data", "metrics", "_accumulate", "optim"], 2),
    **dict.fromkeys(["_finish", "_accumulator", "_checkpoint"], 3),
    **dict.fromkeys(["_fit", "_progress", "_listeners"], 4),
    **dict.fromkeys(["models", "sources", "testing", "ggml", "gguf", "integrations", "report"], 5),
    **dict.fromkeys(["_config", "_cli", "__main__"], 6),
}
# Rooms of one layer do not know each other, but for these pairs: (who imports, whom).
NEIGHBOURS = {
    ("_placement", "_group"),
    *[("_accumulator", "_finish"), ("_checkpoint", "_accumulator")],
    *[("_progress", "_fit"), ("_listeners", "_fit")],
    ("ggml", "gguf"),
    *[("_cli", "_config"), ("__main__", "_cli"), ("__main__", "_config")],
}
COMMON = "errors"  # the one room that every other may enter, its neighbours of layer 0 too
LOOP = 4  # from this layer on, what lies below is used by its public addresses
SHELL = 6
FILE_LINES = 300  # both without docstrings, which may be as long as what they explain
FUNCTION_LINES = 45
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)

# The command line starts ranks, as a user's own script does.
DISTRIBUTED_ROOMS = {"_group", "_placement", "_checkpoint", "_cli"}
STEPPING_ROOMS = {"_finish", "optim"}
PRINTING_ROOMS = {"_progress", "_cli"}
SHELL_MODULES = {"argparse", "click", "tomllib", "tomli_w", "tomlkit", "typer"}


@dataclass(frozen=True)
class Import:
    """One name taken from one module of this package or another."""

    line: int
    written: str  # the module as it is written
    name: str | None  # the name taken from it; None for ``import module``
    target: str  # the module in which the name is found at last


@dataclass(frozen=True)
class Source:
    """One file of the package."""

    module: str
    path: Path
    tree: ast.Module

    @property
    def room(self) -> str:
        """The room of the file; empty for the front door itself."""
        return room_of(self.module)

    @property
    def layer(self) -> int:
        """The layer of the file's room; 0 for one that is not in the table, which has an offence of its own."""
        return LAYERS.get(self.room, 0)

    def at(self, line: int, offence: str) -> str:
        """Say where the offence is."""
        return f"{self.path.name}:{line} ({self.module}): {offence}"


class House:
    """All files of a package, and where its front door finds each name."""

    def __init__(self, package: Path, homes: Mapping[str, str]) -> None:
        self.name = package.name
        self.homes = homes
        self.sources = [
            Source(module_name(package, path), path, ast.parse(path.read_text("utf-8"), str(path)))
            for path in sorted(package.rglob("*.py"))
        ]

    @cached_property
    def modules(self) -> set[str]:
        """The dotted names of all files."""
        return {source.module for source in self.sources}

    @property
    def rooms(self) -> list[Source]:
        """All files but the front door."""
        return [source for source in self.sources if source.room]

    def imports(self, source: Source) -> Iterator[Import]:
        """Find the imports of a file wherever they stand: in functions and under TYPE_CHECKING too."""
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    yield Import(node.lineno, alias.name, None, alias.name)
            elif isinstance(node, ast.ImportFrom):
                written = "." * node.level + (node.module or "")
                for alias in node.names:
                    yield Import(node.lineno, written, alias.name, self.resolve(written, alias.name))
            elif isinstance(node, ast.Attribute) and dotted(node.value) == self.name:
                yield Import(node.lineno, self.name, node.attr, self.resolve(self.name, node.attr))

    def resolve(self, module: str, name: str) -> str:
        """Return the module in which a name is found: a submodule, the home of a front-door name, or ``module``."""
        if f"{module}.{name}" in self.modules:
            return f"{module}.{name}"
        return self.homes.get(name, module) if module == self.name else module

    def own_imports(self, source: Source) -> Iterator[Import]:
        """Find the imports of other rooms of this package."""
        for one in self.imports(source):
            if one.target.startswith(f"{self.name}.") and room_of(one.target) != source.room:
                yield one


def module_name(package: Path, path: Path) -> str:
    """Return the dotted name of a file of a package."""
    parts = path.relative_to(package.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room_of(module: str) -> str:
    """Return the room of a module: its first name below the package."""
    return ".".join(module.split(".")[1:2])


def dotted(node: ast.expr) -> str:
    """Return ``a.b.c`` for an expression that is nothing else, and an empty string for any other."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (front := dotted(node.value)):
        return f"{front}.{node.attr}"
    return ""


def is_private(name: str) -> bool:
    """Say whether a name is private to where it is defined; ``__version__`` and its like are not."""
    return name.startswith("_") and not name.endswith("__")


def unknown_rooms(house: House) -> Iterator[str]:
    """Every room has a layer."""
    for source in house.rooms:
        if source.room not in LAYERS:
            yield source.at(1, f"room {source.room!r} has no layer; give it one in tests/house.py")


def upward_imports(house: House) -> Iterator[str]:
    """A file imports only from rooms of lower layers; within a layer only named neighbours know each other."""
    for source in house.rooms:
        for one in house.own_imports(source):
            room = room_of(one.target)
            allowed = room == COMMON or (source.room, room) in NEIGHBOURS or LAYERS.get(room, SHELL) < source.layer
            if not allowed:
                yield source.at(one.line, f"layer {source.layer} imports {one.target} of layer {LAYERS.get(room)}")


def back_doors(house: House) -> Iterator[str]:
    """Another room is entered by its door, never by one of its private files, and lends no private name."""
    for source in house.rooms:
        for one in house.own_imports(source):
            if one.target.count(".") > 1:
                yield source.at(one.line, f"enters {one.target} past the door of its room")
            elif one.name is not None and is_private(one.name) and f"{house.name}.{one.name}" not in house.modules:
                yield source.at(one.line, f"takes the private name {one.name} from {one.target}")


def private_addresses(house: House) -> Iterator[str]:
    """Layers 4 to 6 use those below by public addresses, as a user would; layers 0 to 3 do not use the front door."""
    for source in house.rooms:
        for one in house.imports(source):
            front, room = one.written == house.name, room_of(one.target)
            lower = source.layer >= LOOP > LAYERS.get(room, SHELL)
            if source.layer < LOOP and front:
                yield source.at(one.line, f"uses the front door; import {one.name} from {one.target}")
            elif lower and is_private(room) and not (front and one.name in house.homes):
                yield source.at(one.line, f"uses {one.target}, which is no public address; import from augend")


def relative_imports(house: House) -> Iterator[str]:
    """Modules are imported by their full names."""
    for source in house.sources:
        for one in house.imports(source):
            if one.written.startswith("."):
                yield source.at(one.line, f"imports {one.name} relatively")


def cycles(house: House) -> Iterator[str]:
    """No module imports itself by any number of others."""
    known = {source.module: {one.target for one in house.imports(source)} for source in house.rooms}
    edges = {module: sorted(targets & known.keys() - {module}) for module, targets in known.items()}
    done: set[str] = set()

    def visit(module: str, path: list[str]) -> Iterator[str]:
        if module in path:
            yield " -> ".join([*path[path.index(module) :], module])
        elif module not in done:
            for target in edges[module]:
                yield from visit(target, [*path, module])
            done.add(module)

    for module in sorted(edges):
        yield from visit(module, [])


def distributed(house: House) -> Iterator[str]:
    """Only the rooms of ranks and files know torch.distributed."""
    for source in house.rooms:
        if source.room in DISTRIBUTED_ROOMS:
            continue
        for one in house.imports(source):
            if f"{one.written}.{one.name}.".startswith("torch.distributed."):
                yield source.at(one.line, "imports torch.distributed")
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Attribute) and dotted(node) == "torch.distributed":
                yield source.at(node.lineno, "uses torch.distributed")


def calls(source: Source) -> Iterator[tuple[int, str]]:
    """Find the plainly named functions that a file calls."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Call) and (name := dotted(node.func)):
            yield node.lineno, name


def steppers(house: House) -> Iterator[str]:
    """Only the finish, and wrappers that are optimizers themselves, call optimizer.step()."""
    for source in house.rooms:
        for line, name in calls(source):
            *owners, method = name.split(".")
            if source.room not in STEPPING_ROOMS and method == "step" and owners and "optim" in owners[-1]:
                yield source.at(line, f"calls {name}()")


def printers(house: House) -> Iterator[str]:
    """Only the progress lines and the command line write to the terminal."""
    for source in house.rooms:
        if source.room in PRINTING_ROOMS:
            continue
        for line, name in calls(source):
            if name in {"print", "Console", "rich.print"}:
                yield source.at(line, f"calls {name}()")
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Attribute) and dotted(node) in {"sys.stdout", "sys.stderr"}:
                yield source.at(node.lineno, f"uses {dotted(node)}")


def shells(house: House) -> Iterator[str]:
    """Only the shell knows TOML and arguments, and only it reads the environment."""
    for source in house.rooms:
        if source.layer == SHELL:
            continue
        for one in house.imports(source):
            if one.written.split(".")[0] in SHELL_MODULES or f"{one.written}.{one.name}" == "msgspec.toml":
                yield source.at(one.line, f"imports {one.written}")
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Attribute) and dotted(node) in {"os.environ", "os.getenv", "sys.argv"}:
                yield source.at(node.lineno, f"reads {dotted(node)}")


def doors(house: House) -> Iterator[str]:
    """The ``__init__`` of a room has a docstring, imports and ``__all__``, and nothing else."""
    for source in house.rooms:
        if source.path.name != "__init__.py":
            continue
        for node in source.tree.body:
            text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            names = isinstance(node, ast.Assign) and [dotted(target) for target in node.targets] == ["__all__"]
            if not (text or names or isinstance(node, ast.ImportFrom)):
                yield source.at(node.lineno, "does more than re-export")


def habits(house: House) -> Iterator[str]:
    """No hasattr (types say what there is), no bare or broad except, no assert for users."""
    for source in house.sources:
        for line, name in calls(source):
            if name == "hasattr":
                yield source.at(line, "calls hasattr()")
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Assert):
                yield source.at(node.lineno, "asserts")
            elif isinstance(node, ast.ExceptHandler) and (node.type is None or dotted(node.type) == "Exception"):
                yield source.at(node.lineno, "catches every exception")


def sizes(house: House) -> Iterator[str]:
    """Files and functions are short enough to be read at once."""
    for source in house.sources:
        documented = sum(docstring_lines(node) for node in ast.walk(source.tree) if isinstance(node, DOCUMENTED))
        if (lines := len(source.path.read_text("utf-8").splitlines()) - documented) > FILE_LINES:
            yield source.at(1, f"has {lines} lines; at most {FILE_LINES}")
        for node in ast.walk(source.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and function_lines(node) > FUNCTION_LINES:
                yield source.at(node.lineno, f"{node.name} has {function_lines(node)} lines; at most {FUNCTION_LINES}")


def function_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Count the lines of a function, signature included, docstring not."""
    return (node.end_lineno - node.lineno + 1) - docstring_lines(node)


def docstring_lines(node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Count the lines of a docstring: what documents a public name makes no file too long."""
    if ast.get_docstring(node, clean=False) is None:
        return 0
    return node.body[0].end_lineno - node.body[0].lineno + 1


RULES: list[Callable[[House], Iterator[str]]] = [
    unknown_rooms,
    upward_imports,
    back_doors,
    private_addresses,
    relative_imports,
    cycles,
    distributed,
    steppers,
    printers,
    shells,
    doors,
    habits,
    sizes,
]
