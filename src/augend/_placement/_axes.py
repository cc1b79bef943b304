"""The axes of a mesh, and what ranks along some of them add up."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor

from augend._group import Mesh
from augend._placement._tensors import Placed, is_split


def axis_names(mesh: Mesh) -> tuple[str, ...]:
    """Return the names of the axes of a mesh; numbers where it has none."""
    names = mesh.mesh_dim_names
    return tuple(f"axis {dim}" for dim in range(mesh.ndim)) if names is None else tuple(names)


@final
@dataclass(frozen=True, slots=True)
class Axes:
    """The full mesh: every axis that parameters or batches are spread over.

    Args:
        mesh: The full mesh; None for one process alone.
        data: Axes whose ranks share a batch.
    """

    mesh: Mesh | None
    data: tuple[str, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """All axes."""
        return () if self.mesh is None else axis_names(self.mesh)

    @property
    def tensor(self) -> tuple[str, ...]:
        """Axes whose ranks run the same rows."""
        return tuple(name for name in self.names if name not in self.data)

    def index(self, name: str) -> int:
        """Return where along an axis this rank is."""
        return 0 if self.mesh is None else self.mesh.get_local_rank(self.names.index(name))

    def size(self, name: str) -> int:
        """Return how many ranks there are along an axis."""
        return 1 if self.mesh is None else self.mesh.size(self.names.index(name))

    def split(self, lies: Placed | None) -> tuple[str, ...]:
        """Return the axes along which ranks hold different elements of a tensor that lies so."""
        if lies is None:
            return ()
        names = self.names if lies[0] == self.mesh else axis_names(lies[0])
        return tuple(axis for axis, way in zip(names, lies[1], strict=True) if is_split(way))

    def first(self, names: Collection[str]) -> bool:
        """Tell whether this rank is the first one along all of some axes."""
        return all(self.index(name) == 0 for name in names)

    def share(self) -> tuple[int, int]:
        """Return rank and world among those that share a batch, in row-major order of the data axes."""
        rank, world = 0, 1
        for name in self.data:
            rank, world = rank * self.size(name) + self.index(name), world * self.size(name)
        return rank, world

    def reduce_(self, tensor: Tensor, names: Collection[str], operation: dist.ReduceOp.RedOpType) -> Tensor:
        """Reduce a tensor in place over some axes, one after another; the same bits on all their ranks."""
        if self.mesh is not None:
            for name in self.names:
                if name in names and self.size(name) > 1:
                    dist.all_reduce(tensor, operation, group=self.mesh.get_group(self.names.index(name)))
        return tensor

    def add_up(self, tensors: Mapping[str, Tensor], over: Mapping[str, tuple[str, ...]]) -> dict[str, Tensor]:
        """Return each tensor summed over its axes; one collective an axis for all that go over the same axes.

        Args:
            tensors: The same names, shapes and dtypes on every rank of an axis.
            over: The axes of each name.
        """
        result = dict(tensors)
        kinds: dict[tuple[tuple[str, ...], torch.dtype, torch.device], list[str]] = {}
        for name, tensor in tensors.items():
            if any(self.size(axis) > 1 for axis in over[name]):
                kinds.setdefault((over[name], tensor.dtype, tensor.device), []).append(name)
        for (axes, _, _), names in kinds.items():
            flat = torch.cat([tensors[name].reshape(-1) for name in names])  # a copy
            self.reduce_(flat, axes, dist.ReduceOp.SUM)
            for name, part in zip(names, torch.split(flat, [tensors[name].numel() for name in names]), strict=True):
                result[name] = part.view(tensors[name].shape)
        return result
