"""The progress line of ggml-opt, and who writes it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Final, TextIO, final

from augend.errors import ContractError
from augend.ggml._epoch import Progress
from augend.ggml._result import Result
from augend.ggml._rules import Compat, rules_of

_CELLS: Final = 8
_LEVELS: Final = " ▏▎▍▌▋▊▉█"
_MICROSECONDS: Final = 1_000_000


def progress_line(
    *,
    train: bool,
    batch: int,
    batches: int,
    rows: int,
    result: Result,
    seconds: float,
    all_rows: int | None = None,
    compat: Compat | None = None,
) -> str:
    """Return one line on how far a part of an epoch is.

    Args:
        train: Whether it is the training part.
        batch: The physical batch that was evaluated last, from 1.
        batches: Of the part.
        rows: Of a physical batch.
        result: What the part measured so far.
        seconds: Since the part began.
        all_rows: Of the part, where the last batch is short; ``batches * rows`` if None.
        compat: With it the line has ggml's very bytes in UTF-8: its bar lacks an eighth of a cell at the end.

    Returns:
        The line, its carriage return, and after the last batch a line feed.

    Raises:
        ContractError: There is no such batch.

    Example:
        >>> from augend.ggml import Result, progress_line
        >>> result = Result()
        >>> line = progress_line(train=True, batch=1, batches=2, rows=500, result=result, seconds=1.5)
        >>> line[:40]
        'train: [████    ] data=0000500/0001000 l'
    """
    if not 1 <= batch <= batches:
        raise ContractError(f"the batches of a part are numbered from 1 to {batches}; got {batch!r:.80}")
    all_rows = batches * rows if all_rows is None else all_rows
    loss, accuracy = result.loss(), result.accuracy()
    elapsed = int(seconds * _MICROSECONDS)
    return (
        f"{'train: [' if train else 'val:   ['}{_bar(batch, batches, whole=not rules_of(compat).whole_batches)}] "
        f"data={min(batch * rows, all_rows):07d}/{all_rows:07d} "
        f"loss={loss.value:.5f}±{loss.error:.5f} acc={100 * accuracy.value:.2f}±{100 * accuracy.error:.2f}% "
        f"t={_clock(elapsed)} ETA={_clock(elapsed * (batches - batch) // batch)} \r" + "\n" * (batch == batches)
    )


@final
class Bar:
    """Writes the progress line of each physical batch: a callback of ``epoch``.

    On a terminal the line is written a few times a second, elsewhere once at the end of each part; with compat always
    for every batch, as ggml does.

    Args:
        stream: Where, such as ``sys.stderr``.
        compat: Whose line; see ``progress_line``.
        every_seconds: Least time between two lines on a terminal; the last one of a part always comes.
        clock: The seconds that ``Progress.started`` is of.
    """

    def __init__(
        self,
        stream: TextIO,
        *,
        compat: Compat | None = None,
        every_seconds: float = 0.1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._every_batch = rules_of(compat).whole_batches
        self._compat = compat
        self._stream = stream
        self._every_seconds = every_seconds
        self._clock = clock
        self._written = -math.inf  # when
        self._name = "fit" if compat is None else "ggml_opt_fit"
        self._epochs = 0

    def __call__(self, event: Progress) -> None:
        """Write the line of a physical batch, if it is time."""
        last, terminal = event.batch == event.batches, self._stream.isatty()
        due = terminal and self._clock() >= self._written + self._every_seconds
        if not (self._every_batch or last or due):
            return
        line = self._line(event)
        self._stream.write(line if self._every_batch or terminal else line.rstrip() + "\n")
        self._stream.flush()
        self._written = self._clock()

    def begin(self, epoch: int, epochs: int) -> None:
        """Write the head of an epoch, from 1, of a fit."""
        self._gap()
        self._write(f"epoch {epoch:04d}/{epochs:04d}:")
        self._epochs += 1

    def end(self, seconds: float) -> None:
        """Write how long a fit took."""
        self._gap()
        self._write(f"training took {_clock(int(seconds * _MICROSECONDS))}")

    def _gap(self) -> None:
        if self._epochs:
            self._stream.write("\n")

    def _write(self, text: str) -> None:
        self._stream.write(f"{self._name}: {text}\n")
        self._stream.flush()

    def _line(self, event: Progress) -> str:
        rows = event.optimizer.training.inputs.shape[1]
        before = 0 if event.train else event.dataset.batches(rows) - event.batches  # batches of the training part
        return progress_line(
            train=event.train,
            batch=event.batch,
            batches=event.batches,
            rows=rows,
            result=event.result,
            seconds=self._clock() - event.started,
            all_rows=min(event.batches * rows, event.dataset.count - before * rows),
            compat=self._compat,
        )


def _bar(batch: int, batches: int, *, whole: bool) -> str:
    """Return eight cells of eight levels each.

    ggml counts an eighth only when more than its share is done, so its last one never comes.
    """
    if whole:
        eighths = _CELLS * 8 * batch // batches
    else:
        eighths = sum(batches * eighth // 8 < _CELLS * batch for eighth in range(1, _CELLS * 8 + 1))
    return "".join(_LEVELS[min(max(eighths - 8 * cell, 0), 8)] for cell in range(_CELLS))


def _clock(microseconds: int) -> str:
    minutes, seconds = divmod(microseconds // _MICROSECONDS, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02d}:{minutes:02d}:{seconds:02d}"
