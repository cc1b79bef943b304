"""Tally: the one value that runs through the house."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, final

import torch
from torch import Tensor

from augend.errors import TallyError

_FLOATING: Final = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_INTEGER: Final = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)


@final
@dataclass(frozen=True, slots=True, eq=False)
class Tally:
    """Sums of a loss (or of any measured quantity) and how much each sum covers, one pair a row.

    Row r contributes ``total[r]`` over ``count[r]`` supervised items. A loss is never a mean: the one division
    happens when all rows of all micro-batches and ranks have been added. A count of 0 with a total of 0 is legal
    and contributes exact zeros.

    Args:
        total: ``[rows]``, floating, usually differentiable. A 0-d tensor is a sum over an unknown number of rows:
            good for gradients, but its standard error is NaN.
        count: ``[rows]``, integers (held as int64) or non-negative finite weights (held as float64); the same shape
            as ``total``, without a graph. Weights are rounded to multiples of 2^-40 where they are summed.

    Raises:
        TallyError: Types, shapes, dtypes or devices do not fit. Values are not read here (that would make a GPU
            wait); negative or non-finite counts are found when the window is finished.

    Example:
        >>> import torch
        >>> tally = augend.Tally(torch.tensor([3.0, 8.0]), torch.tensor([1, 4]))
        >>> tally.mean()
        tensor(2.2000)
        >>> tally.sum()
        Tally(total=tensor([11.]), count=tensor([5]))
    """

    total: Tensor  # [rows] or []
    count: Tensor  # [rows] or [], int64 or floating

    def __post_init__(self) -> None:
        parts: tuple[object, object] = self.total, self.count
        if not all(isinstance(part, Tensor) for part in parts):
            got = " and ".join(type(part).__name__ for part in parts)
            raise TallyError(f"a Tally takes two tensors, total and count, one number a row; got {got}")
        if self.total.dtype not in _FLOATING:
            raise TallyError(f"total must be float32, float64, bfloat16 or float16; got {self.total.dtype}")
        if self.total.dim() > 1 or self.total.shape != self.count.shape:
            shapes = f"total {list(self.total.shape)} and count {list(self.count.shape)}"
            raise TallyError(f"total and count must both be [rows], one number a row (or both 0-d); got {shapes}")
        if self.count.requires_grad:
            raise TallyError("count must not require a gradient; build it from labels or use count.detach()")
        if self.count.device != self.total.device:
            devices = f"total on {self.total.device} and count on {self.count.device}"
            raise TallyError(f"total and count must be on one device; got {devices}")
        if self.count.dtype in _INTEGER:
            object.__setattr__(self, "count", self.count.to(torch.int64))
        elif self.count.dtype in _FLOATING:
            object.__setattr__(self, "count", self.count.to(torch.float64))
        else:
            raise TallyError(f"count must be integers or real weights; got {self.count.dtype}")

    @staticmethod
    def zeros(rows: int, *, device: torch.device | str | None = None) -> Tally:
        """Return the neutral element of ``+``: ``rows`` rows of total 0.0 (float32) over count 0.

        Args:
            rows: How many rows.
            device: Where; the default device if None.
        """
        return Tally(torch.zeros(rows, device=device), torch.zeros(rows, dtype=torch.int64, device=device))

    def sum(self) -> Tally:
        """Return the tally of one row (``[1]``) that holds the sum of all rows; counts beyond 2^63 - 1 wrap here."""
        return Tally(self.total.sum().reshape(1), self.count.sum().reshape(1))

    def mean(self) -> Tensor:
        """Return the total of all rows over the count of all rows, a 0-d tensor; NaN where nothing was counted.

        For looking at, not for training: ``mean().backward()`` would weight the parts of a batch equally.
        """
        return self.total.sum() / self.count.sum()

    def __add__(self, other: Tally) -> Tally:
        """Add totals and counts row by row: more items of the same rows.

        Raises:
            TallyError: The two do not have the same rows.
        """
        if not isinstance(other, Tally):
            return NotImplemented
        if self.total.shape != other.total.shape:
            shapes = f"{list(self.total.shape)} and {list(other.total.shape)}"
            raise TallyError(f"tallies are added row by row and need the same rows; got {shapes}")
        mixed = self.count.is_floating_point() != other.count.is_floating_point()
        counts = [one.count.to(torch.float64) if mixed else one.count for one in (self, other)]
        return Tally(self.total + other.total, counts[0] + counts[1])
