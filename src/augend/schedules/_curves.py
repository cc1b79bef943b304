"""The curves behind the schedules, as functions of the steps since the warm-up, and what their arguments must be.

Schedules are partials of these, so they can be pickled, compared by eye, and hold no state.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise

from augend.errors import ContractError


def warmed(rate: float, warmup_steps: int, curve: Callable[[int], float]) -> Callable[[int], float]:
    """Put a warm-up of ``rate · (t + 1) / (warmup_steps + 1)`` before a curve."""
    return partial(_warmed_at, rate=rate, warmup_steps=warmup_steps, curve=curve)


def _warmed_at(step: int, *, rate: float, warmup_steps: int, curve: Callable[[int], float]) -> float:
    if step < 0:
        raise ContractError(f"step is the number of updates already taken, at least 0; got {step}")
    return rate * ((step + 1) / (warmup_steps + 1)) if step < warmup_steps else curve(step - warmup_steps)


def level(_since: int, *, rate: float) -> float:
    """Return the rate."""
    return rate


def fall(since: int, *, left: Callable[[int, int], float], rate: float, final: float, steps: int) -> float:
    """Mix rate and final so that both ends are exact and small rates keep their digits."""
    share = left(since, steps) if since < steps else 0.0
    return rate * share + final * (1.0 - share)


def left_linear(since: int, steps: int) -> float:
    """Return 1 − p."""
    return (steps - since) / steps


def left_sqrt(since: int, steps: int) -> float:
    """Return 1 − √p."""
    return 1.0 - math.sqrt(since / steps)


def left_cosine(since: int, steps: int) -> float:
    """Return (1 + cos πp) / 2."""
    return (1.0 + math.cos(math.pi * since / steps)) / 2.0


def after(since: int, *, first: float, steps: int, curve: Callable[[int], float]) -> float:
    """Return ``first`` for some steps, then the curve."""
    return first if since < steps else curve(since - steps)


def power(since: int, *, rate: float, factor: float, every: float, final: float) -> float:
    """Return rate · factor^(t / every), at least final."""
    return max(final, rate * math.pow(factor, since / every))


def stairs(since: int, *, rate: float, milestones: tuple[int, ...], factor: float) -> float:
    """Return rate · factor^(number of milestones passed)."""
    return rate * math.pow(factor, bisect.bisect_right(milestones, since))


def rise_and_root(since: int, *, rate: float, width: int, warmup_steps: int) -> float:
    """Return the curve of Vaswani et al. at their step since + 1."""
    return float(rate * width**-0.5 * min((since + 1) ** -0.5, (since + 1) * warmup_steps**-1.5))


def in_turn(step: int, *, schedules: tuple[Callable[[int], float], ...], milestones: tuple[int, ...]) -> float:
    """Ask the schedule whose turn it is, with its own step."""
    turn = bisect.bisect_right(milestones, step)
    return schedules[turn](step - milestones[turn - 1] if turn else step)


def check_whole(name: str, value: int, *, at_least: int) -> None:
    """Refuse what is not a whole number of at least ``at_least``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
        raise ContractError(f"{name} must be a whole number of at least {at_least}; got {value!r}")


def check_rates(rate: float, final: float) -> None:
    """Refuse rates that are not 0 <= final <= rate < inf."""
    if not (math.isfinite(rate) and rate >= 0):
        raise ContractError(f"rate must be finite and at least 0; got {rate}")
    if not 0 <= final <= rate:
        raise ContractError(f"final must be at least 0 and at most the rate, {rate}; got {final}")


def check_factor(factor: float) -> None:
    """Refuse a factor that is not within 0 < factor <= 1."""
    if not 0 < factor <= 1:
        raise ContractError(f"factor must be more than 0 and at most 1; got {factor}")


def check_decay(rate: float, steps: int, final: float, warmup_steps: int) -> None:
    """Refuse a decay without steps."""
    check_rates(rate, final)
    check_whole("steps", steps, at_least=1)
    check_whole("warmup_steps", warmup_steps, at_least=0)
    if warmup_steps >= steps:
        raise ContractError(f"warmup_steps must be fewer than steps; got {warmup_steps} of {steps}")


def check_milestones(milestones: Sequence[int], *, at_least: int) -> None:
    """Refuse milestones that do not rise."""
    for milestone in milestones:
        check_whole("each milestone", milestone, at_least=at_least)
    if any(later <= earlier for earlier, later in pairwise(milestones)):
        raise ContractError(f"milestones must rise; got {list(milestones)}")
