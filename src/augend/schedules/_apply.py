"""The one place where a schedule meets an optimizer."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from augend.errors import ContractError


def apply(optimizer: torch.optim.Optimizer, schedule: Callable[[int], float], step: int) -> float:
    """Set the learning rate of the optimizer's next update.

    The schedule's rate is that of the first parameter group. Other groups keep the ratio that they had to it in the
    beginning: their ``lr`` becomes ``rate · initial_lr / initial_lr of the first``, which is the rate itself where
    they began alike. What a group began with is kept in it as ``initial_lr``, as torch's schedulers do, and travels
    with the optimizer's state. Hence applying a step twice, or after a resume, changes nothing.

    Args:
        optimizer: Any ``torch.optim`` optimizer. Rates that are tensors (``capturable``) are filled in place.
        schedule: Step to rate.
        step: How many updates were taken (``Finished.update``, 0 before the first); skipped ones do not count.

    Returns:
        The rate of the first group.

    Raises:
        ContractError: The schedule's rate is negative or not finite, or ratios to a first rate of 0 are asked for.

    Example:
        >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
        >>> augend.schedules.apply(optimizer, augend.schedules.linear(0.1, steps=2), 1)
        0.05
        >>> optimizer.param_groups[0]["lr"]
        0.05
    """
    rate = float(schedule(step))
    if not (math.isfinite(rate) and rate >= 0):
        raise ContractError(f"the schedule must return a finite rate of at least 0; at step {step} it returned {rate}")
    began = [float(group.setdefault("initial_lr", float(group["lr"]))) for group in optimizer.param_groups]
    if began[0] == 0 and any(began):
        got = ", ".join(map(str, began))
        raise ContractError(f"groups keep their ratio to the first group's rate, which must not be 0; got lr {got}")
    for group, first in zip(optimizer.param_groups, began, strict=True):
        wanted = rate if first == began[0] else rate * (first / began[0])
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(wanted)
        else:
            group["lr"] = wanted
    return rate
