"""The three streams of a process, one of which may have been closed by whoever started it, or lead nowhere."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Final, TextIO

_STANDARD: Final = (0, 1, 2)


def open_all() -> None:
    """Let a stream that is closed lead nowhere, so that no file gets its number, and with it what is written to it."""
    for number in _STANDARD:
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free
    if sys.stdout is None:
        sys.stdout = _nowhere()
    if sys.stderr is None:  # where print() would take standard output instead
        sys.stderr = _nowhere()


def written_out() -> bool:
    """Write out what standard output still holds, and tell whether that was possible; if not, it leads nowhere now."""
    try:
        sys.stdout.flush()
    except OSError:
        with suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return False
    return True


def _nowhere() -> TextIO:
    return Path(os.devnull).open("w", encoding="utf-8")
