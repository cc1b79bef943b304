"""The float64 twin: the whole batch at once, written as the mathematics is.

Nothing here is imported by the package, and nothing here imports it: two roads to the same numbers.
"""

from __future__ import annotations

import decimal
import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from fractions import Fraction

import numpy as np
import torch
from torch import Tensor, nn

UNIT = {torch.float32: 2.0**-24, torch.float64: 2.0**-53, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def gamma(k: int, dtype: torch.dtype) -> float:
    """Higham (2002), §4.2: γ(k) = k·u / (1 - k·u), the relative error of a chain of k roundings."""
    return k * UNIT[dtype] / (1 - k * UNIT[dtype])


def exact_sum(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Add arrays elementwise without rounding, then round once to float64."""
    stacked = np.stack([np.asarray(one, dtype=np.float64) for one in arrays])
    flat = stacked.reshape(len(arrays), -1)
    return np.array([math.fsum(column) for column in flat.T]).reshape(stacked.shape[1:])


def ratio(totals: Iterable[float], counts: Iterable[float]) -> tuple[float, float]:
    """Return Σs/Σc and its standard error over rows, in rational arithmetic until the last root.

    One row that counts something says nothing of how rows differ, however many empty rows stand beside it.
    """
    pairs = [(Fraction(s), Fraction(c)) for s, c in zip(totals, counts, strict=True)]
    n = len(pairs)
    total, count = sum(s for s, _ in pairs), sum(c for _, c in pairs)
    if count == 0:
        return math.nan, math.nan
    value = total / count
    if sum(c > 0 for _, c in pairs) < 2:
        return float(value), math.nan
    variance = Fraction(n, n - 1) * sum((s - value * c) ** 2 for s, c in pairs) / count**2
    with decimal.localcontext(prec=60):  # far more digits than a float64 can tell apart
        return float(value), float((Decimal(variance.numerator) / Decimal(variance.denominator)).sqrt())


def mean_gradients(model: nn.Module, totals: Tensor, count: float) -> dict[str, Tensor]:
    """Return the gradient of Σ totals, over count, for a float64 model: one backward over the whole batch."""
    names = [name for name, _ in model.named_parameters()]
    gradients = torch.autograd.grad(totals.sum(), list(model.parameters()), allow_unused=True)
    return {name: one / count for name, one in zip(names, gradients, strict=True) if one is not None}


def norm(gradients: Mapping[str, Tensor]) -> float:
    """Return the 2-norm over all elements, from an exact sum of exact squares."""
    elements = (Fraction(x) for one in gradients.values() for x in one.double().flatten().tolist())
    return math.sqrt(sum(x * x for x in elements))


def clipped(gradients: Mapping[str, Tensor], max_norm: float) -> dict[str, Tensor]:
    """Scale the gradients so that their norm is at most max_norm."""
    length = norm(gradients)
    scale = min(1.0, max_norm / length) if length else 1.0
    return {name: one * scale for name, one in gradients.items()}


def digest(*parts: object) -> str:
    """Return a SHA-256 over tensors (bit by bit), containers and plain values."""
    state = hashlib.sha256()
    _feed(state, parts)
    return state.hexdigest()


def _feed(state: hashlib._Hash, value: object) -> None:
    if isinstance(value, Tensor):
        dense = value.detach().contiguous()
        state.update(f"{dense.dtype}{tuple(dense.shape)}".encode())
        state.update(dense.reshape(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(value, Mapping):
        for key, one in value.items():
            _feed(state, (str(key), one))
    elif isinstance(value, tuple | list):
        state.update(f"[{len(value)}".encode())
        for one in value:
            _feed(state, one)
    else:
        state.update(repr(value).encode())
