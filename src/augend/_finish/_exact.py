"""Exact sums to means: whole numbers to float32, element by element, and once."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from augend._accumulate import Pending, Reduced, all_finite, check_grids, complete_sums
from augend._numerics import Addend, mean_of_fixed
from augend.errors import NonFiniteError


def exact_means(
    pending: Pending, reduced: Reduced, weights: Mapping[str, float], counts: Mapping[str, float]
) -> dict[str, Tensor]:
    """Return this rank's parts of Σ weight · sum / (loss scale · count), float32. Collective; changes no sums.

    A tensor that had an inf or a nan is nan all over: whole numbers can hold neither. So is one that its grid could
    not hold in such a batch, which is not offered again.
    """
    loss_scale, scales = pending.contract.loss_scale, pending.window.scales
    finite = all_finite(reduced.sizes)
    addends: dict[str, list[Addend]] = {}
    broken = set()
    for term, names in reduced.present.items():
        for name, total in complete_sums(pending, term, names).items():
            if counts[term]:
                scale = reduced.scales[term][name] or 0  # without one all gradients were zero, and so is the sum
                addends.setdefault(name, []).append(Addend(total, scale, loss_scale * counts[term], weights[term]))
                size = reduced.largest[term].get(name, 0.0)
                if not finite and scales is not None and not scales.holds(term, name, size):
                    broken.add(name)
            else:
                addends.setdefault(name, []).append(Addend(torch.zeros_like(total), 0, 1.0, 1.0))
    means = {name: mean_of_fixed(addends[name]) for name in pending.slots.parameters if name in addends}
    return {name: one.fill_(math.nan) if name in broken else one for name, one in means.items()}


def check_sums(pending: Pending, reduced: Reduced) -> None:
    """Refuse to hand over exact sums that do not mean what they were made of.

    Raises:
        StateError: As ``check_grids``.
        NonFiniteError: They were given an inf or a nan, which they cannot hold. The window cannot go on.
    """
    check_grids(pending, reduced)
    for term, sizes in reduced.sizes.items():
        for name, size in sizes.items():
            if not math.isfinite(size):
                pending.window.broken = f"the gradient of parameter {name!r} of term {term!r} holds an inf or a nan"
                raise NonFiniteError(
                    f"{pending.window.broken}, which exact sums cannot hold; the window is kept as it is. Call reset() "
                    'to drop it, or end the batch by finish() with nonfinite="skip"'
                )
