"""The digits."""

from __future__ import annotations

import sys

import pytest
import torch

from augend.errors import ConfigError
from augend.sources import digits


class Offered(dict):
    """A micro-batch by hand."""

    real_rows, epoch, step, offer = 4, 0, 0, 0


def test_rows():
    """1,797 images of 64 pixels, whole sixteenths from 0 to 1, and the ten classes."""
    rows = digits().rows
    assert ([1797, 64], torch.float32) == (list(rows["x"].shape), rows["x"].dtype)
    assert ([1797], torch.int64) == (list(rows["y"].shape), rows["y"].dtype)
    assert (0.0, 1.0) == (rows["x"].min().item(), rows["x"].max().item())
    assert torch.equal((rows["x"] * 16).round() / 16, rows["x"])
    assert list(range(10)) == rows["y"].unique().tolist()


def test_loss_and_accuracy():
    """The loss is the cross entropy of each row; the metric counts hits."""
    source = digits()
    microbatch = Offered({name: column[:4] for name, column in source.rows.items()})  # the digits 0 1 2 3
    logits = torch.eye(10)[[0, 1, 2, 9]] * 200.0  # e^-200 is 0 beside 1
    tally = source.loss(lambda _: logits, microbatch)
    assert [0.0, 0.0, 0.0, 200.0] == tally.total.tolist()
    assert [1, 1, 1, 1] == tally.count.tolist()
    assert 0.75 == source.metrics["accuracy"](lambda _: logits, microbatch).compute().value


def test_without_scikit_learn(monkeypatch):
    """The remedy is a command."""
    monkeypatch.setitem(sys.modules, "sklearn", None)
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ConfigError, match=r"pip install 'augend\[digits\]'"):
        digits()
