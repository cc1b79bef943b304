"""Where a run is, told from the states of its data and its accumulators."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

from augend.data import Batches
from augend.errors import StateError

_REMEDY: Final = "go through each batch with grads.microbatches(batch), which keeps the two together"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """The batch that training goes on with, and how much of it is done.

    Attributes:
        epoch: From 0.
        step: Over all epochs, from 0; so many steps are done.
        rows_done: Rows of that batch whose backward is through, over all ranks: the first ones. Their gradients are
            in the accumulator. 0 right after a step.
        microbatch: How many micro-batches these rows were.
        path: The checkpoint that this was loaded from; None where it was not loaded.
        damaged: Newer checkpoints that were passed over, each with the reason.
    """

    epoch: int = 0
    step: int = 0
    rows_done: int = 0
    microbatch: int = 0
    path: Path | None = None
    damaged: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Return it for people: ``step 12`` or ``step 12, 96 rows done``."""
        return f"step {self.step}" + (f", {self.rows_done} rows done" if self.rows_done else "")


def step_and_rows(data: Batches) -> tuple[int, int]:
    """Return the step that the data goes on with, and how many rows of it everybody has done. Cheap."""
    state = data.state_dict()
    step: int = state["step"]
    pending = [rows for rows, closed in state["ledger"] if not closed]
    if state["ledger"] and not pending:
        return step + 1, 0
    return step, min(pending, default=0)


def position_of(batches: Sequence[Batches], states: Sequence[Mapping[str, Any]], updates: int) -> Position:
    """Return the position that saved states describe.

    Args:
        batches: Those of the checkpoint; the first tell where it is.
        states: The accumulators' states, those of an empty list of accumulators none.
        updates: The step where there are no batches to count them.
    """
    microbatch = max((state["microbatches"] for state in states), default=0)
    if not batches:
        return Position(step=updates, microbatch=microbatch)
    step, rows_done = step_and_rows(batches[0])
    epoch = step // batches[0].steps_per_epoch
    return Position(epoch=epoch, step=step, rows_done=rows_done, microbatch=microbatch)


def check_agreement(data: Batches, owners: Mapping[str, object], states: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuse to save accumulators that hold other rows than the data counts as done.

    Raises:
        StateError: A window holds micro-batches that did not come from ``grads.microbatches``, or other rows.
    """
    position = data.state_dict()
    for name, owner in owners.items():
        state = states[name]
        rows_done, closed = position["ledger"][data.register(owner)]
        if state["loose"] and state["microbatches"]:
            raise StateError(
                f"{name} holds micro-batches of which the data knows nothing, so after a resume their rows would be "
                f"counted twice; {_REMEDY}"
            )
        done = 0 if closed else rows_done
        if state["rows_done"] != done or (done and state["step"] != position["step"]):
            raise StateError(
                f"{name} holds {state['rows_done']} rows of batch {state['step']}, and the data counts {done} rows of "
                f"batch {position['step']} as done for it; {_REMEDY}; after reset(), enter it again first"
            )
