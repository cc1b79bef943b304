"""Leave no trace: random state and train/eval modes, put back whatever happens."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Put back, also after an exception, the random state and the train/eval mode of every submodule.

    Covers torch on the CPU and on every accelerator, ``random``, and numpy's global generator.
    """
    modes = [(module, module.training) for module in model.modules()]
    python, legacy = random.getstate(), np.random.get_state()  # noqa: NPY002 - the global generator is what we guard
    accelerators = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    try:
        with torch.random.fork_rng(devices=range(accelerators)):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(legacy)  # noqa: NPY002 - the global generator is what we guard
        for module, training in modes:
            module.training = training
