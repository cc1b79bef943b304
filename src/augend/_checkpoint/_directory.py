"""A directory of checkpoints: their names, which sort by age, the lock, and what is removed when."""

from __future__ import annotations

import fcntl
import functools
import os
import re
import secrets
import time
import weakref
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, final

from augend._checkpoint._files import Files, append_line, make_directories, remove_tree
from augend._checkpoint._manifest import FILE
from augend.errors import CheckpointError

_NAME: Final = re.compile(r"(?P<sequence>\d{8,})-step-\d+(-rows-\d+)?")
_UNFINISHED, _OLD = ".saving-", ".old-"
_LOCK, _RESTARTS = "lock", "restarts.jsonl"


def names_in(directory: Path) -> list[str]:
    """Return the names of the checkpoints in a directory, the newest first.

    Raises:
        CheckpointError: The directory cannot be read.
    """
    found = []
    with _told(f"{directory} cannot be read"), suppress(FileNotFoundError, NotADirectoryError):
        found = [path.name for path in directory.iterdir() if _NAME.fullmatch(path.name)]
    return sorted(found, key=lambda name: (_sequence(name), name), reverse=True)


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


def unfinished(directory: Path, name: str, token: str) -> Path:
    """Return where a checkpoint is written before it gets its name: a place that no other job writes to.

    Args:
        directory: Of the checkpoints.
        name: What it will be called.
        token: Of the lock; a rank that outlived its own job does not know this one.
    """
    return directory / f"{_UNFINISHED}{name}-{token}"


def check_owner(directory: Path, token: str) -> None:
    """Refuse to write where the lock is another job's by now.

    Raises:
        CheckpointError: The directory's lock has another token, or none can be read.
    """
    found = ""
    with _told(f"{directory / _LOCK} cannot be read, and it must be on a disk that all ranks share"):
        found = (directory / _LOCK).read_text(errors="replace")
    if token not in found.split():
        raise CheckpointError(
            f"{directory} belongs to another job by now, or is not on a disk that all ranks share: its lock is that "
            f"of {found.partition(chr(10))[0] or 'nobody'!r}; this job writes nothing there any more"
        )


def sweep(files: Files, directory: Path) -> None:
    """Remove what saves and removals that did not end left behind. Only with the lock.

    Raises:
        CheckpointError: It cannot be removed.
    """
    with _told(f"what an interrupted job left in {directory} cannot be removed"):
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
    """Return how many restarts a directory has on record.

    Raises:
        CheckpointError: The record cannot be read.
    """
    with _told(f"{directory / _RESTARTS} cannot be read"), suppress(FileNotFoundError, NotADirectoryError):
        return (directory / _RESTARTS).read_bytes().count(b"\n")
    return 0


def record_restart(files: Files, directory: Path, line: str) -> None:
    """Add a restart to the record.

    Raises:
        CheckpointError: It cannot be written.
    """
    with _told(f"{directory / _RESTARTS} cannot be written"):
        new = not (directory / _RESTARTS).exists()
        append_line(files, directory / _RESTARTS, line)
        if new:
            files.fsync_directory(directory)


@contextmanager
def _told(what: str) -> Iterator[None]:
    """Say what could not be done where the system says why."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{what}: {error.strerror or error}") from error


@final
class Lock:
    """Keeps other jobs out of a directory for as long as it is held, or this process lives.

    A process forked from this one (the workers of a data loader are) does not hold it, however long it lives.

    Args:
        files: The file system.
        directory: Made if it is missing.

    Attributes:
        token: By which the ranks of this job know that the directory is theirs.

    Raises:
        CheckpointError: Another job is in it, or it cannot be written to.
    """

    def __init__(self, files: Files, directory: Path) -> None:
        unusable = f"checkpoints cannot be written to {directory}"
        with _told(unusable):
            make_directories(files, directory)
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            file = self._file = os.open(directory / _LOCK, flags, 0o666)
        self.token = secrets.token_hex(8)  # by which ranks know that the directory is still this job's
        self._close = weakref.finalize(self, _unlock, file)
        os.register_at_fork(after_in_child=functools.partial(_forget, weakref.ref(self)))
        try:
            with _told(unusable):
                _take(file, directory, self.token)
        except CheckpointError:
            self.release()
            raise

    def show(self) -> None:
        """Let other machines see whose the directory is. While it is held.

        Raises:
            CheckpointError: The disk does not take it.
        """
        with _told("the lock of the checkpoints cannot be written"):
            os.fsync(self._file)

    @property
    def held(self) -> bool:
        """Whether it is held, by this process."""
        return self._close.alive

    def release(self) -> None:
        """Let others in."""
        self._close()

    def forget(self) -> None:
        """Close the handle without letting others in: in a forked process, where the lock is its parent's."""
        if detached := self._close.detach():
            os.close(*detached[2])


def _take(file: int, directory: Path, token: str) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        holder = os.pread(file, 80, 0).decode(errors="replace").partition("\n")[0].strip()
        if holder.startswith(f"process {os.getpid()} "):
            what = "in use by another Checkpoint of this process", "close() it first"
        else:
            what = f"in use by another job ({holder or 'unknown'})", "wait until it ends, or take another directory"
        raise CheckpointError(f"{directory} is {what[0]}; two would overwrite each other: {what[1]}") from error
    os.ftruncate(file, 0)
    os.pwrite(file, f"process {os.getpid()} since {time.strftime('%F %T')}\n{token}\n".encode(), 0)


def _unlock(file: int) -> None:
    fcntl.flock(file, fcntl.LOCK_UN)  # closing alone would leave it with a fork that has not run any Python yet
    os.close(file)


def _forget(lock: weakref.ref[Lock]) -> None:
    held = lock()
    if held is not None:
        held.forget()
