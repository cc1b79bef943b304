"""Where the workers of one command leave notes for the process that supervises them: small files in one directory."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, final

_RUN: Final = "run"
_OPEN: Final = "open"


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Worker:
    """A worker that is there.

    Args:
        pid: Of its process.
        agent: The process that started it.
        rank: Its rank.
        world: How many ranks it was started with.
    """

    pid: int
    agent: int
    rank: int
    world: int


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Ending:
    """How a worker ended.

    Args:
        pid: Of its process.
        rank: Its rank.
        code: Its exit code, as people shall see it.
        message: One line that says why; empty if there is nothing to say.
        lost: Whether it only ended because another rank did.
        trace: Python's traceback, where that was asked for.
    """

    pid: int
    rank: int
    code: int
    message: str = ""
    lost: bool = False
    trace: str = ""


@final
class Desk:
    """The directory, seen from both sides. A note is there whole or not at all.

    Args:
        path: An existing directory on this machine.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def enrol(self, rank: int, world: int) -> None:
        """Say that this process works as a rank of a world."""
        pid = os.getpid()
        self._leave(f"worker-{pid}", asdict(Worker(pid=pid, agent=os.getppid(), rank=rank, world=world)))

    def end(self, ending: Ending) -> None:
        """Say how this process ends."""
        self._leave(f"ending-{ending.pid}", asdict(ending))

    def name_run(self, directory: Path) -> None:
        """Say where the run's directory is, once it has a config: whoever is started later goes on with it."""
        self._leave(_RUN, {"directory": str(directory)})

    def run(self) -> Path | None:
        """Return the run's directory; None where there is none yet."""
        file = self._path / _RUN
        return Path(json.loads(file.read_bytes())["directory"]) if file.exists() else None

    def workers(self) -> dict[int, Worker]:
        """Return every worker that ever came, by its process, in the order in which they came."""
        found = [Worker(**note) for note in self._notes("worker-*")]
        return {worker.pid: worker for worker in found}

    def endings(self) -> dict[int, Ending]:
        """Return how every worker ended that said so, by its process, the latest last."""
        found = [Ending(**note) for note in self._notes("ending-*")]
        return {ending.pid: ending for ending in found}

    def arrive(self) -> None:
        """Say that this process, an agent, is ready to begin."""
        self._leave(f"agent-{os.getpid()}", {})

    def arrived(self, agent: int) -> bool:
        """Return whether an agent is ready."""
        return (self._path / f"agent-{agent}").exists()

    def open(self) -> None:
        """Let the agents begin: together, so that none is left out of the first world for being slow to start."""
        self._leave(_OPEN, {})

    def is_open(self) -> bool:
        """Return whether the agents may begin."""
        return (self._path / _OPEN).exists()

    def _notes(self, names: str) -> list[dict[str, Any]]:
        files = sorted(self._path.glob(names), key=lambda file: file.stat().st_mtime_ns)
        return [json.loads(file.read_bytes()) for file in files]

    def _leave(self, name: str, note: dict[str, object]) -> None:
        partial = self._path / f"new-{name}-{os.getpid()}"
        partial.write_text(json.dumps(note), encoding="utf-8")
        partial.replace(self._path / name)
