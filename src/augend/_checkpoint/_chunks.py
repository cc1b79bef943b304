"""Which part of a tensor is in this process: all of a plain one, this rank's part of one that is spread over ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset  # torch's checkpoints cut by it too
from torch.distributed.tensor.placement_types import Placement as Way
from torch.nn.parallel import DistributedDataParallel

from augend._group import Mesh
from augend.errors import ContractError


@final
@dataclass(frozen=True, slots=True)
class Chunk:
    """A part of a whole tensor.

    Attributes:
        offsets: Where it begins in the whole, in each dim.
        tensor: The part itself; plain.
    """

    offsets: tuple[int, ...]
    tensor: Tensor


@final
@dataclass(frozen=True, slots=True)
class Layout:
    """Over which ranks a tensor is spread, and how."""

    mesh: Mesh
    ways: tuple[Way, ...]

    @property
    def lowest(self) -> int:
        """The first of the ranks that hold it."""
        return int(self.mesh.mesh.min())

    @property
    def is_first(self) -> bool:
        """Whether no rank of the mesh before this one holds the same part."""
        coordinate = self.mesh.get_coordinate()
        return coordinate is not None and all(
            index == 0 for index, way in zip(coordinate, self.ways, strict=True) if way.is_replicate()
        )

    def cut(self, shape: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return size and offsets of this rank's part of a shape."""
        sizes, offsets = compute_local_shape_and_global_offset(torch.Size(shape), self.mesh, self.ways)
        return tuple(sizes), tuple(offsets)

    def replicated(self) -> Layout:
        """Return the layout in which every rank of the mesh has all."""
        return Layout(self.mesh, tuple(Replicate() for _ in self.ways))

    def spread(self, local: Tensor, shape: Sequence[int]) -> Tensor:
        """Make one tensor of the parts that every rank has; shares memory, and sends nothing."""
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(local, self.mesh, self.ways, run_check=False, shape=torch.Size(shape), stride=stride)


def settled(module: nn.Module) -> nn.Module:
    """Return a module without the wrapper of replicas, so that names do not depend on it.

    Sharded modules give back what they gathered for a forward: their parameters are again those of the optimizer.
    """
    inner = module.module if isinstance(module, DistributedDataParallel) else module
    for one in inner.modules():
        if isinstance(one, FSDPModule):
            one.reshard()
    return inner


def layout_of(tensor: Tensor) -> Layout | None:
    """Return how a tensor is spread; None for a plain one."""
    return Layout(tensor.device_mesh, tuple(tensor.placements)) if isinstance(tensor, DTensor) else None


def layouts_of(tensors: Mapping[str, Tensor]) -> dict[str, Layout]:
    """Return the layouts of those tensors that are spread."""
    return {name: layout for name, tensor in tensors.items() if (layout := layout_of(tensor)) is not None}


def lies_as(tensor: Tensor, other: Tensor) -> bool:
    """Tell whether two tensors are spread alike, and their parts here have the same shape, strides and device."""
    here, there = local_of(tensor), local_of(other)
    alike = layout_of(tensor) is not None and layout_of(tensor) == layout_of(other)
    return alike and here.stride() == there.stride() and here.device == there.device and tensor.shape == other.shape


def local_of(tensor: Tensor) -> Tensor:
    """Return what of a tensor is in this process, without its history; shares memory."""
    held = tensor.detach()
    return held.to_local() if isinstance(held, DTensor) else held


def chunk_of(tensor: Tensor) -> Chunk:
    """Return what of a tensor is in this process, and where it belongs.

    Raises:
        ContractError: It does not lie as its placements say, or ranks still have to add it up.
    """
    local, layout = local_of(tensor), layout_of(tensor)
    if layout is None:
        return Chunk((0,) * local.dim(), local)
    if any(way.is_partial() for way in layout.ways):
        raise ContractError(f"it is spread as {layout.ways}, to be added up yet; redistribute() it first")
    sizes, offsets = layout.cut(tensor.shape)
    if layout.mesh.get_coordinate() is not None and (sizes != tuple(local.shape) or not _in_one_piece(tensor, layout)):
        raise ContractError(
            f"its part on this rank is {list(local.shape)}, and {layout.ways} of {list(tensor.shape)} should give one "
            f"piece of {list(sizes)}; redistribute() it first"
        )
    return Chunk(offsets, local)


def _in_one_piece(tensor: Tensor, layout: Layout) -> bool:
    """Tell whether this rank's part is a box of the whole, which a part in strides may not be."""
    split = [way for way in layout.ways if not way.is_replicate()]
    for dim in {way.dim for way in split if type(way) is not Shard}:  # type: ignore[attr-defined]  # any kind of shard has one
        index = torch.arange(tensor.shape[dim], device="cpu").reshape([1] * dim + [-1])
        for place, (way, count) in enumerate(zip(layout.ways, layout.mesh.shape, strict=True)):
            if not way.is_replicate() and way.dim == dim:  # type: ignore[attr-defined]  # the same
                parts, _ = way._split_tensor(index, count, with_padding=False, contiguous=False)  # type: ignore[attr-defined]  # noqa: SLF001  # torch tells it nowhere else
                index = parts[layout.mesh.get_local_rank(place)]
        if index.numel() and int(index.flatten()[-1] - index.flatten()[0]) != index.numel() - 1:
            return False
    return True


def empty(shape: Sequence[int], dtype: torch.dtype, layout: Layout | None) -> Tensor:
    """Return a tensor to read into: spread like the layout, or whole and on the CPU."""
    if layout is None:
        return torch.empty(list(shape), dtype=dtype, device="cpu")
    if layout.mesh.get_coordinate() is None:
        local = torch.empty(0, dtype=dtype, device="cpu")
    else:
        local = torch.empty(layout.cut(shape)[0], dtype=dtype, device=layout.mesh.device_type)
    return layout.spread(local, shape)


def kept(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor to go back to: on the CPU, or where its parts are."""
    if isinstance(tensor, DTensor):
        return tensor.detach().clone()
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu").copy_(tensor)
