"""Which rank runs which micro-batch: a pure function of rows, not of time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, final, overload


class Round(NamedTuple):
    """What one rank runs in one round.

    Attributes:
        first_row: Offset of the micro-batch's first row in the batch.
        rows: How many rows go through the model.
        real_rows: How many of them count: all, or 0 in a filler.
        rows_done: Rows of the batch that are done over all ranks once this round is.
    """

    first_row: int
    rows: int
    real_rows: int
    rows_done: int


@final
@dataclass(frozen=True, slots=True)
class Rounds(Sequence[Round]):
    """The rounds of one rank for what is left of a batch, computed one by one.

    What is done of a batch is a prefix, so what is left is cut and dealt as if it were a batch: micro-batch j goes
    to rank ``j % world`` in round ``j // world``. The cut is made before the deal, so it never depends on the world.
    A rank without a micro-batch in the last round runs a filler: the batch's first micro-batch once more.

    Args:
        rows: Rows of the batch.
        rows_done: How many of them are done already: the first ones.
        microbatch_size: Rows of a micro-batch; the last one may be short.
        rank: Whose rounds.
        world: How many ranks share the batch.
    """

    rows: int
    rows_done: int
    microbatch_size: int
    rank: int
    world: int

    @property
    def microbatches(self) -> int:
        """How many micro-batches are left, over all ranks."""
        return -(-(self.rows - self.rows_done) // self.microbatch_size)

    @property
    def fillers(self) -> int:
        """How many fillers all ranks together will run."""
        return len(self) * self.world - self.microbatches

    def __len__(self) -> int:
        return (self.microbatches + self.world - 1) // self.world

    @overload
    def __getitem__(self, index: int) -> Round: ...
    @overload
    def __getitem__(self, index: slice) -> list[Round]: ...
    def __getitem__(self, index: int | slice) -> Round | list[Round]:
        """Return one round, or a list of them."""
        if isinstance(index, slice):
            return [self._round(each) for each in range(len(self))[index]]
        return self._round(range(len(self))[index])

    def _round(self, index: int) -> Round:
        size = self.microbatch_size
        rows_done = min(self.rows, self.rows_done + (index + 1) * self.world * size)
        first = self.rows_done + (index * self.world + self.rank) * size
        if first >= self.rows:
            return Round(first_row=0, rows=min(size, self.rows), real_rows=0, rows_done=rows_done)
        real = min(size, self.rows - first)
        return Round(first_row=first, rows=real, real_rows=real, rows_done=rows_done)
