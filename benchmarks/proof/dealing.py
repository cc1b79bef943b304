"""Dealing a batch's micro-batches to ranks otherwise than augend does: in blocks, shuffled, unevenly.

A ``Dealt`` stands in for the batch that ``augend.Accumulator.microbatches`` takes. Its micro-batches are the batch's
own, with the batch's own random state; only which rank gets which, and in what order, is another.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any, final

import torch

from augend.data import Batch, Microbatch

Queues = list[list[int]]  # for each rank the numbers of its micro-batches, in the order in which it does them


def strided(count: int, world: int, _step: int) -> Queues:
    """Deal them out like cards, as augend does."""
    return [list(range(rank, count, world)) for rank in range(world)]


def block(count: int, world: int, _step: int) -> Queues:
    """Give each rank a block."""
    return _blocks(list(range(count)), world)


def shuffled(count: int, world: int, step: int) -> Queues:
    """Give each rank a block of a shuffled deck, another one in every step."""
    numbers = list(range(count))
    random.Random(step).shuffle(numbers)  # noqa: S311  not to be secret, to be the same everywhere
    return _blocks(numbers, world)


def uneven(count: int, world: int, _step: int) -> Queues:
    """Give nothing to the first rank, one each to others, and the rest, backwards, to the last."""
    ones = min(count, max(0, world - 2))
    first = [[] for _ in range(world - 1 - ones)]
    return [*first, *([number] for number in range(ones)), list(range(ones, count))[::-1]]


def _blocks(numbers: list[int], world: int) -> Queues:
    size = -(-len(numbers) // world)
    return [numbers[rank * size : (rank + 1) * size] for rank in range(world)]


DEALS: dict[str, Callable[[int, int, int], Queues]] = {
    "strided": strided,
    "block": block,
    "shuffled": shuffled,
    "uneven": uneven,
}


@final
class Part(Mapping[Any, Any]):
    """A micro-batch at another place than the one that augend would give it.

    Args:
        data: The micro-batch as it was fetched.
        real_rows: How many of its rows count; 0 in a filler.
        rows_done: Rows of the batch that are done, over all ranks, once this round's backward is through.
    """

    def __init__(self, data: Microbatch, *, real_rows: int, rows_done: int) -> None:
        self._data = data
        self.real_rows = real_rows
        self.rows_done = rows_done
        self.offer = data.offer
        self.epoch = data.epoch
        self.step = data.step
        self.first_row = data.first_row

    def __getitem__(self, key: object) -> Any:
        return self._data[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._data)

    def __len__(self) -> int:
        """Return the number of keys."""
        return len(self._data)


@final
class Dealt:
    """A batch whose micro-batches are dealt by a rule of one's own.

    What is done of it is no prefix while it is open, so it is saved between batches only; what a save in the middle
    of a batch of augend's left to do can be dealt.

    Args:
        batch: Of a ``Batches`` whose mesh is this rank alone: it has all micro-batches.
        rank: Whose part of it this is.
        world: Of how many.
        deal: A name of ``DEALS``.
    """

    def __init__(self, batch: Batch, *, rank: int, world: int, deal: str) -> None:
        self._batch = batch
        self._deal = DEALS[deal]
        self.step = batch.step
        self.epoch = batch.epoch
        self.rows = batch.rows
        self.last = batch.last
        self.share = (rank, world)

    @property
    def plan(self) -> dict[str, object]:
        """What its rows and their cut follow from."""
        return self._batch.plan

    def progress(self, owner: object) -> Any:
        """Return how far an accumulator is in it."""
        return self._batch.progress(owner)

    def check_live(self) -> None:
        """Raise StateError if the data has left it."""
        self._batch.check_live()

    def queues(self, count: int) -> Queues:
        """Return the numbers, among ``count`` micro-batches, of those that each rank does."""
        return self._deal(count, self.share[1], self.step)

    def rounds_left(self, owner: object) -> int:
        """Return how many micro-batches ``remaining`` offers on each rank, fillers included."""
        return max(map(len, self.queues(self._batch.rounds_left(owner))))

    def remaining(self, owner: object, offer: int = 0) -> Iterator[Part]:
        """Offer this rank's part of what an accumulator has not done, and fillers while other ranks have more."""
        left = [(each, torch.get_rng_state()) for each in self._batch.remaining(owner, offer)]
        end = torch.get_rng_state()
        queues = self.queues(len(left))
        rows_done = self.rows - sum(each.real_rows for each, _ in left)
        mine = queues[self.share[0]]
        for turn in range(max(map(len, queues))):
            rows_done += sum(left[queue[turn]][0].real_rows for queue in queues if turn < len(queue))
            data, state = left[mine[turn] if turn < len(mine) else 0]
            torch.set_rng_state(state)
            yield Part(data, real_rows=data.real_rows if turn < len(mine) else 0, rows_done=rows_done)
            self.check_live()
        torch.set_rng_state(end)
