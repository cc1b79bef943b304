"""Ranks for tests: processes that join one gloo group and run the cases that a test sends them.

``Ranks(world).run(function, *arguments)`` runs ``function(*arguments)`` on every rank and returns the results in the
order of ranks. Ranks are started at the first case and stay for the next one. Whatever a case does, a test ends: a case
that hangs or kills a rank ends its world, and the next case gets a new one.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from multiprocessing.reduction import send_handle
from pathlib import Path
from typing import Any, final

import coverage

NURSERY = Path(__file__).with_name("nursery.py")
START_SECONDS = 120  # imports of torch on a machine that does much else
GROUP_SECONDS = 20.0  # after which a collective that waits for a rank fails
LOG_BYTES = 4_000

Case = Callable[..., Any]


class LostError(AssertionError):
    """A rank died or hung; the message has what it printed."""


@final
@dataclass(frozen=True)
class Died:
    """What ``Ranks.fatal`` returns for a rank that ended before its case did.

    Attributes:
        code: Its exit code; negative: the signal that ended it.
        log: The end of what it printed.
    """

    code: int
    log: str


@final
@dataclass(frozen=True)
class Hung:
    """What ``Ranks.fatal`` returns for a rank that was still busy when the time was up.

    Attributes:
        log: The end of what it printed: the stacks of its threads.
    """

    log: str


@final
class Nursery:
    """The process that ranks are forked from; started at the first one."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._orders: Connection | None = None
        self._logs = tempfile.TemporaryDirectory(prefix="ranks-")
        self._born = 0

    def fork(self, rank: int, world: int, *, group_seconds: float, once: bool) -> Rank:
        """Fork one rank."""
        if self._orders is None:
            self._start()
        self._born += 1
        log = Path(self._logs.name) / f"{self._born:04d}-rank{rank}of{world}.log"
        settings = {"rank": rank, "world": world, "log": str(log), "group_seconds": group_seconds, "once": once}
        ours, theirs = Pipe()
        try:
            self._orders.send(("fork", {**settings, "measure": measuring(), "paths": sys.path}))
            send_handle(self._orders, theirs.fileno(), self._process.pid)
            pid = self._answer(START_SECONDS)
        except (EOFError, OSError) as error:  # at its imports, which will not go better next time
            raise LostError(f"the nursery ended:\n{(Path(self._logs.name) / 'nursery.log').read_text()}") from error
        theirs.close()
        return Rank(self, rank, pid, ours, log)

    def wait(self, pid: int) -> int:
        """Return the exit code of a rank that is ending."""
        self._orders.send(("wait", pid))
        return self._answer(START_SECONDS)

    def close(self) -> None:
        """End the process, and every rank that is left."""
        if self._orders is not None:
            self._orders.close()
            self._process.stdin.close()
            self._process.wait(10)
        self._logs.cleanup()

    def _start(self) -> None:
        self._orders, theirs = Pipe()
        words = {"TORCH_DISTRIBUTED_DEBUG": "DETAIL", "OMP_NUM_THREADS": "1"}
        environment = {**os.environ, **words, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        command = [sys.executable, str(NURSERY), str(theirs.fileno())]
        with (Path(self._logs.name) / "nursery.log").open("w", encoding="utf-8") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stderr=log, env=environment, pass_fds=[theirs.fileno()]
            )
        theirs.close()

    def _answer(self, seconds: float) -> int:
        if not self._orders.poll(seconds):
            raise LostError(f"the nursery did not answer for {seconds} s")
        return self._orders.recv()


