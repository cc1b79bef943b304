"""Feeding micro-batches to one rank: a stream through torch's DataLoader that can be set anywhere."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, final

import torch
from torch.utils.data import DataLoader

from augend._group import Mesh, rank_and_world
from augend.data._deal import Rounds
from augend.data._fetch import Fetched, Fetcher, Request, as_it_is
from augend.data._plan import Plan
from augend.data._random import digest
from augend.errors import SplitError, StateError

_HANDLED: Mapping[str, str] = {
    "sampler": "the order follows from seed, shuffle and shard_size",
    "batch_sampler": "the cut follows from batch_size and microbatch_size",
    "generator": "the order follows from seed=",
    "persistent_workers": "workers live as long as there are rows to fetch",
    "in_order": "micro-batches always come in order",
    "dataset": "it is the first argument, rows",
}


class Cursor(NamedTuple):
    """A place in the stream of one rank: a round of a pass over what was left of a step's batch."""

    step: int
    rows_done: int  # where the pass began
    round: int


@final
class _Stream:
    """DataLoader's sampler: this rank's requests from a place on, across batches and epochs."""

    def __init__(self, plan: Plan, mesh: Mesh | None) -> None:
        self._plan = plan
        self._mesh = mesh
        self.start = Cursor(0, 0, 0)

    def __iter__(self) -> Iterator[Request]:
        return self._from(self.start)

    def _from(self, start: Cursor) -> Iterator[Request]:
        rank, world = rank_and_world(self._mesh)
        step, rows_done, first_round = start
        while step < self._plan.steps:
            rounds = Rounds(self._plan.batch_rows(step), rows_done, self._plan.microbatch_size, rank, world)
            for index in range(first_round, len(rounds)):
                yield Request(step, rounds[index].first_row, rounds[index].rows)
            step, rows_done, first_round = step + 1, 0, 0


@final
class Feed:
    """The rows of all batches of one `augend.Batches`, for this rank.

    What is asked for is compared with what the running stream will bring next; if it differs (after a load, a skip,
    another cut, a second pass over a batch), the stream is set to the new place. So fetching ahead never moves a
    position: it is only ever a guess.

    Args:
        plan: Sizes and order.
        fetcher: Where rows come from.
        mesh: Who shares a batch.
        options: What goes to torch's DataLoader.

    Raises:
        SplitError: An option would set what is set here.
        PlacementError: The mesh cannot be served.
    """

    def __init__(self, plan: Plan, fetcher: Fetcher, mesh: Mesh | None, options: Mapping[str, Any]) -> None:
        refused = sorted(set(options) & set(_HANDLED))
        if refused:
            raise SplitError(f"{refused[0]}= cannot be passed to the DataLoader: {_HANDLED[refused[0]]}; leave it away")
        rank_and_world(mesh)
        self.plan = plan
        self._mesh = mesh
        self._warned = False
        self._stream = _Stream(plan, mesh)
        generator = torch.Generator()  # the DataLoader would else draw from torch's global one
        generator.manual_seed(int.from_bytes(digest("workers", plan.seed)[:8], "little"))
        self._open = functools.partial(
            DataLoader[Fetched],
            fetcher,
            batch_size=None,
            sampler=self._stream,
            collate_fn=as_it_is,
            generator=generator,
            persistent_workers=options.get("num_workers", 0) > 0,
            **options,
        )
        self._loader: DataLoader[Fetched] | None = self._open()  # now, so that its own refusals come now
        self._running: tuple[Iterator[Request], Iterator[Fetched]] | None = None

    @property
    def share(self) -> tuple[int, int]:
        """Rank and world of those who share a batch."""
        return rank_and_world(self._mesh)

    def left(self, step: int, rows_done: int) -> Rounds:
        """Return this rank's rounds for what is left of a batch."""
        rank, world = rank_and_world(self._mesh)
        return Rounds(self.plan.batch_rows(step), rows_done, self.plan.microbatch_size, rank, world)

    def rounds(self, step: int, rows_done: int) -> Rounds:
        """Return this rank's rounds for what is left of a batch; the first rank warns once of fillers."""
        rounds = self.left(step, rows_done)
        if rounds.fillers and not self._warned and rounds.rank == 0:
            self._warned = True
            warnings.warn(_cost_of_fillers(rounds), UserWarning, stacklevel=4)
        return rounds

    def fetch(self, cursor: Cursor, request: Request) -> object:
        """Return the collated rows of a request that stands at a place of the stream.

        Raises:
            StateError: The DataLoader brought other rows.
        """
        # an exception on the way leaves nothing running, so that the next fetch sets the stream anew
        running, self._running = self._running, None
        if running is None or next(running[0], None) != request:
            running = self._set(cursor)
        fetched = next(running[1])
        if fetched.request != request:
            raise StateError(f"the DataLoader brought {fetched.request} where {request} was due; its order was changed")
        self._running = running
        return fetched.data

    def close(self) -> None:
        """End the workers; the next fetch starts them again."""
        self._running = None
        self._loader = None

    def _set(self, cursor: Cursor) -> tuple[Iterator[Request], Iterator[Fetched]]:
        """Start the stream at a place; return what is ahead behind that place, and the rows arriving from it on."""
        self._stream.start = cursor
        ahead = iter(self._stream)
        next(ahead)
        if self._loader is None:
            self._loader = self._open()
        return ahead, iter(self._loader)


def _cost_of_fillers(rounds: Rounds) -> str:
    places = len(rounds) * rounds.world
    some = "micro-batch" if rounds.microbatches == 1 else "micro-batches"
    return (
        f"{rounds.rows - rounds.rows_done} rows make {rounds.microbatches} {some} of up to "
        f"{rounds.microbatch_size}, which {rounds.world} ranks cannot share evenly: {rounds.fillers} of {places} are "
        f"fillers that are computed and thrown away ({rounds.fillers / places:.0%} of the work); choose "
        f"microbatch_size so that the number of micro-batches is a multiple of {rounds.world}"
    )
