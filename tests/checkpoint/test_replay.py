"""The power may fail at any moment: what is on disk then is the newest checkpoint that was saved, whole."""

from __future__ import annotations

import itertools
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from disk import Event, Node, Recording, Tree, Unsynced, after_power_loss, put, torn_files, waiting_changes
from little import Little

import augend

SHARES = (1.0, 0.0, 0.5, -1.0)  # of the bytes that were not synced: all, none, half, only their number


@dataclass(frozen=True)
class Saved:
    """One save: the name of its checkpoint, what was live, and after how many events it must survive."""

    name: str
    digest: str
    events: int


@dataclass(frozen=True)
class Story:
    """What happened to a disk, and the directory of the checkpoints on it."""

    files: Recording
    directory: str
    saves: list[Saved]


def saving(little: Little, files: Recording, microbatches: int) -> Saved:
    """Train on and save; the checkpoint is safe when its directory has been synced with its name."""
    little.train(microbatches)
    begun = len(files.log)
    name = little.run.save().name
    for index, event in enumerate(files.log[begun:-1], begun):
        named = event.kind == "rename" and event.change[-1][0] == name
        if named and files.log[index + 1] == Event("fsync_directory", event.node):
            return Saved(name, little.digest(), index + 2)
    return Saved(name, little.digest(), len(files.log))


def keep_one(disk: Path) -> Story:
    """Three saves in a directory that is made for them; only one is kept."""
    files = Recording(disk)
    little = Little(disk / "runs" / "a", files, keep=1)
    saves = [saving(little, files, microbatches) for microbatches in (1, 3, 1)]
    little.run.close()
    return Story(files, "runs/a", saves)


def keep_two_and_resume(disk: Path) -> Story:
    """A save; a new job that resumes, and saves twice."""
    files = Recording(disk)
    saves = []
    for counts in ((2,), (3, 1)):
        little = Little(disk, files, keep=2)
        little.run.load_latest()
        saves += [saving(little, files, microbatches) for microbatches in counts]
        little.run.close()
    return Story(files, ".", saves)


def after_a_crash(disk: Path) -> Story:
    """A job begins among what others left: a checkpoint, an older damaged one, one half removed, one half written."""
    little = Little(disk, keep=3)
    first = Saved(little.run.save().name, little.digest(), 0)
    little.train(1)
    half = little.run.save()
    little.run.close()
    (half / "state.json").unlink()
    half.rename(disk / f".old-{half.name}")
    put({"model": {"shard.safetensors": b"{"}, "state.json": b""}, disk / ".saving-00000009-step-1")
    put({"x": b""}, disk / "00000000-step-7")
    files = Recording(disk)
    little = Little(disk, files, keep=1)
    little.run.load_latest()
    saves = [first, *(saving(little, files, microbatches) for microbatches in (1, 1))]
    little.run.close()
    return Story(files, ".", saves)


def losses(nodes: dict[int, Node], draws: int, exhaustive: int) -> Iterator[Tree]:
    """Yield what may be found after a power loss: every subset of a few waiting changes, else a choice of subsets.

    Always there: none, all, those up to each one (a journal), all but each one, each one alone.
    """
    count = waiting_changes(nodes)
    if count <= exhaustive:
        subsets = set(itertools.product((False, True), repeat=count))
    else:
        upto = [[place < end for place in range(count)] for end in range(count + 1)]
        single = [[place == one for place in range(count)] for one in range(count)]
        drawn = [[random.random() < 0.5 for _ in range(count)] for _ in range(draws)]  # noqa: S311  # no secret
        subsets = {tuple(one) for one in (*upto, *single, *drawn)} | {tuple(not bit for bit in one) for one in single}
    for subset in sorted(subsets):
        for shares in itertools.product(SHARES, repeat=torn_files(nodes)):
            yield after_power_loss(nodes, subset, shares)


def trees_of(story: Story, draws: int, exhaustive: int, *, alike: bool) -> Iterator[tuple[int, Tree]]:
    """Yield every different tree that may be found, with the number of events after which the power failed.

    Those that differ only in the bytes of files without a checkpoint's name are taken once where ``alike``.
    """
    seen = set()
    for events in range(len(story.files.log) + 1):
        surviving = sum(saved.events <= events for saved in story.saves)
        for tree in losses(story.files.disk_after(events), draws, exhaustive):
            key = (surviving, repr(outline(tree) if alike else tree))
            if key not in seen:
                seen.add(key)
                yield events, tree


def outline(tree: Tree, *, nameless: bool = False) -> Tree:
    """Return a tree without the bytes of files in what is not yet, or no longer, a checkpoint."""
    return {
        name: outline(inner, nameless=nameless or name.startswith("."))
        if isinstance(inner, dict)
        else inner[: 0 if nameless else None]
        for name, inner in tree.items()
    }


def check(story: Story, events: int, place: Path, fresh: str) -> None:
    """Load the newest checkpoint, compare it with what was saved, train on, save, and look at what is left."""
    surviving = [saved for saved in story.saves if saved.events <= events]
    states = {saved.name: saved.digest for saved in story.saves}
    for name in states:
        if (place / name).exists():
            augend.verify(place / name)  # no name ever stands for a part
    little = Little(place, Unsynced(), keep=1)
    try:
        position = little.run.load_latest()
        if position is None:
            assert ([], fresh) == (surviving, little.digest())
        else:
            name = position.path.name
            assert states[name] == little.digest(), f"a mixture, or not {name}"
            assert not surviving or surviving[-1].name <= name
        little.train(1)
        path = little.run.save()
    finally:
        little.run.close()
    augend.verify(place)
    left = sorted(inner.name for inner in place.iterdir() if inner.name not in {"lock", "restarts.jsonl"})
    assert [path.name] == left


def replayed(tmp_path: Path, tell: Callable[[Path], Story], draws: int, exhaustive: int, *, alike: bool) -> int:
    """Check every tree that may be found at any moment of a story; return how many there were."""
    disk = tmp_path / "disk"
    disk.mkdir()
    story = tell(disk)
    fresh = Little(tmp_path / "fresh").digest()
    number = 0
    for number, (events, tree) in enumerate(trees_of(story, draws, exhaustive, alike=alike), 1):
        found = tmp_path / f"after-{number}"
        put(tree, found)
        check(story, events, found / story.directory, fresh)
        shutil.rmtree(found)
    return number


LEAST = 40  # different trees: each call of a save makes another one
STORIES = [keep_one, keep_two_and_resume, after_a_crash]


@pytest.mark.parametrize("tell", STORIES)
def test_a_power_loss_leaves_the_newest_checkpoint_whole(tmp_path: Path, tell: Callable[[Path], Story]) -> None:
    """After every call of a save, what was not synced dropped: the newest good one, never an error or a mixture."""
    assert replayed(tmp_path, tell, draws=2, exhaustive=3, alike=True) > LEAST


@pytest.mark.long
@pytest.mark.parametrize("tell", STORIES)
def test_a_power_loss_leaves_the_newest_checkpoint_whole_in_any_order(
    tmp_path: Path, tell: Callable[[Path], Story]
) -> None:
    """The same with every subset of up to 8 changes that were not synced, and a hundred draws of more."""
    assert replayed(tmp_path, tell, draws=100, exhaustive=8, alike=False) > 2 * LEAST
