"""The position in the data: which step, and how far each accumulator is in it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
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
        replay: Whether it had when the batch was handed out: after a load, or to a new iterator.
    """

    rows_done: int = 0
    closed: bool = False
    replay: bool = False


def _nobody() -> None:
    """Stand in for the reference to an owner that is gone."""


@final
class Position:
    """A step and its ledger: one `Progress` for each accumulator, by the order in which they enrolled.

    A loaded ledger may be longer than the list of owners: its later entries wait for theirs. Owners are not kept
    alive: what one that is gone had pending is gone with it, and its ordinal goes to the next new one.
    """

    __slots__ = ("ledger", "owners", "place", "step")

    def __init__(self) -> None:
        self.step = 0
        self.ledger: list[Progress] = []
        self.owners: list[Callable[[], object | None]] = []
        self.place: object | None = None  # what the batch at hand is told by; None if none was handed out

    def enrol(self, owner: object) -> int:
        """Return the ordinal of an owner, told apart by identity; the first free one if it is new."""
        known = [one() for one in self.owners]
        for ordinal, other in enumerate(known):
            if other is owner:
                return ordinal
        for ordinal, other in enumerate(known):
            if other is None:
                self.owners[ordinal] = weakref.ref(owner)
                self.ledger[ordinal] = Progress()
                return ordinal
        self.owners.append(weakref.ref(owner))
        if len(self.ledger) < len(self.owners):
            self.ledger.append(Progress())
        return len(self.owners) - 1

    def arrange(self, places: Mapping[int, object]) -> None:
        """Give owners these ordinals, and with them what the ledger says there."""
        moved = list(places.values())
        owners = [_nobody if any(one() is owner for owner in moved) else one for one in self.owners]
        owners.extend(_nobody for _ in range(max(places, default=-1) + 1 - len(owners)))
        for ordinal, owner in places.items():
            owners[ordinal] = weakref.ref(owner)
        self.owners = owners
        self.ledger.extend(Progress() for _ in range(len(owners) - len(self.ledger)))

    def leave(self, owner: object) -> None:
        """Treat an owner as one that is gone."""
        self.owners = [_nobody if one() is owner else one for one in self.owners]

    def hand_out(self) -> object:
        """Return the mark of a new batch for this step; earlier ones are over."""
        self.place = object()
        for progress in self.ledger:
            progress.replay = progress.closed
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
        elif self.owners and self._all_closed():
            self._advance()

    def go_to(self, step: int, ledger: Sequence[Progress]) -> None:
        """Take a loaded position; owners keep their ordinals, batches at hand are dead."""
        self.step = step
        self.ledger = list(ledger)
        self.ledger.extend(Progress() for _ in range(len(self.owners) - len(self.ledger)))
        self.place = None

    def _all_closed(self) -> bool:
        """Tell whether the batch is done: closed by somebody, and open for nobody who can still come."""
        gone = [ordinal < len(self.owners) and self.owners[ordinal]() is None for ordinal in range(len(self.ledger))]
        waiting = any(not lost and not one.closed for lost, one in zip(gone, self.ledger, strict=True))
        return not waiting and any(one.closed for one in self.ledger)

    def _advance(self) -> None:
        while self.owners and self.owners[-1]() is None:
            self.owners.pop()
        self.step += 1
        self.ledger = [Progress() for _ in self.owners]
        self.place = None

    def _refuse_pending(self) -> None:
        for ordinal, progress in enumerate(self.ledger):
            gone = ordinal < len(self.owners) and self.owners[ordinal]() is None
            if progress.rows_done and not progress.closed and not gone:
                waiting = "" if ordinal < len(self.owners) else " of the loaded state, which nobody has claimed,"
                raise StateError(
                    f"the next batch was asked for, but step {self.step} is not finished: accumulator {ordinal}"
                    f"{waiting} holds {progress.rows_done} rows of it; call its step(), finish() or reset() first"
                )
