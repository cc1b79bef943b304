"""metrics.jsonl on resume: one line for each step and validation of the history, all others aside, none lost."""

from __future__ import annotations

import json
import os
import tempfile
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from augend import Estimate
from augend._fit import Begin, History, Step, Validation
from augend._listeners import json_lines


class CrashError(Exception):
    """The machine is gone."""


def step(number: int, **changes) -> Step:
    """Make step ``number``, which counts ``number + 1`` items."""
    values = {
        "step": number, "epoch": 0, "rows": 8, "losses": {"loss": Estimate(2.5, 0.25, 96)}, "count": number + 1,
        "norm": 0.5, "scale": 1.0, "skipped": False, "update": number + 1, "lr": 1e-3, "seconds": 0.125,
    }  # fmt: skip
    return Step(**{**values, **changes})


def validation(number: int) -> Validation:
    """Make a validation after step ``number``."""
    return Validation(step=number, epoch=0, estimates={"loss": Estimate(2.0, 0.5, 10)}, seconds=0.5)


def told(steps: int) -> list[Step | Validation]:
    """Return the events of so many steps, with a validation after every second one."""
    return [event for number in range(steps) for event in (step(number), *([validation(number)] if number % 2 else []))]


def begin(events, restarts: int = 1) -> Begin:
    """Begin with a history of these events."""
    steps = tuple(event for event in events if isinstance(event, Step))
    validations = tuple(event for event in events if isinstance(event, Validation))
    return Begin(steps=99, history=History(steps=steps, validations=validations, stopped="so far"), restarts=restarts)


def write(path: Path, events) -> bytes:
    """Let the listener write events, and return the bytes."""
    listen = json_lines(path)
    path.touch()
    for event in events:
        listen(event)
    return path.read_bytes()


def lost(folder: Path) -> list[bytes]:
    """Return what was moved aside, oldest first; nothing else is beside the file."""
    assert {"metrics.jsonl"} >= {path.name for path in folder.iterdir() if "lost" not in path.name}
    number = len(list(folder.glob("metrics.lost-*.jsonl")))
    return [(folder / f"metrics.lost-{one}.jsonl").read_bytes() for one in range(1, number + 1)]


def comparable(lines: bytes) -> list[dict]:
    """Read lines without what only the process knows."""
    read = [json.loads(line) for line in lines.splitlines()]
    return [{name: value for name, value in line.items() if name not in {"restarts", "memory_bytes"}} for line in read]


@given(st.integers(0, 5), st.integers(0, 5), st.integers(0, 60), st.data())
def test_lines_are_kept_moved_or_written_again(known, more, torn, data):
    """Known lines stay to the byte or are written again, all others are moved in their order, whatever is missing."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "metrics.jsonl"
        lines = write(path, told(known + more)).splitlines(keepends=True)
        present = [line for line in lines if data.draw(st.booleans())]
        torn_line = write(Path(folder) / "other", [step(99)])[:torn]
        (Path(folder) / "other").unlink()
        before = b"".join([*present, torn_line])
        path.write_bytes(before)
        json_lines(path)(begin(told(known), restarts=7))
        after = path.read_bytes().splitlines(keepends=True)
        held = lines[: len(told(known))]
        assert comparable(b"".join(held)) == comparable(b"".join(after))
        assert [line for line in held if line in present] == [line for line in after if line in present]
        again = [json.loads(line) for line in after if line not in present and b"validation" not in line]
        assert all(line["restarts"] == 7 and line["memory_bytes"] is None for line in again)
        rest = b"".join([line for line in present if line not in held] + [torn_line])
        assert ([rest] if rest else []) == lost(Path(folder))
        assert sum(range(known + 1)) == sum(line.get("count", 0) for line in comparable(b"".join(after)))


def test_nothing_is_written_where_nothing_is_to_be_cut(tmp_path):
    """A file that agrees with the history is not touched; one that is not there, and should not be, is not made."""
    path = tmp_path / "metrics.jsonl"
    json_lines(path)(begin([]))
    assert not path.exists()
    before = write(path, told(3))
    stamp = path.stat()
    json_lines(path)(begin(told(3)))
    assert (before, stamp.st_ino, stamp.st_mtime_ns) == (
        path.read_bytes(),
        path.stat().st_ino,
        path.stat().st_mtime_ns,
    )
    assert [] == lost(tmp_path)


def test_without_a_checkpoint_the_file_is_continued(tmp_path):
    """A Begin that knows of no history cuts nothing."""
    path = tmp_path / "metrics.jsonl"
    before = write(path, told(3))
    listen = json_lines(path)
    listen(Begin(steps=9))
    listen(step(3))
    assert path.read_bytes().startswith(before)
    assert 6 - 1 == path.read_bytes().count(b"\n")


def test_each_cut_has_a_file_of_its_own(tmp_path):
    """The rest goes to the first free number, and the restarts are on the lines that follow."""
    path = tmp_path / "metrics.jsonl"
    for restarts in (1, 2):
        listen = json_lines(path)
        listen(begin([step(0)], restarts=restarts))
        listen(step(1))
        listen(step(2, seconds=float(restarts)))
    json_lines(path)(begin([step(0), step(1)], restarts=3))
    assert [[1, 2], [2]] == [[line["step"] for line in comparable(one)] for one in lost(tmp_path)]
    assert [1, 2] == [json.loads(line)["restarts"] for line in path.read_bytes().splitlines()]


@pytest.mark.parametrize(
    "changes",
    [
        {"count": 2.0},
        {"seconds": 0.5},
        {"digests": {"a": "0"}},
        {"losses": {"loss": Estimate(2.25, 0.25, 96)}},
        {"skipped": True},
    ],
)
def test_a_line_that_tells_another_story_is_moved(tmp_path, changes):
    """A line of a known step with another number in it, from a run that is forgotten, gives way to the history's."""
    path = tmp_path / "metrics.jsonl"
    other = write(path, [step(1, **changes)])
    json_lines(path)(begin([step(1)]))
    assert [other] == lost(tmp_path)
    assert step(1).count == json.loads(path.read_bytes())["count"]
    assert step(1).loss.value == json.loads(path.read_bytes())["loss"]


