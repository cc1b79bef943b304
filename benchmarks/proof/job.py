"""The loop of the README over any placement and any dealing, told step by step, and one digest of where it ended."""

from __future__ import annotations

import functools
import hashlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed
from dealing import Dealt
from tasks import Task, named_tensors
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import augend


class Moment(NamedTuple):
    """A point of a run at which it can be saved, in the order in which points come.

    Attributes:
        step: The batch.
        offer: Which time it is offered.
        rows_done: Rows of it whose backward is through, over all ranks.
    """

    step: int
    offer: int
    rows_done: int


@dataclass(frozen=True)
class Told:
    """What one step says of itself, the same for every cut.

    Attributes:
        step: The batch.
        rows: How many rows it has.
        done: What ``Accumulator.step`` returned.
        offers: How often the batch was offered.
        rate: The learning rate.
    """

    step: int
    rows: int
    done: augend.Finished
    offers: int
    rate: float


@dataclass(frozen=True)
class Outcome:
    """A run from its beginning, or from where it was resumed, to its end.

    Attributes:
        weights: SHA-256 of all parameters and buffers.
        optimizer: SHA-256 of all that the optimizer knows of each of them.
        steps: What each step told.
        forwards: Forward calls of the model on this rank.
    """

    weights: str
    optimizer: str
    steps: list[Told]
    forwards: int

    @property
    def digest(self) -> str:
        """SHA-256 of weights and optimizer state."""
        return hashlib.sha256(f"{self.weights}{self.optimizer}".encode()).hexdigest()


