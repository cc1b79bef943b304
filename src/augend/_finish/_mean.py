"""From a window's sums to one mean gradient: counts, terms, norm and policies, all before anything is changed."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor

from augend._accumulate import (
    Pending,
    Reduced,
    Unused,
    Window,
    check_grids,
    complete_sums,
    plain_count,
    reduce_window,
)
from augend._finish._divide import divide_
from augend._finish._exact import exact_means
from augend._finish._policy import Policy
from augend._numerics import exact_norm, norm
from augend.errors import EmptyWindowError, NonFiniteError
from augend.metrics import Estimate

Check = Callable[[Pending, Reduced], None]


@final
@dataclass(frozen=True, slots=True)
class Mean:
    """A mean gradient that is not handed over yet: sums, and the two divisors that belong to them."""

    sums: dict[str, Tensor]  # this rank's parts of the sums over all ranks
    divisors: tuple[float, float]  # the loss scale, the count; of exact means, which are formed, ones
    norm: float
    skipped: bool
    reduced: Reduced

    @property
    def count(self) -> int | float:
        """What the first term's sums cover."""
        return plain_count(next(iter(self.reduced.moments.values())).count)

    def losses(self) -> dict[str, Estimate]:
        """Return every term's value and standard error."""
        return {term: Estimate.ratio(one) for term, one in self.reduced.moments.items()}

    def form(self, scale: float) -> dict[str, Tensor]:
        """Divide, and multiply by ``scale``; overwrites the sums."""
        divide_(self.sums.values(), self.divisors, scale)
        return self.sums


def mean_of(pending: Pending, policy: Policy, what: str, unused: Unused, check: Check = check_grids) -> Mean:
    """Decide what the mean gradient of a window of all ranks is, without changing the window. Collective.

    Everything is decided on reduced values, hence alike on all ranks.

    Args:
        pending: The window, and what belongs to it.
        policy: What the finish is asked for.
        what: What this rank waits for, in words.
        unused: Whether a parameter that some ranks used and others did not is an error.
        check: Refuses exact sums that mean nothing.

    Raises:
        ContractError: A weight is of no term.
        EmptyWindowError: Nothing was counted, and the policy says so (or no micro-batch was made at all).
        NonFiniteError: A sum or a total is inf or nan, and the policy says so. The window cannot go on.
        UnusedError, StateError, TallyError, GradientError, CounterOverflowError: As ``reduce_window``.
    """
    weights = policy.weights(pending.contract.terms)
    reduced = reduce_window(pending, what, unused, policy=policy.to_plain())
    check(pending, reduced)
    moments = reduced.moments
    counts = {term: float(one.count) for term, one in moments.items()}
    divisors = (1.0, 1.0)
    if not any(counts.values()):
        if policy.empty == "skip":
            return Mean({}, divisors, math.nan, skipped=True, reduced=reduced)
        if policy.empty == "raise" or reduced.microbatches == 0:
            raise EmptyWindowError(
                f"nothing was counted since the last finish ({reduced.microbatches} micro-batches were made): there is "
                'no mean. Supervise at least one item, or choose empty="skip", "one" or "zero"'
            )
        counts = dict.fromkeys(counts, 1.0)
    zero = policy.empty == "zero" and not any(one.count for one in moments.values())
    if pending.contract.exact:
        sums = exact_means(pending, reduced, weights, counts)
    else:
        sums, divisors = _combine(pending, reduced, weights, counts)
    if zero:
        sums = {name: torch.zeros_like(tensor) for name, tensor in sums.items()}
    length = _norm(pending, sums, what) / divisors[0] / divisors[1]
    mean = Mean(sums, divisors, length, skipped=False, reduced=reduced)
    return _judged(mean, _non_finite(mean, pending, what), policy, pending.window)


def _norm(pending: Pending, sums: Mapping[str, Tensor], what: str) -> float:
    """Return the norm of all ranks' sums: with a bound on its error, or of exact means correctly rounded."""
    group, placement = pending.placement.group, pending.placement
    counted = [tensor for name, tensor in sums.items() if placement.counted(name)]
    if not pending.contract.exact:
        return norm(counted, functools.partial(group.gather, what))
    elements = sum(one.numel() for one in pending.slots.parameters.values())
    return exact_norm(counted, elements, functools.partial(group.maximum, what), functools.partial(group.total, what))


