"""The schedules; each docstring has its formula."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

from augend.errors import ContractError
from augend.schedules._curves import (
    after,
    check_decay,
    check_factor,
    check_milestones,
    check_rates,
    check_whole,
    fall,
    in_turn,
    left_cosine,
    left_linear,
    left_sqrt,
    level,
    power,
    rise_and_root,
    stairs,
    warmed,
)


def constant(rate: float, *, warmup_steps: int = 0) -> Callable[[int], float]:
    """Return a schedule that stays at ``rate`` after its warm-up.

    Args:
        rate: The rate, at least 0.
        warmup_steps: How many updates rise to it.

    Returns:
        Step to rate.

    Raises:
        ContractError: An argument is out of its range; by the schedule, too, for a negative step.

    Example:
        >>> schedule = augend.schedules.constant(0.3, warmup_steps=2)
        >>> [round(schedule(step), 3) for step in range(4)]
        [0.1, 0.2, 0.3, 0.3]
    """
    check_rates(rate, 0.0)
    check_whole("warmup_steps", warmup_steps, at_least=0)
    return warmed(rate, warmup_steps, partial(level, rate=rate))


def linear(rate: float, *, steps: int, final: float = 0.0, warmup_steps: int = 0) -> Callable[[int], float]:
    """Return a schedule that falls evenly from ``rate`` to ``final``.

    With p = (t − warmup_steps) / (steps − warmup_steps): ``rate · (1 − p) + final · p``, and ``final`` from step
    ``steps`` on.

    Args:
        rate: The largest rate.
        steps: How many updates there are until ``final``, warm-up included.
        final: The last rate, at most ``rate``.
        warmup_steps: How many updates rise to ``rate``; fewer than ``steps``.

    Returns:
        Step to rate.

    Raises:
        ContractError: An argument is out of its range; by the schedule, too, for a negative step.

    Example:
        >>> schedule = augend.schedules.linear(1.0, steps=4)
        >>> [schedule(step) for step in range(6)]
        [1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    """
    check_decay(rate, steps, final, warmup_steps)
    return warmed(
        rate, warmup_steps, partial(fall, left=left_linear, rate=rate, final=final, steps=steps - warmup_steps)
    )


def cosine(rate: float, *, steps: int, final: float = 0.0, warmup_steps: int = 0) -> Callable[[int], float]:
    """Return a schedule that falls from ``rate`` to ``final`` along half a cosine.

    With p = (t − warmup_steps) / (steps − warmup_steps) and g = (1 + cos πp) / 2: ``rate · g + final · (1 − g)``, and
    ``final`` from step ``steps`` on (Loshchilov & Hutter, "SGDR", 2017, eq. 5, one cycle).

    Args:
        rate: The largest rate.
        steps: How many updates there are until ``final``, warm-up included.
        final: The last rate, at most ``rate``.
        warmup_steps: How many updates rise to ``rate``; fewer than ``steps``.

    Returns:
        Step to rate.

    Raises:
        ContractError: An argument is out of its range; by the schedule, too, for a negative step.

    Example:
        >>> schedule = augend.schedules.cosine(1.0, steps=4)
        >>> [round(schedule(step), 3) for step in range(5)]
        [1.0, 0.854, 0.5, 0.146, 0.0]
    """
    check_decay(rate, steps, final, warmup_steps)
    return warmed(
        rate, warmup_steps, partial(fall, left=left_cosine, rate=rate, final=final, steps=steps - warmup_steps)
    )


def wsd(
    rate: float,
    *,
    steps: int,
    decay_steps: int,
    final: float = 0.0,
    warmup_steps: int = 0,
    shape: Literal["linear", "sqrt", "cosine"] = "linear",
) -> Callable[[int], float]:
    """Return a schedule that warms up, stays at ``rate``, and falls to ``final`` in the last ``decay_steps`` updates.

    With p = (t − steps + decay_steps) / decay_steps in the decay: ``rate · g + final · (1 − g)``, where g is
    1 − p ("linear"), 1 − √p ("sqrt") or (1 + cos πp) / 2 ("cosine"); ``final`` from step ``steps`` on
    (Hu et al., "MiniCPM", 2024, section 4; the square root is of Hägele et al., "Scaling laws and compute-optimal
    training beyond fixed training durations", 2024, eq. 1).

    Args:
        rate: The largest rate.
        steps: How many updates there are until ``final``, warm-up and decay included.
        decay_steps: How many of them belong to the decay.
        final: The last rate, at most ``rate``.
        warmup_steps: How many updates rise to ``rate``.
        shape: The shape of the decay.

    Returns:
        Step to rate.

    Raises:
        ContractError: An argument is out of its range; by the schedule, too, for a negative step.

    Example:
        >>> schedule = augend.schedules.wsd(1.0, steps=6, decay_steps=2)
        >>> [schedule(step) for step in range(7)]
        [1.0, 1.0, 1.0, 1.0, 1.0, 0.5, 0.0]
    """
    check_decay(rate, steps, final, warmup_steps)
    check_whole("decay_steps", decay_steps, at_least=1)
    if warmup_steps + decay_steps > steps:
        got = f"{warmup_steps} + {decay_steps} of {steps}"
        raise ContractError(f"warmup_steps + decay_steps must be at most steps; got {got}: raise steps or lower them")
    decays = {"linear": left_linear, "sqrt": left_sqrt, "cosine": left_cosine}
    if shape not in decays:
        raise ContractError(f"shape must be one of {', '.join(decays)}; got {shape!r}")
    decay = partial(fall, left=decays[shape], rate=rate, final=final, steps=decay_steps)
    stable_steps = steps - decay_steps - warmup_steps
    return warmed(rate, warmup_steps, partial(after, first=rate, steps=stable_steps, curve=decay))


def exponential(rate: float, *, factor: float, final: float = 0.0, warmup_steps: int = 0) -> Callable[[int], float]:
    """Return a schedule that multiplies the rate by ``factor`` with each update, and stops at ``final``.

    ``max(final, rate · factor^(t − warmup_steps))``, as torch's ``ExponentialLR`` with its ``gamma``.

    Args:
        rate: The largest rate.
        factor: More than 0, at most 1.
        final: The smallest rate, at most ``rate``.
        warmup_steps: How many updates rise to ``rate``.

    Returns:
        Step to rate.

    Raises:
        ContractError: An argument is out of its range; by the schedule, too, for a negative step.

    Example:
        >>> schedule = augend.schedules.exponential(8.0, factor=0.5, final=2.0)
        >>> [schedule(step) for step in range(4)]
        [8.0, 4.0, 2.0, 2.0]
    """
    check_rates(rate, final)
    check_factor(factor)
    check_whole("warmup_steps", warmup_steps, at_least=0)
    return warmed(rate, warmup_steps, partial(power, rate=rate, factor=factor, every=1, final=final))


def steps(
    rate: float, *, milestones: Sequence[int], factor: float = 0.1, warmup_steps: int = 0
) -> Callable[[int], float]:
    """Return a schedule that multiplies the rate by ``factor`` at each milestone, as torch's ``MultiStepLR``.

    ``rate · factor^k`` at step t, where k is the number of milestones that are at most t.

    Args:
        rate: The first rate.
        milestones: Steps, rising, each from ``warmup_steps`` on.
        factor: More than 0, at most 1.
        warmup_steps: How many updates rise to ``rate``.

    Returns:
        Step to rate.

    Raises:
        ContractError: An argument is out of its range; by the schedule, too, for a negative step.

    Example:
        >>> schedule = augend.schedules.steps(8.0, milestones=[1, 3], factor=0.5)
        >>> [schedule(step) for step in range(5)]
        [8.0, 4.0, 4.0, 2.0, 2.0]
    """
    check_rates(rate, 0.0)
    check_factor(factor)
    check_whole("warmup_steps", warmup_steps, at_least=0)
    check_milestones(milestones, at_least=max(1, warmup_steps))
    since = tuple(milestone - warmup_steps for milestone in milestones)
    return warmed(rate, warmup_steps, partial(stairs, rate=rate, milestones=since, factor=factor))


def noam(rate: float, *, width: int, warmup_steps: int) -> Callable[[int], float]:
    """Return the schedule of the first transformer: an even rise, then a fall with the root of the step.

    ``rate · width^(−1/2) · min((t + 1)^(−1/2), (t + 1) · warmup_steps^(−3/2))`` (Vaswani et al., "Attention is all you
    need", 2017, eq. 3, whose steps count from 1).

    Args:
        rate: A factor; 1.0 in the paper. The largest rate is ``rate / √(width · warmup_steps)``.
        width: The width of the model, at least 1.
        warmup_steps: At least 1.

    Returns:
        Step to rate.

    Raises:
        ContractError: An argument is out of its range; by the schedule, too, for a negative step.

    Example:
        >>> schedule = augend.schedules.noam(1.0, width=4, warmup_steps=4)
        >>> [schedule(step) for step in (0, 1, 3, 15)]
        [0.0625, 0.125, 0.25, 0.125]
    """
    check_rates(rate, 0.0)
    check_whole("width", width, at_least=1)
    check_whole("warmup_steps", warmup_steps, at_least=1)
    return warmed(rate, 0, partial(rise_and_root, rate=rate, width=width, warmup_steps=warmup_steps))


def half_life(
    rate: float, *, half_life_steps: float, final: float = 0.0, warmup_steps: int = 0
) -> Callable[[int], float]:
    """Return a schedule that halves the rate every ``half_life_steps`` updates, and stops at ``final``.

    ``max(final, rate · 2^(−(t − warmup_steps) / half_life_steps))``.

    Args:
        rate: The largest rate.
        half_life_steps: After how many updates the rate has halved; more than 0, and need not be whole.
        final: The smallest rate, at most ``rate``.
        warmup_steps: How many updates rise to ``rate``.

    Returns:
        Step to rate.

    Raises:
        ContractError: An argument is out of its range; by the schedule, too, for a negative step.

    Example:
        >>> schedule = augend.schedules.half_life(8.0, half_life_steps=2, final=1.0)
        >>> [schedule(step) for step in (0, 2, 4, 6, 8)]
        [8.0, 4.0, 2.0, 1.0, 1.0]
    """
    check_rates(rate, final)
    check_whole("warmup_steps", warmup_steps, at_least=0)
    if not (math.isfinite(half_life_steps) and half_life_steps > 0):
        raise ContractError(f"half_life_steps must be finite and more than 0; got {half_life_steps}")
    return warmed(rate, warmup_steps, partial(power, rate=rate, factor=0.5, every=half_life_steps, final=final))


def chain(schedules: Sequence[Callable[[int], float]], *, milestones: Sequence[int]) -> Callable[[int], float]:
    """Return a schedule that follows one schedule after the other; each sees its own steps from 0, as ``SequentialLR``.

    Args:
        schedules: Any functions of the step, at least one.
        milestones: The steps at which the second, third, … take over; rising, one fewer than schedules.

    Returns:
        Step to rate.

    Raises:
        ContractError: The numbers do not fit, or the milestones do not rise.

    Example:
        >>> first, second = augend.schedules.constant(1.0), augend.schedules.linear(0.5, steps=2)
        >>> schedule = augend.schedules.chain([first, second], milestones=[2])
        >>> [schedule(step) for step in range(5)]
        [1.0, 1.0, 0.5, 0.25, 0.0]
    """
    if len(schedules) != len(milestones) + 1:
        got = f"{len(schedules)} schedules and {len(milestones)} milestones"
        raise ContractError(f"a chain needs a milestone between each two schedules; got {got}")
    check_milestones(milestones, at_least=1)
    return partial(in_turn, schedules=tuple(schedules), milestones=tuple(milestones))
