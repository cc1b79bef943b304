"""The optimizer steps, in the order in which ggml rounds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np
import torch
from torch import Tensor

from augend.ggml._parameters import rounded

_BLOCK: Final = 2**17  # elements of a tensor that are taken through all operations while they are in the cache


def step_adamw_(weight: Tensor, gradient: Tensor, m: Tensor, v: Tensor, vector: Sequence[float] | Tensor) -> None:
    """Make one AdamW step in place (Kingma and Ba 2015; Loshchilov and Hutter 2019); the caller disables autograd.

    Args:
        weight: float32; changed.
        gradient: Of the same shape, float32; left alone.
        m: The first moment, of the same shape, float32; changed.
        v: The second moment, of the same shape, float32; changed.
        vector: The seven numbers of ``adamw_vector``, or a float32 tensor ``[7]`` of them.

    Numerics:
        m ← m·β₁ + g·(1-β₁); v ← v·β₂ + g²·(1-β₂); w ← w·(1 - α·wd) - (α·(m·h₁)) / (√(v·h₂) + ε), each operation
        rounded once to float32. On a CPU bitwise what ggml computes where its compiler does not fuse operations.
    """
    numbers = _numbers(vector)
    for block in _blocks(weight, gradient, m, v):
        _adamw_block_(numbers, *block)


def step_sgd_(weight: Tensor, gradient: Tensor, vector: Sequence[float] | Tensor) -> None:
    """Make one step of gradient descent with decoupled weight decay in place; the caller disables autograd.

    Args:
        weight: float32; changed.
        gradient: Of the same shape, float32; left alone.
        vector: alpha and wd, or a float32 tensor ``[2]`` of them.

    Numerics:
        w ← w·(1 - α·wd) - α·g, each operation rounded once to float32; see ``step_adamw_``.
    """
    alpha, wd = _numbers(vector)
    for block_weight, block_gradient in _blocks(weight, gradient):
        _decay_(block_weight, alpha, wd)
        block_weight.sub_(block_gradient * alpha)


def _adamw_block_(numbers: Sequence[float], weight: Tensor, gradient: Tensor, m: Tensor, v: Tensor) -> None:
    alpha, beta1, beta2, eps, wd, correction1, correction2 = numbers
    scratch = gradient * rounded(1.0 - beta1)
    m.mul_(beta1).add_(scratch)
    torch.mul(gradient, gradient, out=scratch)
    v.mul_(beta2).add_(scratch.mul_(rounded(1.0 - beta2)))
    torch.mul(v, correction2, out=scratch)
    _root_(scratch)
    scratch.add_(eps)
    update = (m * correction1).mul_(alpha).div_(scratch)
    _decay_(weight, alpha, wd)
    weight.sub_(update)


def _blocks(*tensors: Tensor) -> Iterable[tuple[Tensor, ...]]:
    """Cut tensors of one shape alike. The steps are elementwise, so the cut is in no bit."""
    if tensors[0].numel() <= _BLOCK or not all(tensor.is_contiguous() for tensor in tensors):
        return (tensors,)
    return zip(*(torch.split(tensor.view(-1), _BLOCK) for tensor in tensors), strict=True)


def _numbers(vector: Sequence[float] | Tensor) -> Sequence[float]:
    numbers: Sequence[float] = vector.tolist() if isinstance(vector, Tensor) else vector
    return numbers


def _root_(values: Tensor) -> None:
    """Take the square root in place, rounded correctly: torch's own is one unit off for one number in five on a CPU."""
    if values.device.type != "cpu":
        values.sqrt_()
        return
    with np.errstate(invalid="ignore"):  # of a negative second moment it is NaN, as everywhere
        np.sqrt(values.numpy(), out=values.numpy())


def _decay_(weight: Tensor, alpha: float, wd: float) -> None:
    # The product of two float32 is exact in float64, so each line rounds once, as float32 does.
    keep = rounded(1.0 - rounded(alpha * wd))
    if keep != 1.0:  # by which all numbers stay what they are
        weight.mul_(keep)
