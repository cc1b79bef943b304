"""Plain torchrun: its workers find each other, one of them speaks, and the same command goes on with the same run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from augend import models
from augend._cli import main
from augend._cli._launch import Launch
from augend._cli._place import _copies, blocks, place
from augend._cli._ranks import Ranks
from augend._cli._witness import said_by_first
from augend._config import Setting, read
from augend.errors import ConfigError

SECONDS = 120


def torchrun(*arguments: str, ranks: int = 2) -> subprocess.CompletedProcess:
    """Run the command by torchrun, on this machine."""
    command = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m", "augend", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *command], env=environment, capture_output=True, text=True, timeout=SECONDS, check=False
    )


def ours(text: str) -> list[str]:
    """Return the lines that the command itself has written on standard error."""
    return [line for line in text.splitlines() if line.startswith("augend: ") and " fillers " not in line]


def lines_of(run: str) -> list[dict]:
    """Return the lines of a run's steps."""
    lines = [json.loads(line) for line in Path(run, "metrics.jsonl").read_text("utf-8").splitlines()]
    return [line for line in lines if "rows" in line]


def test_torchrun_trains_one_run(folder):
    """Two workers make one directory, print each line once, count each step once, and begin with one rank's loss."""
    assert 0 == main(["fit", "stopped.toml", "--run-dir", "alone"])
    done = torchrun("fit", "stopped.toml", "--run-dir", "a")
    assert (0, []) == (done.returncode, ours(done.stderr)), done.stderr
    for line in ("model       ", "ranks       2 share the model", "finished    all 6 steps are done", "run         a"):
        assert 1 == done.stdout.count(line)
    assert [(step, 6, 2) for step in range(6)] == [(one["step"], one["count"], one["world"]) for one in lines_of("a")]
    assert lines_of("alone")[0]["loss"] == lines_of("a")[0]["loss"]


@pytest.mark.long
def test_the_same_command_goes_on_with_the_same_run(folder):
    """torchrun starts again with the same command: a run directory that holds the run already is gone on with."""
    torchrun("fit", "stopped.toml", "--run-dir", "a", "--set=steps=3")
    again = torchrun("fit", "stopped.toml", "--run-dir", "a", "--set=steps=6", ranks=3)
    assert 0 == again.returncode, again.stderr
    assert 1 == again.stdout.count("resumed     step 3, from ")
    assert [2, 2, 2, 3, 3, 3] == [line["world"] for line in lines_of("a")]
    other = torchrun("fit", "stopped.toml", "--run-dir", "a", "--set=seed=4")
    assert 1 == len(ours(other.stderr)), other.stderr
    assert "augend: seed = 4: the run was begun with 0; set it back, or begin a new run" == ours(other.stderr)[0]


@pytest.mark.long
def test_what_all_ranks_would_say_is_said_once(folder):
    """A refusal, of the run file or of the model by the rows, is one line of the first rank."""
    for setting, said in (
        ("optimizer.lr=fast", "stopped.toml: optimizer.lr = 'fast': expected float"),
        ("optimizer.momentun=1", "optimizer.momentun = 1: "),
        ("data.source=stops_of_the_cli:none", "data.source = 'stops_of_the_cli:none': "),
    ):
        (line,) = ours(torchrun("fit", "stopped.toml", "--set", setting).stderr)
        assert said in line
    assert not Path("runs").exists()


@pytest.mark.long
def test_the_failure_of_one_rank_is_its_own(folder):
    """An error on the second rank alone is said by that one, with its number; the first one is ended by torchrun."""
    with Path("stops_of_the_cli.py").open("a", encoding="utf-8") as file:
        file.write("\n\nif os.environ.get('RANK') == '1':\n    happens = {'loss': 1}['x']\n")
    lines = ours(torchrun("fit", "stopped.toml").stderr)
    assert "augend: rank 1: failed: KeyError: 'x' (at stops_of_the_cli.py:" in lines[0]


