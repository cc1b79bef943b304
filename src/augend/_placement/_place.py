"""Where one parameter and its sum lie."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, final

import torch
from torch import Tensor, nn

from augend._placement._axes import Axes
from augend._placement._digests import digest
from augend._placement._tensors import Placed, box, cut, is_box, local_of, placed, spread, whole


class Dtypes(NamedTuple):
    """What gradients are computed in, and what their sums are held in: the same, or whole numbers of grid steps."""

    work: torch.dtype
    held: torch.dtype


@final
@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """One parameter, and what of its sum is on this rank.

    Args:
        parameter: The parameter as optimizers hold it.
        lies: Over what its sum is spread, and how; None where every rank has a sum of the whole parameter.
        partial: Axes along which ranks hold different parts of the sum's value: still to be added up.
        split: Axes along which ranks hold different elements of it.
    """

    parameter: nn.Parameter
    lies: Placed | None
    partial: tuple[str, ...]
    split: tuple[str, ...]

    @property
    def shape(self) -> torch.Size:
        """Of the whole parameter."""
        return self.parameter.shape

    def like(self) -> Tensor:
        """Return this rank's part of the parameter, cut as its sum is; shares memory."""
        if self.lies is None or placed(self.parameter) is not None:
            return local_of(self.parameter)
        return cut(self.parameter.detach(), *self.lies)

    def spread(self, local: Tensor) -> Tensor:
        """Return this rank's part of a complete sum as a tensor that others can place anew; shares memory."""
        return local if self.lies is None else spread(local, self.shape, *self.lies)

    def part(self, tensor: Tensor) -> Tensor:
        """Return what of a complete sum, however it is spread, belongs to this rank. Collective if it is spread."""
        if self.lies is not None and placed(tensor) == self.lies:
            return local_of(tensor)
        every = whole(tensor)
        return every if self.lies is None else cut(every, *self.lies)

    def counted(self, axes: Axes) -> bool:
        """Tell whether this rank's elements enter a norm here: others along the remaining axes hold the same."""
        return axes.first([name for name in axes.names if name not in self.split])

    def digest(self, axes: Axes) -> int:
        """Return this rank's share of the parameter's digest: every element is in one rank's. Collective if no box."""
        if self.lies is not None and not is_box(self.lies[1]):
            every, own = whole(self.parameter), axes.first(axes.names)
            begins = (0,) * every.dim()
        else:
            every, own = self.like(), self.counted(axes)
            begins = (0,) * every.dim() if self.lies is None else box(self.shape, *self.lies)[1]
        return int(digest(every, self.shape, begins)) if own else 0
