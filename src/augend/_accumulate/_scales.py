"""The grids that exact sums are held on: made of the largest gradients of the batch before, and kept for one offer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import final

import torch
from torch import Tensor

from augend._numerics import exceeds, fits, headroom, scale_of

Sizes = Mapping[str, Mapping[str, float]]  # term to parameter to a number


@final
class Scales:
    """The scale of every sum, and the largest gradient that each has seen in this offer of a batch.

    Scales are chosen by what no cut can change: maxima over whole batches, agreed by all ranks. A tensor that has
    none takes the coarsest that is known in its term; a term that knows none is only measured.

    Args:
        known: Term to parameter to scale.
        max_microbatches: The most addends of a sum.
        expected: What will come besides the batch, as far as it came before and had to be dropped.
    """

    def __init__(
        self, known: Mapping[str, Mapping[str, int]], max_microbatches: int, expected: Sizes | None = None
    ) -> None:
        self.expected: Sizes = {} if expected is None else expected
        self.known = {term: dict(scales) for term, scales in known.items()}
        self.headroom = headroom(max_microbatches)
        self.max_microbatches = max_microbatches
        self._coarsest = {term: min(scales.values(), default=None) for term, scales in self.known.items()}
        self._largest: dict[str, dict[str, Tensor]] = {term: {} for term in self.known}  # [] float64, of this rank

    @staticmethod
    def none(terms: Sequence[str], max_microbatches: int) -> Scales:
        """Return the scales of a training that begins."""
        return Scales({term: {} for term in terms}, max_microbatches)

    def of(self, term: str, name: str) -> int | None:
        """Return the scale of a sum; None while its term is only measured."""
        return self.known[term].get(name, self._coarsest[term])

    def see(self, term: str, name: str, size: Tensor) -> None:
        """Take note of the largest magnitude, ``[]`` float64, of a gradient."""
        seen = self._largest[term].get(name)
        self._largest[term][name] = size if seen is None else torch.maximum(seen.to(size.device), size)

    def ordered(self, keys: Sequence[tuple[str, str]]) -> list[int]:
        """Return the largest of each term and parameter as integers in the same order. Waits for the device."""
        seen = [self._largest[term].get(name) for term, name in keys]
        there = [one for one in seen if one is not None]
        device = there[0].device if there else torch.device("cpu")
        zero = torch.zeros((), dtype=torch.float64, device=device)
        together = torch.stack([zero if one is None else one.to(device) for one in seen])
        return [int(one) for one in together.abs().view(torch.int64).tolist()]

    def unfit(self, largest: Sizes) -> tuple[str, str] | None:
        """Return the first term and parameter whose grid cannot hold gradients of this size; None if all can.

        A batch that is not finite has no grid; it is the policy's.
        """
        if not all_finite(largest):
            return None
        for term, sizes in largest.items():
            for name, size in sizes.items():
                if not self.holds(term, name, size):
                    return term, name
        return None

    def overflows(self, term: str, name: str, size: float) -> bool:
        """Tell whether a sum has no grid, or cannot hold gradients of this size; larger ones may still come."""
        scale = self.of(term, name)
        return size != 0 and math.isfinite(size) and (scale is None or exceeds(size, scale, self.headroom))

    def holds(self, term: str, name: str, size: float) -> bool:
        """Tell whether a sum's grid can hold gradients up to this size; none can hold inf or nan."""
        if size == 0 or not math.isfinite(size):
            return size == 0
        scale = self.of(term, name)
        return scale is not None and fits(size, scale, self.headroom)

    def and_expected(self, largest: Sizes) -> Sizes:
        """Return the sizes of gradients and of those that are expected besides."""
        both: dict[str, dict[str, float]] = {}
        for term, sizes in largest.items():
            besides = self.expected.get(term, {})
            both[term] = {name: max(sizes.get(name, 0.0), besides.get(name, 0.0)) for name in {**besides, **sizes}}
        return both

    def after(self, largest: Sizes, expected: Sizes | None = None) -> Scales:
        """Return the scales for what comes after gradients of this size; those that are not finite teach nothing."""
        known = {term: dict(scales) for term, scales in self.known.items()}
        if all_finite(largest):
            for term, sizes in largest.items():
                known[term].update({name: scale_of(size, self.headroom) for name, size in sizes.items() if size})
        return Scales(known, self.max_microbatches, expected)

    def again(self) -> Scales:
        """Return these scales, with nothing seen yet."""
        return Scales(self.known, self.max_microbatches, self.expected)


def deciding(largest: Sizes, counts: Mapping[str, object]) -> Sizes:
    """Return the sizes of those terms that counted something, whose sums are used; of all if none did."""
    if not any(counts[term] for term in largest):
        return largest
    return {term: sizes if counts[term] else {} for term, sizes in largest.items()}


def in_numbers(ordered: Sequence[int]) -> list[float]:
    """Return the numbers that ``Scales.ordered`` wrote as integers: of all ranks, after their maximum."""
    return [
        float(one) for one in torch.tensor(list(ordered), dtype=torch.int64, device="cpu").view(torch.float64).tolist()
    ]


def all_finite(largest: Sizes) -> bool:
    """Tell whether every size is."""
    return all(math.isfinite(size) for sizes in largest.values() for size in sizes.values())
