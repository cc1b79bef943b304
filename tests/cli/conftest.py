"""A place to run the command in: an empty directory with two run files and a module of the user's own."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

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

def rows(label=1.0, broken=False, unread=False):
    x = torch.arange(16.0).reshape(8, 2) / 16
    def loss(model, microbatch):
        if broken:
            raise KeyError("a label\\nof two lines")
        if unread:
            raise augend.errors.ConfigError("rows cannot be read, such as a file that went away")
        return augend.losses.mse(model(microbatch["x"]), microbatch["y"])
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


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """Work in an empty directory with two run files and a module of the user's own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    monkeypatch.delitem(sys.modules, "nets_of_the_cli", raising=False)
    (tmp_path / "llama.toml").write_text(LLAMA, encoding="utf-8")
    (tmp_path / "linear.toml").write_text(LINEAR, encoding="utf-8")
    (tmp_path / "nets_of_the_cli.py").write_text(NETS, encoding="utf-8")
    return tmp_path
