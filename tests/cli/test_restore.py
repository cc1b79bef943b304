"""Back from a run directory to its model: what export, generate and evaluate begin with."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

import augend
from augend._cli._build import build_rows, build_training
from augend._cli._directory import keep_config
from augend._cli._restore import restored
from augend._config import read
from augend.errors import CheckpointError, ConfigError, ContractError


@pytest.fixture
def run(folder) -> Path:
    """Make a run directory with checkpoints of three models: all weights 1, 2 and 3."""
    directory = Path("runs/linear-1")
    directory.mkdir(parents=True)
    described = read(Path("linear.toml"))
    keep_config(directory, described)
    training = build_training(described, build_rows(described))
    model = training.model
    with augend.Checkpoint(directory / "checkpoints", keep=3, model=model, optimizer=training.optimizer) as checkpoint:
        for value in (1.0, 2.0, 3.0):
            with torch.no_grad():
                model.weight.fill_(value)
            checkpoint.save()
    return directory


def weights(found: object) -> list[float]:
    """Return the weights of the one layer."""
    return found.model.weight.flatten().tolist()


def test_a_run_gives_its_newest_model(run):
    """From a run directory or its directory of checkpoints come run, rows and the newest model, and nothing is written."""
    before = sorted(run.rglob("*"))
    for place in (run, run / "checkpoints", run.resolve()):
        found = restored(place)
        assert [3.0, 3.0] == weights(found)
        assert "00000003-step-0" == found.checkpoint.path.name
        assert (read(Path("linear.toml")), 6, 2) == (found.run, len(found.rows.train), len(found.rows.held_out))
    assert before == sorted(run.rglob("*"))


def test_one_checkpoint_gives_its_own_model(run, monkeypatch):
    """A checkpoint inside a run gives the model it holds, also by a relative path from within."""
    assert [1.0, 1.0] == weights(restored(run / "checkpoints" / "00000001-step-0"))
    monkeypatch.chdir(run / "checkpoints" / "00000002-step-0")
    assert [2.0, 2.0] == weights(restored(Path()))


def test_a_damaged_checkpoint_gives_way(run):
    """Where the newest is damaged the next older one is taken; the damaged one itself is refused by name."""
    newest = run / "checkpoints" / "00000003-step-0"
    (newest / "state.json").write_text("{}", "utf-8")
    assert [2.0, 2.0] == weights(restored(run))
    with pytest.raises(CheckpointError, match=r"00000003-step-0.*state\.json"):
        restored(newest)


def test_a_checkpoint_that_was_removed_in_the_meantime_gives_way(run, monkeypatch):
    """A checkpoint pruned between its inspection and its loading is no error: the newest is looked up again."""
    looked_up = []

    def inspected(path: Path) -> augend.Inspection:
        found = augend.inspect(path)
        if len(looked_up) < 1:
            shutil.rmtree(found.path)
        looked_up.append(found.path.name)
        return found

    monkeypatch.setattr("augend._cli._restore.inspect", inspected)
    assert [2.0, 2.0] == weights(restored(run))
    assert ["00000003-step-0", "00000002-step-0"] == looked_up


def test_checkpoints_that_go_faster_than_they_are_read_are_an_error(run, monkeypatch):
    """If each one found is gone when it is read, a remedy is named after a few tries."""
    found = augend.inspect(run)
    shutil.rmtree(found.path)
    monkeypatch.setattr("augend._cli._restore.inspect", lambda path: found)
    with pytest.raises(CheckpointError, match=r"runs/linear-1: checkpoints come and go.*raise checkpoint\.keep"):
        restored(run)


def test_what_is_no_run_is_refused(run):
    """A missing path and a directory without config are refused by name, a run without checkpoints too."""
    with pytest.raises(ConfigError, match=r"^nowhere: no such directory"):
        restored(Path("nowhere"))
    with pytest.raises(ConfigError, match=r"^linear\.toml: no such directory"):
        restored(Path("linear.toml"))
    with pytest.raises(ConfigError, match=r"^runs: not the directory of a run, it has no config\.toml"):
        restored(Path("runs"))
    shutil.rmtree(run / "checkpoints")
    with pytest.raises(CheckpointError, match=r"^runs/linear-1 holds no checkpoint"):
        restored(run)


def test_another_model_is_refused(run):
    """A config that was changed to another model since is refused by the load."""
    text = (run / "config.toml").read_text("utf-8")
    (run / "config.toml").write_text(text.replace("[data]", "width = 2\n[data]"), "utf-8")
    with pytest.raises(ContractError, match="weight"):
        restored(run)
