"""SIGINT and SIGTERM as a request to stop: the first one is noted, the second does what it always did."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any, Final, final

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)


@final
class StopRequest:
    """Whether somebody wants the run to stop. Knows nothing of its owner, so that handlers keep nobody alive."""

    def __init__(self) -> None:
        self.requested = False
        self._previous: dict[signal.Signals, Any] = {}

    @property
    def listening(self) -> bool:
        """Whether signals come here."""
        return bool(self._previous)

    def listen(self) -> None:
        """Take the signals over, where that is possible and nobody asked to ignore them; once."""
        if self._previous or self.requested or threading.current_thread() is not threading.main_thread():
            return
        for one in _SIGNALS:
            handler = signal.getsignal(one)
            if handler is not None and handler != signal.SIG_IGN:
                self._previous[one] = handler
                signal.signal(one, self._note)

    def give_back(self) -> None:
        """Put the handlers back that were there before, unless somebody else has taken over since."""
        if threading.current_thread() is not threading.main_thread():
            return
        previous, self._previous = self._previous, {}
        for one, handler in previous.items():
            if signal.getsignal(one) == self._note:
                signal.signal(one, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002  # the signature of a handler
        self.requested = True
        self.give_back()
