"""Handwritten digits: a classification that takes seconds."""

from __future__ import annotations

from importlib import import_module

import torch
from torch import nn

from augend import Accuracy, Tally
from augend.data import Microbatch
from augend.errors import ConfigError
from augend.losses import cross_entropy
from augend.sources._source import Source


def digits() -> Source:
    """Return the 1,797 handwritten digits that come with scikit-learn, 8 by 8 pixels each.

    Alpaydin & Kaynak, "Optical Recognition of Handwritten Digits", UCI, 1998 (its test set).

    Returns:
        Rows ``{"x": [1797, 64] float32 from 0 to 1, "y": [1797] int64}``; `augend.losses.cross_entropy`; accuracy.

    Raises:
        ConfigError: scikit-learn is not installed.

    Example:
        >>> augend.sources.digits().rows["x"].shape
        torch.Size([1797, 64])
    """
    try:
        datasets = import_module("sklearn.datasets")
    except ImportError as error:
        remedy = "pip install 'augend[digits]'"
        raise ConfigError(f"source digits needs the package scikit-learn, which is not installed: {remedy}") from error
    pixels, classes = datasets.load_digits(return_X_y=True)  # 0 to 16
    rows = {"x": torch.from_numpy(pixels / 16).float(), "y": torch.from_numpy(classes).long()}
    return Source(rows=rows, loss=digit_loss, metrics={"accuracy": digit_accuracy})


def digit_loss(model: nn.Module, microbatch: Microbatch) -> Tally:
    """Return the cross entropy of each digit, in nats."""
    return cross_entropy(model(microbatch["x"]), microbatch["y"])


def digit_accuracy(model: nn.Module, microbatch: Microbatch) -> Accuracy:
    """Return how many digits were recognised."""
    accuracy = Accuracy()
    accuracy.update(model(microbatch["x"]), microbatch["y"], microbatch=microbatch)
    return accuracy
