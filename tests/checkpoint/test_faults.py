"""Disks fill up, fail and write short: a save then says so, and what was saved before is untouched."""

from __future__ import annotations

import errno
import os
import resource
from collections import Counter
from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from disk import KINDS, Counting, Faulty, Short, Unsynced, Watched, open_handles
from little import Little, loaded

import augend
from augend.errors import CheckpointError

FAULTS = [(errno.ENOSPC, "before"), (errno.EIO, "after")]


def begun(directory: Path, **options) -> tuple[Little, Path, str]:
    """Return a run that saved twice and went on, its newest checkpoint, and what was live when that was saved.

    Something that an interrupted save left is there, too, and the next save has a checkpoint too many to remove.
    """
    little = Little(directory, Unsynced(), keep=2, **options)
    for _ in range(2):
        little.train(2)
        path = little.run.save()
    little.run.wait()
    digest = little.digest()
    little.train(1)
    (directory / ".saving-00000001-step-0").mkdir()
    (directory / ".saving-00000001-step-0" / "state.json").touch()
    return little, path, digest


def calls_of_a_save(directory: Path) -> Counter[str]:
    """Count the calls of a save that sweeps, writes and removes."""
    little, _, _ = begun(directory)
    little.run._files = counting = Counting()
    little.run.save()
    little.run.close()
    return counting.calls


def brought_back(path: Path) -> str:
    """Return what another run has when it has loaded a checkpoint, without a lock."""
    with torch.random.fork_rng(devices=[]):
        little = Little(path.parent.with_name("nowhere"))
        little.run.load(path)
        return little.digest()


def unfinished(directory: Path) -> list[str]:
    """Return the names that are no checkpoints yet, or no longer."""
    return [path.name for path in directory.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "append"])
def test_a_fault_at_any_call_is_one_error_and_costs_no_checkpoint(tmp_path: Path, kind: str) -> None:
    """ENOSPC or EIO, before or after the work: CheckpointError; older ones intact, later saves work, no leaks."""
    number = calls_of_a_save(tmp_path / "count")[kind]
    assert number
    cases = [(n, code, when) for n in range(number) for code, when in FAULTS]
    for case, (n, code, when) in enumerate(cases):
        directory = tmp_path / str(case)
        little, newest, saved = begun(directory)
        live, handles = little.digest(), open_handles()
        little.run._files = faulty = Faulty(kind, n, code, when)
        with pytest.raises(CheckpointError) as caught:
            little.run.save()
        assert (True, handles, live) == (faulty.failed, open_handles(), little.digest()), (n, when)
        assert str(directory) in str(caught.value)
        assert os.strerror(code) in str(caught.value)
        augend.verify(directory)
        assert saved == brought_back(newest)
        little.run._files = Unsynced()
        path = little.run.save()
        little.run.close()
        assert live == brought_back(path)
        assert [] == unfinished(directory)
        augend.verify(directory)


@pytest.mark.parametrize("call", ["save", "save_if_due", "wait", "close"])
def test_a_fault_in_the_background_is_heard_at_the_next_call(tmp_path: Path, call: str) -> None:
    """The save returns, and the next call of whatever kind raises CheckpointError, once; then saves work again."""
    for case, (kind, n) in enumerate([("write", 0), ("fsync", 3), ("rename", 0), ("rename", 1)]):
        directory = tmp_path / str(case)
        little, newest, saved = begun(directory, background=True)
        little.run._files = Faulty(kind, n)
        little.run.save()
        futures.wait([little.run._saving._future])
        with pytest.raises(CheckpointError, match="No space left"):
            getattr(little.run, call)()
        assert saved == brought_back(newest)
        little.run._files = Unsynced()
        path = little.run.save()
        little.run.close()
        assert little.digest() == brought_back(path)
        augend.verify(directory)


@pytest.mark.parametrize("most", [1, 777])
def test_short_writes_are_gone_on_with(tmp_path: Path, most: int) -> None:
    """A disk that takes one byte at a call gets every byte of the checkpoint, the same as at once."""
    little = Little(tmp_path / "run", Short(most))
    little.train(2)
    path = little.run.save()
    little.run.close()
    augend.verify(path)
    assert little.digest() == loaded(tmp_path / "run")[1]