@functools.cache
def mesh(shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """Return a mesh, the same one for every run of a process."""
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def rank_and_world() -> tuple[int, int]:
    """Return which rank of how many this is; without a process group the only one."""
    if not torch.distributed.is_initialized():
        return 0, 1
    return torch.distributed.get_rank(), torch.distributed.get_world_size()


def plain(model: nn.Module, _blocks: tuple[str, ...]) -> nn.Module:
    """Leave the model as it is."""
    return model


def fsdp(
    model: nn.Module, blocks: tuple[str, ...], *, replicas: int | None = None, keep: bool = False, narrow: bool = False
) -> nn.Module:
    """Shard block by block, then what is left.

    Args:
        model: The model.
        blocks: Names of the blocks.
        replicas: Of how many copies each rank has a shard; None for a mesh without an axis of copies.
        keep: Whether gathered parameters stay until the backward.
        narrow: Whether forward and backward are in bfloat16.
    """
    world = rank_and_world()[1]
    over = mesh((world,), ("shard",)) if replicas is None else None
    over = over or mesh((replicas, world // replicas), ("replicate", "shard"))
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if narrow else MixedPrecisionPolicy()
    for block in [*map(model.get_submodule, blocks), model]:
        fully_shard(block, mesh=over, reshard_after_forward=not keep, mp_policy=policy)
    return model


PLACES: dict[str, Callable[[nn.Module, tuple[str, ...]], nn.Module]] = {
    "replicated": plain,
    "last": plain,
    "fsdp": fsdp,
    "fsdp, kept": functools.partial(fsdp, keep=True),
    "fsdp in bfloat16": functools.partial(fsdp, narrow=True),
    "hsdp of 1 replica": functools.partial(fsdp, replicas=1),
    "hsdp of 2 replicas": functools.partial(fsdp, replicas=2),
    "hsdp of 3 replicas": functools.partial(fsdp, replicas=3),
    "hsdp of 4 replicas": functools.partial(fsdp, replicas=4),
}


class Job:
    """One rank's part of a run.

    Args:
        task: What is trained.
        place: A name of ``PLACES``.
        deal: A name of ``dealing.DEALS``; None for augend's own dealing.
        dtype: Of the accumulator.
        step: Names and values of more arguments of ``Accumulator.step``.
        accumulator: More arguments of the accumulator.
    """

    def __init__(
        self,
        task: Task,
        place: str = "replicated",
        deal: str | None = None,
        *,
        dtype: str = "exact",
        step: Sequence[tuple[str, Any]] = (),
        **accumulator: Any,
    ) -> None:
        self.task, self.deal, self.finish = task, deal, dict(step)
        rank, world = rank_and_world()
        self.model = PLACES[place](task.build(), task.blocks)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), **task.optimizer)
        sync = "last" if place == "last" else "every"
        self.grads = augend.Accumulator(self.model, dtype=dtype, sync=sync, **accumulator)
        alone = None if deal is None or world == 1 else mesh((world, 1), ("ranks", "alone"))["alone"]
        self.data = augend.Batches(
            task.rows,
            batch_size=task.batch_size,
            microbatch_size=task.microbatch_size,
            collate_fn=task.collate,
            shuffle=task.shuffle,
            mesh=alone,
        )
        warnings.filterwarnings("ignore", message=".*fillers that are computed and thrown away")  # they are meant
        self.steps: list[Told] = []
        self.forwards = 0
        self.model.register_forward_pre_hook(self._count)
        torch.manual_seed(100 * rank)  # random state that is no function of what is computed shows in the digest

    def _count(self, _module: nn.Module, _inputs: object) -> None:
        self.forwards += 1

    def checkpoint(self, directory: Path, keep: int = 2) -> augend.Checkpoint:
        """Return what saves all of it, and keeps so many."""
        parts = {"model": self.model, "optimizer": self.optimizer, "grads": self.grads, "data": self.data}
        return augend.Checkpoint(directory, keep=keep, background=False, **parts)

    def moments(self, steps: int) -> Iterator[Moment]:
        """Train up to so many steps from the beginning, pausing after every micro-batch."""
        rank, world = rank_and_world()
        for batch in self.data:
            dealt = batch if self.deal is None else Dealt(batch, rank=rank, world=world, deal=self.deal)
            rate = augend.schedules.apply(self.optimizer, self.task.schedule, self.grads.updates)
            for microbatch in self.grads.microbatches(dealt):
                self.grads.backward(self.task.loss(self.model, microbatch))
                yield Moment(batch.step, microbatch.offer, microbatch.rows_done)
            done = self.grads.step(self.optimizer, max_norm=self.task.max_norm, **self.finish)
            self.steps.append(Told(batch.step, batch.rows, done, getattr(done, "offers", 1), rate))
            if batch.step + 1 >= steps:
                return

    def train(self, steps: int) -> Outcome:
        """Train up to so many steps from the beginning."""
        for _ in self.moments(steps):
            pass
        return self.outcome()

    def advance(self, moment: Moment, steps: int) -> None:
        """Train up to the first pause that is not before a moment."""
        for at in self.moments(steps):
            if at >= moment:
                return
        raise ValueError(f"the run has no {moment} in {steps} steps")

    def outcome(self) -> Outcome:
        """Tell where the run stands. Collective."""
        names = {one: name for name, one in named_tensors(self.model).items()}
        state = {names[one]: self.optimizer.state[one] for group in self.groups() for one in group["params"]}
        return Outcome(hashed(named_tensors(self.model)), hashed(state), self.steps, self.forwards)

    def groups(self) -> list[dict[str, Any]]:
        """Return the optimizer's groups."""
        return self.optimizer.param_groups


def hashed(tree: dict[str, Any]) -> str:
    """Return the SHA-256 of whole tensors, by name, each with its dtype and shape. Collective."""
    state = hashlib.sha256()
    for name, one in sorted(tree.items()):
        state.update(f"{name}:".encode())
        state.update(hashed(one).encode() if isinstance(one, dict) else content(one))
    return state.hexdigest()


def content(value: Tensor | float) -> bytes:
    """Return the bytes of a tensor, wherever its parts are, or of a number."""
    if not isinstance(value, Tensor):
        return repr(value).encode()
    whole = value.detach().full_tensor() if isinstance(value, DTensor) else value.detach()
    flat = whole.contiguous().reshape(-1).view(torch.uint8)
    return f"{whole.dtype}{tuple(whole.shape)}".encode() + flat.numpy().tobytes()
