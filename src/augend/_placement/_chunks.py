"""Sums of replicated parameters, each rank holding a share of every one: reduce-scatter in, all-gather out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, final

import torch
import torch.distributed as dist
from torch import Tensor

Write = Callable[[str, Tensor, Tensor], None]
_BUCKET_ELEMENTS: Final = 2**23  # sent at a time, unless one parameter alone has more


@final
@dataclass(frozen=True, slots=True)
class _Cut:
    """How one parameter is dealt: in rows of its first dim, equally many to each rank, the last ones fewer."""

    name: str
    shape: torch.Size
    world: int

    @property
    def rows(self) -> int:
        """Rows of a rank's padded part."""
        return -(-self.shape[0] // self.world)

    @property
    def elements(self) -> int:
        """Elements of a rank's padded part."""
        return self.rows * self.shape[1:].numel()

    def real(self, rank: int) -> torch.Size:
        """Return the shape of a rank's part without padding."""
        rows = max(0, min(self.rows, self.shape[0] - rank * self.rows))
        return torch.Size((rows, *self.shape[1:]))


@final
class Chunks:
    """Deals gradients of whole parameters to ranks, in one order, whatever each of them used.

    Args:
        shapes: Of every parameter, by name; each has at least one dim.
        group: Who shares the sums.
        held: Dtype of the sums.
        device: Of the parameters.
    """

    def __init__(
        self, shapes: Mapping[str, torch.Size], group: dist.ProcessGroup, held: torch.dtype, device: torch.device
    ) -> None:
        self._group = group
        self._rank, self._world = dist.get_rank(group), dist.get_world_size(group)
        self._held = held
        self._device = device
        self._buckets = list(_buckets([_Cut(name, shape, self._world) for name, shape in shapes.items()]))

    def scatter(self, gradients: Mapping[str, Tensor], write: Write) -> Iterator[tuple[str, Tensor]]:
        """Add up every rank's gradients, and yield this rank's part of each. Collective.

        Args:
            gradients: Of whole parameters; a missing one counts as zeros.
            write: Writes a gradient in the dtype of the sums: its name, rows of it, and where to.
        """
        for bucket in self._buckets:
            size = sum(one.elements for one in bucket)
            every = torch.zeros((self._world, size), dtype=self._held, device=self._device)
            begin = 0
            for one in bucket:
                if one.name in gradients:
                    flat = gradients[one.name].reshape(-1)
                    ranks, left = divmod(flat.numel(), one.elements)
                    rows = flat[: ranks * one.elements].view(ranks, one.elements)
                    if ranks:
                        write(one.name, rows, every[:ranks, begin : begin + one.elements])
                    if left:
                        write(one.name, flat[-left:].view(1, left), every[ranks : ranks + 1, begin : begin + left])
                begin += one.elements
            mine = torch.empty(size, dtype=self._held, device=self._device)
            dist.reduce_scatter(mine, list(every), group=self._group)
            yield from self._unpacked(bucket, mine, self._rank)

    def gather(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return whole tensors of every rank's parts. Collective.

        Args:
            parts: The same names on every rank, each this rank's part, all of one dtype; not all need be there.
        """
        result: dict[str, Tensor] = {}
        for bucket in self._buckets:
            held = [one for one in bucket if one.name in parts]
            if not held:
                continue
            size, dtype = sum(one.elements for one in held), parts[held[0].name].dtype
            mine = torch.zeros(size, dtype=dtype, device=self._device)
            begin = 0
            for one in held:
                part = parts[one.name].reshape(-1)
                mine[begin : begin + part.numel()].copy_(part)
                begin += one.elements
            every = torch.empty((self._world, size), dtype=dtype, device=self._device)
            dist.all_gather(list(every), mine, group=self._group)
            rows = [dict(self._unpacked(held, every[rank], rank)) for rank in range(self._world)]
            for one in held:
                result[one.name] = torch.cat([row[one.name] for row in rows])
        return result

    def _unpacked(self, bucket: Sequence[_Cut], flat: Tensor, rank: int) -> Iterator[tuple[str, Tensor]]:
        begin = 0
        for one in bucket:
            shape = one.real(rank)
            yield one.name, flat[begin : begin + shape.numel()].view(shape)
            begin += one.elements


def _buckets(cuts: Sequence[_Cut]) -> Iterator[list[_Cut]]:
    bucket: list[_Cut] = []
    elements = 0
    for one in cuts:
        if bucket and elements + one.elements * one.world > _BUCKET_ELEMENTS:
            yield bucket
            bucket, elements = [], 0
        bucket.append(one)
        elements += one.elements * one.world
    if bucket:
        yield bucket
