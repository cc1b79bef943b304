"""inspect and verify: what a person or a script learns of a run, while it goes on too."""

from __future__ import annotations

import hashlib
import itertools
import json
from pathlib import Path

import pytest
import torch
from jobs import Job

import augend
from augend._checkpoint import _inspect
from augend.errors import CheckpointError


def saved(directory: Path, moments: int, **options) -> Path:
    """Train for a few moments and save."""
    job = Job(directory, **options)
    for _ in itertools.islice(job.moments(), moments):
        pass
    path = job.run.save()
    job.run.close()
    return path


def test_inspect_tells_the_position(tmp_path):
    """In the middle of the second batch: one step and two micro-batches of 3 rows are done; each row is one item."""
    path = saved(tmp_path, 7)
    inspection = augend.inspect(tmp_path)
    assert (path, True, None, ()) == (inspection.path, inspection.complete, inspection.problem, inspection.damaged)
    assert (0, 1, 2, 6) == (inspection.epoch, inspection.step, inspection.microbatch, inspection.rows_done)
    assert (6, 1, 1) == (inspection.count, inspection.updates, inspection.world)
    assert {"data": 0, "grads": 8, "model": 16, "optimizer": 24} == {
        name: part.tensors for name, part in inspection.parts.items()
    }
    files = [one for one in path.rglob("*") if one.is_file() and one.name != "manifest.json"]
    assert sum(one.stat().st_size for one in files) == inspection.bytes
    assert inspection == augend.inspect(path)


def test_the_plain_form_is_json(tmp_path):
    """What --json prints has at least the promised fields, and is all numbers and text."""
    saved(tmp_path, 7)
    plain = json.loads(json.dumps(augend.inspect(tmp_path).to_plain()))
    assert {"step", "microbatch", "rows_done", "count", "world", "digest", "complete"} <= plain.keys()
    assert (1, 2, True) == (plain["step"], plain["microbatch"], plain["complete"])


def test_the_end_of_a_run_is_the_step_after_its_last(tmp_path):
    """After two epochs of three steps: step 6, epoch 2, nothing pending."""
    saved(tmp_path, 99)
    inspection = augend.inspect(tmp_path)
    assert (2, 6, 0, 0, 0) == (
        inspection.epoch,
        inspection.step,
        inspection.microbatch,
        inspection.rows_done,
        inspection.count,
    )


def test_the_digest_is_over_all_parameters_in_order(tmp_path):
    """SHA-256 over part, name, dtype, shape and bytes of every parameter, sorted by name; buffers are not in it."""
    job = Job(tmp_path)
    job.run.save()
    digest = hashlib.sha256()
    for name, parameter in sorted(dict(job.model.named_parameters()).items()):
        digest.update(f"model\0{name}\0float32\0{list(parameter.shape)}\0".encode())
        digest.update(parameter.detach().numpy().tobytes())
    assert digest.hexdigest() == augend.inspect(tmp_path).digest
    job.model.norm.running_mean += 1
    job.run.save()
    assert digest.hexdigest() == augend.inspect(tmp_path).digest
    with torch.no_grad():
        job.model.fixed.bias[0] += 1
    job.run.save()
    job.run.close()
    assert digest.hexdigest() != augend.inspect(tmp_path).digest


def test_a_damaged_checkpoint_is_told(tmp_path):
    """By its own path it is described with what is wrong; by its directory the older one is, and the damage named."""
    older = saved(tmp_path, 3)
    newer = saved(tmp_path, 5)
    (newer / "state.json").write_bytes(b"")
    inspection = augend.inspect(newer)
    assert not inspection.complete
    assert inspection.digest is None
    assert f"{newer}: state.json has 0 bytes" in inspection.problem
    assert (1, 0) == (inspection.step, inspection.rows_done)
    inspection = augend.inspect(tmp_path)
    assert (older, True) == (inspection.path, inspection.complete)
    assert [augend.inspect(newer).problem] == list(inspection.damaged)
    (newer / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=rf"{newer.name}: manifest.json is missing"):
        augend.inspect(newer)


