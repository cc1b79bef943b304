"""Learn to read 1,797 handwritten digits in a few seconds, and say how well, with the interval.

python examples/digits.py [--epochs 10]
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn

import augend


def loss(model: nn.Module, microbatch: augend.data.Microbatch) -> augend.Tally:
    """Return the cross entropy of each row, as a sum and a count."""
    return augend.losses.cross_entropy(model(microbatch["pixels"]), microbatch["digit"])


def accuracy(model: nn.Module, microbatch: augend.data.Microbatch) -> augend.Accuracy:
    """Return the accuracy of one micro-batch; evaluate merges them."""
    metric = augend.Accuracy()
    metric.update(model(microbatch["pixels"]), microbatch["digit"], microbatch=microbatch)
    return metric


def main(epochs: int) -> augend.Estimate:
    """Train a small network and return its accuracy on digits that it never saw."""
    pixels, digit = load_digits(return_X_y=True)
    rows = {"pixels": torch.tensor(pixels / 16, dtype=torch.float32), "digit": torch.tensor(digit)}
    train, held_out = augend.split(rows, fraction=0.2, seed=0)
    data = augend.Batches(train, batch_size=32, microbatch_size=16, seed=0)
    validation = augend.Batches(held_out, batch_size=512, microbatch_size=512)

    torch.manual_seed(0)
    model = augend.models.MLP([64, 128, 10])
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    history = augend.fit(
        model,
        data,
        loss=loss,
        optimizer=optimizer,
        epochs=epochs,
        max_norm=1.0,
        schedule=augend.schedules.cosine(5e-3, steps=epochs * data.steps_per_epoch),
        validation=validation,
        metrics={"accuracy": accuracy},
    )
    print(history)
    return history.validations[-1].estimates["accuracy"]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=10)
    print(f"held-out accuracy {main(parser.parse_args().epochs)}")
