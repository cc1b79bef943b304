"""The runs that are compared: how each is made, what it is called, and whether they ended alike."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import forked
from dealing import DEALS
from job import Job, Moment, Outcome, rank_and_world
from tasks import Task

SECONDS = 600.0  # after which a run counts as hung


@dataclass(frozen=True, kw_only=True)
class Run:
    """One way of training a task.

    Attributes:
        ranks: How many; 0 for a process without a group.
        place: A name of ``job.PLACES``.
        deal: A name of ``dealing.DEALS``; None for augend's own dealing.
        dtype: Of the accumulator.
        resumed: How many ranks go on after a rank was killed in the middle of a batch; None where none is.
    """

    ranks: int
    place: str = "fsdp"
    deal: str | None = None
    dtype: str = "exact"
    resumed: int | None = None

    def __str__(self) -> str:
        ranks = "1 process, plain" if self.ranks == 0 else f"{counted(self.ranks)}, {self.place}"
        words = [ranks, *([self.deal] if self.deal else [])]
        if self.resumed is not None:
            words.append(f"killed in mid-batch, resumed on {counted(self.resumed)}")
        return f"{self.dtype:7}  {', '.join(words)}"


@dataclass(frozen=True)
class Ended:
    """How a run ended.

    Attributes:
        outcome: What its ranks agree on.
        forwards: Forward calls of the model over all ranks.
        seconds: How long it took.
    """

    outcome: Outcome
    forwards: int
    seconds: float


def counted(ranks: int) -> str:
    """Return a number of ranks in words."""
    return f"{ranks} rank{'s' if ranks != 1 else ''}"


def execute(run: Run, task: Task, steps: int) -> Ended:
    """Make a run, killed and resumed if it asks for that.

    Raises:
        LostError: A rank failed or hung, or ranks ended differently.
    """
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="proof-") as folder:
        directory = None if run.resumed is None else Path(folder)
        if directory is not None:
            forked.run(run.ranks, begin, run, task, steps, directory, seconds=SECONDS, killed=True)
        ranks = run.ranks if run.resumed is None else run.resumed
        outcomes = forked.run(ranks, finish, run, task, steps, directory, seconds=SECONDS)
    first = outcomes[0]
    for rank, other in enumerate(outcomes):
        if replace(other, forwards=first.forwards) != first:
            raise forked.LostError(f"rank {rank} ended otherwise than rank 0: {other.digest} and {first.digest}")
    return Ended(first, sum(one.forwards for one in outcomes), time.monotonic() - began)


def begin(run: Run, task: Task, steps: int, directory: Path) -> None:
    """Train to the middle of the middle batch, save there, go on for a micro-batch, and lose a rank."""
    job = Job(task, run.place, run.deal, dtype=run.dtype)
    checkpoint = job.checkpoint(directory)
    saved = False
    rank, world = rank_and_world()
    for at in job.moments(steps):
        if saved and rank == world - 1:
            forked.die()
        if not saved and at >= middle(task, steps):
            checkpoint.save()
            saved = True
    raise forked.LostError("the run ended before it was killed")


def middle(task: Task, steps: int) -> Moment:
    """Return where a run is killed: a batch is open, and some of its micro-batches are done on any number of ranks."""
    return Moment(steps // 2, 0, task.microbatch_size)


def finish(run: Run, task: Task, steps: int, directory: Path | None) -> Outcome:
    """Train to the end, from the newest checkpoint if there is one."""
    place = "replicated" if run.ranks == 0 else run.place
    job = Job(task, place, run.deal, dtype=run.dtype)
    if directory is not None:
        with job.checkpoint(directory) as checkpoint:
            checkpoint.load_latest()
            return job.train(steps)
    return job.train(steps)


def expected_forwards(run: Run, task: Task, outcome: Outcome) -> int:
    """Return how often the model must have been called over all ranks: nothing is bought by computing it everywhere.

    For a run that was not killed: micro-batches and fillers, each as often as its batch was offered.
    """
    ranks, total = max(1, run.ranks), 0
    for told in outcome.steps:
        microbatches = -(-told.rows // task.microbatch_size)
        rounds = max(map(len, DEALS[run.deal or "strided"](microbatches, ranks, told.step)))
        total += rounds * ranks * told.offers
    return total


def pairs(worlds: Sequence[int]) -> Iterator[Run]:
    """Every number of ranks, killed in mid-batch and resumed on every other."""
    for before in worlds:
        for after in worlds:
            if before != after:
                yield Run(ranks=before, resumed=after)


# What `make proof` compares, and its control.
DEMO = [
    Run(ranks=0),
    *[Run(ranks=ranks) for ranks in (2, 3, 4)],
    Run(ranks=2, resumed=3),
    Run(ranks=2, deal="shuffled"),
]
CONTROL = [Run(ranks=ranks, dtype="float32") for ranks in (0, 2)]

WORLDS = (1, 2, 3, 4, 8)
MATRIX = [
    Run(ranks=0),
    *[Run(ranks=ranks, place=place) for ranks in WORLDS for place in ("fsdp", "fsdp, kept", "replicated", "last")],
    *[Run(ranks=ranks, deal=deal) for ranks in WORLDS for deal in ("block", "shuffled", "uneven")],
    *[Run(ranks=ranks, place="replicated", deal=deal) for ranks in (3, 4) for deal in ("shuffled", "uneven")],
    *[Run(ranks=2, place=f"hsdp of {n}") for n in ("1 replica", "2 replicas")],
    *[Run(ranks=4, place=f"hsdp of {n}") for n in ("1 replica", "2 replicas", "4 replicas")],
    *[Run(ranks=4, place="hsdp of 2 replicas", deal=deal) for deal in ("shuffled", "uneven")],
    Run(ranks=8, place="hsdp of 2 replicas"),
    *pairs(WORLDS),
]
MATRIX_CONTROL = [Run(ranks=ranks, dtype="float32") for ranks in WORLDS]
