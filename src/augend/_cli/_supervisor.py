"""A run on several ranks of this machine, seen from the process that the user has started."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from shlex import quote
from types import FrameType
from typing import Any, Final, final

from augend._cli._crew import Crew, kill
from augend._cli._desk import Ending, Worker
from augend._cli._directory import CHECKPOINTS, METRICS, checkpoints_of
from augend._cli._failures import FAILED, INTERRUPTED_SAVED, INTERRUPTED_UNSAVED, complain
from augend._cli._signals import show_cursor

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)
_GLANCE_SECONDS: Final = 0.05
_GRACE_SECONDS: Final = 1.0  # for the cause of a failure to show: a rank that was killed says nothing itself
_FIRST_SECONDS: Final = 4.0  # for the first rank to say what it makes of the failure of another
_LINGER_SECONDS: Final = 5.0  # for the ranks that are left to find out by themselves that one is lost
_END_SECONDS: Final = 10.0  # for the other ranks to come to their end after the first one has
_IN_VAIN: Final = 5  # restarts in a row without anything gained


def supervise(program: Sequence[str], ranks: int, directory: Path | None, environment: Mapping[str, str]) -> int:
    """Run a program on several ranks, again whenever one is lost, until it is done.

    Args:
        program: The module that each of them runs, and its arguments.
        ranks: How many to begin with.
        directory: The run directory, where it is known before.
        environment: What they are started with.

    Returns:
        The exit code of the command. One that was killed by a signal has none: then this process is, too.
    """
    with (
        tempfile.TemporaryDirectory(prefix="augend-") as folder,
        Crew(Path(folder), program, ranks, environment) as crew,
    ):
        if directory is not None:
            crew.desk.name_run(directory)
        watch = _Watch(crew)
        with watch:
            code = watch.until_the_end()
    if code == INTERRUPTED_UNSAVED and signal.SIGTERM in watch.signals:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.raise_signal(signal.SIGTERM)
    return code


@final
class _Watch:
    """Looks after the workers, passes signals on, and knows when it is over.

    Args:
        crew: The processes.
    """

    def __init__(self, crew: Crew) -> None:
        self.signals: list[int] = []
        self._crew = crew
        self._asked: set[int] = set()  # workers that were asked to stop
        self._seen: set[int] = set()  # workers of rank 0
        self._failed_at: dict[int, float] = {}  # when the failure of a worker was first seen
        self._told_lost: set[int] = set()
        self._over_at: dict[int, float] = {}  # until when a worker of a world that is no more may live on
        self._gained: object = None
        self._in_vain = 0
        self._agents = crew.agents

    def __enter__(self) -> None:
        handlers: dict[int, Any] = {number: signal.getsignal(number) for number in _SIGNALS}
        self._before = {
            number: handler for number, handler in handlers.items() if handler not in {None, signal.SIG_IGN}
        }
        for number in self._before:
            signal.signal(number, self._note)

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002 - the signature of a handler
        self.signals.append(number)

    def until_the_end(self) -> int:
        """Return the exit code of the command."""
        while True:
            self._crew.look()
            code = self._interrupted() if self.signals else self._ended()
            if code is not None:
                return code
            time.sleep(_GLANCE_SECONDS)

    # ---------------------------------------------------------------- a signal came

    def _interrupted(self) -> int | None:
        """Pass the first signal on once, and wait for what comes of it; the second one ends at once."""
        if len(self.signals) > 1:
            show_cursor()
            complain(f"ended at once; {self._what_is_kept()}")
            return INTERRUPTED_UNSAVED
        current, endings = self._crew.current(), self._crew.desk.endings()
        if not self._asked:
            self._asked = {pid for pid in current if pid not in self._crew.gone and pid not in endings}
            for pid in self._asked:
                os.kill(pid, signal.SIGINT)
        if any(pid not in self._crew.gone and pid not in endings for pid in self._asked):
            return None
        said = [ending for pid, ending in endings.items() if pid in self._asked]
        first = min(said, key=lambda ending: (ending.lost, ending.rank), default=None)
        if first is None or (first.code == INTERRUPTED_UNSAVED and first.message):
            show_cursor()
            complain(f"interrupted while the ranks were starting; {self._what_is_kept()}")
            return INTERRUPTED_UNSAVED
        return self._concluded(first)

    def _what_is_kept(self) -> str:
        directory = self._crew.desk.run()
        if directory is None:
            return "nothing was begun"
        if checkpoints_of(directory / CHECKPOINTS):
            return f"the last checkpoint is kept; go on with: augend resume {quote(str(directory))}"
        return f"nothing was saved yet; begin with: augend resume {quote(str(directory))}"

    # ---------------------------------------------------------------- the ranks end, or are lost

    def _ended(self) -> int | None:
        """Tell whether the run is over; begin to count a new world of it."""
        current, endings = self._crew.current(), self._crew.desk.endings()
        for worker in current.values():
            if worker.rank == 0 and worker.pid not in self._seen:
                self._seen.add(worker.pid)
                if len(self._seen) > 1 and not self._has_gained():
                    return self._given_up("ranks were lost again and again, with nothing gained between", endings)
        said = [endings[pid] for pid in current if pid in endings]
        done = next((ending for ending in said if ending.rank == 0 and ending.code == 0), None)
        if done is not None:
            return self._all_ended(current)
        failed = [ending for ending in said if ending.code not in {0, INTERRUPTED_SAVED} and not ending.lost]
        if failed and self._is_the_cause(failed, current, endings):
            return self._concluded(min(failed, key=lambda ending: ending.rank))
        if not self._crew.agents and self._have_stopped(endings):
            return INTERRUPTED_SAVED
        if not self._crew.agents:
            return self._given_up("no rank is left", endings)
        self._clear_away(current, endings)
        self._tell_lost(current, endings)
        return None

    def _all_ended(self, current: Mapping[int, Worker]) -> int:
        """Wait for the last ones of a run that is done."""
        end = time.monotonic() + _END_SECONDS
        while any(pid not in self._crew.gone for pid in current) and time.monotonic() < end:
            self._crew.look()
            time.sleep(_GLANCE_SECONDS)
        return 0

    def _is_the_cause(
        self, failed: Sequence[Ending], current: Mapping[int, Worker], endings: Mapping[int, Ending]
    ) -> bool:
        """Tell, some time after the first failure, whether nobody was lost: then a restart would mend nothing."""
        now = time.monotonic()
        age = now - min(self._failed_at.setdefault(ending.pid, now) for ending in failed)
        vanished = any(pid in self._crew.gone and pid not in endings for pid in current)
        heard = age >= _FIRST_SECONDS or any(worker.rank == 0 and pid in endings for pid, worker in current.items())
        return age >= _GRACE_SECONDS and heard and not vanished and self._agents == self._crew.agents

    def _clear_away(self, current: Mapping[int, Worker], endings: Mapping[int, Ending]) -> None:
        """Kill, after a while, who is left of a world that has lost a rank: torchrun would wait longer for them."""
        fresh = [pid for pid in current if pid not in self._over_at]
        lost = any(endings[pid].lost if pid in endings else pid in self._crew.gone for pid in fresh)
        if lost or self._agents != self._crew.agents:
            self._over_at |= dict.fromkeys(fresh, time.monotonic() + _LINGER_SECONDS)
        for pid, end in self._over_at.items():
            if pid not in self._crew.gone and time.monotonic() >= end:
                kill(pid)

    def _have_stopped(self, endings: Mapping[int, Ending]) -> bool:
        """Tell whether the last ranks have all saved and ended: a signal came to them, and not here."""
        latest = self._crew.latest()
        said = [endings[one.pid].code for one in latest if one.pid in endings]
        return bool(latest) and said == [INTERRUPTED_SAVED] * len(latest)

    def _tell_lost(self, current: Mapping[int, Worker], endings: Mapping[int, Ending]) -> None:
        """Say once of each world that a rank of it is gone; what becomes of the others then is no news."""
        killed = [
            pid for pid in current if pid in self._crew.gone and pid not in endings and pid not in self._told_lost
        ]
        if self._agents != self._crew.agents and self._have_stopped(endings):
            self._agents = self._crew.agents
            return
        if self._agents != self._crew.agents:
            self._agents = self._crew.agents
            what = f"a rank is gone for good; the run goes on from its newest checkpoint, with {self._agents} left"
        elif killed:
            what = f"rank {current[killed[0]].rank} was killed; the run goes on from its newest checkpoint"
        else:
            return
        self._told_lost |= current.keys()
        show_cursor()
        complain(what)

    def _has_gained(self) -> bool:
        """Tell whether a restart is worth it: something was saved or done since the one before, or it was not often."""
        directory = self._crew.desk.run()
        gained: object = None
        if directory is not None:
            metrics = directory / METRICS
            gained = checkpoints_of(directory / CHECKPOINTS)[-1:], metrics.exists() and metrics.stat().st_size
        self._in_vain = self._in_vain + 1 if gained == self._gained else 0
        self._gained = gained
        return self._in_vain < _IN_VAIN

    def _given_up(self, what: str, endings: Mapping[int, Ending]) -> int:
        said = [ending.message.removeprefix("failed: ") for ending in endings.values() if ending.message]
        last = said[-1] if said else self._crew.last_words()
        show_cursor()
        complain(f"failed: {what}; {f'{last}; ' if last else ''}{self._what_is_kept()}")
        return FAILED

    def _concluded(self, ending: Ending) -> int:
        """Say what a worker had to say, and return its exit code."""
        if ending.trace:
            print(ending.trace, file=sys.stderr, end="")
        if ending.message:
            show_cursor()
            complain(ending.message if ending.rank == 0 else f"rank {ending.rank}: {ending.message}")
        return ending.code
