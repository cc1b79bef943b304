"""What goes wrong with a checkpoint on one rank goes wrong on all: the same error, and nothing has changed."""

from __future__ import annotations

import os
import shutil
import signal
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from disk import Faulty, Watched
from jobs_on_ranks import Job, Net
from ranks import Ranks

import augend
from augend._checkpoint import _verify
from augend.errors import AugendError, CheckpointError, ContractError, LostRankError, PlacementError, StateError

Told = tuple[str, str]


def told(call: Callable[[], object]) -> Told:
    """Return kind and message of the error that a call raises."""
    with pytest.raises(AugendError) as caught:
        call()
    return type(caught.value).__name__, str(caught.value)


def same(outcomes: list[Any]) -> Any:
    """Return what all ranks returned."""
    assert [outcomes[0]] * len(outcomes) == outcomes
    return outcomes[0]


class Note:
    """A part with any state, which may refuse to be loaded."""

    def __init__(self, state: object, *, refuse: bool = False) -> None:
        self.state = state
        self._refuse = refuse

    def state_dict(self) -> object:
        return self.state

    def load_state_dict(self, state: object) -> None:
        if self._refuse and state != self.state:
            raise ValueError("no")
        self.state = state


# ---------------------------------------------------------------- saving


def fill(directory: Path, kind: str, background: bool) -> tuple[Told, list[str], str]:
    """Save while rank 1's disk is full, then once more when it is not."""
    job = Job(directory, "fsdp", background=background)
    first = job.run.save()
    job.run.wait()
    whole = job.run._files
    if dist.get_rank() == 1:
        job.run._files = Faulty(kind, 0)
    error = told(lambda: (job.run.save(), job.run.wait()))
    dist.barrier()
    left = sorted(one.name for one in directory.iterdir())
    dist.barrier()
    job.run._files = whole
    job.run.save()
    job.run.close()
    return error, left, first.name


@pytest.mark.parametrize(
    ("kind", "background"), [("create", False), ("write", True), ("fsync", True), ("fsync_directory", False)]
)
def test_a_full_disk_on_one_rank(ranks2: Ranks, tmp_path: Path, kind: str, background: bool) -> None:
    """Every rank raises the same, which names the rank; nothing is left of it, and the next save is as always."""
    error, left, first = same(ranks2.run(fill, tmp_path, kind, background))
    saved = tmp_path / "00000002-step-0"
    message = f"{saved} could not be saved: No space left on device; the checkpoints before it are untouched"
    assert ("CheckpointError", f"rank 1: {message}") == error
    assert [first, "lock"] == left
    augend.verify(tmp_path)
    assert 2 == len([*tmp_path.glob("0*")])


def fail_at_rank_0(directory: Path, kind: str) -> tuple[Told, bool]:
    """Save while the disk of rank 0 fails in what it does for all."""
    job = Job(directory, "fsdp")
    if dist.get_rank() == 0:
        job.run._files = Faulty(kind, 0)
    error = told(job.run.save)
    dist.barrier()
    there = any(one.name.startswith(".saving") for one in directory.iterdir())
    job.run.close()
    return error, there


@pytest.mark.parametrize("kind", ["make_directory", "rename"])
def test_a_full_disk_on_the_first_rank(ranks2: Ranks, tmp_path: Path, kind: str) -> None:
    """What rank 0 cannot do for all, all hear of."""
    (kind, message), left = same(ranks2.run(fail_at_rank_0, tmp_path, kind))
    assert "CheckpointError" == kind
    assert message.startswith("rank 0: ")
    assert "No space left on device" in message
    assert not left


