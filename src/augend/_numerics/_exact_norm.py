"""The 2-norm of float32 tensors, correctly rounded, whatever they are cut into.

The squares of float32 numbers fit float64. They are cut into limbs on fixed grids below the square of the largest
element, and limbs are whole numbers, whose sums know no order. What lies below the last limb was rounded, and is
bounded; where it could decide the rounding of the norm, more limbs are taken, at most until nothing is below.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Final

import torch
from torch import Tensor

from augend._numerics._exact import nearest, root, scaled
from augend._numerics._fixed_point import chunk, largest

Reduce = Callable[[Sequence[int]], Sequence[int]]

_BITS: Final = 62  # of a sum of limbs
_FINEST: Final = 298  # every square of a float32 number is a multiple of 2^-298
_SPARE: Final = 4  # limbs end so far below that they decide the rounding of hardly any norm


def exact_norm(tensors: Sequence[Tensor], elements: int, maximum: Reduce = list, total: Reduce = list) -> float:
    """Return the float64 that is nearest to the 2-norm of all elements of all tensors, those of other processes too.

    Args:
        tensors: float32, of any shapes: this process's.
        elements: At least as many as all processes' tensors have together; the same number on each.
        maximum: Returns the largest of every process's numbers, one by one; called first, once.
        total: Returns the sum of every process's numbers, one by one; called once, hardly ever twice.

    Returns:
        A plain number, the same for any partition of the elements; inf or nan if any element is.

    Numerics:
        Correctly rounded. With L = ceil(log2(elements)) a limb has 62 - L bits, so that sums of it stay below 2^62;
        two limbs up to 2^22 elements, three to 2^32, four to 2^38. What they leave is at most
        ``2**(2 * L - 61 - (62 - L) * (limbs - 1))`` of the square of the norm, which is 2^-57 or less.
    """
    held = [tensor.detach() for tensor in tensors if tensor.numel()]
    (found,) = maximum([_ordered(_largest(held))])
    top = _number(found)
    if top == 0 or not math.isfinite(top):
        return top
    exponent = math.frexp(top)[1]
    bits = _BITS - max(1, (elements - 1).bit_length())
    shift = bits - 2 * exponent  # the largest square is below 2**bits in units of 2**-shift
    limbs = max(2, 1 + -(-(2 * (_BITS - bits) - _SPARE) // bits))
    while True:
        lowest = shift + bits * (limbs - 1)
        sums = total(_limb_sums(held, shift, bits, limbs))
        square = scaled(sum(one << bits * (limbs - 1 - place) for place, one in enumerate(sums)), -lowest)
        left = Fraction(0) if lowest >= _FINEST else scaled(elements, -lowest - 1)
        low, high = nearest(root(square - left)), nearest(root(square + left))
        if low == high:
            return low
        limbs += 1


def _limb_sums(tensors: Sequence[Tensor], shift: int, bits: int, limbs: int) -> list[int]:
    """Return the sum of every limb of all squares, the highest first: in units of 2^-shift, 2^-(shift + bits), ..."""
    sums = [torch.zeros(limbs, dtype=torch.int64, device=tensor.device) for tensor in tensors]
    for tensor, found in zip(tensors, sums, strict=True):
        flat = tensor.reshape(-1)  # [elements]
        length = chunk(flat.device)
        for begin in range(0, flat.numel(), length):
            rest = flat[begin : begin + length].to(torch.float64)
            rest.mul_(rest).mul_(math.ldexp(1.0, shift))
            for place in range(limbs):
                limb = torch.round(rest)
                found[place] += limb.to(torch.int64).sum()
                rest.sub_(limb).mul_(math.ldexp(1.0, bits))
    if not sums:
        return [0] * limbs
    device = sums[0].device
    return [int(one) for one in torch.stack([found.to(device) for found in sums]).sum(dim=0).tolist()]


def _largest(tensors: Sequence[Tensor]) -> float:
    if not tensors:
        return 0.0
    sizes = list(map(largest, tensors))
    return float(torch.stack([one.to(sizes[0].device) for one in sizes]).max())  # nan if any is


def _ordered(number: float) -> int:
    """Return an integer that is the larger the larger a number is that is not negative; that of nan is the largest."""
    return int(torch.tensor(abs(number), dtype=torch.float64, device="cpu").view(torch.int64))


def _number(ordered: int) -> float:
    """Return the number that ``_ordered`` was given."""
    return float(torch.tensor(ordered, dtype=torch.int64, device="cpu").view(torch.float64))
