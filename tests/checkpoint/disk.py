"""Disks that lose power, fill up and fail: file systems for the tests of checkpoints."""

from __future__ import annotations

import copy
import errno
import itertools
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from augend._checkpoint._files import Files, LocalFiles

KINDS: Final = (
    *("create", "append", "write", "fsync", "close", "rename", "fsync_directory"),
    *("make_directory", "list", "remove", "remove_directory"),
)


class Watched(Files):
    """The local file system, with one place through which every call goes."""

    def __init__(self) -> None:
        self._local = LocalFiles()

    def call(self, kind: str, *arguments: Any) -> Any:
        """Make one call."""
        return getattr(self._local, kind)(*arguments)

    def create(self, path):
        return self.call("create", path)

    def append(self, path):
        return self.call("append", path)

    def write(self, file, data):
        return self.call("write", file, data)

    def fsync(self, file):
        return self.call("fsync", file)

    def close(self, file):
        return self.call("close", file)

    def rename(self, source, target):
        return self.call("rename", source, target)

    def fsync_directory(self, path):
        return self.call("fsync_directory", path)

    def make_directory(self, path):
        return self.call("make_directory", path)

    def list(self, path):
        return self.call("list", path)

    def remove(self, path):
        return self.call("remove", path)

    def remove_directory(self, path):
        return self.call("remove_directory", path)


class Counting(Watched):
    """Counts the calls of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def call(self, kind, *arguments):
        self.calls[kind] += 1
        return super().call(kind, *arguments)


class Faulty(Watched):
    """Fails once: at the n-th call of one kind (from 0), before or after it has done what it should.

    Args:
        kind: Which call.
        number: Which of them.
        code: The error that it gives.
        when: "before" it did anything, or "after" it did all.
    """

    def __init__(self, kind: str, number: int, code: int = errno.ENOSPC, when: str = "before") -> None:
        super().__init__()
        self.failed = False
        self._left = number
        self._kind, self._code, self._when = kind, code, when

    def call(self, kind, *arguments):
        if kind != self._kind:
            return super().call(kind, *arguments)
        self._left -= 1
        if self._left != -1:
            return super().call(kind, *arguments)
        self.failed = True
        if self._when == "after" or kind == "close":  # Linux gives the handle back even where close fails
            done = super().call(kind, *arguments)
            if kind in {"create", "append"}:
                super().call("close", done)
        raise OSError(self._code, os.strerror(self._code))


class Unsynced(Watched):
    """Does not wait for the disk, which takes most of a test's time."""

    def call(self, kind, *arguments):
        return None if kind.startswith("fsync") else super().call(kind, *arguments)


