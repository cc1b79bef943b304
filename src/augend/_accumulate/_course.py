"""Where one accumulator stands in the batch that it is working through."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol, TypeVar, final

from augend._accumulate._window import Window
from augend.errors import StateError


class ProgressLike(Protocol):
    """How far one accumulator is in the current batch; held by the data and saved with its position."""

    rows_done: int
    closed: bool
    replay: bool


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

    @property
    def share(self) -> tuple[int, int]:
        """Which rank of how many it is dealt to here."""

    @property
    def plan(self) -> Mapping[str, object]:
        """What its rows follow from: equal on all ranks that share it."""

    def rounds_left(self, owner: object) -> int:
        """Return how many micro-batches ``remaining`` will offer."""

    def progress(self, owner: object) -> ProgressLike:
        """Return how far ``owner`` is; StateError if this batch is over."""

    def remaining(self, owner: object, offer: int) -> Iterator[M_co]:
        """Offer the micro-batches that ``owner`` has not done; the batch was offered ``offer`` times before."""

    def check_live(self) -> None:
        """Raise StateError if the data has left this batch."""


@final
class Course:
    """One accumulator's way through one batch: a backward for each micro-batch, then one finish."""

    def __init__(self) -> None:
        self.batch: BatchLike[MicrobatchLike] | None = None
        self.entered = False  # some batch, ever
        self.replayed = False  # the batch was finished before it was handed out: finish() gives the saved record
        self._dropped = False  # the window was dropped before its batch was entered
        self._turn: object = None  # the loop that entered last
        self._progress: ProgressLike | None = None
        self._current: MicrobatchLike | None = None
        self._calls = 0

    def forget(self) -> None:
        """Be in no batch; what is done of the one that was open stays done."""
        self.batch, self._progress, self._current, self.replayed = None, None, None, False
        self._dropped = False

    def enter(self, owner: object, batch: BatchLike[MicrobatchLike], window: Window, turn: object) -> None:
        """Enter a batch, or go on in it.

        Raises:
            StateError: The window holds rows of another batch, or not those that the data counts as done, or the
                batch is finished.
        """
        progress = batch.progress(owner)
        if self._dropped and not progress.closed:
            progress.rows_done = 0
        if progress.closed:
            _check_replay(batch, progress, window)
        elif progress.rows_done != window.rows_done or (window.rows_done and window.step != batch.step):
            raise StateError(
                f"the window holds {window.rows_done} rows of batch {window.step}, and {progress.rows_done} of batch "
                f"{batch.step} count as done. Save and load accumulator and data together, and finish() one batch "
                "before the next"
            )
        elif window.loose and progress.rows_done < batch.rows:
            raise StateError(
                "the window holds micro-batches that did not come from microbatches(); their rows would be counted "
                "twice. finish() or reset() first, and add what belongs to no row after the loop"
            )
        self.batch, self._progress, self.replayed = batch, progress, progress.closed
        self.entered = True
        self._current, self._turn, self._dropped = None, turn, False

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

    def place(self) -> str:
        """Return in words where this is, for messages."""
        return "" if self.batch is None else f" of batch {self.batch.step}"

    def leave(self, turn: object) -> None:
        """No micro-batch of this loop is current any more; a newer loop's stays."""
        if self._turn is turn:
            self._current = None

    def current(self) -> MicrobatchLike | None:
        """Return the micro-batch that a backward would belong to, or None outside the loop.

        Raises:
            StateError: It had its backward already, or the loop was left before the batch's end.
        """
        if self._current is not None and self._calls:
            raise StateError("a second backward() for one micro-batch; use terms=(...) for several losses")
        if self._current is None and self.batch is not None and (self.replayed or self._rows_left()):
            what = "was finished before" if self.replayed else f"has {self._rows_left()} rows to do"
            raise StateError(
                f"a backward() outside the loop, while batch {self.batch.step} {what}; enter the loop over "
                "microbatches(batch) again, or drop what is there with reset()"
            )
        return self._current

    def advance(self) -> tuple[int, int] | None:
        """Count the current micro-batch as done; returns the batch's step and its rows done, None outside the loop."""
        if self._current is None or self._progress is None or self.batch is None:
            return None
        self._calls += 1
        self._progress.rows_done = self._current.rows_done
        return self.batch.step, self._progress.rows_done

    def _rows_left(self) -> int:
        if self.batch is None or self._progress is None or self._progress.closed:
            return 0
        return self.batch.rows - self._progress.rows_done

    def rewind(self) -> None:
        """Nothing of the batch is done any more, and this is still in it."""
        self._current = None
        if self._progress is not None:
            self._progress.rows_done = 0

    def check_finishable(self) -> None:
        """Raise StateError if rows of the open batch were not offered yet."""
        batch, left = self.batch, self._rows_left()
        if batch is not None and left:
            raise StateError(
                f"batch {batch.step} has {batch.rows - left} of {batch.rows} rows done; "
                "finish the loop over microbatches(batch) first, or drop what is there with reset()"
            )

    def close(self) -> None:
        """The batch is finished for this accumulator."""
        if self._progress is not None:
            self._progress.closed = True
        self.forget()

    def restart(self) -> None:
        """Nothing of the open batch is done any more, nor of the one that is entered next."""
        progress = self._progress
        self.forget()
        if progress is None:
            self._dropped = True
        elif not progress.closed:
            progress.rows_done = 0


def _check_replay(batch: BatchLike[MicrobatchLike], progress: ProgressLike, window: Window) -> None:
    """A closed batch is entered only where it was closed before it was handed out, and with an empty window."""
    if not progress.replay:
        raise StateError(
            f"batch {batch.step} is finished; take the next one. To train on one batch several times, make "
            "augend.Batches of its rows alone"
        )
    if window.microbatches:
        raise StateError(f"batch {batch.step} is finished, yet the window holds {window.microbatches} micro-batches")
