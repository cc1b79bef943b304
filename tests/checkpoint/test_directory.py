"""A directory of checkpoints: names sort by age, the newest good ones stay, and one job at a time is in it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import weakref
from pathlib import Path

import pytest
from disk import Faulty, Recording, Unsynced, open_handles, put
from hypothesis import given
from hypothesis import strategies as st

from augend._checkpoint._directory import (
    Lock,
    _forget,
    count_restarts,
    is_checkpoint,
    names_in,
    next_name,
    prune,
    record_restart,
    sweep,
    unfinished,
)
from augend._checkpoint._files import LocalFiles
from augend.errors import CheckpointError

FOREIGN = [
    *("lock", "restarts.jsonl", "1-step-2", "00000001", "00000001-step", "00000001-step-2-rows", "00000001-step-x"),
    *("a00000001-step-1", "00000001-step-1 ", "00000001-step-1\n", "-0000001-step-1", "latest", ".old-00000009-step-1"),
    *(".saving-00000009-step-1", "00000001-step-2-rows-3-x", "checkpoints"),
]


@given(st.lists(st.tuples(st.integers(0, 10**9), st.integers(0, 30)), unique_by=lambda one: one[0], max_size=8))
def test_names_sort_by_age(drawn: list[tuple[int, int]]) -> None:
    """By their number, also beyond eight digits, and whatever else lies there; the next one is newer than all."""
    with tempfile.TemporaryDirectory() as place:
        directory = Path(place)
        names = [f"{sequence:08d}-step-{step}" for sequence, step in sorted(drawn, reverse=True)]
        for name in (*reversed(names), *FOREIGN):
            (directory / name).mkdir()
        assert names == names_in(directory)
        following = next_name(directory, 5, 0)
        (directory / following).mkdir()
        assert [following, *names] == names_in(directory)
        assert max((sequence for sequence, _ in drawn), default=0) + 1 == int(following.partition("-")[0])


@pytest.mark.parametrize(
    ("there", "following"),
    [
        ([], "00000001-step-4-rows-6"),
        (["00000007-step-9"], "00000008-step-4-rows-6"),
        (["99999999-step-1"], "100000000-step-4-rows-6"),
        (["99999999-step-1", "100000000-step-1"], "100000001-step-4-rows-6"),
    ],
)
def test_the_next_name_is_newer_than_all(tmp_path: Path, there: list[str], following: str) -> None:
    """Good or damaged, directories or not; step and rows are for people."""
    for name in there:
        (tmp_path / name).touch()
    assert following == next_name(tmp_path, 4, 6)
    assert following.replace("-rows-6", "") == next_name(tmp_path, 4, 0)


def test_no_directory_has_no_names(tmp_path: Path) -> None:
    """A missing directory, or a file: nothing was ever saved there; one that cannot be read is an error."""
    (tmp_path / "file").touch()
    assert [[]] * 3 == [names_in(tmp_path / name) for name in ("missing", "file", "file/inside")]
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(CheckpointError, match="loop cannot be read: Too many levels of symbolic links"):
        names_in(tmp_path / "loop")


def test_equal_numbers_have_an_order(tmp_path: Path) -> None:
    """Names that someone copied here: the same order on every file system."""
    for name in ("00000001-step-2", "00000001-step-10", "00000001-step-2-rows-4"):
        (tmp_path / name).mkdir()
    assert ["00000001-step-2-rows-4", "00000001-step-2", "00000001-step-10"] == names_in(tmp_path)


def test_a_checkpoint_is_known_by_name_or_manifest(tmp_path: Path) -> None:
    """One that was renamed is one still; a directory of them is none."""
    (tmp_path / "best").mkdir()
    (tmp_path / "best" / "manifest.json").touch()
    assert is_checkpoint(tmp_path / "best")
    assert is_checkpoint(tmp_path / "00000001-step-2")
    assert not is_checkpoint(tmp_path)


@given(
    st.lists(st.sampled_from(["good", "known", "unknown"]), max_size=7),
    st.integers(1, 4),
    st.booleans(),
)
def test_the_newest_good_ones_are_never_removed(kinds: list[str], keep: int, synced: bool) -> None:
    """Whatever is damaged, known or not, and however many are kept: what was just saved stays, and keep of the good."""
    with tempfile.TemporaryDirectory() as place:
        directory = Path(place)
        names = [f"{index:08d}-step-{index}" for index in range(1, len(kinds) + 2)]
        kinds = [*kinds, "good"]  # the one that was just saved
        for name in names:
            put({"manifest.json": b"", "model": {"x": b""}}, directory / name)
        damaged = {name for name, kind in zip(names, kinds, strict=True) if kind == "known"}
        prune(LocalFiles() if synced else Unsynced(), directory, keep, damaged)
        left = names_in(directory)
        believed = [name for name in reversed(names) if name not in damaged]
        assert believed[:keep] == [name for name in left if name not in damaged]
        oldest = believed[keep - 1] if len(believed) > keep else names[0]
        assert [name for name in reversed(names) if name >= oldest] == left
        assert sorted(left) == sorted(path.name for path in directory.iterdir())


def test_a_name_goes_and_is_gone_on_disk_before_any_file(tmp_path: Path) -> None:
    """All renames, a sync, then the removals."""
    for name in ("00000001-step-1", "00000002-step-2", "00000003-step-3"):
        put({"manifest.json": b"", "model": {"x": b""}}, tmp_path / name)
    files = Recording(tmp_path)
    prune(files, tmp_path, 1, ())
    kinds = [event.kind for event in files.log]
    assert ["rename", "rename", "fsync_directory"] == kinds[:3]
    assert {"remove", "remove_directory"} == set(kinds[3:])


def test_leftovers_are_swept_whatever_they_are(tmp_path: Path) -> None:
    """Directories, files and links that an interrupted job left; nothing else, and not what a link points to."""
    put({"keep": b""}, tmp_path / "00000001-step-1")
    put({"model": {"x": b""}, "state.json": b""}, unfinished(tmp_path, "00000002-step-1", "abc"))
    put({}, tmp_path / ".old-00000001-step-0")
    (tmp_path / ".saving-file").touch()
    (tmp_path / ".old-link").symlink_to(tmp_path / "00000001-step-1")
    (tmp_path / ".hidden").touch()
    sweep(LocalFiles(), tmp_path)
    assert [".hidden", "00000001-step-1"] == sorted(path.name for path in tmp_path.iterdir())
    assert (tmp_path / "00000001-step-1" / "keep").exists()


def test_restarts_are_counted(tmp_path: Path) -> None:
    """One line each, on disk with the name of its file; none is none."""
    assert [0, 0] == [count_restarts(tmp_path), count_restarts(tmp_path / "missing")]
    files = Recording(tmp_path)
    for number in range(3):
        assert number == count_restarts(tmp_path)
        record_restart(files, tmp_path, f'{{"step": {number}}}')
    assert 3 == count_restarts(tmp_path)
    expected = ["append", "write", "fsync", "fsync_directory", *["write", "fsync"] * 2]
    assert expected == [event.kind for event in files.log]
    with pytest.raises(CheckpointError, match=r"restarts\.jsonl cannot be written: No space left"):
        record_restart(Faulty("write", 0), tmp_path, "{}")
    (tmp_path / "restarts.jsonl").unlink()
    (tmp_path / "restarts.jsonl").mkdir()
    with pytest.raises(CheckpointError, match=r"restarts\.jsonl cannot be read: Is a directory"):
        count_restarts(tmp_path)


# ---------------------------------------------------------------- the lock


def test_two_jobs_in_one_process_keep_each_other_out(tmp_path: Path) -> None:
    """The second is refused, and told by whom; when the first lets go, or is forgotten, the next may enter."""
    handles = open_handles()
    lock = Lock(LocalFiles(), tmp_path / "new" / "run")
    with pytest.raises(CheckpointError, match="run is in use by another Checkpoint of this process"):
        Lock(LocalFiles(), tmp_path / "new" / "run")
    lock.release()
    lock.release()
    second = Lock(LocalFiles(), tmp_path / "new" / "run")
    del second
    Lock(LocalFiles(), tmp_path / "new" / "run").release()
    assert handles == open_handles()


def test_another_directory_is_another_lock(tmp_path: Path) -> None:
    """Two runs beside each other do not know each other."""
    locks = [Lock(LocalFiles(), tmp_path / name) for name in ("a", "b")]
    for lock in locks:
        lock.release()


HOLD = """
import fcntl, os, sys
file = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
fcntl.flock(file, fcntl.LOCK_EX)
os.write(file, sys.argv[2].encode())
print("held", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize(("note", "holder"), [("process 7 since now\n", "process 7 since now"), ("", "unknown")])
def test_another_process_keeps_us_out_until_it_dies(tmp_path: Path, note: str, holder: str) -> None:
    """However it ends: a kill is enough, no file has to be removed."""
    command = [sys.executable, "-c", HOLD, str(tmp_path / "lock"), note]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert "held\n" == other.stdout.readline()
        with pytest.raises(CheckpointError, match=re.escape(f"in use by another job ({holder})")):
            Lock(LocalFiles(), tmp_path)
        other.kill()
    Lock(LocalFiles(), tmp_path).release()
    assert (tmp_path / "lock").read_text().startswith(f"process {os.getpid()} since ")


FORK = """
import os, sys, time
from pathlib import Path
from augend._checkpoint._directory import Lock
from augend._checkpoint._files import LocalFiles

place = Path(sys.argv[1])
gone = Lock(LocalFiles(), place / "gone")
del gone  # what is no more is not closed again in the other process
held = Lock(LocalFiles(), place / "run")
read, write = os.pipe()
if os.fork() == 0:  # a worker of a data loader
    held.release()  # and whatever a worker does with what it inherited
    os.close(read)
    os.write(write, b"x")
    time.sleep(60)
    os._exit(0)
os.read(read, 1)
try:
    Lock(LocalFiles(), place / "run")
    print("let in", flush=True)
except RuntimeError:
    print("kept out", flush=True)
sys.stdin.read()
"""


def test_a_worker_neither_opens_a_lock_nor_keeps_it_when_its_job_is_killed(tmp_path: Path) -> None:
    """A forked process shares nothing with the lock: the job has it alone, and its death frees it at once."""
    command = [sys.executable, "-c", FORK, str(tmp_path)]
    path = {"PYTHONPATH": ":".join(path for path in sys.path if path)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    job = subprocess.Popen(command, env=path, text=True, start_new_session=True, **pipes)
    try:
        assert "kept out\n" == job.stdout.readline()
        with pytest.raises(CheckpointError, match=f"in use by another job .process {job.pid} since"):
            Lock(LocalFiles(), tmp_path / "run")
        job.kill()
        job.wait()
        Lock(LocalFiles(), tmp_path / "run").release()
    finally:
        os.killpg(job.pid, signal.SIGKILL)  # the worker, which has outlived it
        job.stdin.close()
        job.stdout.close()


def test_a_lock_that_is_forgotten_stays_with_whoever_else_has_it(tmp_path: Path) -> None:
    """What a forked process does at its begin: it closes its own handle, and lets nobody in."""
    handles = open_handles()
    lock = Lock(LocalFiles(), tmp_path)
    reference = weakref.ref(lock)
    parents = os.dup(lock._close.peek()[2][0])
    _forget(reference)
    _forget(reference)
    lock.release()
    with pytest.raises(CheckpointError, match="in use by another Checkpoint of this process"):
        Lock(LocalFiles(), tmp_path)
    os.close(parents)
    Lock(LocalFiles(), tmp_path).release()
    del lock
    _forget(reference)
    assert handles == open_handles()


def test_a_lock_is_given_back_whoever_else_has_its_handle(tmp_path: Path) -> None:
    """Also where a fork that never came to run any Python still has it."""
    lock = Lock(LocalFiles(), tmp_path)
    other = os.dup(lock._close.peek()[2][0])
    lock.release()
    Lock(LocalFiles(), tmp_path).release()
    os.close(other)


def test_what_cannot_be_locked_is_said(tmp_path: Path) -> None:
    """A directory, a pipe or a link in the place of the lock: CheckpointError in words, no wait, nothing written."""
    handles = open_handles()
    for name in ("directory", "link", "pipe"):
        (tmp_path / name).mkdir()
    (tmp_path / "directory" / "lock").mkdir()
    (tmp_path / "link" / "lock").symlink_to(tmp_path / "victim")
    (tmp_path / "victim").write_text("mine")
    os.mkfifo(tmp_path / "pipe" / "lock")
    for name in ("directory", "link", "pipe"):
        with pytest.raises(CheckpointError, match=f"checkpoints cannot be written to .*{name}: "):
            Lock(LocalFiles(), tmp_path / name)
    assert "mine" == (tmp_path / "victim").read_text()
    with pytest.raises(CheckpointError, match="cannot be written to .*a/b: No space left"):
        Lock(Faulty("make_directory", 1), tmp_path / "a" / "b")
    assert handles == open_handles()
