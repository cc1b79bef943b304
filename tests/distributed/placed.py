"""Every way of placing a model on ranks, and how to read whole tensors back."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import augend

COLUMNS = {"up": ColwiseParallel, "down": RowwiseParallel}


@dataclass(frozen=True)
class Placed:
    """A model on ranks.

    Attributes:
        model: What the training loop calls.
        accumulator: Arguments of its ``Accumulator``.
        data: Arguments of its ``Batches``.
    """

    model: nn.Module
    accumulator: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)

    def grads(self, **options: Any) -> augend.Accumulator:
        """Make the accumulator."""
        return augend.Accumulator(self.model, **self.accumulator, **options)

    def batches(self, rows: object, **options: Any) -> augend.Batches:
        """Make the data, and leave out that some ranks will run fillers: here they are meant to."""
        warnings.filterwarnings("ignore", message=".*fillers that are computed and thrown away")
        return augend.Batches(rows, **self.data, **options)


@functools.cache
def mesh(shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """Return a mesh, the same one for every case of a world."""
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def world() -> int:
    """Return how many ranks there are."""
    return torch.distributed.get_world_size()


def sharded(model: nn.Module, blocks: tuple[str, ...], over: DeviceMesh, **options: Any) -> nn.Module:
    """Shard the blocks of a model one by one, then what is left."""
    for block in blocks:
        fully_shard(model.get_submodule(block), mesh=over, **options)
    return fully_shard(model, mesh=over, **options)


def plain(model: nn.Module, blocks: tuple[str, ...]) -> Placed:
    """Leave the model plain: one process alone, or replicas whose sums are shared out over ranks."""
    return Placed(model)


def last(model: nn.Module, blocks: tuple[str, ...]) -> Placed:
    """Leave the model plain; ranks are added once."""
    return Placed(model, {"sync": "last"})


def wrapped(model: nn.Module, blocks: tuple[str, ...], **options: bool) -> Placed:
    """Wrap the model into DistributedDataParallel."""
    level = torch.distributed.get_debug_level()
    torch.distributed.set_debug_level(torch.distributed.DebugLevel.OFF)  # on a watched gloo group, torch 2.13 crashes
    try:
        group = torch.distributed.new_group()
    finally:
        torch.distributed.set_debug_level(level)
    options = options or {"find_unused_parameters": True}
    return Placed(DistributedDataParallel(model, process_group=group, **options))


def fsdp(model: nn.Module, blocks: tuple[str, ...]) -> Placed:
    """Shard over all ranks."""
    return Placed(sharded(model, blocks, mesh((world(),), ("shard",))))


def hsdp(model: nn.Module, blocks: tuple[str, ...], *, replicas: int) -> Placed:
    """Shard over some ranks, replicate over the others, both by FSDP2."""
    return Placed(sharded(model, blocks, mesh((replicas, world() // replicas), ("replicate", "shard"))))


def hybrid(model: nn.Module, blocks: tuple[str, ...], *, replicas: int) -> Placed:
    """Shard over some ranks by FSDP2, and leave the replicas to the accumulator."""
    full = mesh((replicas, world() // replicas), ("replicate", "shard"))
    return Placed(sharded(model, blocks, full["shard"]), {"mesh": full})


def tensor_parallel(model: nn.Module, blocks: tuple[str, ...]) -> Placed:
    """Split by tensor parallelism over all ranks, with a sequence-parallel layer in between."""
    full = mesh((1, world()), ("data", "tensor"))
    plan = {
        "up": ColwiseParallel(),
        "down": RowwiseParallel(output_layouts=Shard(1)),
        "gain": SequenceParallel(sequence_dim=1),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    return Placed(parallelize_module(model, full["tensor"], plan), {"mesh": full}, {"mesh": full["data"]})


def tensor_beside_whole(model: nn.Module, blocks: tuple[str, ...]) -> Placed:
    """Split a pair of layers by tensor parallelism over all ranks, and leave the others plain."""
    full = mesh((1, world()), ("data", "tensor"))
    plan = {name: style() for name, style in COLUMNS.items()}
    return Placed(parallelize_module(model, full["tensor"], plan), {"mesh": full}, {"mesh": full["data"]})


def tensor_and_fsdp(model: nn.Module, blocks: tuple[str, ...], *, tensor: int = 2) -> Placed:
    """Split a pair of layers by tensor parallelism, then shard everything."""
    full = mesh((world() // tensor, tensor), ("data", "tensor"))
    plan = {name: style() for name, style in COLUMNS.items()}
    parallelize_module(model, full["tensor"], plan)
    return Placed(fully_shard(model, mesh=full["data"]), {"mesh": full}, {"mesh": full["data"]})


def sequence_and_fsdp(model: nn.Module, blocks: tuple[str, ...], *, tensor: int = 2) -> Placed:
    """Split everything by tensor parallelism, with a sequence-parallel layer, then shard everything."""
    full = mesh((world() // tensor, tensor), ("data", "tensor"))
    plan = {
        "up": ColwiseParallel(),
        "down": RowwiseParallel(output_layouts=Shard(1)),
        "gain": SequenceParallel(sequence_dim=1),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    parallelize_module(model, full["tensor"], plan)
    return Placed(fully_shard(model, mesh=full["data"]), {"mesh": full}, {"mesh": full["data"]})


PLACES: dict[str, Callable[[nn.Module, tuple[str, ...]], Placed]] = {
    "alone": plain,
    "replicated": plain,
    "last": last,
    "wrapped": wrapped,
    "fsdp": fsdp,
    "hsdp of 1 replica": functools.partial(hsdp, replicas=1),
    "hsdp of 2 replicas": functools.partial(hsdp, replicas=2),
    "hsdp of 3 replicas": functools.partial(hsdp, replicas=3),
    "hybrid of 1 replica": functools.partial(hybrid, replicas=1),
    "hybrid of 2 replicas": functools.partial(hybrid, replicas=2),
    "tensor": tensor_parallel,
    "tensor beside whole": tensor_beside_whole,
    "tensor and fsdp": tensor_and_fsdp,
    "sequence and fsdp": sequence_and_fsdp,
}


def whole(tensor: Tensor) -> Tensor:
    """Return a copy of all of a tensor, wherever its parts are. Collective for those that are spread."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of tensors that are split twice, torch says that gathering them is slow
        return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Return the whole gradient of each parameter that has one."""
    return {name: whole(one.grad) for name, one in parameters(model) if one.grad is not None}


def weights(model: nn.Module) -> dict[str, Tensor]:
    """Return all parameters, whole."""
    return {name: whole(one) for name, one in parameters(model)}


def parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return names and parameters, without the name that a wrapper adds."""
    return [(name.removeprefix("module."), one) for name, one in model.named_parameters()]


def local(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return what of each tensor is on this rank."""
    return {name: one.to_local() if isinstance(one, DTensor) else one for name, one in tensors.items()}