def test_lines_of_an_earlier_augend_stay(tmp_path):
    """A line without ``offers`` is that of a batch that was offered once, and of no other."""
    path = tmp_path / "metrics.jsonl"
    before = write(path, [step(0), step(1)]).replace(b'"offers": 1, ', b"")
    path.write_bytes(before)
    json_lines(path)(begin([step(0), step(1, offers=2)]))
    first, second = path.read_bytes().splitlines(keepends=True)
    assert before.splitlines(keepends=True) == [first, *lost(tmp_path)]
    assert 2 == json.loads(second)["offers"]


@pytest.mark.parametrize("junk", [b"\n", b"\0\0\0\n", b"\xff\n", b"[1]\n", b"null\n", b"{}\n", b'{"step": 0}\n', b"{"])
def test_what_is_no_line_of_ours_is_moved(tmp_path, junk):
    """Garbage is no error; a second line of one step is one too many."""
    path = tmp_path / "metrics.jsonl"
    mine = write(path, [step(0), step(1)])
    first, second = mine.splitlines(keepends=True)
    path.write_bytes(first + junk.rstrip(b"{") + first + second + (junk if junk == b"{" else b""))
    json_lines(path)(begin([step(0), step(1)]))
    assert mine == path.read_bytes()
    assert [(b"" if junk == b"{" else junk) + first + (junk if junk == b"{" else b"")] == lost(tmp_path)


def test_a_line_without_its_end_is_torn(tmp_path):
    """A last line that lacks only its end may be a part of a number: it is moved, and written again."""
    path = tmp_path / "metrics.jsonl"
    mine = write(path, [step(0), step(1)])
    path.write_bytes(mine[:-1])
    json_lines(path)(begin([step(0), step(1)]))
    assert comparable(mine) == comparable(path.read_bytes())
    assert [mine.splitlines()[1]] == lost(tmp_path)


def test_order_is_that_of_the_history(tmp_path):
    """Lines that stand in another order are put in theirs."""
    path = tmp_path / "metrics.jsonl"
    mine = write(path, told(4))
    path.write_bytes(b"".join(reversed(mine.splitlines(keepends=True))))
    json_lines(path)(begin(told(4)))
    assert (mine, []) == (path.read_bytes(), lost(tmp_path))


class Disk:
    """Counts the calls that reach the disk, and crashes before or after one of them."""

    def __init__(self, monkeypatch, crash_at: int = -1) -> None:
        self.log: list[str] = []
        self._crash_at = crash_at
        fsync, replace = os.fsync, Path.replace

        def synced(file: int) -> None:
            name = Path(f"/proc/self/fd/{file}").readlink()
            self.count(f"sync {name.name if name.is_file() else 'directory'}")
            fsync(file)
            self.count("")

        def replaced(path: Path, target: Path) -> None:
            self.count(f"{path.name} -> {target.name}")
            replace(path, target)
            self.count("")

        monkeypatch.setattr(os, "fsync", synced)
        monkeypatch.setattr(Path, "replace", replaced)

    def count(self, call: str) -> None:
        """Note a call, or the end of one, and crash if it is its turn."""
        if len(self.log) == self._crash_at:
            raise CrashError
        self.log.append(call)


def test_what_is_moved_is_on_disk_before_the_file_is_cut(tmp_path, monkeypatch):
    """Bytes first, then the name, then the directory; the rest before the file."""
    path = tmp_path / "metrics.jsonl"
    write(path, told(4))
    disk = Disk(monkeypatch)
    json_lines(path)(begin(told(2)))
    assert [
        "sync metrics.lost-1.jsonl.new",
        "metrics.lost-1.jsonl.new -> metrics.lost-1.jsonl",
        "sync directory",
        "sync metrics.jsonl.new",
        "metrics.jsonl.new -> metrics.jsonl",
        "sync directory",
    ] == [call for call in disk.log if call]


@pytest.mark.parametrize("crash_at", range(12))
def test_a_crash_at_any_call_loses_no_line(tmp_path, crash_at):
    """Before and after each call every line is somewhere; the next resume ends as if there had been no crash."""
    path = tmp_path / "metrics.jsonl"
    before = write(path, told(5)) + b'{"step": 5, "ep'
    path.write_bytes(before)
    held = before.splitlines(keepends=True)[: len(told(3))]
    with pytest.MonkeyPatch.context() as monkeypatch:
        Disk(monkeypatch, crash_at)
        with pytest.raises(CrashError):
            json_lines(path)(begin(told(3)))
    files = [path, *tmp_path.glob("metrics.lost-?.jsonl")]
    there = sum((Counter(file.read_bytes().splitlines()) for file in files), Counter())
    assert not Counter(before.splitlines()) - there
    json_lines(path)(begin(told(3)))
    assert b"".join(held) == path.read_bytes()
    assert [before[len(b"".join(held)) :]] == lost(tmp_path)