class Short(Watched):
    """Writes at most so many bytes a call."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def call(self, kind, *arguments):
        if kind == "write":
            file, data = arguments
            return super().call(kind, file, memoryview(data)[: self._most])
        return super().call(kind, *arguments)


# ---------------------------------------------------------------- a disk that loses power

NO_NAME: Final = -1


@dataclass
class Node:
    """A file or a directory on a disk, as far as the disk has been told.

    Attributes:
        names: What a directory holds for certain: name to number of the node; None for a file.
        waiting: Changes of the directory that are not synced: each a list of (name, number or NO_NAME) that holds as
            a whole or not at all.
        safe: Bytes of a file that are synced.
        bytes: All bytes that were written.
    """

    names: dict[str, int] | None = None
    waiting: list[list[tuple[str, int]]] = field(default_factory=list)
    safe: bytes = b""
    bytes: bytes = b""


@dataclass(frozen=True)
class Event:
    """One call that changed something: its kind and the nodes and names that it concerns."""

    kind: str
    node: int
    change: tuple[tuple[str, int], ...] = ()
    data: bytes = b""


class Recording(Watched):
    """Keeps a log of everything that reaches a directory, and what was there before, which is safe.

    Args:
        root: The directory.
    """

    def __init__(self, root: Path) -> None:
        super().__init__()
        self.log: list[Event] = []
        self.before: dict[int, Node] = {}
        self._numbers: dict[Path, int] = {}
        self._files: dict[int, int] = {}
        self._next = itertools.count()
        self._look(root)

    def _look(self, path: Path) -> int:
        number = self._numbers[path] = next(self._next)
        if path.is_dir():
            self.before[number] = Node({inner.name: self._look(inner) for inner in sorted(path.iterdir())})
        else:
            self.before[number] = Node(safe=path.read_bytes(), bytes=path.read_bytes())
        return number

    def disk_after(self, events: int) -> dict[int, Node]:
        """Return what the disk was told after so many events of the log."""
        return disk_after(self.before, self.log[:events])

    def call(self, kind, *arguments):
        done = super().call(kind, *arguments)
        match kind:
            case "create" | "append" | "make_directory":
                path = arguments[0]
                if path not in self._numbers:
                    number = self._numbers[path] = next(self._next)
                    self.log.append(Event(kind, self._numbers[path.parent], ((path.name, number),)))
                if kind != "make_directory":
                    self._files[done] = self._numbers[path]
            case "write":
                self.log.append(Event(kind, self._files[arguments[0]], data=bytes(arguments[1][:done])))
            case "fsync":
                self.log.append(Event(kind, self._files[arguments[0]]))
            case "fsync_directory":
                self.log.append(Event(kind, self._numbers[arguments[0]]))
            case "rename":
                self._renamed(*arguments)
            case "remove" | "remove_directory":
                path = arguments[0]
                del self._numbers[path]
                self.log.append(Event(kind, self._numbers[path.parent], ((path.name, NO_NAME),)))
        return done

    def _renamed(self, source: Path, target: Path) -> None:
        assert source.parent == target.parent, "a rename between directories is two changes, which this log has not"
        for path in [one for one in self._numbers if one.is_relative_to(source)]:
            self._numbers[target / path.relative_to(source)] = self._numbers.pop(path)
        change = ((source.name, NO_NAME), (target.name, self._numbers[target]))
        self.log.append(Event("rename", self._numbers[source.parent], change))


def disk_after(before: dict[int, Node], log: Sequence[Event]) -> dict[int, Node]:
    """Return what a disk was told by a log."""
    nodes = copy.deepcopy(before)
    for event in log:
        node = nodes[event.node]
        match event.kind:
            case "create" | "append" | "make_directory":
                ((_, number),) = event.change
                nodes[number] = Node(names={} if event.kind == "make_directory" else None)
                node.waiting.append(list(event.change))
            case "rename" | "remove" | "remove_directory":
                node.waiting.append(list(event.change))
            case "write":
                node.bytes += event.data
            case "fsync":
                node.safe = node.bytes
            case "fsync_directory":
                for change in node.waiting:
                    _apply(node.names, change)
                node.waiting = []
    return nodes


def _apply(names: dict[str, int], change: Iterable[tuple[str, int]]) -> None:
    for name, number in change:
        names.pop(name, None)
        if number != NO_NAME:
            names[name] = number


def waiting_changes(nodes: dict[int, Node]) -> int:
    """Return how many changes of directories are not synced."""
    return sum(len(node.waiting) for node in nodes.values())


def torn_files(nodes: dict[int, Node]) -> int:
    """Return how many files have bytes that are not synced."""
    return sum(node.safe != node.bytes for node in nodes.values())


def after_power_loss(nodes: dict[int, Node], reached: Sequence[bool], torn: Sequence[float]) -> Tree:
    """Return the tree that is found when the power is back.

    Args:
        nodes: What the disk was told.
        reached: For each change that was not synced, whether it reached the disk.
        torn: For each file with bytes that were not synced, the share of them that did; the length may be there
            before the bytes are, which read as zeros then: a share below 0 says so.
    """
    changes, shares = iter(reached), iter(torn)
    names: dict[int, dict[str, int]] = {}
    contents: dict[int, bytes] = {}
    for number, node in nodes.items():
        if node.names is None:
            contents[number] = node.safe
            if node.safe != node.bytes:
                rest, share = node.bytes[len(node.safe) :], next(shares)
                contents[number] += bytes(len(rest)) if share < 0 else rest[: round(share * len(rest))]
        else:
            names[number] = dict(node.names)
            for change in node.waiting:
                if next(changes):
                    _apply(names[number], change)
    return _tree(0, names, contents)


Tree = dict[str, Any]


def _tree(number: int, names: dict[int, dict[str, int]], contents: dict[int, bytes]) -> Tree:
    return {
        name: contents[inner] if inner in contents else _tree(inner, names, contents)
        for name, inner in sorted(names[number].items())
    }


def put(tree: Tree, directory: Path) -> None:
    """Make a directory that holds a tree."""
    directory.mkdir()
    for name, inner in tree.items():
        if isinstance(inner, bytes):
            (directory / name).write_bytes(inner)
        else:
            put(inner, directory / name)


def open_handles() -> int:
    """Return how many files this process has open."""
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208  # no path is wanted


def files_in(directory: Path) -> Iterator[Path]:
    """Yield the files below a directory, sorted."""
    yield from sorted(path for path in directory.rglob("*") if path.is_file() and not path.is_symlink())