def refuse_to_save(directory: Path, case: str) -> tuple[Told, list[str]]:
    """Save what cannot be saved on rank 1, or is another there."""
    rank = dist.get_rank()
    model = Net()
    notes = {
        "object": {"a": Note(object() if rank else 1)},
        "other number": {"a": Note({"x": 1}), "b": Note({"x": rank})},
        "other tensor": {"b": Note({"x": torch.zeros(1 + rank)})},
        "other dtype": {"b": Note({"x": torch.zeros(1, dtype=(torch.float32, torch.float64)[rank])})},
        "more tensors": {"b": Note({"x": [torch.zeros(1)] * (1 + rank)})},
        "more parts": {"a": Note(1), "b": Note(1)} if rank else {"a": Note(1)},
        "other parts": {"a": Note(1)} if rank else {"b": Note(1)},
        "other order": {"a": Note(1), "b": Note(1)} if rank else {"b": Note(1), "a": Note(1)},
        "other kind": {"a": Note(1) if rank else torch.nn.Linear(1, 1)},
        "other directory": {"a": Note(1)},
    }
    place = directory / f"of rank {rank}" if case == "other directory" else directory
    run = augend.Checkpoint(place, model=model, background=False, **notes[case])
    error = told(run.save)
    run.close()
    return error, sorted(one.name for one in directory.rglob("*"))


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("object", "rank 1: a: its state is a builtins.object, which a checkpoint cannot keep"),
        ("other number", "the part b of rank 1 differs from rank 0's; what is no tensor must be equal on all ranks"),
        ("other tensor", "the part b of rank 1 differs from rank 0's"),
        ("other dtype", "the part b of rank 1 differs from rank 0's"),
        ("more tensors", "the part b of rank 1 differs from rank 0's"),
        ("more parts", "b of rank 1 is not on every rank"),
        ("other parts", "b of rank 0 is not on every rank"),
        ("other order", "in the same order on all ranks; rank 0 has the directory, model, b, a"),
        ("other kind", "a of rank 1 differs from rank 0's"),
        ("other directory", "the directory of rank 1 differs from rank 0's"),
    ],
)
def test_a_state_that_one_rank_cannot_save_or_has_alone(ranks2: Ranks, tmp_path: Path, case: str, message: str) -> None:
    """Named on all ranks, before a byte is written."""
    error, left = same(ranks2.run(refuse_to_save, tmp_path, case))
    assert "ContractError" == error[0]
    assert message in error[1]
    assert set(left) <= {"lock"}


def take_it_twice(directory: Path) -> tuple[Told, Told, list[str]]:
    """Make two Checkpoints on one directory, and one that other ranks do not see."""
    first, second = (augend.Checkpoint(directory, model=Net(), background=False) for _ in range(2))
    first.save()
    error = told(second.save)
    first.close()
    second.save()
    second.close()
    lock = directory / "lock"
    third = augend.Checkpoint(directory, model=Net(), background=False)
    real = third._tenancy.enter.__func__.__globals__["check_owner"]
    elsewhere = lambda place, token: real(place.with_name("elsewhere"), token)  # noqa: E731  # as on a disk of its own
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr("augend._checkpoint._tenancy.check_owner", elsewhere)
        unseen = told(third.save)
    dist.barrier()
    assert lock.exists()
    third.save()
    third.close()
    return error, unseen, sorted(one.name for one in directory.glob("0*"))


def test_a_directory_belongs_to_one_job_and_is_one_for_all_ranks(ranks2: Ranks, tmp_path: Path) -> None:
    """A second job is refused on all ranks, and so is a directory that a rank does not see; then it is free again."""
    error, unseen, names = same(ranks2.run(take_it_twice, tmp_path / "run"))
    assert "CheckpointError" == error[0] == unseen[0]
    assert "in use by another Checkpoint of this process" in error[1]
    assert unseen[1].startswith("rank 1: ")
    assert "must be on a disk that all ranks share" in unseen[1]
    assert ["00000001-step-0", "00000002-step-0", "00000003-step-0"][-2:] == names


def save_without_a_window(directory: Path) -> list[Told]:
    """Ask rank by rank for what only one of them refuses: an unfinished window, a gradient that is left."""
    errors = []
    job = Job(directory, "fsdp")
    job.advance(1)
    job.run._half_loaded = dist.get_rank() == 1
    errors.append(told(job.run.save))
    job.run._half_loaded = False
    job.run.save()
    job.run.close()
    empty = augend.Checkpoint(directory.with_name("empty"))
    errors.append(told(empty.save))
    empty.close()
    return errors


