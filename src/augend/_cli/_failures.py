"""How a failure looks to a person: one line on standard error, and an exit code."""

from __future__ import annotations

import os
import re
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Final, final

import typer

from augend._cli._desk import Ending
from augend._cli._launch import Launch
from augend.errors import AugendError, ConfigError, LostRankError

FAILED: Final = 1
WRONG_USAGE: Final = 2
NOBODY_READS: Final = 141  # 128 + SIGPIPE, as shells say it
INTERRUPTED_SAVED: Final = 3
INTERRUPTED_UNSAVED: Final = 130  # 128 + SIGINT, as shells say it
# What torch says, in errors of no type of their own, where another rank does not come.
_OF_LOST_RANKS: Final = ("gloo", "nccl", "by peer", "process group", "processgroup", "timed out", "tcpstore", "c10d")


def complain(message: str) -> None:
    """Print one line on standard error."""
    print(f"augend: {' '.join(message.split())}", file=sys.stderr)


@final
class Reported:
    """A context in which every failure ends the command with one line and its exit code.

    ``ConfigError`` is 2, any other error 1, an interrupt 130. Of several ranks the first one says what all would say,
    and where there is a supervisor it is told how this rank ends, and says it.

    Args:
        show_traceback: Whether Python's traceback comes before the line.
        launch: Which rank this is.
    """

    def __init__(self, *, show_traceback: bool, launch: Launch | None = None) -> None:
        self._show_traceback = show_traceback
        self._launch = Launch() if launch is None else launch

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        if error is None or isinstance(error, typer.Exit | SystemExit):
            return self._ends(error)
        if isinstance(error, KeyboardInterrupt):
            self._say("interrupted", INTERRUPTED_UNSAVED, error)
            raise typer.Exit(INTERRUPTED_UNSAVED)
        if not isinstance(error, Exception):
            return None
        code = WRONG_USAGE if isinstance(error, ConfigError) else FAILED
        message = _told(error)
        self._say(message if code == WRONG_USAGE else f"failed: {message}", code, error)
        raise typer.Exit(code)

    def _ends(self, ended: BaseException | None) -> bool:
        """Note how a rank ends of its own accord; return whether that is no failure to those that would restart it."""
        code = _code(ended)
        if self._launch.desk is None:
            return False
        self._launch.desk.end(Ending(pid=os.getpid(), rank=self._launch.rank, code=code))
        return code == INTERRUPTED_SAVED

    def _say(self, message: str, code: int, error: BaseException) -> None:
        trace = "".join(traceback.format_exception(error)) if self._show_traceback else ""
        launch = self._launch
        if launch.desk is not None:
            lost = is_of_lost_ranks(error)
            launch.desk.end(
                Ending(pid=os.getpid(), rank=launch.rank, code=code, message=message, lost=lost, trace=trace)
            )
            return
        if launch.world > 1:
            from augend._cli._witness import said_by_first

            if said_by_first(launch, message):
                return
            message = f"rank {launch.rank}: {message}" if not launch.leads else message
        print(trace, file=sys.stderr, end="")
        complain(message)


def _told(error: Exception) -> str:
    if isinstance(error, AugendError):
        return str(error)
    if not is_of_lost_ranks(error):
        return placed(error)
    what = re.sub(r"^\[[^]]*\] ", "", str(error).partition("\n")[0]).partition(". ")[0]
    return f"another rank is gone or late ({what}); what it said itself tells why"


def placed(error: Exception) -> str:
    """Return type, first line and place of an error that augend did not raise."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    first = str(error).strip().partition("\n")[0]
    what = f"{type(error).__name__}: {first}" if first else type(error).__name__
    return f"{what} (at {Path(frame.filename).name}:{frame.lineno}); --traceback shows where it came from"


def is_of_lost_ranks(error: BaseException) -> bool:
    """Return whether an error came of another rank that is gone or late, and of nothing in this one."""
    return any(
        isinstance(one, LostRankError)
        or (
            type(one).__module__ in {"builtins", "torch.distributed"}
            and isinstance(one, RuntimeError)
            and any(word in str(one).lower() for word in _OF_LOST_RANKS)
        )
        for one in _causes(error)
    )


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _code(ended: BaseException | None) -> int:
    code = ended.exit_code if isinstance(ended, typer.Exit) else ended.code if isinstance(ended, SystemExit) else 0
    return code if isinstance(code, int) else 0 if code is None else FAILED
