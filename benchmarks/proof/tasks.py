"""What is trained: the demo's model on its rows, and a small Llama and an MLP whose dimensions divide nothing."""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import augend

DEMO = Path(__file__).resolve().parents[2] / "examples" / "docstrings.toml"
Rows = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Task:
    """A model, rows, and how one is trained on the other.

    Attributes:
        build: Makes the model, equal every time.
        loss: Its tally for a micro-batch.
        blocks: Modules that ``fully_shard`` wraps one by one, before the whole.
        rows: What ``augend.Batches`` takes.
        batch_size: Rows of a step.
        microbatch_size: Rows of a forward.
        collate: For ``augend.Batches``.
        optimizer: Arguments of AdamW.
        schedule: Learning rate of an update.
        max_norm: What gradients are clipped to.
        shuffle: Whether each epoch has an order of its own.
    """

    build: Callable[[], nn.Module]
    loss: Callable[[nn.Module, Rows], augend.Tally]
    blocks: tuple[str, ...]
    rows: Any
    batch_size: int
    microbatch_size: int
    collate: Callable[..., Any] | None = None
    optimizer: Mapping[str, Any]
    schedule: Callable[[int], float]
    max_norm: float
    shuffle: bool = True


@functools.cache
def demo(max_bytes: int) -> Task:
    """Return the demo: a Llama of about a million parameters, and those of its rows that are not too long."""
    run = tomllib.loads(DEMO.read_text(encoding="utf-8"))
    source = augend.sources.docstrings(max_bytes=max_bytes)
    rows, _ = augend.split(source.rows, fraction=run["data"]["validation"], seed=0)
    sizes = {name: value for name, value in run["model"].items() if name != "name"}
    optimizer = {name: value for name, value in run["optimizer"].items() if name != "name"}

    def build() -> nn.Module:
        torch.manual_seed(0)
        return augend.models.Llama(vocab_size=source.tokenizer.vocab_size, **sizes)

    return Task(
        build=build,
        loss=source.loss,
        blocks=tuple(f"model.layers.{layer}" for layer in range(sizes["layers"])),
        rows=rows,
        batch_size=run["batch_size"],
        microbatch_size=run["microbatch_size"],
        collate=source.collate,
        optimizer={**optimizer, "betas": tuple(optimizer["betas"])},
        schedule=augend.schedules.cosine(
            optimizer["lr"], steps=run["steps"], warmup_steps=run["schedule"]["warmup_steps"]
        ),
        max_norm=run["step"]["max_norm"],
    )


@functools.cache
def llama() -> Task:
    """Return a Llama with dropout: widths of 50, 10, 37 and 53, grouped queries, tied embeddings, gaps in labels."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, 53, (31, 12), generator=generator)  # [rows, length]
    counted = torch.randint(0, 3, tokens.shape, generator=generator) > 0
    labels = tokens.where(counted, -100)
    labels[4:6] = -100  # where nothing is supervised

    def build() -> nn.Module:
        torch.manual_seed(1)
        return augend.models.Llama(vocab_size=53, width=50, layers=2, heads=5, kv_heads=1, hidden=37, dropout=0.1)

    return Task(
        build=build,
        loss=lambda model, rows: augend.losses.causal_lm(model(rows["tokens"]), rows["labels"]),
        blocks=("model.layers.0", "model.layers.1"),
        rows={"tokens": tokens, "labels": labels},
        batch_size=9,
        microbatch_size=2,
        optimizer={"lr": 1e-2, "weight_decay": 0.1, "betas": (0.9, 0.95)},
        schedule=augend.schedules.cosine(1e-2, steps=60, warmup_steps=3),
        max_norm=0.5,
    )


@functools.cache
def mlp() -> Task:
    """Return an MLP with dropout: widths of 13, 29, 17 and 11, and inputs of very different sizes."""
    generator = torch.Generator().manual_seed(4)
    sizes = 2.0 ** torch.randint(-12, 3, (31, 1), generator=generator)
    x = torch.randn(31, 13, generator=generator) * sizes  # [rows, features]
    y = torch.randint(0, 11, (31,), generator=generator)
    y[7:9] = -100

    def build() -> nn.Module:
        torch.manual_seed(2)
        return augend.models.MLP([13, 29, 17, 11], activation="gelu", dropout=0.1)

    return Task(
        build=build,
        loss=lambda model, rows: augend.losses.cross_entropy(model(rows["x"]), rows["y"]),
        blocks=("layers.0", "layers.1"),
        rows={"x": x, "y": y},
        batch_size=9,
        microbatch_size=2,
        optimizer={"lr": 1e-2, "weight_decay": 0.1, "betas": (0.9, 0.95)},
        schedule=augend.schedules.linear(1e-2, steps=60, warmup_steps=3),
        max_norm=0.5,
    )


TASKS: dict[str, Callable[[], Task]] = {"llama": llama, "mlp": mlp}


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers by name, without the name that a wrapper adds."""
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name.removeprefix("module."): one for name, one in named}