def test_what_only_one_rank_refuses_is_refused_by_all(ranks2: Ranks, tmp_path: Path) -> None:
    """A load that was interrupted on one rank, and nothing to save."""
    half, nothing = same(ranks2.run(save_without_a_window, tmp_path / "run"))
    assert "StateError" == half[0]
    assert half[1].startswith("rank 1: the last load was interrupted in the middle of it")
    assert "ContractError" == nothing[0]


# ---------------------------------------------------------------- loading


def three_saves(directory: Path) -> list[str]:
    """Save three times."""
    job = Job(directory, "fsdp", keep=3)
    names = []
    for _ in range(3):
        job.advance(1)
        names.append(job.run.save().name)
    job.run.close()
    return names


def load_latest(directory: Path, place: str) -> tuple[str, tuple[str, ...], list[str], dict[str, str]]:
    """Load the newest good one, and return which, what was passed over, and what was warned of."""
    job = Job(directory, place, seed=7)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        position = job.run.load_latest()
    job.run.close()
    return position.path.name, position.damaged, [str(one.message) for one in caught], job.everything()


@pytest.mark.parametrize("damage", ["torn", "flipped", "missing", "mixed", "foreign", "state", "manifest"])
def test_a_damaged_checkpoint_is_passed_over_alike(ranks: Callable[[int], Ranks], tmp_path: Path, damage: str) -> None:
    """Torn, flipped, missing, of another moment, not of it: every rank takes the next older one, and says why."""
    names = same(ranks(3).run(three_saves, tmp_path))
    newest, before = tmp_path / names[2], tmp_path / names[1]
    file = sorted((newest / "model").iterdir())[1]
    match damage:
        case "torn":
            file.write_bytes(file.read_bytes()[:-1])
        case "flipped":
            file.write_bytes(file.read_bytes()[:-1] + bytes([file.read_bytes()[-1] ^ 1]))
        case "missing":
            file.unlink()
        case "mixed":
            shutil.copy(before / "model" / file.name, file)
        case "foreign":
            shutil.copy(file, file.with_name("shard-00004-model-00001-of-00001.safetensors"))
        case "state":
            shutil.copy(before / "state.json", newest / "state.json")
        case "manifest":
            shutil.copy(before / "manifest.json", newest / "manifest.json")
    for world in (2, 1):
        name, passed, warned, _ = same(ranks(world).run(load_latest, tmp_path, "fsdp"))
        assert names[1] == name
        assert 1 == len(passed)
        assert str(newest) in passed[0]
        assert f"a checkpoint was passed over: {passed[0]}" in warned


def load_nothing_good(directory: Path) -> tuple[Told, bool]:
    """Load where nothing is good."""
    job = Job(directory, "fsdp", seed=7)
    before = job.everything()
    error = told(job.run.load_latest)
    job.run.close()
    return error, before == job.everything()


def test_where_nothing_is_good_every_rank_says_so(ranks2: Ranks, tmp_path: Path) -> None:
    """All are named, and nothing has changed."""
    names = same(ranks2.run(three_saves, tmp_path))
    for name in names:
        (tmp_path / name / "state.json").write_bytes(b"")
    error, unchanged = same(ranks2.run(load_nothing_good, tmp_path))
    assert unchanged
    assert "CheckpointError" == error[0]
    assert all(name in error[1] for name in names)


def load_on_another(directory: Path, case: str) -> tuple[Told, bool]:
    """Load where something is another on rank 1."""
    job = Job(directory, "replicated", seed=7)
    parts = dict(job.run.parts)
    if dist.get_rank() == 1:
        wider = Net()
        wider.gain = torch.nn.Linear(5, 2)
        others: dict[str, dict[str, object]] = {
            "model": {"model": wider, "optimizer": torch.optim.AdamW(wider.parameters())},
            "optimizer": {"optimizer": torch.optim.SGD(job.model.parameters())},
            "data": {"data": augend.Batches(torch.zeros(5, 2), batch_size=5, microbatch_size=1, epochs=2)},
        }
        parts.update(others[case])
    run = augend.Checkpoint(directory, background=False, **parts)
    before = job.everything()
    error = told(run.load_latest)
    run.close()
    return error, before == job.everything()


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("model", "rank 1: model: 'gain.weight' was saved as torch.float32 of [1, 5], and is torch.float32 of [2, 5]"),
        ("optimizer", "rank 1: optimizer: torch.optim.adamw.AdamW was saved, and this is torch.optim.sgd.SGD"),
        ("data", "rank 1: data: the data state was saved with"),
    ],
)
def test_a_part_that_is_another_on_one_rank(ranks2: Ranks, tmp_path: Path, case: str, message: str) -> None:
    """What does not fit is named with its rank, on all ranks, and all parts of all ranks are as they were."""
    ranks2.run(three_saves, tmp_path)
    error, unchanged = same(ranks2.run(load_on_another, tmp_path, case))
    assert error[1].startswith(message)
    assert unchanged


