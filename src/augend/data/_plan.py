"""What is fixed about a run over rows: everything that follows from the arguments alone."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

import numpy as np

from augend.data._order import ORDER, GivenOrder, Indices, ShuffledOrder
from augend.errors import SplitError


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Sizes, seed and order; workers hold a copy and compute row ids by themselves.

    Raises:
        SplitError: The numbers do not fit each other.
    """

    rows: int
    batch_size: int
    microbatch_size: int
    shard_size: int
    seed: int
    shuffle: bool
    drop_last: bool
    epochs: int | None
    split: str  # how the rows were split from others; "" if they were not

    def __post_init__(self) -> None:
        if self.microbatch_size > self.batch_size:
            raise SplitError(
                f"microbatch_size must be at most batch_size; got {self.microbatch_size} > {self.batch_size}; "
                "a micro-batch is a part of a batch: lower microbatch_size or raise batch_size"
            )
        if self.drop_last and self.rows < self.batch_size:
            raise SplitError(
                f"drop_last=True would drop every row: {self.rows} rows are fewer than batch_size {self.batch_size}; "
                "lower batch_size or leave drop_last=False"
            )

    @property
    def steps_per_epoch(self) -> int:
        """Batches in one epoch, the short last one included unless it is dropped."""
        return self.rows // self.batch_size if self.drop_last else -(-self.rows // self.batch_size)

    @property
    def rows_per_epoch(self) -> int:
        """Rows that one epoch visits."""
        return self.steps_per_epoch * self.batch_size if self.drop_last else self.rows

    @property
    def steps(self) -> float:
        """Batches in all epochs; inf if they never end."""
        return math.inf if self.epochs is None else self.epochs * self.steps_per_epoch

    def end(self, step: int) -> float:  # noqa: ARG002 - the shape of `end_of_epoch`: both say where a pass ends
        """Return the first step behind all epochs."""
        return self.steps

    def epoch_of(self, step: int) -> int:
        """Return the epoch that a step belongs to."""
        return step // self.steps_per_epoch

    def end_of_epoch(self, step: int) -> float:
        """Return the first step behind the epoch that a step belongs to, or behind all epochs."""
        return min(self.steps, (self.epoch_of(step) + 1) * self.steps_per_epoch)

    def batch_rows(self, step: int) -> int:
        """Return how many rows the batch of a step has."""
        return min(self.batch_size, self.rows_per_epoch - step % self.steps_per_epoch * self.batch_size)

    def order(self, epoch: int) -> ShuffledOrder | GivenOrder:
        """Return the order of an epoch."""
        if self.shuffle:
            return ShuffledOrder(self.rows, shard_size=self.shard_size, seed=self.seed, epoch=epoch)
        return GivenOrder()

    def positions(self, step: int, first_row: int, rows: int) -> Indices:
        """Return the positions in their epoch of some rows of a step's batch, ``[rows]``."""
        start = step % self.steps_per_epoch * self.batch_size + first_row
        return np.arange(start, start + rows, dtype=np.int64)

    def contract(self) -> dict[str, int | bool | str]:
        """Return what a saved position means nothing without; the cut and the number of epochs may change."""
        return {
            "algorithm": ORDER,
            "rows": self.rows,
            "batch_size": self.batch_size,
            "shard_size": self.shard_size,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "drop_last": self.drop_last,
            "split": self.split,
        }
