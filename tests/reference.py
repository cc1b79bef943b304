"""The float64 twin: the whole batch at once, written as the mathematics is.

Nothing here is imported by the package, and nothing here imports it: two roads to the same numbers.
"""

from __future__ import annotations

import decimal
import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction

import numpy as np
import torch
from torch import Tensor, nn

Arrays = dict[str, np.ndarray]  # float64, one for each parameter that has a gradient

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


@dataclass(frozen=True)
class Part:
    """One micro-batch, as autograd left it.

    Attributes:
        gradients: Of the loss SUM, for the parameters that had one.
        total: The loss sum.
        count: What it covers.
    """

    gradients: Mapping[str, Tensor]
    total: float
    count: float


def part(model: nn.Module, totals: Tensor, count: float) -> Part:
    """Return the gradients of Σ totals in the model's own dtype: one micro-batch, one backward."""
    named = {name: one for name, one in model.named_parameters() if one.requires_grad}
    gradients = torch.autograd.grad(totals.sum(), list(named.values()), allow_unused=True)
    present = {name: one for name, one in zip(named, gradients, strict=True) if one is not None}
    return Part(present, math.fsum(totals.double().tolist()), count)


def deal(parts: Sequence[Part], world: int) -> list[list[Part]]:
    """Return the micro-batches of each rank: j goes to rank j mod world."""
    return [list(parts[rank::world]) for rank in range(world)]


def whole_mean(ranks: Sequence[Sequence[Part]]) -> tuple[Arrays, Arrays]:
    """Return Σg/N and Σ|g|/N over all micro-batches of all ranks: exact sums, one division by the global count.

    A parameter that no micro-batch used is in neither.
    """
    parts = [one for rank in ranks for one in rank]
    count = math.fsum(one.count for one in parts)
    means, sizes = {}, {}
    for name in sorted({name for one in parts for name in one.gradients}):
        arrays = [one.gradients[name].double().numpy() for one in parts if name in one.gradients]
        means[name] = exact_sum(arrays) / count
        sizes[name] = exact_sum([np.abs(array) for array in arrays]) / count
    return means, sizes


def mean_of_means(ranks: Sequence[Sequence[Part]]) -> Arrays:
    """Return what averaging gives, which depends on the cut: micro-batches weigh the same, and so do ranks."""
    result: Arrays = {}
    for rank in ranks:
        for one in rank:
            for name, gradient in one.gradients.items():
                mean = gradient.double().numpy() / max(one.count, 1) / len(rank) / len(ranks)
                result[name] = result.get(name, 0.0) + mean
    return result


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
    """Return a SHA-256 over tensors (bit by bit), containers and plain values; the order of keys is not looked at."""
    state = hashlib.sha256()
    _feed(state, parts)
    return state.hexdigest()


def _feed(state: hashlib._Hash, value: object) -> None:
    if isinstance(value, Tensor):
        dense = value.detach().contiguous()
        state.update(f"{dense.dtype}{tuple(dense.shape)}".encode())
        state.update(dense.reshape(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(value, Mapping):
        for key, one in sorted(value.items(), key=lambda item: str(item[0])):
            _feed(state, (str(key), one))
    elif isinstance(value, tuple | list):
        state.update(f"[{len(value)}".encode())
        for one in value:
            _feed(state, one)
    else:
        state.update(repr(value).encode())