def load_what_one_refuses(directory: Path) -> tuple[Told, bool, object, Told, int]:
    """Load where a part of rank 1 refuses its state when it gets it; then without that part."""
    job = Job(directory, "fsdp")
    job.advance(3)
    note = Note("saved")
    with job.run.attached(note=note):
        path = job.run.save()
    job.run.close()
    other = Job(directory, "fsdp", seed=7)
    stubborn = Note("here", refuse=dist.get_rank() == 1)
    before = other.everything()
    with other.run.attached(note=stubborn):
        error = told(other.run.load_latest)
    unchanged = before == other.everything()
    missing = told(lambda: other.run.load(path))
    other.run.load(path, only=["model", "data", "grads", "optimizer"])
    assert job.everything() == other.everything()
    other.run.save()
    other.run.close()
    return error, unchanged, stubborn.state, missing, augend.inspect(directory).step


def test_a_part_that_refuses_late_on_one_rank_is_undone_on_all(ranks2: Ranks, tmp_path: Path) -> None:
    """What others have loaded already goes back to what it was, on every rank."""
    error, unchanged, state, missing, step = same(ranks2.run(load_what_one_refuses, tmp_path))
    assert ("ContractError", "rank 1: note: Note refused its saved state: ValueError('no')") == error
    assert unchanged
    assert "here" == state
    assert "has a part 'note' that is not loaded" in missing[1]
    assert 1 == step


def load_from_nowhere(directory: Path) -> tuple[object, Told, Told]:
    """Load where nothing was ever saved, by both ways, and a part that was not."""
    job = Job(directory / "new", "fsdp")
    first = job.run.load_latest()
    nothing = told(lambda: job.run.load(directory / "none"))
    job.run.save()
    job.run.close()
    unknown = told(lambda: job.run.load(directory / "new", only=["other"]))
    return first, nothing, unknown


def test_what_is_not_there_is_not_there_for_all(ranks2: Ranks, tmp_path: Path) -> None:
    """None at the beginning of a run; an error for a path; an error for a part."""
    first, nothing, unknown = same(ranks2.run(load_from_nowhere, tmp_path))
    assert first is None
    assert ("CheckpointError", f"rank 0: {tmp_path / 'none'} does not exist") == (nothing[0], nothing[1].split(";")[0])
    assert "the checkpoint has no part 'other'" in unknown[1]


# ---------------------------------------------------------------- ranks that come late, or go


def use_before_the_group(directory: Path) -> Told:
    """Use a Checkpoint alone, then as one of several ranks."""
    run = augend.Checkpoint(directory / str(dist.get_rank()), model=Net(), background=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "is_initialized", lambda: False)
        run.save()
    error = told(run.save)
    run.close()
    return error


def test_a_checkpoint_stays_with_its_ranks(ranks2: Ranks, tmp_path: Path) -> None:
    """One that was used before there was a process group is refused afterwards, with the remedy."""
    for rank, error in enumerate(ranks2.run(use_before_the_group, tmp_path)):
        assert PlacementError.__name__ == error[0]
        assert f"first used by rank 0 of 1, and this is rank {rank} of 2: make the process group first" in error[1]


