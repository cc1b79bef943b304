"""Jobs on ranks that the checkpoint's tests save, stop, and take up again elsewhere."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import placed
import torch
from torch import Tensor, nn

import augend
import reference

ROWS, BATCH, MICRO = 22, 12, 3  # two batches an epoch, of 12 and 10 rows: four micro-batches each


class Net(nn.Module):
    """Layers that no world divides, one that is narrower than it, a frozen one, a buffer, and no bias at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 5)
        self.gain, self.head = nn.Linear(5, 1), nn.Linear(5, 3, bias=False)
        self.fixed = nn.Linear(5, 5).requires_grad_(requires_grad=False)
        self.register_buffer("scale", torch.arange(3.0))

    def forward(self, x: Tensor) -> Tensor:
        x = self.fixed(torch.tanh(self.down(torch.tanh(self.up(x)))))
        return self.head(x) * torch.tanh(self.gain(x)) + self.scale


def source() -> dict[str, Tensor]:
    """Return 22 rows."""
    generator = torch.Generator().manual_seed(3)
    return {"x": torch.randn(ROWS, 4, generator=generator), "y": torch.randint(0, 3, (ROWS,), generator=generator)}


OPTIMIZERS = {
    "adamw": functools.partial(torch.optim.AdamW, lr=0.01),
    "fused": functools.partial(torch.optim.AdamW, lr=0.01, fused=True),
    "momentum": functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9),
    "nadam": functools.partial(torch.optim.NAdam, lr=0.01),
    "sgd": functools.partial(torch.optim.SGD, lr=1.0),
}


class Job:
    """The loop of the README on ranks, with everything that it saves.

    Args:
        directory: Of its checkpoints.
        place: How the model is placed: a name of ``placed.PLACES``.
        optimizer: A name of ``OPTIMIZERS``.
        dtype: Of the parameters; if not float32, the optimizer is ``MasterWeights``.
        options: For ``Checkpoint``.
    """

    def __init__(
        self,
        directory: Path,
        place: str,
        *,
        optimizer: str = "adamw",
        dtype: torch.dtype = torch.float32,
        seed: int = 1,
        **options: Any,
    ) -> None:
        torch.manual_seed(seed)
        there = placed.PLACES[place](Net().to(dtype), ("up", "down"))
        self.model = there.model
        make = OPTIMIZERS[optimizer]
        parameters = list(self.model.parameters())
        masters = dtype != torch.float32
        self.optimizer = augend.optim.MasterWeights(parameters, make) if masters else make(parameters)
        self.grads = there.grads()
        self.data = there.batches(source(), batch_size=BATCH, microbatch_size=MICRO, seed=5, epochs=2)
        self.run = augend.Checkpoint(
            directory,
            **{"background": False, **options},
            model=self.model,
            optimizer=self.optimizer,
            grads=self.grads,
            data=self.data,
        )

    def moments(self) -> Iterator[None]:
        """Train to the end, pausing wherever a checkpoint can be taken."""
        yield
        for batch in self.data:
            for microbatch in self.grads.microbatches(batch):
                logits = self.model(microbatch["x"].to(next(self.model.parameters()).dtype))
                self.grads.backward(augend.losses.cross_entropy(logits, microbatch["y"]))
                yield
            self.grads.step(self.optimizer, max_norm=1.0)
            yield

    def advance(self, moments: int) -> None:
        """Train on for so many pauses."""
        for _, _ in zip(range(moments + 1), self.moments(), strict=False):
            pass

    def weights(self) -> dict[str, Tensor]:
        """Return parameters and buffers, whole, without the name that a wrapper adds."""
        return {name.removeprefix("module."): placed.whole(one) for name, one in self.model.state_dict().items()}

    def everything(self) -> dict[str, str]:
        """Hash all that a checkpoint brings back, whole, each part by itself."""
        inner = self.optimizer.inner if isinstance(self.optimizer, augend.optim.MasterWeights) else self.optimizer
        slots = [whole(inner.state[one]) for group in inner.param_groups for one in group["params"]]
        options = [{**group, "params": None} for group in inner.param_groups]
        sums = whole(self.grads.state_dict())
        return {
            "weights": reference.digest(self.weights()),
            "moments": reference.digest(slots, options),
            "sums": reference.digest(sums),
            "position": reference.digest(self.data.state_dict()),
        }


def whole(tree: Any) -> Any:
    """Return a state with all its tensors whole."""
    if isinstance(tree, Tensor):
        return placed.whole(tree)
    if isinstance(tree, Mapping):
        return {key: whole(one) for key, one in tree.items()}
    return tree
