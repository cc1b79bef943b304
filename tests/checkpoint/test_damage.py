"""Whatever happens to a checkpoint's files is found before any of it is used, and named; the one before is used."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from disk import files_in
from little import Little, loaded, three_saves

import augend
from augend.errors import CheckpointError

NAMES = [
    "manifest.json",
    "state.json",
    "grads/shard-00001-model-00001-of-00001.safetensors",
    "model/shard-00001-model-00001-of-00001.safetensors",
    "optimizer/shard-00001-model-00001-of-00001.safetensors",
]
FLIPS = 100


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """Return a directory of three checkpoints, and what was live when each was saved; copied by those who damage it."""
    directory = tmp_path_factory.mktemp("saved") / "run"
    return directory, three_saves(directory)


@pytest.fixture
def run(saved: tuple[Path, list[str]], tmp_path: Path) -> tuple[Path, list[Path]]:
    """Return a copy of that directory, and its checkpoints, the oldest first."""
    directory = tmp_path / "run"
    shutil.copytree(saved[0], directory)
    return directory, sorted(path for path in directory.iterdir() if path.is_dir())


def test_the_files_of_a_checkpoint_are_these(run: tuple[Path, list[Path]]) -> None:
    """So what follows damages all of them."""
    for path in run[1]:
        assert sorted(NAMES) == sorted(file.relative_to(path).as_posix() for file in files_in(path))
    augend.verify(run[0])


@pytest.mark.parametrize("name", NAMES)
def test_one_flipped_byte_anywhere_is_found(run: tuple[Path, list[Path]], name: str) -> None:
    """At 100 places from the first byte to the last of every file, one bit or all: verify names the file."""
    path = run[1][-1]
    good = (path / name).read_bytes()
    last = len(good) - 1
    for place in sorted({round(number * last / (FLIPS - 1)) for number in range(FLIPS)}):
        for mask in (1 << place % 8, 255):
            bad = bytearray(good)
            bad[place] ^= mask
            (path / name).write_bytes(bad)
            with pytest.raises(CheckpointError) as caught:
                augend.verify(path)
            assert str(path) in str(caught.value)
            assert name in str(caught.value)
    (path / name).write_bytes(good)
    augend.verify(path)


def shortened(size: Callable[[int], int]) -> Callable[[Path, Path], None]:
    """Return what leaves so many of a file's bytes."""
    return lambda file, _: os.truncate(file, size(file.stat().st_size))


def deleted(file: Path, _: Path) -> None:
    """Remove the file."""
    file.unlink()


def extended(file: Path, _: Path) -> None:
    """Add a byte at the end."""
    file.write_bytes(file.read_bytes() + b"\n")


def linked(file: Path, _: Path) -> None:
    """Put a link to an identical file in its place."""
    beside = file.parents[2] / f"beside-{file.name}"
    file.rename(beside)
    file.symlink_to(beside)


def made_directory(file: Path, _: Path) -> None:
    """Put a directory in its place."""
    file.unlink()
    file.mkdir()


def made_fifo(file: Path, _: Path) -> None:
    """Put a pipe in its place, on which a reader would wait for ever."""
    file.unlink()
    os.mkfifo(file)


def swapped(file: Path, older: Path) -> None:
    """Put the file of an older checkpoint of the same run in its place."""
    shutil.copyfile(older, file)


