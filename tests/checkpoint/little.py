"""The smallest run that has everything: a model, AdamW, an accumulator in the middle of a window, and data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import augend
import reference
from augend._checkpoint._files import Files

ROWS, BATCH, MICRO = 12, 6, 2  # two batches an epoch, of three micro-batches


class Little:
    """A run on a directory, with everything in it that can be saved.

    Args:
        directory: Where its checkpoints are.
        files: The file system that it writes to; None for its own.
        options: For `Checkpoint`.
    """

    def __init__(self, directory: Path, files: Files | None = None, **options: Any) -> None:
        torch.manual_seed(1)
        self.model = torch.nn.Linear(3, 2)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.grads = augend.Accumulator(self.model)
        rows = torch.arange(3.0 * ROWS).reshape(ROWS, 3) / 7
        self.data = augend.Batches(rows, batch_size=BATCH, microbatch_size=MICRO, seed=5)
        parts = {"model": self.model, "optimizer": self.optimizer, "grads": self.grads, "data": self.data}
        self.run = augend.Checkpoint(directory, **{"background": False, **options}, **parts)
        if files is not None:
            self.run._files = files

    def train(self, microbatches: int) -> None:
        """Go on for so many micro-batches; a batch that is full is stepped before the next one begins."""
        for batch in self.data:
            for microbatch in self.grads.microbatches(batch):
                if not microbatches:
                    return
                self.grads.backward(augend.losses.sum(self.model(microbatch[0]).square()))
                microbatches -= 1
            if not microbatches:
                return
            self.grads.step(self.optimizer)

    def digest(self) -> str:
        """Hash everything that a checkpoint brings back."""
        slots = [self.optimizer.state.get(one) for one in self.model.parameters()]
        options = [{**group, "params": None} for group in self.optimizer.param_groups]
        states = [one.state_dict() for one in (self.model, self.grads, self.data)]
        return reference.digest(states, slots, options, torch.get_rng_state())


def loaded(directory: Path, **options: Any) -> tuple[augend.Position | None, str]:
    """Return what a new run on a directory goes on with: its position, and the digest of everything live."""
    little = Little(directory, **options)
    try:
        return little.run.load_latest(), little.digest()
    finally:
        little.run.close()


def three_saves(directory: Path, **options: Any) -> list[str]:
    """Save three times, each in another place of a batch; return the digest that each had."""
    little = Little(directory, keep=3, **options)
    digests = []
    for microbatches in (4, 2, 1):
        little.train(microbatches)
        little.run.save()
        digests.append(little.digest())
    little.run.close()
    return digests
