"""The end of a batch in order: check, decide, empty the window, write, step, record."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import torch

from augend._accumulate import Pending
from augend._finish._apply import take_step, targets_of, write_gradients
from augend._finish._mean import judge_narrowing, mean_of
from augend._finish._policy import Policy
from augend._finish._results import Finished

Asked = tuple[Sequence[torch.optim.Optimizer], Policy]
_STEP_FAILED: Final = "an exception left optimizer.step(), so the update may be half taken"


def end_batch(pending: Pending, ask: Callable[[], Asked], *, updates: int) -> Finished:
    """Finish the window, step the optimizers if there are any, and return the record. Collective.

    Everything that can be refused is refused before the window is touched, on all ranks alike.

    Args:
        pending: The accumulator's window and what belongs to it.
        ask: Returns the optimizers to step (with none, the gradient stays in ``.grad``) and the policy, or refuses.
        updates: Steps really taken before this one.
    """
    what = f"the end of the batch{pending.course.place()}"
    optimizers, policy = pending.check_drain(lambda: _checked(pending, ask))
    targets = targets_of(pending.slots.parameters, optimizers)
    mean = mean_of(pending, policy, what, pending.unused)
    scale = 1.0 if mean.skipped else policy.scale(mean.norm)
    mean = judge_narrowing(mean, scale, {name: one.dtype for name, one in targets.items()}, policy, pending)
    pending.drain(mean.reduced)
    pending.taker.drop()
    if not mean.skipped:
        pending.window.broken = _STEP_FAILED
        gradients = pending.placement.handed_over(mean.form(scale))
        pending.taker.written = write_gradients(gradients, targets, pending.placement)
        if optimizers:
            take_step(optimizers, targets)
            pending.taker.written = {}
        pending.window.broken = None
    pending.course.close()  # only now: after a step that failed, the batch can be offered again
    taken = updates + (not mean.skipped)
    scale = 1.0 if mean.skipped else scale
    reduced = mean.reduced
    return Finished(
        mean.count,
        reduced.microbatches,
        mean.norm,
        scale,
        mean.skipped,
        taken,
        mean.losses(),
        offers=reduced.offer + 1,
    )


def _checked(pending: Pending, ask: Callable[[], Asked]) -> Asked:
    asked = ask()
    pending.taker.check_foreign()
    return asked