DAMAGES = {
    "emptied": shortened(lambda size: 0),
    "cut to 1": shortened(lambda size: 1),
    "cut to half": shortened(lambda size: size // 2),
    "cut by 1": shortened(lambda size: size - 1),
    "deleted": deleted,
    "extended": extended,
    "linked": linked,
    "directory": made_directory,
    "fifo": made_fifo,
    "swapped": swapped,
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", NAMES)
def test_a_damaged_file_is_named_and_the_checkpoint_before_is_loaded(
    run: tuple[Path, list[Path]], saved: tuple[Path, list[str]], name: str, damage: str
) -> None:
    """verify names checkpoint and file; load_latest says the same, loads the next older one, and goes on from it."""
    directory, (_, older, newest) = run
    DAMAGES[damage](newest / name, older / name)
    for place in (newest, directory):
        with pytest.raises(CheckpointError) as caught:
            augend.verify(place)
        assert str(newest) in str(caught.value)
        assert damage == "swapped" or name in str(caught.value)
    with pytest.warns(UserWarning, match=f"passed over: {newest}"):
        position, digest = loaded(directory)
    assert (older, saved[1][1]) == (position.path, digest)
    assert str(newest) in position.damaged[0]
    augend.verify(older)


def extra_file(path: Path) -> str:
    """Add a file."""
    (path / "notes.txt").touch()
    return "notes.txt"


def extra_tensors(path: Path) -> str:
    """Add tensors which a reader that takes what lies there would load instead of, or with, the right ones."""
    name = "shard-00002-model-00001-of-00001.safetensors"
    shutil.copyfile(path / NAMES[3], path / "model" / name)
    return f"model/{name}"


def extra_directory(path: Path) -> str:
    """Add an empty directory."""
    (path / "more").mkdir()
    return "more"


def extra_directory_inside(path: Path) -> str:
    """Add a directory with a file to the directory of a part."""
    (path / "model" / "more").mkdir()
    (path / "model" / "more" / "x").touch()
    return "model/more"


def linked_part(path: Path) -> str:
    """Move a part away, and put a link to it in its place."""
    (path / "model").rename(path.parent / "elsewhere")
    (path / "model").symlink_to(path.parent / "elsewhere")
    return "model"


def part_of_another(path: Path) -> str:
    """Put a file where the directory of a part was."""
    shutil.rmtree(path / "model")
    (path / "model").touch()
    return "model"


def missing_part(path: Path) -> str:
    """Remove the directory of a part."""
    shutil.rmtree(path / "optimizer")
    return NAMES[4]


def undecodable_name(path: Path) -> str:
    """Add a file whose name is no text."""
    Path(os.fsdecode(os.fsencode(path) + b"/\xff\xfe")).touch()
    return "udcff"


@pytest.mark.parametrize(
    "alter",
    [
        *(extra_file, extra_tensors, extra_directory, extra_directory_inside),
        *(linked_part, part_of_another, missing_part, undecodable_name),
    ],
)
def test_what_does_not_belong_is_named(
    run: tuple[Path, list[Path]], saved: tuple[Path, list[str]], alter: Callable[[Path], str]
) -> None:
    """A checkpoint with something too many, or something else, is not used: the one before is."""
    directory, (_, older, newest) = run
    name = alter(newest)
    with pytest.raises(CheckpointError) as caught:
        augend.verify(newest)
    assert str(newest) in str(caught.value)
    assert name in str(caught.value)
    str(caught.value).encode()
    with pytest.warns(UserWarning, match=f"passed over: {newest}"):
        position, digest = loaded(directory)
    assert (older, saved[1][1]) == (position.path, digest)


@pytest.mark.parametrize("name", NAMES)
def test_where_all_are_damaged_nothing_is_loaded(run: tuple[Path, list[Path]], name: str) -> None:
    """No checkpoint is good: CheckpointError names them all, what is live stays, and nothing is removed."""
    directory, paths = run
    for path in paths:
        extended(path / name, path)
    little = Little(directory)
    little.train(1)
    before = little.digest()
    with pytest.raises(CheckpointError, match="no checkpoint is good") as caught:
        little.run.load_latest()
    assert before == little.digest()
    assert [True] * 3 == [str(path) in str(caught.value) for path in paths]
    for path in paths:
        with pytest.raises(CheckpointError, match=path.name):
            little.run.load(path)
    assert before == little.digest()
    little.run.close()
    assert [True] * 3 == [path.is_dir() for path in paths]


def test_damaged_ones_go_when_enough_good_ones_are_newer(run: tuple[Path, list[Path]]) -> None:
    """Passed over, damaged checkpoints are not counted among those that are kept."""
    directory, (oldest, older, newest) = run
    deleted(newest / "state.json", newest)
    little = Little(directory, keep=2)
    with pytest.warns(UserWarning, match=f"{newest.name}: state.json is missing"):
        little.run.load_latest()
    little.train(1)
    first = little.run.save()
    assert [older, newest, first] == sorted(path for path in directory.iterdir() if path.is_dir())
    assert not oldest.exists()
    little.train(1)
    second = little.run.save()
    little.run.close()
    assert [first, second] == sorted(path for path in directory.iterdir() if path.is_dir())
    augend.verify(directory)


def test_a_directory_without_a_manifest_is_no_checkpoint(run: tuple[Path, list[Path]], tmp_path: Path) -> None:
    """A name alone makes no checkpoint: a file, a link to a good one, and an empty directory are passed over."""
    directory, (*_, newest) = run
    (directory / "00000007-step-9").touch()
    (directory / "00000008-step-9").symlink_to(newest)
    (directory / "00000009-step-9-rows-3").mkdir()
    with pytest.warns(UserWarning, match="passed over"):
        position, _ = loaded(directory)
    assert (newest, 3) == (position.path, len(position.damaged))
    little = Little(directory, keep=1)
    with pytest.warns(UserWarning, match="passed over"):
        little.run.load_latest()
    path = little.run.save()
    little.run.close()
    assert "00000010-step-2-rows-2" == path.name
    assert [path] == sorted(one for one in directory.iterdir() if one.name[0] == "0")
