"""Places to run the command in: a directory with run files and modules of the user's own, and a saved run.

A run of ``stopped.toml`` does to itself what the file ``stop`` says: ``loss 5 SIGTERM`` in its fifth loss of training.
With ``wait`` it makes the file ``waiting`` and goes on when that is gone; where there is a file ``slow`` it is slow.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from augend import Checkpoint
from augend._cli._build import build_model, build_rows, build_training
from augend._cli._directory import keep_config
from augend._config import read

LLAMA = """
steps = 3
batch_size = 8
microbatch_size = 3
[model]
name = "llama"
width = 16
layers = 1
heads = 2
max_length = 80
[data]
source = "docstrings"
max_bytes = 64
limit = 40
validation = 0.2
[schedule]
name = "cosine"
[validate]
every_steps = 2
"""

NETS = """
import math
import torch
import augend

def make(width=1, frozen=False):
    return torch.nn.Linear(2, width).requires_grad_(not frozen)

def rows(label=1.0, broken=False, unread=False, counted=True):
    x = torch.arange(16.0).reshape(8, 2) / 16
    def loss(model, microbatch):
        if broken:
            raise KeyError("a label\\nof two lines")
        if unread:
            raise augend.errors.ConfigError("rows cannot be read, such as a file that went away")
        tally = augend.losses.mse(model(microbatch["x"]), microbatch["y"])
        return tally if counted else augend.Tally(tally.total * 0, tally.count * 0)
    return augend.sources.Source(rows={"x": x, "y": torch.full((8, 1), label)}, loss=loss)

def number():
    return 7

def refuse(width=1):
    raise ValueError(f"width {width} is a bad one")

def broken(parameters, lr):
    raise RuntimeError("a fault")

def noisy():
    import random, numpy
    class Noisy(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.norm = torch.nn.Linear(2, 1), torch.nn.BatchNorm1d(2)
            self.register_buffer("seen", torch.zeros(1))
        def forward(self, x):
            self.seen = self.seen + len(x)
            random.random(), numpy.random.rand(), torch.rand(1)
            return self.layer(self.norm(x))
    return Noisy().eval()

def none(parameters, lr):
    return None

def sgd(parameters, *, lr, again=False):
    return torch.optim.SGD(parameters, lr=lr)
"""

LINEAR = """
steps = 2
batch_size = 4
[model]
name = "nets_of_the_cli:make"
[data]
source = "nets_of_the_cli:rows"
validation = 0.25
"""

STOPS = """
import os
import signal
import time
from collections import Counter
from pathlib import Path

import torch
import augend

counts = Counter()

def happens(what):
    counts[what] += 1
    if Path("slow").exists():
        time.sleep(0.15)
    order = Path("stop")
    if not order.exists():
        return
    where, number, *signals = order.read_text("utf-8").split()
    if (where, int(number)) == (what, counts[what]):
        order.unlink()
        for name in signals:
            if name == "exit":
                raise SystemExit(3)
            if name == "wait":
                Path("waiting").touch()
                end = time.monotonic() + 60
                while Path("waiting").exists() and time.monotonic() < end:
                    time.sleep(0.01)
            else:
                os.kill(os.getpid(), getattr(signal, name))

def make():
    return torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1))

def rows():
    counts.clear()
    x = torch.arange(48.0).reshape(24, 2) / 48
    def loss(model, microbatch):
        trial = model.training and not torch.is_grad_enabled()
        happens("trial" if trial else "loss" if model.training else "validation")
        return augend.losses.mse(model(microbatch["x"]), microbatch["x"].sum(dim=1, keepdim=True))
    return augend.sources.Source(rows={"x": x}, loss=loss)

def schedule(rate):
    def at(step):
        happens("schedule")
        return rate / (1 + step)
    return at

class Sgd(torch.optim.SGD):
    def step(self, closure=None):
        super().step(closure)
        happens("step")
"""

STOPPED = """
steps = 6
batch_size = 6
microbatch_size = 2
[model]
name = "stops_of_the_cli:make"
[data]
source = "stops_of_the_cli:rows"
validation = 0.25
[optimizer]
name = "stops_of_the_cli:Sgd"
momentum = 0.9
lr = 0.05
[schedule]
name = "stops_of_the_cli:schedule"
[validate]
every_steps = 2
"""


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """Work in an empty directory with run files and modules of the user's own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    for module in ("nets_of_the_cli", "stops_of_the_cli"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    (tmp_path / "llama.toml").write_text(LLAMA, encoding="utf-8")
    (tmp_path / "linear.toml").write_text(LINEAR, encoding="utf-8")
    (tmp_path / "stopped.toml").write_text(STOPPED, encoding="utf-8")
    (tmp_path / "nets_of_the_cli.py").write_text(NETS, encoding="utf-8")
    (tmp_path / "stops_of_the_cli.py").write_text(STOPS, encoding="utf-8")
    return tmp_path


@pytest.fixture
def saved(folder) -> Path:
    """Make a run directory with checkpoints of three models: all weights 1, 2 and 3."""
    directory = Path("runs/linear-1")
    directory.mkdir(parents=True)
    run = read(Path("linear.toml"))
    keep_config(directory, run)
    rows = build_rows(run)
    model = build_model(run, rows.source)
    training = build_training(run, rows, model, strict_bits=False)
    with Checkpoint(directory / "checkpoints", keep=3, model=model, optimizer=training.optimizer) as checkpoint:
        for value in (1.0, 2.0, 3.0):
            with torch.no_grad():
                model.weight.fill_(value)
            checkpoint.save()
    return directory
