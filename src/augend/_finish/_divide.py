"""The one division: how a sum becomes a mean, whatever the size of the factor."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import torch
from torch import Tensor

_NORMAL: Final = {
    torch.float32: (2.0**-126, 2.0**126),  # both a number in here and its inverse are normal
    torch.float64: (2.0**-1022, 2.0**1022),
}


def divide_(tensors: Iterable[Tensor], divisors: tuple[float, float], multiplier: float = 1.0) -> None:
    """Set each tensor to ``tensor / divisors[0] / divisors[1] * multiplier``.

    The factor is formed in float64 and rounded once to the tensor's dtype, and the tensor is divided by it, as
    torch's fused optimizers divide by their ``grad_scale``. If it or its inverse is not a normal number there, the
    tensor goes through float64 with its factors one by one, so that nothing turns into 0 or inf on the way.

    Args:
        tensors: float32 or float64; overwritten.
        divisors: The loss scale and the count; positive and finite.
        multiplier: From 0 to 1, or nan.

    Numerics:
        Two roundings: relative error at most 2u + u², u the unit roundoff of the tensor's dtype; one rounding where
        the factor is exact (a count up to 2^24 without clipping, in float32).
    """
    factor = divisors[0] * divisors[1] / multiplier if multiplier else 0.0
    held: dict[tuple[torch.dtype, torch.device], Tensor] = {}
    for tensor in tensors:
        low, high = _NORMAL[tensor.dtype]
        if low <= factor <= high:
            # A 0-d tensor and not a number: on a GPU torch turns division by a number into a product with its inverse.
            kind = tensor.dtype, tensor.device
            if kind not in held:
                held[kind] = torch.tensor(factor, dtype=tensor.dtype, device=tensor.device)
            tensor.div_(held[kind])
        else:
            tensor.copy_(tensor.to(torch.float64).div_(divisors[0]).div_(divisors[1]).mul_(multiplier))
