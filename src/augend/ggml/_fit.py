"""fit: shuffle, split, and train a graph for some epochs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from fractions import Fraction
from os import PathLike
from typing import Any, TextIO, final

from augend import Checkpoint
from augend.errors import ContractError, SplitError
from augend.ggml._course import Course, Plan
from augend.ggml._dataset import Dataset
from augend.ggml._epoch import Callback, Progress, check_epoch, epoch
from augend.ggml._given import whole_number
from augend.ggml._graph import Graph
from augend.ggml._history import History
from augend.ggml._limits import Limits
from augend.ggml._line import Bar
from augend.ggml._optimizer import Optimizer
from augend.ggml._parameters import Build, Moment, Parameters, Schedule, check_parameters, rounded
from augend.ggml._random import Random
from augend.ggml._rules import Compat, rules_of
from augend.ggml._training import Training


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Fit:
    """How a graph is fitted.

    Args:
        epochs: How often the training rows are gone through.
        logical_batch: Rows that one update is made of; a multiple of the physical batch.
        validation_split: Which part of the rows is held out, or a little more, so that whole logical batches are left
            to train on; 0.05 means the decimal, hence exactly 1/20 (with ``compat`` the float32 next to it, computed
            in float32).
        parameters: The optimizer's numbers: a list with those of each epoch, or a function that is asked before each
            update; those of the training if None.
        patience: Stop after so many epochs in a row without a smaller validation loss (training loss where nothing is
            held out), and restore the weights of the best epoch; None to make all epochs.
    """

    epochs: int
    logical_batch: int
    validation_split: float | str | Fraction = 0.0
    parameters: Sequence[Parameters] | Schedule | None = None
    patience: int | None = None


def fit(
    graph: Graph,
    training: Training,
    dataset: Dataset,
    options: Fit,
    *,
    random: Random | None = None,
    compat: Compat | None = None,
    on_train: Callback | None = None,
    on_evaluate: Callback | None = None,
    progress: TextIO | None = None,
    checkpoint: str | PathLike[str] | None = None,
    every_seconds: float = 600.0,
) -> History:
    """Fit a graph to a data set: hold rows out, then train on the others and evaluate on them, epoch by epoch.

    All shards are shuffled once, and the last logical batches are held out; each epoch shuffles the others. The rows
    that a data set once held out stay out in every later fit (with ``compat`` they do not).

    Args:
        graph: Its parameters are trained, in place.
        training: What is trained, on what, and how; its period is replaced by logical batch / physical batch.
        dataset: The rows.
        options: How many epochs, which batches, what is held out.
        random: What shuffles; seeded with 5489 if None, as in ggml.
        compat: Whose numbers to reproduce; None for the right ones.
        on_train: Called after each physical batch of a training part. ``True`` ends the fit: with the update of the
            window that is open, and the validation of the epoch.
        on_evaluate: Called after each of a validation part. ``True`` ends the part and the fit.
        progress: Where ggml's progress line is written, such as sys.stderr; None for silence.
        checkpoint: A directory that keeps the run: a fit that was stopped, anywhere, goes on from there, with the
            same numbers to the bit.
        every_seconds: How often it is saved besides at the end of each epoch.

    Returns:
        The losses of each epoch, and why it ended.

    Raises:
        ContractError: An option is out of bounds, or sizes do not fit, see ``epoch``; or the directory holds another
            fit, which trained on other rows or cut them otherwise.
        SplitError: Nothing would be left to train on, or other rows were held out before.
        NonFiniteError: A gradient is inf or nan, and ``compat`` is None.
        CheckpointError: The directory holds no good checkpoint of this fit.
    """
    schedule = _schedule(training, options, compat, graph.limits)
    physical = training.inputs.shape[1]
    period, split = _sizes(dataset, options, physical, compat)
    training = replace(training, period=period, parameters=schedule)
    optimizer = Optimizer(graph, training, random=random, compat=compat)
    bar = None if progress is None else Bar(progress, compat=compat)
    patience, logical = options.patience, options.logical_batch
    plan = Plan(rows=dataset.count, split=split, logical=logical, physical=physical, keeps_best=patience is not None)
    course = Course(graph, plan, options.epochs, patience, compat)
    parts: dict[str, Any] = {"graph": graph, "optimizer": optimizer, "dataset": dataset, "course": course}
    run = None if checkpoint is None else Checkpoint(checkpoint, every_seconds=every_seconds, **parts)
    fitting = _Fitting(optimizer, dataset, split, logical, course, bar, on_train, on_evaluate, run)
    began = time.monotonic()
    try:
        check_epoch(optimizer, dataset, split)
        if run is None or run.load_latest() is None:
            _divide(dataset, optimizer.random, logical, split)
        while course.why is None:
            fitting.epoch()
    finally:
        if run is not None:
            run.close()
    if bar is not None:
        bar.end(time.monotonic() - began)
    course.restore_best()
    graph.drop_computed()
    return History(epochs=tuple(course.epochs), stopped=course.why)


def _divide(dataset: Dataset, random: Random, logical: int, split: int) -> None:
    if logical < dataset.count:
        dataset.divide(random, split)
    else:  # one batch an epoch, which ggml does not shuffle
        dataset.check_division(split)


@final
@dataclass(frozen=True, slots=True)
class _Fitting:
    """What an epoch of a fit needs."""

    optimizer: Optimizer
    dataset: Dataset
    split: int
    logical: int
    course: Course
    bar: Bar | None
    on_train: Callback | None
    on_evaluate: Callback | None
    run: Checkpoint | None

    def epoch(self) -> None:
        course = self.course
        self.optimizer.epoch = course.number
        if not course.batch and self.logical < self.split:
            self.dataset.shuffle(self.optimizer.random, self.split)
        if self.bar is not None:
            self.bar.begin(course.number, course.planned)
        epoch(
            self.optimizer,
            self.dataset,
            split=self.split,
            train=course.train,
            evaluate=course.validation,
            on_train=self._trained,
            on_evaluate=self._evaluated,
            start=self._start(),
        )
        course.end_epoch(self.optimizer.iteration - 1)
        if self.run is not None:
            self.run.save()

    def _start(self) -> int:
        """Return how many physical batches of the training part are done, or need not be."""
        over = self.course.ended and self.course.batch and not self.optimizer.index
        return self.course.batches if over else self.course.batch

    def _trained(self, event: Progress) -> bool:
        self._tell(event, self.on_train)
        self.course.batch = event.batch
        if self.run is not None:
            self.run.save_if_due()
        return self.course.ended

    def _evaluated(self, event: Progress) -> bool:
        return self._tell(event, self.on_evaluate)

    def _tell(self, event: Progress, callback: Callback | None) -> bool:
        if self.bar is not None:
            self.bar(event)
        stop = callback is not None and callback(event) is True
        self.course.ended = self.course.ended or stop
        return stop


# ------------------------------------------------------------------------ options


def _schedule(training: Training, options: Fit, compat: Compat | None, limits: Limits) -> Parameters | Schedule:
    for name, value, most in (
        ("epochs", options.epochs, limits.epochs),
        ("logical_batch", options.logical_batch, limits.logical_batch),
    ):
        whole_number(name, value, 1, most)
    if options.patience is not None:
        whole_number("patience", options.patience, 1)
    if training.build is not Build.UPDATE:
        raise ContractError(f"a fit makes updates; the training is built for less, {training.build}")
    given = options.parameters
    if given is None:
        return training.parameters
    if callable(given):
        return given
    if not isinstance(given, Sequence):
        raise ContractError(f"parameters must be a list with those of each epoch, or a function; got {given!r:.80}")
    if len(given) != options.epochs:
        raise ContractError(f"parameters must have one entry for each of the {options.epochs} epochs; got {len(given)}")
    each = tuple(given)
    for one in each:
        check_parameters(one, training.kind, compat)

    def of_epoch(moment: Moment) -> Parameters:
        return each[moment.epoch - 1]

    return of_epoch


def _sizes(dataset: Dataset, options: Fit, physical: int, compat: Compat | None) -> tuple[int, int]:
    """Return the physical batches of a window, and how many rows are trained on."""
    logical = options.logical_batch
    if logical % physical:
        raise ContractError(
            f"logical_batch must be a multiple of the physical batch, {physical} rows here; got {logical}"
        )
    if compat is not None and dataset.count % logical:
        raise ContractError(
            f"with compat the rows must come in whole logical batches of {logical}; the data set has {dataset.count}"
        )
    held_out = _fraction(options.validation_split)
    if rules_of(compat).binary32_split:
        as_float32 = rounded(float(held_out))
        if as_float32 >= 1:
            raise SplitError(f"validation_split must be less than 1 in float32; got {options.validation_split!r}")
        return logical // physical, _binary32(as_float32, dataset.count // logical) * logical
    if not held_out:
        return logical // physical, dataset.count
    trained = int((1 - held_out) * dataset.count / logical)
    if trained == 0:
        raise SplitError(
            f"validation_split {options.validation_split} of {dataset.count} rows leaves no logical batch of {logical} "
            "to train on: make it smaller, or the batches"
        )
    return logical // physical, trained * logical


def _binary32(held_out: float, batches: int) -> int:
    """Return how many logical batches are trained on, as ggml rounds."""
    return int(rounded(rounded(1.0 - held_out) * rounded(batches)))


def _fraction(given: float | str | Fraction) -> Fraction:
    try:
        exact = given if isinstance(given, Fraction) else Fraction(Decimal(str(given)))
    except (ArithmeticError, ValueError) as error:
        raise SplitError(f"validation_split must be a number from 0 to less than 1; got {given!r}") from error
    if not 0 <= exact < 1:
        raise SplitError(f"validation_split must be a number from 0 to less than 1; got {given!r}")
    return exact
