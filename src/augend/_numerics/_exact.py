"""Sums without rounding: floats as integers on a grid that holds every one of them."""

from __future__ import annotations

from fractions import Fraction
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

COUNT_LIMIT: Final = 2**63 - 1
_WEIGHT_GRID: Final = 2.0**40
_MANTISSA_BITS: Final = 53


def on_grid(weights: Tensor) -> Tensor:
    """Round fractional counts to the nearest multiple of 2^-40, ties to even, in float64.

    Weights of 2^13 and more are on that grid already, so the result is exact for them.

    Args:
        weights: ``[rows]``, floating.
    """
    return torch.round(weights.to(torch.float64) * _WEIGHT_GRID) / _WEIGHT_GRID


def fixed(values: Tensor) -> tuple[npt.NDArray[np.object_], int]:
    """Write finite numbers as Python integers over one power of two: ``values[i] == integers[i] * 2**exponent``.

    Args:
        values: ``[n]``, floating or int64, on any device, without a graph. Nothing is rounded.

    Returns:
        The integers (an object array, ``[n]``) and the exponent.
    """
    if not values.is_floating_point():
        return values.cpu().numpy().astype(object), 0
    mantissas, exponents = np.frexp(values.to(torch.float64).cpu().numpy())
    integers = (mantissas * 2.0**_MANTISSA_BITS).astype(np.int64)  # [n], exact: a float64 has 53 bits
    nonzero = integers != 0
    if not nonzero.any():
        return np.zeros(integers.shape, dtype=object), 0
    lowest = int(exponents[nonzero].min())
    shifts = np.where(nonzero, exponents - lowest, 0)
    return integers.astype(object) << shifts.astype(object), lowest - _MANTISSA_BITS


def scaled(integer: int, exponent: int) -> Fraction:
    """Return ``integer * 2**exponent`` as an exact fraction."""
    return Fraction(integer << exponent) if exponent >= 0 else Fraction(integer, 1 << -exponent)


def exact_sum(values: Tensor) -> Fraction:
    """Return the sum of finite numbers without any rounding, hence without dependence on their order.

    Args:
        values: ``[n]``, floating or int64, on any device, without a graph.
    """
    integers, exponent = fixed(values)
    return scaled(sum(integers.tolist()), exponent)
