"""Tensors that are spread over ranks, and the part of them that is here."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset  # torch's checkpoints cut by it too
from torch.distributed.tensor.placement_types import Placement as Way

from augend._group import Mesh

Placed = tuple[Mesh, tuple[Way, ...]]


def local_of(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that is in this process, without its history; shares memory."""
    if isinstance(tensor, DTensor):
        with torch.no_grad():
            return tensor.to_local().detach()
    return tensor.detach()


def placed(tensor: Tensor) -> Placed | None:
    """Return over what a tensor is spread, and how; None for a plain one."""
    return (tensor.device_mesh, tuple(tensor.placements)) if isinstance(tensor, DTensor) else None


def spread(local: Tensor, shape: torch.Size, mesh: Mesh, ways: Sequence[Way]) -> Tensor:
    """Make one tensor of the parts that every rank has; shares memory. Nothing is sent."""
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, mesh, tuple(ways), run_check=False, shape=shape, stride=stride)


def whole(tensor: Tensor) -> Tensor:
    """Return all of a tensor. Collective over its mesh if it has one."""
    held = tensor.detach()
    return held.full_tensor() if isinstance(held, DTensor) else held


def cut(tensor: Tensor, mesh: Mesh, ways: Sequence[Way]) -> Tensor:
    """Return the part of a whole tensor that belongs to this rank; shares memory. Nothing is sent."""
    sizes, begins = box(tensor.shape, mesh, ways)
    for dim, (size, begin) in enumerate(zip(sizes, begins, strict=True)):
        tensor = tensor.narrow(dim, begin, size)
    return tensor


def box(shape: torch.Size, mesh: Mesh, ways: Sequence[Way]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the sizes of this rank's part of a tensor, and where in the whole it begins, if it `is_box`."""
    sizes, begins = compute_local_shape_and_global_offset(shape, mesh, tuple(ways))
    return tuple(sizes), tuple(min(begin, length) for begin, length in zip(begins, shape, strict=True))


def is_box(ways: Sequence[Way]) -> bool:
    """Tell whether a part is one box of the whole: not where torch shards rows that tensor parallelism has split."""
    return all(type(way) in {Shard, Replicate} for way in ways)


def laid(gradient: Tensor, ways: Sequence[Way]) -> Tensor:
    """Return a gradient that lies as its parameter does, parts that are still to be added added. Collective if not yet.

    torch leaves the gradient of a tensor-parallel parameter as its last operation made it.
    """
    if isinstance(gradient, DTensor) and tuple(gradient.placements) != tuple(ways):
        return gradient.redistribute(placements=tuple(ways))
    return gradient


def is_split(way: Way) -> bool:
    """Tell whether ranks along an axis hold different elements."""
    return not way.is_replicate() and not way.is_partial()
