"""Back from a run directory to its model: what export, generate and evaluate begin with."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import augend
from augend._cli._restore import restored
from augend._config import read
from augend.errors import CheckpointError, ConfigError, ContractError


def weights(found: object) -> list[float]:
    """Return the weights of the one layer."""
    return found.model.weight.flatten().tolist()


def test_a_run_gives_its_newest_model(saved):
    """From a run directory or its directory of checkpoints come run, rows and the newest model; nothing is written."""
    before = sorted(saved.rglob("*"))
    for place in (saved, saved / "checkpoints", saved.resolve()):
        found = restored(place)
        assert [3.0, 3.0] == weights(found)
        assert "00000003-step-0" == found.checkpoint.path.name
        assert (read(Path("linear.toml")), 6, 2) == (found.run, len(found.rows.train), len(found.rows.held_out))
    assert before == sorted(saved.rglob("*"))


def test_one_checkpoint_gives_its_own_model(saved, monkeypatch):
    """A checkpoint inside a run gives the model it holds, also by a relative path from within."""
    assert [1.0, 1.0] == weights(restored(saved / "checkpoints" / "00000001-step-0"))
    monkeypatch.chdir(saved / "checkpoints" / "00000002-step-0")
    assert [2.0, 2.0] == weights(restored(Path()))


def test_a_damaged_checkpoint_gives_way(saved):
    """Where the newest is damaged the next older one is taken; the damaged one itself is refused by name."""
    newest = saved / "checkpoints" / "00000003-step-0"
    (newest / "state.json").write_text("{}", "utf-8")
    assert [2.0, 2.0] == weights(restored(saved))
    with pytest.raises(CheckpointError, match=r"00000003-step-0.*state\.json"):
        restored(newest)


def test_a_checkpoint_that_was_removed_in_the_meantime_gives_way(saved, monkeypatch):
    """A checkpoint pruned between its inspection and its loading is no error: the newest is looked up again."""
    looked_up = []

    def inspected(path: Path) -> augend.Inspection:
        found = augend.inspect(path)
        if len(looked_up) < 1:
            shutil.rmtree(found.path)
        looked_up.append(found.path.name)
        return found

    monkeypatch.setattr("augend._cli._restore.inspect", inspected)
    assert [2.0, 2.0] == weights(restored(saved))
    assert ["00000003-step-0", "00000002-step-0"] == looked_up


def test_checkpoints_that_go_faster_than_they_are_read_are_an_error(saved, monkeypatch):
    """If each one found is gone when it is read, a remedy is named after a few tries."""
    found = augend.inspect(saved)
    shutil.rmtree(found.path)
    monkeypatch.setattr("augend._cli._restore.inspect", lambda path: found)
    with pytest.raises(CheckpointError, match=r"runs/linear-1: checkpoints come and go.*raise checkpoint\.keep"):
        restored(saved)


def test_what_is_no_run_is_refused(saved):
    """A missing path and a directory without config are refused by name, a run without checkpoints too."""
    with pytest.raises(ConfigError, match=r"^nowhere: no such directory"):
        restored(Path("nowhere"))
    with pytest.raises(ConfigError, match=r"^linear\.toml: no such directory"):
        restored(Path("linear.toml"))
    with pytest.raises(ConfigError, match=r"^runs: not the directory of a run, it has no config\.toml"):
        restored(Path("runs"))
    shutil.rmtree(saved / "checkpoints")
    with pytest.raises(CheckpointError, match=r"^runs/linear-1 holds no checkpoint"):
        restored(saved)


def test_another_model_is_refused(saved):
    """A config that was changed to another model since is refused by the load."""
    text = (saved / "config.toml").read_text("utf-8")
    (saved / "config.toml").write_text(text.replace("[data]", "width = 2\n[data]"), "utf-8")
    with pytest.raises(ContractError, match="weight"):
        restored(saved)