class Deadly(Watched):
    """A disk whose machine loses power when it is written to."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self._kind = kind

    def call(self, kind, *arguments):
        if kind == self._kind:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().call(kind, *arguments)


def die_in_a_save(directory: Path, background: bool, which: int, kind: str) -> tuple[str, str]:
    """Save; then lose a rank in the middle of the next save."""
    job = Job(directory, "replicated" if which else "fsdp", background=background)
    job.advance(1)
    job.run.save()
    job.run.wait()
    if dist.get_rank() == which:
        job.run._files = Deadly(kind)
    with pytest.raises(LostRankError) as caught:
        job.run.save()
        job.run.wait()
    job.run.close()
    return type(caught.value).__name__, str(caught.value)


@pytest.mark.parametrize(
    ("background", "which", "kind"), [(False, 1, "create"), (True, 1, "fsync"), (True, 0, "rename")]
)
def test_a_rank_that_dies_in_a_save_ends_the_others(
    ranks2: Ranks, tmp_path: Path, background: bool, which: int, kind: str
) -> None:
    """Within the time-out, with an error that names it; the checkpoint before is good, and the next job begins."""
    outcomes = ranks2.fatal(die_in_a_save, tmp_path, background, which, kind, group_seconds=8)
    other = outcomes[1 - which]
    assert isinstance(other, tuple), other
    assert "LostRankError" == other[0]
    assert f"rank {which}" in other[1]
    assert -9 == outcomes[which].code
    augend.verify(tmp_path)
    assert ["00000001-step-0-rows-6"] == [one.name for one in tmp_path.glob("0*")]
    place = "replicated" if which else "fsdp"
    assert "00000001-step-0-rows-6" == same(ranks2.run(load_latest, tmp_path, place))[0]
    assert {"lock", "restarts.jsonl", "00000001-step-0-rows-6"} == {one.name for one in tmp_path.iterdir()}


def outlive(directory: Path) -> tuple[Told, Told, list[str]]:
    """Go on saving after another job has taken the directory, as ranks that outlived their agents do."""
    job = Job(directory, "fsdp")
    job.run.save()
    dist.barrier()
    if dist.get_rank() == 0:
        (directory / "lock").write_text("process 7 since now\n0123456789abcdef\n")  # where locks do not reach
        (directory / ".saving-00000002-step-0-0123456789abcdef").mkdir()
    dist.barrier()
    save, load = told(job.run.save), told(job.run.load_latest)
    job.run.close()
    return save, load, sorted(one.name for one in directory.iterdir())


def test_ranks_that_outlived_their_job_write_nothing(ranks2: Ranks, tmp_path: Path) -> None:
    """They neither publish, nor sweep away what the new job is writing; the message says whose the directory is."""
    save, load, left = same(ranks2.run(outlive, tmp_path))
    for kind, message in (save, load):
        assert CheckpointError.__name__ == kind
        assert f"{tmp_path} belongs to another job by now" in message
        assert "'process 7 since now'" in message
    assert [".saving-00000002-step-0-0123456789abcdef", "00000001-step-0", "lock"] == left


def test_errors_are_of_the_kinds_that_are_documented() -> None:
    """A script may catch them as the built-ins that they are."""
    assert issubclass(CheckpointError, RuntimeError)
    assert issubclass(ContractError, ValueError)
    assert issubclass(StateError, RuntimeError)


class Slow(Watched):
    """A disk that takes its time at first."""

    def __init__(self) -> None:
        super().__init__()
        self._waits = 2

    def call(self, kind, *arguments):
        if kind == "fsync" and self._waits:
            self._waits -= 1
            time.sleep(3)
        return super().call(kind, *arguments)


def take_long(directory: Path, which: int) -> tuple[str, str]:
    """Save and load where one rank's disk is slower than the ranks' time-out."""
    job = Job(directory, "replicated", background=True)
    job.advance(1)
    if dist.get_rank() == which:
        job.run._files = Slow()
    job.run.save()
    job.run.wait()
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == which:
            real = _verify._check_coverage
            patch.setattr(_verify, "_check_coverage", lambda *each: (time.sleep(3), real(*each)))
        position = job.run.load_latest()
    job.run.close()
    return position.path.name, str(position)


@pytest.mark.parametrize("which", [0, 1])
def test_a_slow_rank_is_waited_for(ranks2: Ranks, tmp_path: Path, which: int) -> None:
    """A disk may take longer than a collective: as long as its rank is there, nobody is lost."""
    outcomes = ranks2.fatal(take_long, tmp_path, which, group_seconds=5)
    assert ("00000001-step-0-rows-6", "step 0, 6 rows done") == same(outcomes)
