"""The position in the data: which step, and how far each accumulator is in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from augend.errors import StateError


@final
@dataclass(slots=True)
class Progress:
    """How far one accumulator is in one batch; a new batch brings a new one.

    Attributes:
        rows_done: Rows whose backward is through, over all ranks: the first ones of the batch.
        closed: Whether the accumulator has finished the batch.
    """

    rows_done: int = 0
    closed: bool = False


@final
class Position:
    """A step and its ledger: one `Progress` for each accumulator, by the order in which they enrolled.

    A loaded ledger may be longer than the list of owners: its later entries wait for theirs.
    """

    __slots__ = ("ledger", "owners", "place", "step")

    def __init__(self) -> None:
        self.step = 0
        self.ledger: list[Progress] = []
        self.owners: list[object] = []
        self.place: object | None = None  # what the batch at hand is told by; None if none was handed out

    def enrol(self, owner: object) -> int:
        """Return the ordinal of an owner, told apart by identity; the first free one if it is new."""
        for ordinal, known in enumerate(self.owners):
            if known is owner:
                return ordinal
        self.owners.append(owner)
        if len(self.ledger) < len(self.owners):
            self.ledger.append(Progress())
        return len(self.owners) - 1

    def hand_out(self) -> object:
        """Return the mark of a new batch for this step; earlier ones are over."""
        self.place = object()
        return self.place

    def move_on(self) -> None:
        """Go to the next batch to hand out.

        A batch that was handed out is over, unless rows of it are pending. One that was not (a fresh iterator, a
        loaded state) is handed out, unless everybody has closed it already.

        Raises:
            StateError: Rows of the current batch are pending in some accumulator.
        """
        if self.place is not None:
            self._refuse_pending()
            self._advance()
        elif self.owners and all(progress.closed for progress in self.ledger):
            self._advance()

    def go_to(self, step: int, ledger: Sequence[Progress]) -> None:
        """Take a loaded position; owners keep their ordinals, batches at hand are dead."""
        self.step = step
        self.ledger = list(ledger)
        self.ledger.extend(Progress() for _ in range(len(self.owners) - len(self.ledger)))
        self.place = None

    def _advance(self) -> None:
        self.step += 1
        self.ledger = [Progress() for _ in self.owners]
        self.place = None

    def _refuse_pending(self) -> None:
        for ordinal, progress in enumerate(self.ledger):
            if progress.rows_done and not progress.closed:
                waiting = "" if ordinal < len(self.owners) else " of the loaded state, which nobody has claimed,"
                raise StateError(
                    f"the next batch was asked for, but step {self.step} is not finished: accumulator {ordinal}"
                    f"{waiting} holds {progress.rows_done} rows of it; call its step(), finish() or reset() first"
                )
