"""The few calls through which a save reaches the disk, so that each of them can be made to fail in a test."""

from __future__ import annotations

import errno
import os
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Final, final

_NEW: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_MORE: Final = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC


class Files(ABC):
    """What a save needs of a file system. Every method raises ``OSError`` where it fails."""

    @abstractmethod
    def create(self, path: Path) -> int:
        """Open a new file for writing; one that exists is an error. Returns its handle."""

    @abstractmethod
    def append(self, path: Path) -> int:
        """Open a file to write at its end, a new one if there is none. Returns its handle."""

    @abstractmethod
    def write(self, file: int, data: bytes | bytearray | memoryview) -> int:
        """Write some of the data; returns how many bytes."""

    @abstractmethod
    def fsync(self, file: int) -> None:
        """Wait until what was written is on disk."""

    @abstractmethod
    def close(self, file: int) -> None:
        """Give a handle back."""

    @abstractmethod
    def rename(self, source: Path, target: Path) -> None:
        """Give a file or directory another name at once."""

    @abstractmethod
    def fsync_directory(self, path: Path) -> None:
        """Wait until the names in a directory are on disk."""

    @abstractmethod
    def make_directory(self, path: Path) -> None:
        """Make a new directory; one that exists is an error."""

    @abstractmethod
    def list(self, path: Path) -> list[str]:
        """Return the names in a directory."""

    @abstractmethod
    def remove(self, path: Path) -> None:
        """Remove a file, or a link but not what it points to."""

    @abstractmethod
    def remove_directory(self, path: Path) -> None:
        """Remove an empty directory."""


@final
class LocalFiles(Files):
    """The file system of this machine."""

    def create(self, path: Path) -> int:
        """Open a new file for writing."""
        return os.open(path, _NEW, 0o666)

    def append(self, path: Path) -> int:
        """Open a file to write at its end."""
        return os.open(path, _MORE, 0o666)

    def write(self, file: int, data: bytes | bytearray | memoryview) -> int:
        """Write some of the data."""
        return os.write(file, data)

    def fsync(self, file: int) -> None:
        """Wait until what was written is on disk."""
        os.fsync(file)

    def close(self, file: int) -> None:
        """Give a handle back."""
        os.close(file)

    def rename(self, source: Path, target: Path) -> None:
        """Give a file or directory another name at once."""
        source.rename(target)

    def fsync_directory(self, path: Path) -> None:
        """Wait until the names in a directory are on disk."""
        directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)

    def make_directory(self, path: Path) -> None:
        """Make a new directory."""
        path.mkdir()

    def list(self, path: Path) -> list[str]:
        """Return the names in a directory."""
        return sorted(inner.name for inner in path.iterdir())

    def remove(self, path: Path) -> None:
        """Remove a file."""
        path.unlink()

    def remove_directory(self, path: Path) -> None:
        """Remove an empty directory."""
        path.rmdir()


def write_all(files: Files, file: int, data: bytes | bytearray | memoryview) -> None:
    """Write all of the data: one call may take only a part of it.

    Raises:
        OSError: A write failed, or took nothing.
    """
    rest = memoryview(data).cast("B")
    while rest:
        written = files.write(file, rest)
        if written <= 0:
            raise OSError(errno.EIO, "a write took no byte")
        rest = rest[written:]


def write_file(files: Files, path: Path, data: bytes) -> None:
    """Write a new file and wait until it is on disk; its name is not, until the directory is synced."""
    file = files.create(path)
    try:
        write_all(files, file, data)
        files.fsync(file)
    finally:
        files.close(file)


def append_line(files: Files, path: Path, line: str) -> None:
    """Add a line to a file and wait until it is on disk."""
    file = files.append(path)
    try:
        write_all(files, file, f"{line}\n".encode())
        files.fsync(file)
    finally:
        files.close(file)


def make_directories(files: Files, path: Path) -> None:
    """Make a directory and its missing parents, each on disk with its name."""
    missing = [one for one in (path, *path.parents) if not one.exists()]
    for one in reversed(missing):
        files.make_directory(one)
        files.fsync_directory(one.parent)


def remove_tree(files: Files, path: Path) -> None:
    """Remove a directory and all in it, or what stands in its place; links are removed, not followed."""
    if path.is_symlink() or not path.is_dir():
        files.remove(path)
        return
    for name in files.list(path):
        remove_tree(files, path / name)
    files.remove_directory(path)
