"""When the next checkpoint is due."""

from __future__ import annotations

import time
from collections.abc import Callable
from numbers import Integral, Real
from typing import Final, final

from augend.errors import ContractError

_EVERY_SECONDS: Final = 600.0


@final
class Due:
    """Counts seconds and steps since the last save or load.

    Args:
        every_steps: A save is due when so many steps more are done; None for never.
        every_seconds: A save is due when so many seconds are over; None for never, or for ten minutes if there are no
            steps to count either.

    Raises:
        ContractError: One is out of its domain.
    """

    def __init__(self, every_steps: int | None, every_seconds: float | None) -> None:
        self._every_steps = None if every_steps is None else at_least_one("every_steps", every_steps)
        seconds = _EVERY_SECONDS if every_steps is None and every_seconds is None else every_seconds
        if seconds is not None and (not isinstance(seconds, Real) or not seconds >= 0):
            raise ContractError(f"every_seconds must be a number of at least 0; got {seconds!r}")
        self._every_seconds = seconds
        self._since: float | None = None
        self._steps = 0

    def by_seconds(self, *, busy: bool) -> bool:
        """Tell whether a save is due by this process's clock.

        Args:
            busy: Whether a save is still being written: seconds do not queue behind it, steps do.
        """
        now = time.monotonic()
        if self._since is None:
            self._since = now
        return self._every_seconds is not None and now - self._since >= self._every_seconds and not busy

    def by_steps(self, steps_done: Callable[[], int]) -> bool:
        """Tell whether a save is due by the steps that are done, which are asked for only where they count."""
        return self._every_steps is not None and steps_done() // self._every_steps > self._steps // self._every_steps

    def note(self, steps_done: int) -> None:
        """Count from here on."""
        self._since = time.monotonic()
        self._steps = steps_done


def at_least_one(name: str, value: object) -> int:
    """Return a whole number.

    Raises:
        ContractError: It is none, or less than 1.
    """
    if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
        raise ContractError(f"{name} must be a whole number of at least 1; got {value!r}")
    return int(value)
