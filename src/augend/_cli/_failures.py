"""How a failure looks to a person: one line on standard error, and an exit code."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path
from types import TracebackType
from typing import Final, final

import typer

from augend.errors import AugendError, ConfigError

FAILED: Final = 1
WRONG_USAGE: Final = 2
NOBODY_READS: Final = 141  # 128 + SIGPIPE, as shells say it
INTERRUPTED_SAVED: Final = 3
INTERRUPTED_UNSAVED: Final = 130  # 128 + SIGINT, as shells say it


def complain(message: str) -> None:
    """Print one line on standard error."""
    print(f"augend: {' '.join(message.split())}", file=sys.stderr)


@final
class Reported:
    """A context in which every failure ends the command with one line and its exit code.

    ``ConfigError`` is 2, any other error 1, an interrupt 130.

    Args:
        show_traceback: Whether Python's traceback comes before the line.
    """

    def __init__(self, *, show_traceback: bool) -> None:
        self._show_traceback = show_traceback

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, KeyboardInterrupt):
            complain("interrupted")
            raise typer.Exit(INTERRUPTED_UNSAVED)
        if not isinstance(error, Exception) or isinstance(error, typer.Exit):
            return
        if self._show_traceback:
            traceback.print_exception(error)
        if isinstance(error, ConfigError):
            complain(str(error))
            raise typer.Exit(WRONG_USAGE)
        complain(f"failed: {error if isinstance(error, AugendError) else placed(error)}")
        raise typer.Exit(FAILED)


def placed(error: Exception) -> str:
    """Return type, first line and place of an error that augend did not raise."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    first = str(error).strip().partition("\n")[0]
    what = f"{type(error).__name__}: {first}" if first else type(error).__name__
    return f"{what} (at {Path(frame.filename).name}:{frame.lineno}); --traceback shows where it came from"