def test_one_rank_of_torchrun_is_like_none(folder, monkeypatch, capsys):
    """A world of one needs no process group, and shards nothing."""
    for name, value in (("TORCHELASTIC_RUN_ID", "1"), ("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0")):
        monkeypatch.setenv(name, value)
    assert 0 == main(["fit", "linear.toml", "--run-dir", "a", "--ranks", "4"])
    assert "ranks  " not in capsys.readouterr().out
    assert 0 == main(["fit", "linear.toml", "--run-dir", "a"])
    assert "no step was left to do" in capsys.readouterr().out
    monkeypatch.setenv("RANK", "1")
    assert 0 == main(["fit", "linear.toml", "--dry-run"])
    assert "" == capsys.readouterr().out


def test_a_dry_run_starts_no_ranks(folder, capsys):
    """--dry-run tries out in this process what several would train."""
    assert 0 == main(["fit", "linear.toml", "--ranks", "8", "--dry-run"])
    assert "ranks = 8\n" in capsys.readouterr().out
    assert not Path("runs").exists()


# ---------------------------------------------------------------- where a model is cut


class Two(nn.Module):
    """A model with lists of many kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(2))
        self.shared = nn.Sequential(self.layers[0], self.layers[1])
        self.uneven = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 5)])
        self.bare = nn.ModuleList([nn.ReLU(), nn.ReLU()])
        self.kinds = nn.ModuleList([nn.Linear(4, 4), nn.Bilinear(2, 2, 4)])
        self.one = nn.ModuleList([nn.Linear(4, 4)])
        self.lists = nn.ModuleList(nn.ModuleList([nn.Linear(4, 3)]) for _ in range(2))


def test_the_blocks_are_those_of_lists_of_equal_ones():
    """Equal types and shapes, two or more, with parameters; inner ones first; each once, however often it is used."""
    model = Two()
    outer = list(model.layers)
    inner = [linear for layer in model.layers for linear in layer]
    found = list(blocks(model))
    assert {*map(id, outer), *map(id, inner)} == set(map(id, found))
    assert len(found) == len(set(map(id, found)))
    assert all(found.index(layer) > found.index(linear) for layer in outer for linear in layer)


def test_the_layers_of_a_llama_are_its_blocks():
    """A llama is cut at its layers, and nowhere within."""
    model = models.Llama(vocab_size=8, width=16, layers=3, heads=2, max_length=8)
    assert list(map(id, reversed(model.model.layers))) == list(map(id, blocks(model)))


@pytest.mark.parametrize(("world", "copies"), [(2, 2), (4, 2), (6, 2), (3, 1), (1, 1), (5, 1)])
def test_copies_are_as_many_as_share_the_ranks_evenly(folder, world, copies):
    """Where ranks were lost and two copies would be uneven, there is one."""
    run = read(Path("linear.toml"), [Setting(("parallel", "mode"), "hsdp")])
    assert copies == _copies(run, world)
    assert 1 == _copies(read(Path("linear.toml")), world)


def test_one_rank_places_nothing(folder):
    """A process alone keeps its model as it is."""
    model = nn.Linear(2, 2)
    assert "alone" == place(read(Path("linear.toml")), model, Ranks(Launch()))
    assert nn.Linear is type(model)


def test_one_rank_agrees_with_itself():
    """What it raises is raised, and what it returns is returned; leaving is nothing."""
    ranks = Ranks(Launch())
    assert (3, "a", True) == (ranks.agreed(lambda: 3), ranks.from_first(lambda: "a"), ranks.leads)
    with pytest.raises(ConfigError, match="a = 1"):
        ranks.agreed(lambda: (_ for _ in ()).throw(ConfigError("a = 1")))
    ranks.leave()


def test_a_witness_needs_nobody(monkeypatch):
    """The first rank leaves its word in torch's store; others compare theirs, and where no store is they speak."""
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(store.port))
    first, second = Launch(rank=0, world=2, torchrun=True), Launch(rank=1, world=2, torchrun=True)
    assert [False, True, False] == [said_by_first(first, "x"), said_by_first(second, "x"), said_by_first(second, "y")]
    monkeypatch.setenv("MASTER_PORT", "")
    assert not said_by_first(second, "x")
