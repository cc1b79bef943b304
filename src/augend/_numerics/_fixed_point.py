"""Sums in fixed point: floats as whole numbers of one grid step a tensor, which add up without rounding or order.

A tensor with the scale k is held as integers in units of ``2**-k``. Of the 62 bits that an integer is given here,
some are head-room for the number of addends, and some for addends that are larger than those that k was chosen by.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor

_BITS: Final = 62  # one less than an int64 has, so that no rounding of a limit matters
_GROWTH_BITS: Final = 12  # how far above the addends that a scale was made of others may be
_COARSEST: Final = 24  # a grid step is at most this many powers of two below the largest addend: float32's own bits
_CHUNK: Final = 2**15  # elements converted at a time: 256 KiB of float64, which stay in cache and in a heap
_LARGE_CHUNK: Final = 2**24  # elsewhere a launch costs more than memory


def chunk(device: torch.device) -> int:
    """Return how many elements are to be converted at a time."""
    return _CHUNK if device.type == "cpu" else _LARGE_CHUNK


def headroom(addends: int) -> int:
    """Return the bits that a sum of so many addends may have more than each of them."""
    return (addends - 1).bit_length()


def largest(values: Tensor) -> Tensor:
    """Return the largest magnitude, ``[]`` float64, on the device; nan where an element is.

    Args:
        values: Floating, not empty.
    """
    low, high = torch.aminmax(values.detach())
    return torch.maximum(-low, high).to(torch.float64)


def scale_of(size: float, headroom: int) -> int:
    """Return the scale for addends of which the largest has this magnitude.

    Args:
        size: Positive and finite.
        headroom: Bits for the number of addends.
    """
    return _BITS - headroom - _GROWTH_BITS - math.frexp(size)[1]


def fits(size: float, scale: int, headroom: int) -> bool:
    """Tell whether addends up to this magnitude cannot overflow, and have a grid that is fine enough.

    Args:
        size: Finite; of 0 every scale will do.
        scale: Of the grid.
        headroom: Bits for the number of addends.
    """
    if size == 0:
        return True
    return not exceeds(size, scale, headroom) and math.ldexp(1.0, -scale) <= math.ldexp(size, -_COARSEST)


def exceeds(size: float, scale: int, headroom: int) -> bool:
    """Tell whether addends up to this magnitude can overflow."""
    return size > math.ldexp(1.0, _BITS - headroom - scale)


def add_fixed_(total: Tensor, values: Tensor, scale: int) -> None:
    """Add values to a sum on its grid, each rounded to the nearest step, ties to even.

    Args:
        total: int64, dense in memory; overwritten.
        values: Floating, of the same shape; what does not fit is not noticed here, and the sum then means nothing.
        scale: Of the grid.

    Numerics:
        Exact where an element is a multiple of ``2**-scale``, as all are of which the unit in the last place is one;
        else within half of that. The multiplication, in float64, rounds nothing.
    """
    sums, addends = _flat(total), _flat_like(values, total)
    factor = math.ldexp(1.0, scale)
    most = chunk(total.device)
    steps = torch.empty(min(most, sums.numel()), dtype=torch.float64, device=total.device)
    whole = torch.empty_like(steps, dtype=torch.int64)
    for begin in range(0, sums.numel(), most):
        part = sums[begin : begin + most]
        length = part.numel()
        steps[:length].copy_(addends[begin : begin + most]).mul_(factor).round_()
        part.add_(whole[:length].copy_(steps[:length]))


def write_fixed(result: Tensor, values: Tensor, scale: int) -> None:
    """Write values as whole numbers of grid steps; see ``add_fixed_``.

    Args:
        result: ``[rows, columns]`` int64, of any strides; overwritten.
        values: ``[rows, columns]``, floating, of any strides.
        scale: Of the grid.
    """
    factor = math.ldexp(1.0, scale)
    columns = max(1, chunk(values.device) // max(1, values.shape[0]))
    for begin in range(0, values.shape[1], columns):
        steps = values[:, begin : begin + columns].to(torch.float64).mul_(factor).round_()
        result[:, begin : begin + columns].copy_(steps)


class Addend(NamedTuple):
    """A sum in fixed point, and how it enters a mean: ``weight * total * 2**-scale / divisor``."""

    total: Tensor  # int64
    scale: int
    divisor: float
    weight: float


def mean_of_fixed(addends: Sequence[Addend]) -> Tensor:
    """Return the sum of what the addends stand for, float32, in the memory layout of the first.

    Args:
        addends: At least one; totals of one shape, dense in memory.

    Numerics:
        Formed element by element in float64, in the order of the addends, and rounded once to float32: of one addend
        with a weight of 1 the relative error is at most ``2**-24 + 2**-52``.
    """
    first = addends[0].total
    result = torch.empty_like(first, dtype=torch.float32)
    flat = _flat(result)
    totals = [_flat_like(one.total, first) for one in addends]
    # 0-d tensors and not numbers: on a GPU torch turns division by a number into a product with its inverse.
    divisors = [torch.full((), one.divisor, dtype=torch.float64, device=first.device) for one in addends]
    for begin in range(0, flat.numel(), chunk(first.device)):
        end = begin + chunk(first.device)
        parts = [
            total[begin:end].to(torch.float64).mul_(math.ldexp(1.0, -one.scale)).div_(divisor).mul_(one.weight)
            for total, one, divisor in zip(totals, addends, divisors, strict=True)
        ]
        for part in parts[1:]:
            parts[0].add_(part)
        flat[begin:end].copy_(parts[0])
    return result


def _flat(tensor: Tensor) -> Tensor:
    """Return the elements of a dense tensor as they lie in memory; shares it."""
    return tensor.as_strided((tensor.numel(),), (1,))


def _flat_like(tensor: Tensor, like: Tensor) -> Tensor:
    """Return the elements of a tensor in the order in which those of another lie in memory."""
    if tensor.stride() != like.stride():
        tensor = torch.empty_like(like, dtype=tensor.dtype).copy_(tensor)
    return _flat(tensor.detach())
