"""Batches and micro-batches as a training loop sees them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, final

import torch
from torch import Tensor

from augend.data._deal import Round
from augend.data._feed import Cursor, Feed
from augend.data._fetch import Request
from augend.data._position import Position, Progress
from augend.data._random import seed_all
from augend.errors import StateError


@final
class Microbatch(Mapping[Any, Any]):
    """The rows that go through forward and backward at once: a mapping of what the collation made of them.

    Its keys are those of a collated mapping, 0, 1, ... for a tuple or list, and 0 for anything else.

    Attributes:
        real_rows: How many of its rows count: all of them, or 0 in a filler.
        offer: 0 the first time a micro-batch is offered, then 1, ...
        epoch: Epoch of its batch.
        step: Step of its batch, over all epochs.
        first_row: Offset of its first row in the batch.
        rows_done: Rows of the batch that are done, over all ranks, once this round's backward is through.
    """

    __slots__ = ("_data", "epoch", "first_row", "offer", "real_rows", "rows_done", "step")

    def __init__(self, data: Mapping[Any, Any], at: Round, *, offer: int, epoch: int, step: int) -> None:
        self._data = data
        self.real_rows = at.real_rows
        self.first_row = at.first_row
        self.rows_done = at.rows_done
        self.offer = offer
        self.epoch = epoch
        self.step = step

    def __getitem__(self, key: object) -> Any:
        return self._data[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._data)

    def __len__(self) -> int:
        """Return the number of keys, as of any mapping; see `real_rows` for the rows."""
        return len(self._data)

    def __repr__(self) -> str:
        return (
            f"Microbatch(step={self.step}, first_row={self.first_row}, real_rows={self.real_rows}, "
            f"keys={list(self._data)})"
        )


@final
class Batch:
    """The rows of one optimizer step, over all ranks.

    Iterating it yields its micro-batches from row 0 on and tracks nothing; `augend.Accumulator.microbatches` takes
    what is left of it, and keeps the position.

    Attributes:
        step: Over all epochs, from 0.
        epoch: From 0.
        rows: How many rows it has: ``batch_size``, or fewer at the end of an epoch.
        last: Whether it is the last of its epoch.
    """

    __slots__ = ("_feed", "_place", "_position", "_seed_random", "epoch", "last", "rows", "step")

    def __init__(self, feed: Feed, position: Position, *, seed_random: bool) -> None:
        self._feed = feed
        self._position = position
        self._seed_random = seed_random
        self._place = position.hand_out()
        self.step = position.step
        self.epoch = feed.plan.epoch_of(self.step)
        self.rows = feed.plan.batch_rows(self.step)
        self.last = self.step + 1 == feed.plan.end_of_epoch(self.step)

    def __repr__(self) -> str:
        return f"Batch(step={self.step}, epoch={self.epoch}, rows={self.rows}, last={self.last})"

    @property
    def indices(self) -> Tensor:
        """The row ids in the source, ``[rows]`` int64, in the order of the batch."""
        plan = self._feed.plan
        return torch.from_numpy(plan.order(self.epoch).rows_at(plan.positions(self.step, 0, self.rows)))

    def __iter__(self) -> Iterator[Microbatch]:
        """Yield all micro-batches of this rank; random state is that of the first accumulator."""
        return self._microbatches(rows_done=0, ordinal=0, offer=0)

    def progress(self, owner: object) -> Progress:
        """Return how far an accumulator is in this batch; enrol it if it is new.

        Not collective, but every rank must enrol its accumulators in one order.

        Args:
            owner: The accumulator, told apart by identity.

        Raises:
            StateError: The data is not at this batch any more.
        """
        self.check_live()
        return self._position.ledger[self._position.enrol(owner)]

    def remaining(self, owner: object, offer: int = 0) -> Iterator[Microbatch]:
        """Yield the micro-batches of this rank that an accumulator has still to do; none if it closed the batch.

        Random state is seeded by (seed, epoch, step, first row, ordinal of the accumulator) before the rows are
        fetched and once more right before they are handed out, so that it depends neither on fetching nor on what
        the model drew before, and by an end marker behind the last one.

        Not collective; every rank gets equally many.

        Args:
            owner: The accumulator, told apart by identity; it is enrolled.
            offer: What the micro-batches carry as ``offer``.

        Raises:
            StateError: The data is not at this batch any more, also while iterating.
        """
        progress = self.progress(owner)
        rows_done = self.rows if progress.closed else progress.rows_done
        for microbatch in self._microbatches(rows_done, self._position.enrol(owner), offer):
            yield microbatch
            self.check_live()

    @property
    def share(self) -> tuple[int, int]:
        """Which rank of how many its micro-batches are dealt to here."""
        return self._feed.share

    @property
    def plan(self) -> dict[str, object]:
        """What its rows and their cut follow from, in plain numbers and text: equal on all ranks that share it."""
        plan = self._feed.plan
        return {**plan.contract(), "microbatch_size": plan.microbatch_size, "epochs": plan.epochs}

    def rounds_left(self, owner: object) -> int:
        """Return how many micro-batches `remaining` yields, fillers included: equally many on every rank."""
        progress = self.progress(owner)
        return len(self._feed.left(self.step, self.rows if progress.closed else progress.rows_done))

    def check_live(self) -> None:
        """Do nothing if the data is at this batch.

        Raises:
            StateError: The data has moved on, a new iterator was begun, or another state was loaded.
        """
        if self._position.place is not self._place:
            raise StateError(
                f"the batch of step {self.step} is over: the data is at step {self._position.step} now, because the "
                "loop moved on, began anew, or a state was loaded; take batches from the newest iterator"
            )

    def _microbatches(self, rows_done: int, ordinal: int, offer: int) -> Iterator[Microbatch]:
        for index, each in enumerate(self._feed.rounds(self.step, rows_done)):
            self._seed("micro-batch", each.first_row, ordinal)
            request = Request(self.step, each.first_row, each.rows)
            data = self._feed.fetch(Cursor(self.step, rows_done, index), request)
            self._seed("micro-batch", each.first_row, ordinal)
            yield Microbatch(_as_mapping(data), each, offer=offer, epoch=self.epoch, step=self.step)
        self._seed("end of batch", self.rows, ordinal)

    def _seed(self, purpose: str, row: int, ordinal: int) -> None:
        if self._seed_random:
            seed_all(purpose, self._feed.plan.seed, self.epoch, self.step, row, ordinal)


def _as_mapping(data: object) -> Mapping[Any, Any]:
    if isinstance(data, Mapping):
        return data
    if isinstance(data, (tuple, list)):
        return dict(enumerate(data))
    return {0: data}
