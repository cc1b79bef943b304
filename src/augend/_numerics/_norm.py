"""The 2-norm of many tensors, in float64, with a bound on its error."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Final

import torch
from torch import Tensor

_CHUNK: Final = 2**18  # elements converted at a time: 2 MiB of float64, which stays in cache
_ROW: Final = 2**12  # elements summed by one chain of float64 additions
_SAFE_LOW: Final = 2.0**-900  # below this, squares of float64 elements may have been lost to underflow
_UNIT: Final = 2.0**-53

# Squares (1 rounding), a chain of at most 2^12 additions, one rounding of the exact sum of a process, one of that of
# all; the root halves it and rounds once more: (γ(2^12 + 1) + 2u) / 2 + u, γ(k) = k·u / (1 - k·u) (Higham 2002, §4.2).
NORM_RELATIVE_ERROR: Final = ((_ROW + 1) * _UNIT / (1 - (_ROW + 1) * _UNIT) + 2 * _UNIT) / 2 + _UNIT

Gather = Callable[[Sequence[float]], Sequence[Sequence[float]]]


def norm(tensors: Iterable[Tensor], gather: Gather = lambda numbers: [numbers]) -> float:
    """Return the 2-norm of all elements of all tensors together, those of other processes too.

    Args:
        tensors: Floating tensors of any shapes, dtypes and devices: this process's.
        gather: Returns every process's numbers, given this one's; called once, or twice where magnitudes are extreme.

    Returns:
        A plain number; inf or nan if any element is. No element overflows or vanishes on the way, whatever the
        magnitudes: 1e30 and 1e-30 in float32, 1e300 and 1e-300 in float64.

    Numerics:
        Relative error at most ``NORM_RELATIVE_ERROR`` (2.3e-13), whatever the number of elements. A norm below
        2^-1022, which float64 holds with fewer bits, is besides rounded once more, to a multiple of 2^-1074.
    """
    held = [tensor.detach() for tensor in tensors]
    total = _fsum([one for (one,) in gather([_square_sum(held)])])
    if _SAFE_LOW <= total < math.inf or math.isnan(total):
        return math.sqrt(total)
    parts = gather(_scaled_sum(held))
    if not all(math.isfinite(largest) for largest, _, _ in parts):
        return max(largest for largest, _, _ in parts)
    exponents = [int(exponent) for largest, exponent, _ in parts if largest]
    if not exponents:
        return 0.0
    top = max(exponents)
    total = _fsum([math.ldexp(one, 2 * (int(exponent) - top)) for largest, exponent, one in parts if largest])
    return _ldexp(math.sqrt(total), top)


def _scaled_sum(tensors: Sequence[Tensor]) -> tuple[float, float, float]:
    """Return the largest magnitude, an exponent of about its size, and the sum of squares in units of that."""
    largest = max((float(tensor.abs().max()) for tensor in tensors if tensor.numel()), default=0.0)
    if largest == 0.0 or not math.isfinite(largest):
        return largest, 0.0, 0.0
    exponent = math.frexp(largest)[1]
    return largest, exponent, _square_sum(tensors, -exponent)


def _fsum(numbers: Iterable[float]) -> float:
    try:
        return math.fsum(numbers)
    except OverflowError:  # finite sums whose total is beyond float64
        return math.inf


def _ldexp(value: float, exponent: int) -> float:
    try:
        return math.ldexp(value, exponent)
    except OverflowError:
        return math.inf


def _square_sum(tensors: Sequence[Tensor], exponent: int = 0) -> float:
    """Return the sum of all ``(element * 2**exponent)**2``: rows in float64, their sums added without rounding."""
    partials = [partial for tensor in tensors for partial in _row_sums(tensor, exponent)]
    if not partials:
        return 0.0
    device = partials[0].device
    sums = torch.cat([partial.to(device) for partial in partials]).tolist()
    return _fsum(sums)


def _row_sums(tensor: Tensor, exponent: int) -> list[Tensor]:
    """Return float64 sums of squares of rows of ``_ROW`` elements: a few short vectors, left on the device."""
    flat = tensor.reshape(-1)  # [elements]
    buffer = torch.empty(min(_CHUNK, flat.numel()), dtype=torch.float64, device=flat.device)
    sums = []
    for start in range(0, flat.numel(), _CHUNK):
        part = flat[start : start + _CHUNK]
        squares = buffer[: part.numel()].copy_(part)
        if exponent:
            half = exponent // 2  # 2**1074 is beyond float64, so two factors
            squares.mul_(2.0**half).mul_(2.0 ** (exponent - half))
        squares.mul_(squares)
        whole = part.numel() - part.numel() % _ROW
        if whole:
            sums.append(squares[:whole].view(-1, _ROW).sum(dim=1))
        if whole < part.numel():
            sums.append(squares[whole:].sum(dim=0, keepdim=True))
    return sums
