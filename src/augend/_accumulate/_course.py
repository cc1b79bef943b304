"""Where one accumulator stands in the batch that it is working through."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol, TypeVar, final

from augend.errors import StateError


class ProgressLike(Protocol):
    """How far one accumulator is in the current batch; held by the data and saved with its position."""

    rows_done: int
    closed: bool


class MicrobatchLike(Protocol):
    """What an accumulator must know of a micro-batch."""

    @property
    def real_rows(self) -> int:
        """How many rows are the batch's own; 0 for a filler."""

    @property
    def rows_done(self) -> int:
        """Rows of the batch that are done, over all ranks, once the backward of this micro-batch is."""


M = TypeVar("M", bound=MicrobatchLike)
M_co = TypeVar("M_co", bound=MicrobatchLike, covariant=True)


class BatchLike(Protocol[M_co]):
    """What an accumulator must know of a batch; ``augend.data.Batch`` is one."""

    @property
    def step(self) -> int:
        """Which batch it is, counted over all epochs."""

    @property
    def rows(self) -> int:
        """How many rows it has."""

    def progress(self, owner: object) -> ProgressLike:
        """Return how far ``owner`` is; StateError if this batch is over."""

    def remaining(self, owner: object) -> Iterator[M_co]:
        """Offer the micro-batches that ``owner`` has not done."""

    def check_live(self) -> None:
        """Raise StateError if the data has left this batch."""


@final
class Course:
    """One accumulator's way through one batch: a backward for each micro-batch, then one finish."""

    def __init__(self) -> None:
        self.batch: BatchLike[MicrobatchLike] | None = None
        self.replayed = False  # the batch was finished before it was loaded: finish() gives the saved record
        self._progress: ProgressLike | None = None
        self._current: MicrobatchLike | None = None
        self._calls = 0

    def _forget(self) -> None:
        self.batch, self._progress, self._current, self.replayed = None, None, None, False

    def enter(self, owner: object, batch: BatchLike[MicrobatchLike], rows_held: int) -> None:
        """Enter a batch, or go on in it.

        Raises:
            StateError: The window holds rows of another batch, or not those that the data counts as done.
        """
        progress = batch.progress(owner)
        if progress.closed:
            if rows_held:
                raise StateError(f"batch {batch.step} is finished, yet the window holds {rows_held} rows of a batch")
        elif progress.rows_done != rows_held:
            raise StateError(
                f"the window holds {rows_held} rows of a batch, and batch {batch.step} counts {progress.rows_done} as "
                "done. Save and load accumulator and data together, and finish() one batch before the next"
            )
        self.batch, self._progress, self.replayed = batch, progress, progress.closed
        self._current = None

    def hand_out(self, microbatch: MicrobatchLike) -> None:
        """Make a micro-batch the current one."""
        self._current, self._calls = microbatch, 0

    def check_done(self, microbatch: MicrobatchLike) -> None:
        """Raise StateError unless the micro-batch handed out last got its one backward."""
        if self._current is not microbatch:
            raise StateError(
                "the window was reset, loaded or finished inside the loop over microbatches(); start a new loop"
            )
        if self._calls == 0:
            raise StateError(
                "a micro-batch got no backward(): every one needs exactly one, also when nothing in it is supervised "
                "(its count is then 0)"
            )

    def leave(self) -> None:
        """No micro-batch is current any more."""
        self._current = None

    def current(self) -> MicrobatchLike | None:
        """Return the micro-batch that a backward would belong to, or None outside the loop.

        Raises:
            StateError: It had its backward already.
        """
        if self._current is not None and self._calls:
            raise StateError("a second backward() for one micro-batch; use terms=(...) for several losses")
        return self._current

    def advance(self) -> int | None:
        """Count the current micro-batch as done; returns the rows of the batch that are, or None outside the loop."""
        if self._current is None or self._progress is None:
            return None
        self._calls += 1
        self._progress.rows_done = self._current.rows_done
        return self._progress.rows_done

    def check_finishable(self) -> None:
        """Raise StateError if rows of the open batch were not offered yet."""
        if self.batch is None or self._progress is None or self._progress.closed:
            return
        if self._progress.rows_done < self.batch.rows:
            raise StateError(
                f"batch {self.batch.step} has {self._progress.rows_done} of {self.batch.rows} rows done; finish the "
                "loop over microbatches(batch) first, or drop what is there with reset()"
            )

    def close(self) -> None:
        """The batch is finished for this accumulator."""
        if self._progress is not None:
            self._progress.closed = True
        self._forget()

    def restart(self) -> None:
        """Nothing of the open batch is done any more."""
        if self._progress is not None and not self._progress.closed:
            self._progress.rows_done = 0
        self._forget()
