"""One pass over a data set: a training part, and an evaluated part after it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import TypeAlias, final

from augend.errors import ContractError
from augend.ggml._dataset import Dataset
from augend.ggml._given import whole_number
from augend.ggml._optimizer import Optimizer
from augend.ggml._result import Result


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """One physical batch of a pass is done.

    Args:
        train: Whether it is of the training part.
        optimizer: What evaluated it.
        dataset: What it is of.
        result: Of its part so far.
        batch: Its number within its part, from 1.
        batches: Of its part.
        started: When the part began, in seconds of ``time.monotonic``.
    """

    train: bool
    optimizer: Optimizer
    dataset: Dataset
    result: Result
    batch: int
    batches: int
    started: float


Callback: TypeAlias = Callable[[Progress], object]
"""Called after each physical batch; ``True`` ends the part, of training with the update of the window that is open."""


def epoch(
    optimizer: Optimizer,
    dataset: Dataset,
    *,
    split: int | None = None,
    train: Result | None = None,
    evaluate: Result | None = None,
    on_train: Callback | None = None,
    on_evaluate: Callback | None = None,
    start: int = 0,
) -> None:
    """Train on the first rows of a data set, in the order of its permutation, and evaluate the rest.

    Nothing is shuffled, and the results are not reset. The last window of the training part may be short: it counts
    what is in it (with ``compat`` the rows must come in whole physical batches, and the window stays open).

    Args:
        optimizer: What is trained.
        dataset: What it is trained on; as wide as ``training.inputs``.
        split: How many rows are trained on, all if None; whole physical batches, or all rows.
        train: Takes what the training part measures.
        evaluate: Takes what the rest measures.
        on_train: Called after each physical batch of the training part.
        on_evaluate: Called after each of the rest.
        start: How many physical batches of the training part are done already, as after a resume.

    Raises:
        ContractError: Rows, widths, labels or the split do not fit; nothing was evaluated.
        NonFiniteError, StateError: As ``Optimizer.evaluate``.
    """
    rows = optimizer.training.inputs.shape[1]
    split = dataset.count if split is None else whole_number("split", split, 0, dataset.count)
    check_epoch(optimizer, dataset, split)
    whole_number("start", start, 0, -(-split // rows))
    trained, batches = -(-split // rows), dataset.batches(rows)
    train = Result(compat=optimizer.compat) if train is None else train
    evaluate = Result(compat=optimizer.compat) if evaluate is None else evaluate
    _Part(optimizer, dataset, train, on_train, 0, trained, train=True).run(start)
    _Part(optimizer, dataset, evaluate, on_evaluate, trained, batches, train=False).run(trained)


@final
@dataclass(frozen=True, slots=True)
class _Part:
    """Physical batches of a data set from one to another, which are trained on or evaluated."""

    optimizer: Optimizer
    dataset: Dataset
    result: Result
    callback: Callback | None
    begin: int
    end: int
    _: KW_ONLY
    train: bool

    def run(self, start: int) -> None:
        began = time.monotonic()
        stop = False
        for batch in range(start, self.end):
            self._evaluate(batch)
            if self.callback is not None and self.callback(self._progress(batch, began)) is True:
                stop = True
            if stop and not (self.train and self.optimizer.index):
                return

    def _evaluate(self, batch: int) -> None:
        rows = self.optimizer.training.inputs.shape[1]
        last = self.train and batch == self.end - 1 and self.optimizer.compat is None
        self.optimizer.allocate(self.train, last=last)
        there = self.optimizer.read(self.dataset, rows, batch)
        self.optimizer.evaluate(self.result, rows=None if there == rows else there)

    def _progress(self, batch: int, began: float) -> Progress:
        return Progress(
            train=self.train,
            optimizer=self.optimizer,
            dataset=self.dataset,
            result=self.result,
            batch=batch + 1 - self.begin,
            batches=self.end - self.begin,
            started=began,
        )


def check_epoch(optimizer: Optimizer, dataset: Dataset, split: int) -> None:
    """Refuse a data set or a split that an optimizer cannot go through.

    Raises:
        ContractError: Widths, labels, rows or rules do not fit.
    """
    rows, compat = optimizer.training.inputs.shape[1], optimizer.compat
    inputs, labels = optimizer.training.inputs, optimizer.labels_tensor
    if dataset.compat != compat:
        raise ContractError(
            f"the data set was made with compat={dataset.compat!r} and is used with compat={compat!r}: make both alike"
        )
    if inputs.shape[2:] != (1, 1) or inputs.shape[0] != dataset.width:
        raise ContractError(
            f"the inputs must be [{dataset.width}, rows], as wide as the data set; {inputs!r} is {list(inputs.shape)}"
        )
    if labels is None and dataset.label_width:
        raise ContractError(
            f"the data set has labels, and {optimizer.training.loss} uses none: leave them out of the data set"
        )
    if labels is not None and labels.shape != (dataset.label_width, rows, 1, 1):
        raise ContractError(
            f"the labels must be [{labels.shape[0]}, {labels.shape[1]}] for each physical batch of {rows} rows; those "
            f"of the data set are {dataset.label_width} wide"
        )
    if compat is not None and dataset.count % rows:
        raise ContractError(
            f"with compat the rows must come in whole batches of {rows}; the data set has {dataset.count}"
        )
    if split % rows and split != dataset.count:
        raise ContractError(
            f"split must be a multiple of {rows} rows from 0 to {dataset.count}, or all rows; got {split}"
        )
    dataset.batches(rows)
