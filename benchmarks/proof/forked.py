"""Ranks as forks of this process, which has imported torch already: four of them begin in no time."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed

GROUP = timedelta(seconds=60)  # after which a collective that waits for a rank fails


class LostError(RuntimeError):
    """A rank failed, died or hung; the message says which, and why."""


@dataclass(frozen=True)
class Seat:
    """Which rank of how many a process is, and the file by which they find each other."""

    rank: int
    world: int
    meeting: Path


@dataclass(frozen=True)
class Crew:
    """Ranks at work.

    Attributes:
        processes: One for each.
        answers: Where each one's result comes from.
    """

    processes: list[multiprocessing.process.BaseProcess]
    answers: list[Connection]

    def end(self) -> None:
        """End those that are left."""
        for process in self.processes:
            if process.is_alive():
                process.kill()
            process.join()


def run(world: int, case: Callable[..., Any], *arguments: Any, seconds: float, killed: bool = False) -> list[Any]:
    """Run ``case(*arguments)`` on each of ``world`` ranks of a gloo group; return their results in order.

    Args:
        world: How many ranks; 0 for one process without a group.
        case: Any function: forks inherit it.
        *arguments: Anything, too.
        seconds: After which the run counts as hung.
        killed: Whether a rank kills itself in it, and all others are to be killed then.

    Raises:
        LostError: A rank failed, died or hung, or none died that should.
    """
    with tempfile.TemporaryDirectory(prefix="proof-") as folder:
        crew = start(world, Path(folder) / "group", case, arguments)
        try:
            return _wait_for_death(crew, seconds) if killed else _collect(crew, seconds)
        finally:
            crew.end()


def start(world: int, meeting: Path, case: Callable[..., Any], arguments: tuple[Any, ...]) -> Crew:
    """Fork the ranks."""
    fork = multiprocessing.get_context("fork")
    crew = Crew([], [])
    for rank in range(max(1, world)):
        ours, theirs = fork.Pipe(duplex=False)
        process = fork.Process(target=live, args=(theirs, Seat(rank, world, meeting), case, arguments), daemon=True)
        process.start()
        theirs.close()
        crew.processes.append(process)
        crew.answers.append(ours)
    return crew


def live(pipe: Connection, seat: Seat, case: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """Be one rank: join the group, work, answer."""
    torch.set_num_threads(1)
    try:
        if seat.world:
            store = torch.distributed.FileStore(str(seat.meeting), seat.world)
            torch.distributed.init_process_group(
                "gloo", store=store, rank=seat.rank, world_size=seat.world, timeout=GROUP
            )
        pipe.send((case(*arguments), None))
        if seat.world:
            torch.distributed.destroy_process_group()
    except Exception:  # noqa: BLE001  told to the parent, which ends everything
        with contextlib.suppress(BrokenPipeError):
            pipe.send((None, traceback.format_exc()))


def die() -> None:
    """End this rank as a machine ends whose power is gone."""
    os.kill(os.getpid(), signal.SIGKILL)


def _collect(crew: Crew, seconds: float) -> list[Any]:
    """Return all answers; the first failure ends the wait."""
    end = time.monotonic() + seconds
    results: dict[int, Any] = {}
    while len(results) < len(crew.answers):
        waiting = [each for rank, each in enumerate(crew.answers) if rank not in results]
        ready = wait(waiting, max(0.0, end - time.monotonic()))
        if not ready:
            raise LostError(f"ranks {sorted(set(range(len(crew.answers))) - set(results))} hung for {seconds} s")
        for pipe in ready:
            rank = crew.answers.index(pipe)
            try:
                results[rank], failure = pipe.recv()
            except EOFError:
                crew.processes[rank].join(10)
                failure = f"it ended with code {crew.processes[rank].exitcode}"
            if failure:
                raise LostError(f"rank {rank}: {failure}")
    for process in crew.processes:
        process.join(max(0.0, end - time.monotonic()))
    return [results[rank] for rank in range(len(crew.answers))]


def _wait_for_death(crew: Crew, seconds: float) -> list[Any]:
    """Wait until a rank was killed, as it is a machine that fails; the others are killed, as a scheduler would."""
    end = time.monotonic() + seconds
    sentinels = {process.sentinel: process for process in crew.processes}
    failures = []
    while sentinels and (ready := wait(list(sentinels), max(0.0, end - time.monotonic()))):
        for sentinel in ready:
            process = sentinels.pop(sentinel)
            process.join()
            if process.exitcode == -signal.SIGKILL:
                return []
            pipe = crew.answers[crew.processes.index(process)]
            failures += [pipe.recv()[1]] if pipe.poll() else []
    raise LostError("\n".join([f"no rank was killed within {seconds} s", *map(str, failures)]))
