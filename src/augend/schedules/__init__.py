"""Learning rates as pure functions of the step.

A schedule is a ``Callable[[int], float]``: the number of updates already taken (0 for the first) to the rate of the
next one. It knows no world, no micro-batches and no history, so it gives the same list of rates for every cut and
after every resume, and a skipped update does not move it.

All but ``noam`` share: ``rate`` is the largest rate; ``steps`` is the number of updates until ``final`` is reached,
warm-up included (the last of ``steps`` updates comes just before it); ``warmup_steps`` updates rise evenly to ``rate``,
``rate · (t + 1) / (warmup_steps + 1)`` at step t, so that the first is not wasted on a rate of 0 and step
``warmup_steps`` has the whole rate. ``noam`` keeps the formula of its paper, in which ``rate`` is a factor.
"""

from __future__ import annotations

from augend.schedules._apply import apply as apply
from augend.schedules._schedules import chain as chain
from augend.schedules._schedules import constant as constant
from augend.schedules._schedules import cosine as cosine
from augend.schedules._schedules import exponential as exponential
from augend.schedules._schedules import half_life as half_life
from augend.schedules._schedules import linear as linear
from augend.schedules._schedules import noam as noam
from augend.schedules._schedules import steps as steps
from augend.schedules._schedules import wsd as wsd

__all__ = [
    "apply",
    "chain",
    "constant",
    "cosine",
    "exponential",
    "half_life",
    "linear",
    "noam",
    "steps",
    "wsd",
]