@final
class Rank:
    """One process: how to reach it, and how to end it."""

    def __init__(self, nursery: Nursery, rank: int, pid: int, pipe: Connection, log: Path) -> None:
        self._nursery = nursery
        self.rank = rank
        self.pid = pid
        self.pipe = pipe
        self._log = log

    def log(self) -> str:
        """Return the end of what it printed."""
        return self._log.read_bytes()[-LOG_BYTES:].decode(errors="replace") if self._log.exists() else ""

    def stacks(self) -> str:
        """Let it print what its threads are doing, and return the end of all it printed."""
        os.kill(self.pid, signal.SIGUSR1)
        time.sleep(0.5)
        return self.log()

    def kill(self) -> None:
        """End it now."""
        os.kill(self.pid, signal.SIGKILL)
        self.end()

    def end(self) -> int:
        """Wait for a rank that is ending, and return its exit code."""
        self.pipe.close()
        return self._nursery.wait(self.pid)


@final
class World:
    """Ranks of one group, from its beginning to its end."""

    def __init__(
        self, nursery: Nursery, world: int, *, group_seconds: float = GROUP_SECONDS, once: bool = False
    ) -> None:
        each = {"group_seconds": group_seconds, "once": once}
        self.ranks = [nursery.fork(rank, world, **each) for rank in range(world)]
        if not self.ranks[0].pipe.poll(START_SECONDS):
            raise LostError(f"rank 0 of {world} opened no store for {START_SECONDS} s: {self.ranks[0].log()}")
        port = self.ranks[0].pipe.recv()
        for each in self.ranks[1:]:
            each.pipe.send(port)

    def ask(self, order: bytes, seconds: float) -> list[tuple[bytes, list[str]] | Died | None]:
        """Send an order to every rank; return each one's answer, its death, or None if it is still busy."""
        for each in self.ranks:
            with contextlib.suppress(BrokenPipeError):  # it is dead, and found so below
                each.pipe.send_bytes(order)
        answers: list[tuple[bytes, list[str]] | Died | None] = [None] * len(self.ranks)
        busy = {each.pipe: each for each in self.ranks}
        end = time.monotonic() + seconds
        while busy and (ready := wait(list(busy), max(0.0, end - time.monotonic()))):
            for pipe in ready:
                each = busy.pop(pipe)
                try:
                    answers[each.rank] = pickle.loads(pipe.recv_bytes())  # noqa: S301  our own words
                except (EOFError, ConnectionResetError):
                    answers[each.rank] = Died(each.end(), each.log())
        return answers

    def close(self) -> None:
        """Let every rank leave, and end those that do not."""
        for each in self.ranks:
            if not each.pipe.closed:
                with contextlib.suppress(BrokenPipeError):  # it is leaving already
                    each.pipe.send_bytes(b"")
        end = time.monotonic() + 10
        for each in self.ranks:
            if not each.pipe.closed:
                leaves = each.pipe.poll(max(0.0, end - time.monotonic()))  # the end of file that it leaves behind
                each.end() if leaves else each.kill()

    def kill(self) -> None:
        """End every rank that is left, now."""
        for each in self.ranks:
            if not each.pipe.closed:
                each.kill()


