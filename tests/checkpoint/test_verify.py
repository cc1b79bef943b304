"""Files are opened only where they are plain, and parts of a tensor must fill it, each element once."""

from __future__ import annotations

import itertools
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from disk import open_handles
from hypothesis import given
from hypothesis import strategies as st
from little import Little, three_saves

import augend
from augend._checkpoint._manifest import from_bytes
from augend._checkpoint._verify import _exactly_once, plain_file, read_manifest, verified
from augend.errors import CheckpointError

sizes = st.lists(st.integers(0, 3), max_size=3)


@st.composite
def boxes(draw: st.DrawFn) -> tuple[list[int], list[list[tuple[int, int]]]]:
    """Draw a shape and boxes: sometimes cuts of it, some of them changed."""
    shape = draw(sizes)
    cuts = [sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=2))}) for size in shape]
    sides = [[*itertools.pairwise(cut)] or [(0, 0)] for cut in cuts]
    whole = [list(box) for box in itertools.product(*sides)]
    for _ in range(draw(st.integers(0, 2))):
        change = draw(st.sampled_from(["drop", "again", "other", "dims"]))
        place = draw(st.integers(0, max(len(whole) - 1, 0)))
        if change == "drop":
            whole[place : place + 1] = []
        elif change == "again":
            whole += whole[place : place + 1]
        else:
            dims = len(shape) + (change == "dims")
            begins = draw(st.lists(st.integers(0, 3), min_size=dims, max_size=dims))
            whole.append([(begin, begin + draw(st.integers(0, 3))) for begin in begins])
    return shape, draw(st.permutations(whole))


@given(boxes())
def test_boxes_fill_a_tensor_exactly_once(drawn: tuple[list[int], list[list[tuple[int, int]]]]) -> None:
    """By counting each element, which is the definition."""
    shape, parts = drawn
    counts = np.zeros(shape, dtype=int)
    fits = bool(parts)
    for box in parts:
        inside = len(box) == len(shape) and all(end <= size for (_, end), size in zip(box, shape, strict=True))
        fits = fits and inside
        if inside:
            counts[tuple(slice(*side) for side in box)] += 1
    assert (fits and bool((counts == 1).all())) == _exactly_once(shape, parts)


def test_a_tensor_of_nothing_must_be_one_that_torch_can_have() -> None:
    """Without elements no file need be large, and the sizes may still be beyond what torch can count."""
    assert _exactly_once([1 << 40, 0], [[(0, 1 << 40), (0, 0)]])
    assert not _exactly_once([1 << 62, 1 << 62, 0], [[(0, 1 << 62), (0, 1 << 62), (0, 0)]])


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Return a directory of three checkpoints."""
    three_saves(tmp_path / "run")
    return tmp_path / "run"


def test_a_plain_file_is_lent_and_closed(tmp_path: Path) -> None:
    """Its content can be read; the handle is given back, also after an error."""
    (tmp_path / "file").write_bytes(b"abc")
    handles = open_handles()
    with plain_file(tmp_path / "file") as file:
        assert b"abc" == file.read()
    with pytest.raises(KeyError), plain_file(tmp_path / "file"):
        raise KeyError
    assert handles == open_handles()


def test_nothing_else_is_opened(tmp_path: Path) -> None:
    """A directory, a pipe, a link, a device, nothing: CheckpointError names it as asked, without a wait or a leak."""
    (tmp_path / "directory").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "file")
    handles = open_handles()
    for name, problem in (
        ("directory", "is not a plain file"),
        ("pipe", "is not a plain file"),
        ("link", "cannot be opened as a plain file: Too many levels of symbolic links"),
        ("missing", "is missing"),
        ("file/inside", "cannot be opened as a plain file: Not a directory"),
    ):
        for shown in ("", "part/shown"):
            expected = f"{shown or Path(name).name} {problem}"
            with pytest.raises(CheckpointError, match=expected), plain_file(tmp_path / name, shown):
                pytest.fail("it was opened")
    with pytest.raises(CheckpointError, match="null is not a plain file"), plain_file(Path("/dev/null")):
        pytest.fail("it was opened")
    assert handles == open_handles()


def test_what_is_verified_is_the_manifest(run: Path) -> None:
    """A good checkpoint gives what its manifest says, with or without the files being read; no handle is left."""
    newest = max(path for path in run.iterdir() if path.is_dir())
    handles = open_handles()
    expected = from_bytes((newest / "manifest.json").read_bytes())
    assert [expected] * 2 == [verified(newest), read_manifest(newest)]
    assert handles == open_handles()
    (newest / "state.json").unlink()
    assert expected == read_manifest(newest)
    with pytest.raises(CheckpointError, match=f"{newest}: state.json is missing"):
        verified(newest)


def test_a_checkpoint_can_be_copied_moved_and_renamed(run: Path, tmp_path: Path) -> None:
    """It is whole by itself; its name is for people."""
    newest = max(path for path in run.iterdir() if path.is_dir())
    shutil.copytree(newest, tmp_path / "best")
    augend.verify(tmp_path / "best")
    little = Little(tmp_path / "other")
    assert tmp_path / "best" == little.run.load(tmp_path / "best").path


def test_what_is_no_directory_is_no_checkpoint(run: Path, tmp_path: Path) -> None:
    """A file, a link, nothing, a name that no system takes: CheckpointError names the path."""
    newest = max(path for path in run.iterdir() if path.is_dir())
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(newest)
    for name in ("file", "link", "missing"):
        with pytest.raises(CheckpointError, match=f"{tmp_path / name}: it is no directory"):
            read_manifest(tmp_path / name)
    with pytest.raises(CheckpointError, match="cannot be read: File name too long"):
        read_manifest(tmp_path / ("x" * 300))


def test_all_damaged_ones_are_named_at_once(run: Path) -> None:
    """A directory is verified to its end."""
    paths = sorted(path for path in run.iterdir() if path.is_dir())
    (paths[0] / "state.json").unlink()
    (paths[2] / "more").touch()
    with pytest.raises(CheckpointError, match=rf"{paths[2]}: 'more' does not belong.*; {paths[0]}: state\.json is mis"):
        augend.verify(run)