def test_a_write_that_takes_nothing_is_an_error(tmp_path: Path) -> None:
    """Zero bytes written, for ever: CheckpointError, not a loop."""
    little = Little(tmp_path, Short(0))
    with pytest.raises(CheckpointError, match="a write took no byte"):
        little.run.save()
    little.run.close()
    assert (None, Little(tmp_path).digest()) == loaded(tmp_path)


class Interrupted(Watched):
    """Is interrupted by something that is no error of the disk, at the n-th write."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self._left = number

    def call(self, kind, *arguments):
        if kind == "write":
            self._left -= 1
            if self._left == -1:
                raise KeyboardInterrupt
        return super().call(kind, *arguments)


@pytest.mark.parametrize("number", range(5))
def test_an_interrupt_in_a_save_leaves_no_handle_and_no_part(tmp_path: Path, number: int) -> None:
    """What ends a save without being a disk's error passes through; nothing leaks, and the next save is good."""
    little, newest, saved = begun(tmp_path / "run")
    handles = open_handles()
    little.run._files = Interrupted(number)
    with pytest.raises(KeyboardInterrupt):
        little.run.save()
    assert handles == open_handles()
    assert saved == brought_back(newest)
    little.run._files = Unsynced()
    little.run.save()
    little.run.close()
    augend.verify(tmp_path / "run")
    assert [] == unfinished(tmp_path / "run")


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Let the system itself refuse every file beyond a size."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("size", [0, 1, 700, 2000])
def test_a_disk_that_the_system_lets_nobody_fill_further(tmp_path: Path, size: int) -> None:
    """The real thing, not a double: short writes up to the limit, then EFBIG: CheckpointError, older ones intact."""
    directory = tmp_path / "run"
    little, newest, saved = begun(directory)
    little.run._files = Unsynced()
    with largest_file(size), pytest.raises(CheckpointError, match="File too large") as caught:
        little.run.save()
    assert str(directory) in str(caught.value)
    assert saved == brought_back(newest)
    assert live_after(little) == brought_back(directory)


def live_after(little: Little) -> str:
    """Save, close, and return what was live."""
    little.run.save()
    little.run.close()
    return little.digest()


def test_a_full_disk_refuses_a_job_in_words(tmp_path: Path) -> None:
    """The lock cannot be written, nor the restart be recorded: CheckpointError, and nobody is kept out after it."""
    directory = tmp_path / "run"
    little, _, _ = begun(directory)
    live = live_after(little)
    for call in ("load_latest", "save", "save_if_due"):
        refused = Little(directory)
        with largest_file(0), pytest.raises(CheckpointError, match="cannot be written to .*run: File too large"):
            getattr(refused.run, call)()
    resumed = Little(directory, Faulty("append", 0))
    with pytest.raises(CheckpointError, match=r"restarts\.jsonl cannot be written: No space left"):
        resumed.run.load_latest()
    resumed.run.close()
    assert live == loaded(directory)[1]


@pytest.mark.parametrize("call", ["load_latest", "save", "save_if_due"])
def test_a_file_in_the_place_of_the_directory_is_said(tmp_path: Path, call: str) -> None:
    """Where no directory can be, one CheckpointError says where and why."""
    (tmp_path / "file").write_text("mine")
    for directory in (tmp_path / "file", tmp_path / "file" / "deeper" / "run"):
        little = Little(directory)
        with pytest.raises(CheckpointError, match=f"cannot be written to {directory}: Not a directory"):
            getattr(little.run, call)()
    assert "mine" == (tmp_path / "file").read_text()


@pytest.mark.parametrize("kind", ["list", "remove", "remove_directory"])
def test_what_cannot_be_swept_on_loading_is_said(tmp_path: Path, kind: str) -> None:
    """A fault while leftovers are removed: CheckpointError from load_latest, and the live objects are as they were."""
    little, _, _ = begun(tmp_path / "run")
    live = little.digest()
    little.run._files = Faulty(kind, 0)
    with pytest.raises(CheckpointError, match="left in .*run cannot be removed: No space left"):
        little.run.load_latest()
    assert live == little.digest()
    little.run.close()
