"""Sums without rounding: floats as integers on a grid that holds every one of them."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

COUNT_LIMIT: Final = 2**63 - 1
_WEIGHT_GRID: Final = 2.0**40
_ALWAYS_ON_GRID: Final = 2.0**13  # the distance to the next float64 is 2^-39 from here on
_MANTISSA_BITS: Final = 53
_ROOT_BITS: Final = 66  # a float64 has 53, so that one sticky bit decides every rounding


def on_grid(weights: Tensor) -> Tensor:
    """Round fractional counts to the nearest multiple of 2^-40, ties to even, in float64.

    Weights of 2^13 and more are on that grid already and come back as they are; so do inf and nan.

    Args:
        weights: ``[rows]``, floating.
    """
    weights = weights.to(torch.float64)
    small = weights.abs() < _ALWAYS_ON_GRID  # beyond it the multiplication might overflow
    return torch.where(small, torch.round(weights * _WEIGHT_GRID) / _WEIGHT_GRID, weights)


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


def nearest(number: Fraction) -> float:
    """Return the float64 nearest to a fraction, ties to even; inf of its sign beyond the largest float64."""
    try:
        return number.numerator / number.denominator
    except OverflowError:
        return math.inf if number > 0 else -math.inf


def root(square: Fraction) -> Fraction:
    """Return the square root of a non-negative fraction: exact where it is rational.

    Numerics:
        Elsewhere within a factor of 1 ± 2^-64, and on the same side as the true root of every number of 65 bits or
        fewer, so that ``nearest(root(square))`` is the float64 nearest to the true root.
    """
    exact = Fraction(math.isqrt(square.numerator), math.isqrt(square.denominator))
    if exact * exact == square:
        return exact
    bits = square.numerator.bit_length() - square.denominator.bit_length()
    shift = _ROOT_BITS - bits // 2
    shifted = square * scaled(1, 2 * shift)
    return scaled(2 * math.isqrt(math.floor(shifted)) + 1, -shift - 1)