@final
class Ranks:
    """A world that runs one case after another."""

    def __init__(self, nursery: Nursery, world: int) -> None:
        self.world = world
        self._nursery = nursery
        self._live: World | None = None

    def run(self, function: Case, *arguments: object, seconds: float = 60) -> list[Any]:
        """Run a case on every rank and return the results in the order of ranks.

        Args:
            function: A module-level function of a test module.
            *arguments: What pickle can send; the same for every rank.
            seconds: After which the case counts as hung.

        Raises:
            Exception: What the case raised on the first rank that raised, with every rank's traceback as notes.
            LostError: A rank died or hung, or the case left something behind.
        """
        outcomes = self.outcomes(function, *arguments, seconds=seconds)
        raised = [one for one in outcomes if isinstance(one, Exception)]
        if raised:
            for other in raised[1:]:
                for note in other.__notes__:
                    raised[0].add_note(note)
            raise raised[0]
        return outcomes

    def outcomes(self, function: Case, *arguments: object, seconds: float = 60) -> list[Any]:
        """Run a case as ``run`` does, but return a rank's exception in the place of its result.

        Raises:
            LostError: As ``run``.
        """
        if self._live is None:
            self._live = World(self._nursery, self.world)
        try:
            answers = self._live.ask(packed(function, arguments), seconds)
        except BaseException:  # pytest's time-out, or ctrl-C: the answers that still come are nobody's
            self.kill()
            raise
        lost = [f"rank {rank} {told(self._live, rank, one)}" for rank, one in enumerate(answers) if is_lost(one)]
        if lost:
            self.kill()
            raise LostError("\n".join(lost))
        left = [f"rank {rank} left {one}" for rank, (_, things) in enumerate(answers) for one in things]
        outcomes = [opened(answer) for answer, _ in answers]
        if any(isinstance(one, Exception) for one in outcomes):
            self._check_up()
        if left:
            self.kill()
            raise LostError("\n".join(left))
        return outcomes

    def fatal(
        self, function: Case, *arguments: object, seconds: float = 60, group_seconds: float = GROUP_SECONDS
    ) -> list[Any]:
        """Run a case that may lose ranks, on processes of its own: each ends with its case, as a program does.

        What a case raises ends its rank and is seen by the others as they would see it.

        Args:
            function: As for ``run``.
            *arguments: As for ``run``.
            seconds: After which a rank that is still busy counts as hung.
            group_seconds: The group's time-out.

        Returns:
            For each rank its result, its exception, `Died` or `Hung`.
        """
        world = World(self._nursery, self.world, group_seconds=group_seconds, once=True)
        try:
            answers = world.ask(packed(function, arguments), seconds)
            outcomes: list[Any] = []
            for each, answer in zip(world.ranks, answers, strict=True):
                if answer is None:
                    outcomes.append(Hung(each.stacks()))
                    each.kill()
                else:
                    outcomes.append(answer if isinstance(answer, Died) else opened(answer[0]))
            world.close()
        finally:
            world.kill()
        return outcomes

    def close(self) -> None:
        """Let the ranks leave."""
        if self._live is not None:
            self._live.close()
            self._live = None

    def kill(self) -> None:
        """End the ranks now; the next case gets new ones."""
        if self._live is not None:
            self._live.kill()
            self._live = None

    def _check_up(self) -> None:
        """End the world if its group no longer works after a case that raised."""
        order = pickle.dumps(("__main__", "", "add_ranks", pickle.dumps(()), True))
        answers = self._live.ask(order, GROUP_SECONDS + 10)
        whole = [isinstance(one, tuple) and opened(one[0]) == self.world * (self.world + 1) // 2 for one in answers]
        if not all(whole):
            self.kill()


def packed(function: Case, arguments: Sequence[object]) -> bytes:
    """Pickle a case as the file and the name to find it by."""
    if "<" in function.__qualname__:
        raise ValueError(f"a case must be a function of a module, to be found by name; got {function.__qualname__}")
    path = sys.modules[function.__module__].__file__
    return pickle.dumps((function.__module__, path, function.__qualname__, pickle.dumps(arguments), False))


def opened(answer: bytes) -> Any:
    """Unpickle an outcome: a result, or an exception with its notes."""
    result, error, notes = pickle.loads(answer)  # noqa: S301  our own words
    if error is None:
        return result
    error.__notes__ = notes
    return error


def is_lost(answer: object) -> bool:
    """Say whether a rank died or is still busy."""
    return answer is None or isinstance(answer, Died)


def told(world: World, rank: int, answer: Died | None) -> str:
    """Say what became of a lost rank."""
    if answer is None:
        return f"hung; it printed:\n{world.ranks[rank].stacks()}"
    return f"died with exit code {answer.code}; it printed:\n{answer.log}"


def measuring() -> str | None:
    """Return where the ranks find the settings of the coverage that is being measured, if it is."""
    measured = coverage.Coverage.current()
    if measured is None:
        return None
    config = measured.config.config_file or ""
    return f"{config}\n{Path(measured.config.data_file).resolve()}"
