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


# ------------------------------------------------------------------ the exact mode, in rational arithmetic

HEAD_ROOM = 65_536  # micro-batches that a batch may have if nothing else is said
MARGIN = 12  # bits by which a gradient may grow from one batch to the next
FINEST = 24  # a grid coarser than this many bits below the largest gradient is too coarse

Parts = Sequence[Mapping[str, Sequence[float]]]  # for each micro-batch: parameter to the elements of its gradient


def head_bits(microbatches: int) -> int:
    """Return the smallest L with microbatches <= 2^L."""
    bits = 0
    while microbatches > 2**bits:
        bits += 1
    return bits


def exponent_above(largest: float) -> int:
    """Return the smallest e with largest < 2^e, for a positive number."""
    value, exponent = Fraction(largest), 0
    while value >= Fraction(2) ** exponent:
        exponent += 1
    while value < Fraction(2) ** (exponent - 1):
        exponent -= 1
    return exponent


def grid_for(largest: float, microbatches: int = HEAD_ROOM) -> int:
    """Return k: multiples of 2^-k hold 2^12 times the largest, and as many micro-batches, in 62 bits."""
    return 62 - head_bits(microbatches) - MARGIN - exponent_above(largest)


def largest_on(k: int, microbatches: int = HEAD_ROOM) -> Fraction:
    """Return the largest magnitude that a micro-batch may bring to the grid of 2^-k."""
    return Fraction(2) ** (62 - head_bits(microbatches) - k)


def rounded_to(k: int, value: float) -> int:
    """Return the multiple of 2^-k nearest to a number, ties to even."""
    return round(Fraction(value) * Fraction(2) ** k)


def mean_on(k: int, total: int, divisor: Fraction) -> float:
    """Return total · 2^-k / divisor in float64, rounded once more to float32."""
    with np.errstate(over="ignore"):
        return float(np.float32(float(total) * 2.0**-k / float(divisor)))


def square_sum(elements: np.ndarray) -> int:
    """Return the sum of squares of float32 numbers as a multiple of 2^-298, of which every square is one."""
    mantissas, exponents = np.frexp(np.asarray(elements, dtype=np.float32).astype(np.float64).reshape(-1))
    integers = (mantissas * 2.0**24).astype(np.int64)  # exact: 24 bits
    total = 0
    for exponent in np.unique(exponents):
        squares = integers[exponents == exponent] ** 2  # below 2^48; halves of them add up to 2^39 elements
        whole = (int((squares >> 24).sum()) << 24) + int((squares & 2**24 - 1).sum())
        scaled = Fraction(whole) * Fraction(2) ** (298 + 2 * (int(exponent) - 24))
        assert scaled.denominator == 1
        total += scaled.numerator
    return total


def exact_norm(elements: np.ndarray) -> float:
    """Return the float64 nearest to the 2-norm of float32 numbers, ties to even: one rounding in all."""
    square = square_sum(elements) << 200  # so that the root of the least one has 100 bits
    root = math.isqrt(square)
    sticky = root * root != square
    return (2 * root + sticky) / 2 ** (1 + 249)  # the quotient of two integers is rounded once


@dataclass(frozen=True)
class ExactBatch:
    """What one batch must come to.

    Attributes:
        offers: How often it is offered.
        scales: The k of each parameter's grid, of 2^-k.
        sums: Multiples of that.
        means: As float32 numbers.
        norm: Of all means.
    """

    offers: int
    scales: Mapping[str, int]
    sums: Mapping[str, list[int]]
    means: Mapping[str, list[float]]
    norm: float


class ExactTwin:
    """One term's fixed point over batches: which grid each parameter has, and what sums and means are on it.

    Attributes:
        scales: The k that each parameter would use in the next batch, of those that have one.
    """

    def __init__(self, microbatches: int = HEAD_ROOM) -> None:
        self.microbatches = microbatches
        self.scales: dict[str, int] = {}

    def batch(self, parts: Parts, divisor: Fraction) -> ExactBatch:
        """Return what a batch of finite gradients comes to, and learn its scales.

        Args:
            parts: The micro-batches, as gradients of loss_scale times the loss sum.
            divisor: The count times loss_scale.
        """
        names = sorted({name for part in parts for name in part})
        largest = {name: max(abs(x) for part in parts for x in part.get(name, [0.0])) for name in names}
        measured = {name: grid_for(one, self.microbatches) for name, one in largest.items() if one}
        again = self._unfit(largest)
        used = {**self.scales, **measured} if again else self.scales
        coarsest = min(used.values(), default=0)
        scales = {name: used.get(name, coarsest) for name in names}
        sums = {name: self._sum(name, scales[name], parts) for name in names}
        means = {name: [mean_on(scales[name], one, divisor) for one in sums[name]] for name in names}
        self.scales.update(measured)
        norm = exact_norm(np.array([x for one in means.values() for x in one]))
        return ExactBatch(1 + again, scales, sums, means, norm)

    def _unfit(self, largest: Mapping[str, float]) -> bool:
        """Tell whether some gradient is beyond its grid, or below what its grid is good for."""
        if not self.scales:
            return any(largest.values())
        coarsest = min(self.scales.values())
        fits = []
        for name, one in largest.items():
            k = self.scales.get(name, coarsest)
            beyond = Fraction(one) > largest_on(k, self.microbatches)
            coarse = one > 0 and Fraction(2) ** -k > Fraction(one) / 2**FINEST
            fits.append(not beyond and not coarse)
        return not all(fits)

    def _sum(self, name: str, k: int, parts: Parts) -> list[int]:
        present = [[rounded_to(k, x) for x in part[name]] for part in parts if name in part]
        return [sum(column) for column in zip(*present, strict=True)]


def exact_bound(parts: Sequence[float], k: int, divisor: Fraction) -> Fraction:
    """Bound the error of one mean against the exact sum over divisor.

    Each micro-batch is off by at most half a grid step: |S' - S| <= M · 2^-(k+1). S' is rounded to float64, scaled
    exactly, divided by a rounded divisor and rounded again: (1 + u)^3 / (1 - u) - 1 <= 5u, u = 2^-53. The last
    rounding, to float32, is 2^-24 of the result or half of the least float32, 2^-150.
    """
    exact = abs(sum((Fraction(x) for x in parts), Fraction(0)))
    grid = len(parts) * Fraction(1, 2) * Fraction(2) ** -k
    before = grid + (exact + grid) * 5 * Fraction(1, 2**53)
    return (before + (exact + before) * Fraction(1, 2**24)) / divisor + Fraction(1, 2**150)


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
