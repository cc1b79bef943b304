"""A directory of checkpoints: their names, which sort by age, the lock, and what is removed when."""

from __future__ import annotations

import fcntl
import os
import re
import time
import weakref
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Final, final

from augend._checkpoint._files import Files, append_line, make_directories, remove_tree
from augend._checkpoint._manifest import FILE
from augend.errors import CheckpointError

_NAME: Final = re.compile(r"(?P<sequence>\d{8,})-step-\d+(-rows-\d+)?")
_UNFINISHED, _OLD = ".saving-", ".old-"
_LOCK, _RESTARTS = "lock", "restarts.jsonl"


def names_in(directory: Path) -> list[str]:
    """Return the names of the checkpoints in a directory, the newest first."""
    with suppress(FileNotFoundError, NotADirectoryError):
        found = [path.name for path in directory.iterdir() if _NAME.fullmatch(path.name)]
        return sorted(found, key=_sequence, reverse=True)
    return []


def is_checkpoint(path: Path) -> bool:
    """Tell whether a path is one checkpoint rather than a directory of them."""
    return bool(_NAME.fullmatch(path.name)) or (path / FILE).exists()


def next_name(directory: Path, step: int, rows_done: int) -> str:
    """Return the name of the next checkpoint: newer than all that are there, good ones or not."""
    rows = f"-rows-{rows_done}" if rows_done else ""
    sequence = max((_sequence(name) for name in names_in(directory)), default=0) + 1
    return f"{sequence:08d}-step-{step}{rows}"


def _sequence(name: str) -> int:
    return int(name.partition("-")[0])


def unfinished(directory: Path, name: str) -> Path:
    """Return where a checkpoint is written before it gets its name."""
    return directory / f"{_UNFINISHED}{name}"


def sweep(files: Files, directory: Path) -> None:
    """Remove what saves and removals that did not end left behind. Only with the lock."""
    for name in files.list(directory):
        if name.startswith((_UNFINISHED, _OLD)):
            remove_tree(files, directory / name)


def prune(files: Files, directory: Path, keep: int, damaged: Collection[str]) -> None:
    """Remove checkpoints older than the newest ``keep`` that are not known to be damaged. Only with the lock.

    Each loses its name first, and only when that is on disk its files: so no name ever stands for a part.
    """
    names = names_in(directory)
    good = [name for name in names if name not in damaged]
    if len(good) <= keep:
        return
    oldest_kept = _sequence(good[keep - 1])
    removed = [name for name in names if _sequence(name) < oldest_kept]
    for name in removed:
        files.rename(directory / name, directory / f"{_OLD}{name}")
    files.fsync_directory(directory)
    for name in removed:
        remove_tree(files, directory / f"{_OLD}{name}")


def count_restarts(directory: Path) -> int:
    """Return how many restarts a directory has on record."""
    with suppress(FileNotFoundError):
        return (directory / _RESTARTS).read_bytes().count(b"\n")
    return 0


def record_restart(files: Files, directory: Path, line: str) -> None:
    """Add a restart to the record."""
    new = not (directory / _RESTARTS).exists()
    append_line(files, directory / _RESTARTS, line)
    if new:
        files.fsync_directory(directory)


@final
class Lock:
    """Keeps other jobs out of a directory for as long as it is held, or this process lives.

    Args:
        files: The file system.
        directory: Made if it is missing.

    Raises:
        CheckpointError: Another job is in it, or it cannot be written to.
    """

    def __init__(self, files: Files, directory: Path) -> None:
        try:
            make_directories(files, directory)
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            file = os.open(directory / _LOCK, flags, 0o666)
        except OSError as error:
            raise CheckpointError(f"checkpoints cannot be written to {directory}: {error.strerror}") from error
        self._close = weakref.finalize(self, os.close, file)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.pread(file, 80, 0).decode(errors="replace").strip()
            self.release()
            raise CheckpointError(
                f"{directory} is in use by another job ({holder or 'unknown'}); two would overwrite each other: "
                "wait until it ends, or take another directory"
            ) from error
        os.ftruncate(file, 0)
        os.pwrite(file, f"process {os.getpid()} since {time.strftime('%F %T')}\n".encode(), 0)

    def release(self) -> None:
        """Let others in."""
        self._close()
