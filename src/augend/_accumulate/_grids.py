"""Exact sums that mean nothing, because their grids could not hold what was added: never handed over."""

from __future__ import annotations

from augend._accumulate._reduce import Held, Reduced
from augend._accumulate._scales import Scales
from augend.errors import StateError


def check_grids(held: Held, reduced: Reduced) -> None:
    """Raise StateError if a grid cannot hold the gradients that it was given: such sums mean nothing.

    Where the batch cannot be offered again by itself, a reset makes the grids that it needs.
    """
    scales = held.window.scales
    unfit = None if scales is None else scales.unfit(reduced.sizes)
    if scales is None or unfit is None:
        return
    told = _unfit(scales, reduced, *unfit)
    if reduced.loose:
        held.window.unfit = reduced.sizes
        raise StateError(
            f"{told}. Micro-batches that do not come from microbatches() cannot be offered again: call reset(), which "
            "makes the grid for them, and add all of them once more"
        )
    raise StateError(f"{told}. microbatches() offers such a batch again: go through its loop to the end")


def check_limits(held: Held, reduced: Reduced) -> None:
    """Raise StateError if a sum means nothing so far, as it overflowed or has no grid: for looks in between."""
    scales = held.window.scales
    if scales is None:
        return
    for term, sizes in reduced.sizes.items():
        for name, size in sizes.items():
            if scales.overflows(term, name, size):
                raise StateError(
                    f"{_unfit(scales, reduced, term, name)}. There is no sum to look at before the batch was offered "
                    "again"
                )


def _unfit(scales: Scales, reduced: Reduced, term: str, name: str) -> str:
    grid = "no grid yet" if scales.of(term, name) is None else "a grid for other magnitudes"
    size = reduced.largest[term][name]
    return f"the largest gradient of parameter {name!r} is {size:.6g}, and its exact sum has {grid}"