def judge_narrowing(
    mean: Mean, scale: float, dtypes: Mapping[str, torch.dtype], policy: Policy, pending: Pending
) -> Mean:
    """Apply the policy to means that are finite but too large for the dtype that they are handed over in. Collective.

    No element exceeds the norm, so only where the norm is too large are elements looked at.

    Raises:
        NonFiniteError: One is, and the policy says so. The window cannot go on.
    """
    narrow = [name for name in mean.sums if not mean.norm * scale <= torch.finfo(dtypes[name]).max]
    if mean.skipped or not narrow:
        return mean
    device = mean.sums[narrow[0]].device
    here = torch.stack([_largest(mean.sums[name]).to(device) for name in narrow])
    everywhere = pending.placement.group.gather("the largest elements", here.tolist())
    for name, sizes in zip(narrow, zip(*everywhere, strict=True), strict=True):
        size = math.nan if any(map(math.isnan, sizes)) else max(sizes)
        largest = torch.tensor(size / mean.divisors[0] / mean.divisors[1] * scale, dtype=torch.float64)
        dtype = dtypes[name]
        if torch.isfinite(largest) and torch.isinf(largest.to(dtype)):
            fault = f"the mean gradient of parameter {name!r} reaches {float(largest):.6g}, which {dtype} cannot hold"
            return _judged(mean, fault, policy, pending.window)
    return mean


def _largest(tensor: Tensor) -> Tensor:
    return torch.linalg.vector_norm(tensor, ord=math.inf) if tensor.numel() else tensor.new_zeros(())


def _judged(mean: Mean, fault: str | None, policy: Policy, window: Window) -> Mean:
    if fault is None or policy.nonfinite == "allow":
        return mean
    if policy.nonfinite == "skip":
        return replace(mean, skipped=True)
    window.broken = fault
    raise NonFiniteError(
        f"{fault}; the window is kept as it is. Call reset() to drop it or load_state_dict() to go back, and finish "
        'with nonfinite="skip" to leave such batches out'
    )


def _combine(
    pending: Pending, reduced: Reduced, weights: Mapping[str, float], counts: Mapping[str, float]
) -> tuple[dict[str, Tensor], tuple[float, float]]:
    """Return the gradients of Σ weight · sum / count, and the two numbers that they still must be divided by."""
    loss_scale = pending.contract.loss_scale
    sums_of = {term: complete_sums(pending, term, names) for term, names in reduced.present.items()}
    (first, *others) = sums_of
    if not others and weights[first] == 1.0:
        return sums_of[first], (loss_scale, counts[first])
    combined: dict[str, Tensor] = {}
    for term, sums in sums_of.items():
        for name, tensor in sums.items():
            # Where nothing was counted: exact zeros, whatever the masked rows left behind.
            part = tensor.clone() if counts[term] else torch.zeros_like(tensor)
            divide_([part], (counts[term] or 1.0, 1.0))
            part.mul_(weights[term])
            combined[name] = combined[name].add_(part) if name in combined else part
    return {name: combined[name] for name in pending.slots.parameters if name in combined}, (loss_scale, 1.0)


def _non_finite(mean: Mean, pending: Pending, what: str) -> str | None:
    """Say where the first inf or nan is, or None; the same on all ranks."""
    if not math.isfinite(mean.norm):
        for name in mean.sums:  # exact sums know it; others that their grids could not hold are nan too
            if not all(math.isfinite(sizes.get(name, 0.0)) for sizes in mean.reduced.sizes.values()):
                return f"the gradient of parameter {name!r} holds an inf or a nan"
        here = [not bool(torch.isfinite(tensor).all()) for tensor in mean.sums.values()]
        anywhere = pending.placement.group.maximum(what, here)
        for name, bad in zip(mean.sums, anywhere, strict=True):
            if bad:
                return f"the gradient of parameter {name!r} holds an inf or a nan"
        return f"the norm of the mean gradient is {mean.norm}, although every sum is finite"
    for term, one in mean.reduced.moments.items():
        if not one.finite:
            return f"a row's total of term {term!r} is inf or nan, although all gradients are finite"
    return None