def test_a_run_directory_is_looked_through(tmp_path):
    """A run directory, its checkpoints directory and one checkpoint are all understood; all of them are verified."""
    run = tmp_path / "run"
    paths = [saved(run / "checkpoints", 3, keep=9), saved(run / "checkpoints", 5, keep=9)]
    assert [paths[1]] * 3 == [augend.inspect(one).path for one in (run, run / "checkpoints", paths[1])]
    for one in (run, run / "checkpoints", *paths):
        augend.verify(one)
    for path in paths:
        (path / "state.json").write_bytes(b"")
    with pytest.raises(CheckpointError) as caught:
        augend.verify(run)
    assert all(f"{path}: state.json has 0 bytes" in str(caught.value) for path in paths)
    with pytest.raises(CheckpointError, match=r"no checkpoint is good: .*step-1: .*; .*rows-6: "):
        augend.inspect(run)


@pytest.mark.parametrize("look", [augend.inspect, augend.verify])
def test_a_path_without_checkpoints_is_refused(tmp_path, look):
    """Nothing there, an empty directory and a file are told apart."""
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "empty").mkdir()
    for name, message in (("none", "does not exist"), ("empty", "holds no checkpoint"), ("file", "is no checkpoint")):
        with pytest.raises(CheckpointError, match=f"{name} {message}"):
            look(tmp_path / name)


@pytest.mark.parametrize("call", ["_digest", "verified"])
@pytest.mark.parametrize("times", [1, 3])
def test_a_checkpoint_that_is_replaced_meanwhile_is_looked_for_again(tmp_path, monkeypatch, call, times):
    """While a run goes on, its newest checkpoint may be gone before it was read: then the next newest is taken."""
    job = Job(tmp_path, keep=1)
    job.run.save()
    calls = []

    def meanwhile(path, *rest):
        calls.append(path.name)
        if len(calls) <= times:
            job.run.save()  # and the one before is removed
        return whole(path, *rest)

    whole = getattr(_inspect, call)
    monkeypatch.setattr(_inspect, call, meanwhile)
    assert f"{times + 1:08d}-step-0" == augend.inspect(tmp_path).path.name
    assert [f"{number + 1:08d}-step-0" for number in range(times + 1)] == calls
    job.run.close()


@pytest.mark.parametrize("call", ["_digest", "verified"])
def test_a_directory_without_rest_is_given_up(tmp_path, monkeypatch, call):
    """If every checkpoint is gone before it was read, again and again, that is said."""
    job = Job(tmp_path, keep=1)
    job.run.save()

    def meanwhile(path, *rest):
        job.run.save()
        return whole(path, *rest)

    whole = getattr(_inspect, call)
    monkeypatch.setattr(_inspect, call, meanwhile)
    with pytest.raises(CheckpointError, match="being written to faster than it can be read"):
        augend.inspect(tmp_path)
    job.run.close()


def test_what_is_removed_while_it_is_verified_is_no_damage(tmp_path, monkeypatch):
    """verify says nothing of a checkpoint that the run has removed meanwhile; a path that is gone is told."""
    job = Job(tmp_path, keep=1)
    path = job.run.save()

    def meanwhile(one):
        job.run.save()
        return whole(one)

    whole = _inspect.verified
    monkeypatch.setattr(_inspect, "verified", meanwhile)
    augend.verify(tmp_path)
    with pytest.raises(CheckpointError, match=f"{path.name}: it is no directory"):
        augend.verify(path)
    job.run.close()


def test_a_digest_is_the_same_however_much_is_read_at_once(tmp_path, monkeypatch):
    """A model is hashed tensor by tensor where it is too large to be held."""
    path = saved(tmp_path, 3)
    expected = augend.inspect(path).digest
    for elements in (0, 30, 100):
        monkeypatch.setattr(_inspect, "_ELEMENTS_HELD", elements)
        assert expected == augend.inspect(path).digest


def test_a_damaged_file_is_no_replacement(tmp_path, monkeypatch):
    """An error in reading what is still there is not taken for one that is gone."""
    path = saved(tmp_path, 3)

    def broken(place, manifest):
        raise CheckpointError("a fault")

    monkeypatch.setattr(_inspect, "_digest", broken)
    with pytest.raises(CheckpointError, match="a fault"):
        augend.inspect(tmp_path)
    assert path.exists()


def test_a_checkpoint_under_another_name_is_one(tmp_path):
    """Copied or renamed, a checkpoint is still one: it can be inspected, verified and loaded."""
    path = saved(tmp_path / "run", 5)
    path.rename(tmp_path / "best")
    assert 1 == augend.inspect(tmp_path / "best").step
    augend.verify(tmp_path / "best")
    job = Job(tmp_path / "other")
    assert 1 == job.run.load(tmp_path / "best").step
    job.run.close()
