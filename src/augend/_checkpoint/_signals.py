"""SIGINT and SIGTERM as a request to stop: the first one is noted, the second does what it always did."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any, Final, final

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)


@final
class StopRequest:
    """Whether somebody wants the run to stop. Knows nothing of its owner, so that handlers keep nobody alive.

    Several may listen at a time, one on top of the other: a signal is a request to all of them.
    """

    def __init__(self) -> None:
        self.requested = False
        self.before: dict[int, Any] = {}  # the handlers that ours stand on, while they stand
        self._over = False

    @property
    def listening(self) -> bool:
        """Whether signals come here."""
        return bool(self.before) and not self._over

    def listen(self) -> None:
        """Take the signals over, where that is possible and nobody asked to ignore them; once."""
        if self.listening or self.requested or threading.current_thread() is not threading.main_thread():
            return
        self._over = False
        for one in _SIGNALS:
            handler = signal.getsignal(one)
            if handler not in {None, signal.SIG_IGN, self.note}:
                self.before[one] = handler
                signal.signal(one, self.note)

    def give_back(self) -> None:
        """Put the handlers back that were there before; from another thread that is left to the next signal."""
        self._over = True
        if threading.current_thread() is threading.main_thread():
            for one in _SIGNALS:
                _take_out(one, self)

    def note(self, number: int, frame: FrameType | None) -> None:
        """Take a signal: the handler."""
        before = self.before.get(number, signal.SIG_DFL)
        if self._over:  # given back elsewhere, or by somebody who stands on us: as if we were not there
            _take_out(number, self)
            if callable(before):
                before(number, frame)
            elif before == signal.SIG_DFL:
                signal.signal(number, signal.SIG_DFL)
                signal.raise_signal(number)
            return
        self.requested = True
        self.give_back()
        below = _request_of(before)
        if below is not None:
            below.note(number, frame)


def _request_of(handler: Any) -> StopRequest | None:
    owner = getattr(handler, "__self__", None)
    return owner if isinstance(owner, StopRequest) else None


def _take_out(number: int, request: StopRequest) -> None:
    """Take a request's handler out of the pile, wherever in it other requests' handlers have left it.

    Under somebody else's it stays, for that one to call.
    """
    mine, before = request.note, request.before.get(number)
    above = signal.getsignal(number)
    if above == mine and before is not None:
        signal.signal(number, before)
        return
    other = _request_of(above)
    while other is not None:
        below = other.before.get(number)
        if below == mine:
            other.before[number] = before
            return
        other = _request_of(below)
