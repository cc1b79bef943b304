"""Checkpoints of several ranks: each writes its part, and any number of ranks goes on from it, to the bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint
from jobs_on_ranks import Job, Net
from ranks import Ranks
from torch.distributed.checkpoint import HuggingFaceStorageReader

import augend

World = Callable[[int], Ranks]


PLACES = ("fsdp", "wrapped", "replicated", "hsdp of 2 replicas", "last", "hybrid of 2 replicas", "tensor beside whole")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def save(directory: Path, place: str, moments: int, options: dict[str, Any]) -> tuple[dict[str, str], str]:
    """Train for some moments, save, and return what was saved and where."""
    job = Job(directory, place, **options)
    job.advance(moments)
    before = job.everything()
    path = job.run.save()
    job.run.close()
    assert before == job.everything()
    return before, path.name


def load(directory: Path, place: str, options: dict[str, Any]) -> tuple[dict[str, str], str]:
    """Load into another job, and return what is there then, and where it came from."""
    job = Job(directory, place, seed=9, **options)
    position = job.run.load_latest()
    job.run.close()
    assert job.grads.state.microbatches == position.microbatch > 0
    return job.everything(), position.path.name


@pytest.mark.parametrize(("there", "here"), [(2, 1), (2, 3), (2, 2), (3, 2), (1, 2)])
def test_any_number_of_ranks_reads_what_others_wrote(ranks: World, tmp_path: Path, there: int, here: int) -> None:
    """Everything is the same to the bit on every rank, in the middle of a batch, with uneven and empty shards."""
    saved = ranks(there).run(save, tmp_path, "fsdp", 6 if there == 1 else 4, {})
    assert [saved[0]] * there == saved
    assert [saved[0]] * here == ranks(here).run(load, tmp_path, "fsdp", {})


def pass_around(directory: Path) -> list[list[tuple[dict[str, str], str]]]:
    """Save in each placement and load in the next one."""
    pairs = []
    for number, place in enumerate(PLACES):
        saved = save(directory / str(number), place, 1, {})
        pairs.append([saved, load(directory / str(number), PLACES[(number + 1) % len(PLACES)], {})])
    return pairs


def test_any_placement_reads_what_another_wrote(ranks2: Ranks, tmp_path: Path) -> None:
    """Sharded, replicated, hybrid, split: the same tensors, cut otherwise, to the bit."""
    every = ranks2.run(pass_around, tmp_path)
    assert every[0] == every[1]
    assert [saved for saved, _ in every[0]] == [loaded for _, loaded in every[0]]


@pytest.mark.long
def test_four_ranks_read_what_four_others_wrote(ranks4: Ranks, tmp_path: Path) -> None:
    """The same where shards have replicas, and where tensors are split twice."""
    places = ("hsdp of 2 replicas", "tensor and fsdp", "hybrid of 2 replicas", "fsdp")
    for number, place in enumerate(places):
        saved = ranks4.run(save, tmp_path / str(number), place, 1, {})
        assert saved == ranks4.run(load, tmp_path / str(number), places[number - 1], {})


@pytest.mark.parametrize(
    ("optimizer", "dtype"),
    [("fused", "float32"), ("momentum", "float32"), ("nadam", "float32"), ("fused", "bfloat16")],
)
def test_every_optimizer_goes_from_two_ranks_to_three(ranks: World, tmp_path: Path, optimizer: str, dtype: str) -> None:
    """Moments, masters of 16-bit parameters and counters are the same to the bit; half of the parameters are plain."""
    options = {"optimizer": optimizer, "dtype": DTYPES[dtype]}
    place = "fsdp" if dtype == "float32" else "replicated"
    saved = ranks(2).run(save, tmp_path, place, 4, options)
    assert [saved[0]] * 3 == ranks(3).run(load, tmp_path, place, options)


def finish(directory: Path, place: str) -> dict[str, torch.Tensor]:
    """Train to the end from wherever the directory's newest checkpoint is, and return the weights."""
    job = Job(directory, place)
    job.run.load_latest()
    job.advance(100)
    job.run.close()
    return job.weights()


def test_a_save_in_the_middle_changes_nothing_on_the_same_ranks(ranks2: Ranks, tmp_path: Path) -> None:
    """Uninterrupted, or saved at any moment and gone on from there: the same weights, to the bit."""
    expected = ranks2.run(finish, tmp_path / "whole", "fsdp")
    for moments in range(1, 5):
        ranks2.run(save, tmp_path / str(moments), "fsdp", moments, {})
        after = ranks2.run(finish, tmp_path / str(moments), "fsdp")
        for rank in range(2):
            assert expected[rank].keys() == after[rank].keys()
            assert all(torch.equal(one, after[rank][name]) for name, one in expected[rank].items())


def test_the_digest_does_not_depend_on_the_world(ranks: World, tmp_path: Path) -> None:
    """One process that inspects finds the same weights, whoever wrote them; and so does verify, in any world."""
    for number, (world, place) in enumerate([(1, "fsdp"), (2, "fsdp"), (3, "fsdp"), (2, "replicated")]):
        ranks(world).run(save, tmp_path / str(number), place, 0, {})
    found = [augend.inspect(tmp_path / str(number)) for number in range(4)]
    assert [1, 2, 3, 2] == [one.world for one in found]
    assert {found[0].digest} == {one.digest for one in found}
    assert {found[0].parts["model"].tensors} == {one.parts["model"].tensors for one in found}
    assert not torch.distributed.is_initialized()


def written(directory: Path, place: str) -> dict[str, int]:
    """Save, and return how many bytes each file has that this rank wrote."""
    job = Job(directory, place)
    job.advance(4)
    path = job.run.save()
    job.run.close()
    name = f"shard-{torch.distributed.get_rank() + 1:05d}"
    return {str(one.relative_to(path)): one.stat().st_size for one in path.rglob("*") if one.name.startswith(name)}


def test_each_rank_writes_its_own_shards_and_nothing_twice(ranks: World, tmp_path: Path) -> None:
    """Three ranks share a sharded model; a replicated one is the first rank's; buffers and counters too."""
    for place in ("fsdp", "replicated"):
        every = ranks(3).run(written, tmp_path / place, place)
        (path,) = (tmp_path / place).glob("0*")
        header = len("model"), *sorted(str(one.relative_to(path)) for one in path.rglob("*.safetensors"))
        assert sorted(name for one in every for name in one) == list(header[1:])
        assert {"model", "optimizer", "grads"} == {name.partition("/")[0] for name in every[0]}
    model = tmp_path / "replicated"
    assert 1 == len([*model.glob("0*/model/*")])
    # ZeRO-2 like: of replicated parameters the sums are shared out
    assert 3 == len([*model.glob("0*/grads/*")])
    assert 3 == len([*(tmp_path / "fsdp").glob("0*/model/*")])


def test_torch_reads_what_ranks_wrote(ranks: World, tmp_path: Path) -> None:
    """torch's own reader, in a process without augend's: the files are those of torch.distributed.checkpoint."""
    ranks(3).run(save, tmp_path, "fsdp", 4, {})
    (path,) = tmp_path.glob("0*")
    model = {name: torch.zeros_like(one) for name, one in Net().state_dict().items()}
    with pytest.warns(UserWarning, match="single process"):
        torch.distributed.checkpoint.load(model, storage_reader=HuggingFaceStorageReader(str(path / "model")))
    run = augend.Checkpoint(tmp_path / "other", model=Net(), background=False)
    run.load(path, only=["model"])
    expected = run.parts["model"].state_dict()
    assert all(torch.equal(one, model[name]) for name, one in expected.items())
