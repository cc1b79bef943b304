"""What a person is told at the first Ctrl-C or SIGTERM, which saves the run, and at the second, which does not."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from functools import partial
from types import FrameType, TracebackType
from typing import Any, Final, final

from augend._cli._launch import Launch

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)
_SHOW_CURSOR: Final = b"\x1b[?25h"


@final
class Announced:
    """A context that answers signals with a line on standard error, and puts every handler back at its end.

    A handler that is not Python's own, which Python can neither name nor put back, is left alone.
    Lines are written past Python's buffers: a handler may run in the middle of another line.

    Args:
        resume: The command that goes on with the run.
        launch: Which rank this is: the first one says the lines. Under torchrun the second signal is not heard: it
            may be the first one again, to a whole job and then from torchrun, which kills in the end who does not end.
    """

    def __init__(self, resume: str, launch: Launch) -> None:
        self._resume = resume
        self._leads = launch.leads
        self._ends_once_more = not launch.torchrun or launch.desk is not None

    def __enter__(self) -> Announced:
        handlers: dict[int, Any] = {number: signal.getsignal(number) for number in _SIGNALS}
        self._before = {number: handler for number, handler in handlers.items() if handler is not None}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def announce(self) -> None:
        """Say from now on what those do who have taken the signals over in the meantime: stop, saved, at the first."""
        for number, before in self._before.items():
            handler = signal.getsignal(number)
            if handler != before:
                signal.signal(number, partial(self._first, handler))

    def _first(self, handler: Any, number: int, frame: FrameType | None) -> None:
        for each, before in self._before.items():
            second = partial(_second, self._resume) if before == signal.SIG_DFL else before
            signal.signal(each, second if self._ends_once_more else signal.SIG_IGN)
        if self._leads:
            end = "; once more ends at once" if self._ends_once_more else ""
            _write(f"stopping: this micro-batch is finished and saved{end}")
        handler(number, frame)


def _second(resume: str, number: int, frame: FrameType | None) -> None:  # noqa: ARG001 - the signature of a handler
    show_cursor()
    _write(f"ended at once; the last checkpoint is kept; go on with: {resume}")
    signal.signal(number, signal.SIG_DFL)
    signal.raise_signal(number)


def show_cursor() -> None:
    """Bring back on a terminal what a progress bar hides, where nothing runs any more that would."""
    with suppress(OSError):
        if os.isatty(1):
            os.write(1, _SHOW_CURSOR + b"\n")


def _write(message: str) -> None:
    start = "\n" if sys.stderr is not None and sys.stderr.isatty() else ""  # below a progress bar and the ^C
    with suppress(OSError):
        os.write(2, f"{start}augend: {message}\n".encode())
