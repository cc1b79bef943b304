"""A tensor as 64 bits that do not depend on how it is cut: every element's bits and index mixed, and summed up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

_ELEMENTS: Final = 2**16  # mixed at a time: what stays in a cache
_BITS: Final = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _signed(number: int) -> int:
    """Return 64 bits as the integer that torch has for them."""
    return number - 2**64 if number >= 2**63 else number


# Odd numbers: multiplying by them loses nothing. The first is 2^64 over the golden ratio; shifts and factors are
# Stafford's 13th mixer, as in SplitMix64 (Steele, Lea and Flood, Fast Splittable Pseudorandom Number Generators, 2014).
_OF_INDICES: Final = _signed(0x9E3779B97F4A7C15)
_OF_BITS: Final = _signed(0xD1342543DE82EF95)
_ROUNDS: Final = ((30, _signed(0xBF58476D1CE4E5B9)), (27, _signed(0x94D049BB133111EB)), (31, 1))


def digest(part: Tensor, shape: Sequence[int], begins: Sequence[int]) -> Tensor:
    """Return the sum over a part's elements of their mixed bits and indices, modulo 2^64.

    The sums of parts that together are a tensor add up to that of the tensor, so equal tensors have equal sums however
    they are cut. Of different ones, one pair in 2^64 is expected to have equal sums; nothing here resists an adversary.

    Args:
        part: Of any real dtype; copied if its memory is not in row-major order.
        shape: Of the whole tensor.
        begins: Where in it the part begins, in each dim.

    Returns:
        A number, ``[]`` int64, on the part's device.
    """
    flat = part.detach().reshape(-1).view(_BITS[part.element_size()])  # [elements]
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for begin in range(0, flat.numel(), _ELEMENTS):
        bits = flat[begin : begin + _ELEMENTS].to(torch.int64, copy=True)
        indices = torch.arange(begin, begin + bits.numel(), device=flat.device)
        total += _mixed(bits, _in_whole(indices, part.shape, shape, begins)).sum()
    return total


def written(number: int) -> str:
    """Return a sum as 16 hexadecimal digits."""
    return f"{number % 2**64:016x}"


def _mixed(bits: Tensor, indices: Tensor) -> Tensor:
    """Mix numbers, ``[elements]`` int64, in place."""
    bits.mul_(_OF_BITS).add_(indices.mul_(_OF_INDICES))
    for shift, factor in _ROUNDS:
        low = (bits >> shift).bitwise_and_(2 ** (64 - shift) - 1)  # torch's shift brings in the sign
        bits.bitwise_xor_(low).mul_(factor)
    return bits


def _in_whole(indices: Tensor, sizes: Sequence[int], shape: Sequence[int], begins: Sequence[int]) -> Tensor:
    """Turn row-major indices into a part into those into the whole, in place where rows are whole."""
    strides = torch.empty(tuple(shape), device="meta").stride()
    if tuple(sizes[1:]) == tuple(shape[1:]):
        return indices.add_(sum(begin * stride for begin, stride in zip(begins[:1], strides[:1], strict=True)))
    result = torch.zeros_like(indices)
    for size, begin, stride in reversed([*zip(sizes, begins, strides, strict=True)]):
        result += (indices % size + begin).mul_(stride)
        indices = indices // size
    return result
