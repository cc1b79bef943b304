"""Small jobs that the checkpoint's tests save, stop, and take up again."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path

import torch

import augend
import reference

ROWS, BATCH, MICRO = 22, 8, 3  # three batches an epoch, the last of 6 rows; micro-batches of 3, 3, 2


def source() -> dict[str, torch.Tensor]:
    """Return 22 rows."""
    generator = torch.Generator().manual_seed(3)
    return {"x": torch.randn(ROWS, 4, generator=generator), "y": torch.randint(0, 3, (ROWS,), generator=generator)}


class Net(torch.nn.Module):
    """Dropout, so that random state matters, running statistics, a tied, a frozen and an idle parameter."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.a, self.b = torch.nn.Linear(4, 8, dtype=dtype), torch.nn.Linear(8, 3, dtype=dtype)
        self.norm, self.drop = torch.nn.BatchNorm1d(8, dtype=dtype), torch.nn.Dropout(0.3)
        self.first, self.again = torch.nn.Linear(8, 8, bias=False, dtype=dtype), torch.nn.Linear(8, 8, dtype=dtype)
        self.again.weight = self.first.weight
        self.fixed = torch.nn.Linear(8, 8, dtype=dtype).requires_grad_(requires_grad=False)
        self.idle = torch.nn.Linear(2, 2, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(torch.tanh(self.a(x.to(self.a.weight.dtype))))
        return self.b(self.drop(self.fixed(self.again(self.first(x)))))


def loss(model: torch.nn.Module, microbatch) -> augend.Tally:
    """Return the cross entropy of a micro-batch."""
    return augend.losses.cross_entropy(model(microbatch["x"]), microbatch["y"])


OPTIMIZERS = {
    "adamw": functools.partial(torch.optim.AdamW, lr=0.01),
    "fused": functools.partial(torch.optim.AdamW, lr=0.01, fused=True),
    "amsgrad": functools.partial(
        torch.optim.AdamW, lr=torch.tensor(0.01), amsgrad=True, capturable=False, foreach=False
    ),
    "sgd": functools.partial(torch.optim.SGD, lr=0.05),
    "momentum": functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True),
    "adafactor": functools.partial(torch.optim.Adafactor, lr=0.01),
    "rprop": functools.partial(torch.optim.Rprop, lr=0.01),
}


class Job:
    """The loop of the README, with everything that it saves."""

    def __init__(
        self,
        directory: Path,
        *,
        optimizer: str = "adamw",
        dtype: torch.dtype = torch.float32,
        microbatch_size: int = MICRO,
        work: str = "float32",
        epochs: int = 2,
        **options,
    ) -> None:
        torch.manual_seed(1)
        self.model = Net(dtype)
        make = OPTIMIZERS[optimizer]
        masters = dtype != torch.float32
        self.optimizer = (
            augend.optim.MasterWeights(self.model.parameters(), make) if masters else make(self.model.parameters())
        )
        self.grads = augend.Accumulator(self.model, dtype=work)
        self.data = augend.Batches(source(), batch_size=BATCH, microbatch_size=microbatch_size, seed=5, epochs=epochs)
        self.run = augend.Checkpoint(
            directory,
            model=self.model,
            optimizer=self.optimizer,
            grads=self.grads,
            data=self.data,
            **{"background": False, **options},
        )
        self.printed: list[str] = []

    def moments(self) -> Iterator[None]:
        """Train to the end, pausing wherever a checkpoint can be taken; what the README prints is kept."""
        yield
        for batch in self.data:
            for microbatch in self.grads.microbatches(batch):
                self.grads.backward(loss(self.model, microbatch))
                yield
            done = self.grads.step(self.optimizer, max_norm=1.0)
            self.printed.append(f"step {batch.step}  loss {done.loss!r}  |g| {done.norm!r}")
            yield

    def bits(self) -> str:
        """Hash weights, buffers and optimizer state."""
        inner = self.optimizer.inner if isinstance(self.optimizer, augend.optim.MasterWeights) else self.optimizer
        masters = list(self.optimizer.masters.values()) if inner is not self.optimizer else []
        return reference.digest(dict(self.model.state_dict()), inner.state_dict(), masters)

    def everything(self) -> str:
        """Hash all that a save or a load could disturb, gradients and random state included."""
        held = {name: parameter.grad for name, parameter in self.model.named_parameters() if parameter.grad is not None}
        state = self.grads.state_dict()
        return reference.digest(self.bits(), held, repr(self.data.state_dict()), repr(state), torch.get_rng_state())


def finished(job: Job) -> tuple[str, list[str]]:
    """Train to the end; return the bits and what was printed."""
    for _ in job.moments():
        pass
    job.run.close()
    return job.bits(), job.printed
