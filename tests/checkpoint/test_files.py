"""The calls that reach the disk: all bytes are written, names are new, links are not followed."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from disk import Recording, Short, Watched, open_handles, put
from hypothesis import given
from hypothesis import strategies as st

from augend._checkpoint._files import (
    LocalFiles,
    append_line,
    make_directories,
    remove_tree,
    write_all,
    write_file,
)


class Scripted(Watched):
    """Takes as many bytes at each write as it is told, and keeps them."""

    def __init__(self, takes: list[int]) -> None:
        super().__init__()
        self.taken = b""
        self._takes = iter(takes)

    def call(self, kind, *arguments):
        assert kind == "write"
        part = bytes(arguments[1][: next(self._takes)])
        self.taken += part
        return len(part)


@given(st.binary(max_size=50), st.lists(st.integers(1, 9), min_size=50, max_size=50))
def test_all_is_written_however_little_is_taken_at_once(data: bytes, takes: list[int]) -> None:
    """Every byte once, in order; data of any element size counts in bytes."""
    files = Scripted(takes)
    write_all(files, -1, data)
    assert data == files.taken
    wide = Scripted(takes * 8)
    write_all(wide, -1, memoryview(data + bytes(-len(data) % 8)).cast("d"))
    assert data + bytes(-len(data) % 8) == wide.taken


@pytest.mark.parametrize("took", [0, -1])
def test_a_write_that_takes_nothing_ends(took: int) -> None:
    """No loop for ever: OSError."""
    files = Watched()
    files.write = lambda file, data: took
    with pytest.raises(OSError, match="a write took no byte"):
        write_all(files, -1, b"x")


def test_a_new_file_is_written_and_synced_before_it_is_closed(tmp_path: Path) -> None:
    """create, write, fsync, in this order; the name is for the caller to sync."""
    files = Recording(tmp_path)
    write_file(files, tmp_path / "new", b"content")
    assert ["create", "write", "fsync"] == [event.kind for event in files.log]
    assert b"content" == (tmp_path / "new").read_bytes()


def test_what_is_there_is_never_written_over(tmp_path: Path) -> None:
    """A file, a directory, a link to somewhere, a link to nowhere: FileExistsError, untouched."""
    (tmp_path / "file").write_text("mine")
    (tmp_path / "directory").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "file")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    handles = open_handles()
    for name in ("file", "directory", "link", "dangling"):
        with pytest.raises(FileExistsError):
            write_file(LocalFiles(), tmp_path / name, b"other")
        with pytest.raises(FileExistsError):
            LocalFiles().make_directory(tmp_path / name)
    assert handles == open_handles()
    assert ("mine", False) == ((tmp_path / "file").read_text(), (tmp_path / "nowhere").exists())


def test_lines_are_added_at_the_end_and_synced(tmp_path: Path) -> None:
    """A missing file is made; one that is there grows; a link is not followed; one byte at a time is enough."""
    files = Recording(tmp_path)
    for line in ("one", "zwölf"):
        append_line(files, tmp_path / "log", line)
    append_line(Short(1), tmp_path / "log", "three")
    assert "one\nzwölf\nthree\n" == (tmp_path / "log").read_text("utf-8")
    assert ["append", "write", "fsync", "write", "fsync"] == [event.kind for event in files.log]
    (tmp_path / "link").symlink_to(tmp_path / "log")
    with pytest.raises(OSError, match="symbolic links"):
        append_line(files, tmp_path / "link", "four")


def test_directories_are_made_from_the_top_each_with_its_name_on_disk(tmp_path: Path) -> None:
    """Every missing one, its parent synced before the next is made; what is there is left alone."""
    files = Recording(tmp_path)
    make_directories(files, tmp_path / "a" / "b" / "c")
    assert ["make_directory", "fsync_directory"] * 3 == [event.kind for event in files.log]
    made = [event.node for event in files.log]
    assert made[0::2] == made[1::2]
    make_directories(files, tmp_path / "a" / "b" / "c")
    make_directories(files, tmp_path / "a" / "b" / "d")
    assert 8 == len(files.log)
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        make_directories(files, tmp_path / "file" / "a")


def test_a_tree_is_removed_and_links_are_not_followed(tmp_path: Path) -> None:
    """Files, directories and links inside, at any depth; what links point to stays."""
    outside = tmp_path / "outside"
    put({"keep": b"mine", "inner": {"keep": b"mine"}}, outside)
    place = tmp_path / "place"
    put({"a": b"1", "b": {"c": {"d": b"2"}, "empty": {}}}, place)
    (place / "link").symlink_to(outside)
    (place / "b" / "file").symlink_to(outside / "keep")
    (place / "b" / "dangling").symlink_to(tmp_path / "nowhere")
    os.mkfifo(place / "pipe")
    remove_tree(LocalFiles(), place)
    assert [outside] == list(tmp_path.iterdir())
    assert ["inner/keep", "keep"] == sorted(
        path.relative_to(outside).as_posix() for path in outside.rglob("*") if path.is_file()
    )


def test_what_is_no_directory_is_removed_alone(tmp_path: Path) -> None:
    """A file in the place of a tree goes; a link goes, and not what it points to."""
    put({"keep": b"mine"}, tmp_path / "outside")
    (tmp_path / "link").symlink_to(tmp_path / "outside")
    (tmp_path / "file").touch()
    for name in ("link", "file"):
        remove_tree(LocalFiles(), tmp_path / name)
    assert ["outside"] == [path.name for path in tmp_path.iterdir()]
    assert b"mine" == (tmp_path / "outside" / "keep").read_bytes()
    with pytest.raises(FileNotFoundError):
        remove_tree(LocalFiles(), tmp_path / "nowhere")


def test_names_are_listed_in_order(tmp_path: Path) -> None:
    """The same order on every file system."""
    for name in ("b", "a", "c", ".d"):
        (tmp_path / name).touch()
    assert [".d", "a", "b", "c"] == LocalFiles().list(tmp_path)


MISSING: dict[str, Callable[[LocalFiles, Path], object]] = {
    "create": lambda files, path: files.create(path / "x"),
    "append": lambda files, path: files.append(path / "x"),
    "write": lambda files, path: files.write(1 << 20, b"x"),
    "fsync": lambda files, path: files.fsync(1 << 20),
    "close": lambda files, path: files.close(1 << 20),
    "rename": lambda files, path: files.rename(path, path.with_name("other")),
    "fsync_directory": lambda files, path: files.fsync_directory(path),
    "make_directory": lambda files, path: files.make_directory(path / "x"),
    "list": lambda files, path: files.list(path),
    "remove": lambda files, path: files.remove(path),
    "remove_directory": lambda files, path: files.remove_directory(path),
}


@pytest.mark.parametrize("call", MISSING)
def test_every_call_fails_with_an_oserror(tmp_path: Path, call: str) -> None:
    """As its users rely on."""
    with pytest.raises(OSError, match="No such file|Bad file descriptor"):
        MISSING[call](LocalFiles(), tmp_path / "missing")
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        LocalFiles().fsync_directory(tmp_path / "file")
