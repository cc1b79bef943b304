"""fit: the training loop. Built on the public API alone: copy it, change it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Integral
from time import perf_counter
from typing import Literal, cast, final

import torch
from torch import nn

from augend import Accumulator, Finished, schedules
from augend._fit._evaluate import NO_METRICS, LossFunction, MetricFunction, check_batches, evaluate
from augend._fit._history import Begin, End, Event, History, Listener, Step, Validation
from augend.data import Batch, Batches
from augend.errors import ContractError


def fit(
    model: nn.Module,
    data: Batches,
    *,
    loss: LossFunction,
    optimizer: torch.optim.Optimizer,
    steps: int | None = None,
    epochs: int | None = None,
    max_norm: float | None = None,
    schedule: Callable[[int], float] | None = None,
    validation: Batches | None = None,
    validate_every: int | None = None,
    patience: int | None = None,
    metrics: Mapping[str, MetricFunction] = NO_METRICS,
    accumulator: Accumulator | None = None,
    listeners: Iterable[Listener] = (),
    compile: bool = False,  # noqa: A002 - the word torch uses
    empty: Literal["raise", "skip"] = "raise",
    nonfinite: Literal["raise", "skip"] = "raise",
) -> History:
    """Train ``model`` on ``data``, in the train/eval mode it is in, and tell what happened.

    Collective: every rank, with equal arguments.

    Args:
        model: The model; its parameters are changed in place.
        data: Training rows; training begins at their position.
        loss: ``loss(model, microbatch)`` returns a ``Tally``, or one for each named term of ``accumulator``.
        optimizer: Any ``torch.optim`` optimizer over the model's parameters.
        steps: Stop when ``data`` has this many steps behind it. Give exactly one of ``steps``, ``epochs`` and
            ``Batches(epochs=...)``.
        epochs: Stop when ``data`` has this many epochs behind it.
        max_norm: Largest 2-norm of the mean gradient; None leaves it alone.
        schedule: Learning rate as a function of the number of updates taken before, see ``augend.schedules``. None
            leaves the optimizer's rate alone. A skipped step does not move it.
        validation: Held-out rows, measured by ``evaluate`` with ``loss`` and ``metrics`` as training goes on and at
            its end. Training has the same bits with and without.
        validate_every: Steps between two validations; None validates at the end of every epoch.
        patience: Stop after this many validations in a row without a lower loss (of the first term); None never does.
            The weights stay as they are then, not as they were at the best validation.
        metrics: See ``evaluate``.
        accumulator: What sums the gradients; None makes ``Accumulator(model)``. Needed for named terms, for other
            than float32 sums, and to go on with the random draws and the schedule of an earlier call.
        listeners: Called with every ``Begin``, ``Step``, ``Validation`` and ``End``, in order.
        compile: Whether to run the model, and nothing else, through ``torch.compile``.
        empty: What a batch without any supervised item does: raise, or skip the update.
        nonfinite: What an inf or a nan in the summed gradients does: raise, or skip the update.

    Returns:
        Every step, every validation, and why it stopped.

    Raises:
        ContractError: Arguments that do not fit each other, as said above.
        EmptyWindowError: A batch counted nothing, with ``empty="raise"``.
        NonFiniteError: A summed gradient is inf or nan, with ``nonfinite="raise"``.

    Example:
        >>> import torch
        >>> x = torch.arange(8.0).reshape(8, 1)
        >>> data = augend.Batches({"x": x, "y": 2 * x}, batch_size=4, microbatch_size=2)
        >>> model = torch.nn.Linear(1, 1)
        >>> def loss(model, microbatch):
        ...     return augend.losses.mse(model(microbatch["x"]), microbatch["y"])
        >>> sgd = torch.optim.SGD(model.parameters(), lr=0.01)
        >>> history = augend.fit(model, data, loss=loss, optimizer=sgd, steps=40)
        >>> len(history.steps), history.steps[-1].loss.value < history.steps[0].loss.value
        (40, True)
    """
    limit = _limit(data, steps, epochs)
    _check_validation(validation, validate_every, patience)
    forward = cast("nn.Module", torch.compile(model)) if compile else model
    told = _Told(listeners)
    told(Begin(steps=limit))
    with _accumulating(model, accumulator) as grads:
        update = grads.updates  # not 0 where the accumulator has trained before
        stopped = f"all {limit} steps are done"
        for batch in data:
            if batch.step >= limit:
                break
            begun = perf_counter()
            for microbatch in grads.microbatches(batch):
                grads.backward(loss(forward, microbatch))
            if schedule is not None:
                schedules.apply(optimizer, schedule, update)
            done = grads.step(optimizer, max_norm=max_norm, empty=empty, nonfinite=nonfinite)
            update = done.update
            told(_step(batch, done, optimizer, perf_counter() - begun))
            if validation is not None and _is_due(batch, limit, validate_every):
                told(_validation(batch, forward, validation, loss, metrics))
                if _out_of_patience(told.validations, patience):
                    stopped = f"no lower validation loss in {patience} validations"
                    break
    return told.end(stopped)


@contextmanager
def _accumulating(model: nn.Module, given: Accumulator | None) -> Iterator[Accumulator]:
    """Lend the given accumulator, or one of our own; what an exception leaves in ours is offered again later."""
    if given is not None:
        yield given
        return
    own = Accumulator(model)
    try:
        yield own
    finally:
        own.reset()


def _limit(data: Batches, steps: int | None, epochs: int | None) -> int:
    """Return how many steps ``data`` will have behind it when training ends."""
    check_batches("data", data)
    lengths = {"steps": steps, "epochs": epochs, "Batches(epochs=)": data.epochs}
    given = {name: length for name, length in lengths.items() if length is not None}
    if len(given) != 1:
        got = ", ".join(f"{name} = {length}" for name, length in given.items()) or "none of them"
        raise ContractError(f"give exactly one of steps, epochs and Batches(epochs=); got {got}")
    ((name, length),) = given.items()
    if isinstance(length, bool) or not isinstance(length, Integral):  # numpy's integers are whole numbers too
        raise ContractError(f"{name} must be a whole number of at least 1; got {length!r}")
    if length < 1:
        raise ContractError(f"{name} must be at least 1; got {length}")
    return length if name == "steps" else length * data.steps_per_epoch


def _check_validation(validation: Batches | None, validate_every: int | None, patience: int | None) -> None:
    if validation is not None:
        check_batches("validation", validation)
    for name, value in (("validate_every", validate_every), ("patience", patience)):
        if value is not None and validation is None:
            raise ContractError(f"{name} = {value} needs validation=, the held-out rows")
        if value is not None and value < 1:
            raise ContractError(f"{name} must be at least 1; got {value}")


def _step(batch: Batch, done: Finished, optimizer: torch.optim.Optimizer, seconds: float) -> Step:
    return Step(
        step=batch.step,
        epoch=batch.epoch,
        rows=batch.rows,
        losses=done.losses,
        count=done.count,
        norm=done.norm,
        scale=done.scale,
        skipped=done.skipped,
        update=done.update,
        lr=float(optimizer.param_groups[0]["lr"]),
        seconds=seconds,
    )


def _is_due(batch: Batch, limit: int, validate_every: int | None) -> bool:
    done = batch.step + 1
    return done == limit or (batch.last if validate_every is None else done % validate_every == 0)


def _validation(
    batch: Batch, model: nn.Module, validation: Batches, loss: LossFunction, metrics: Mapping[str, MetricFunction]
) -> Validation:
    begun = perf_counter()
    estimates = evaluate(model, validation, loss=loss, metrics=metrics)
    return Validation(step=batch.step, epoch=batch.epoch, estimates=estimates, seconds=perf_counter() - begun)


def _out_of_patience(validations: Sequence[Validation], patience: int | None) -> bool:
    """Whether the lowest first loss (the earliest one, and any number before NaN) is ``patience`` validations old."""
    values = [validation.loss.value for validation in validations]
    best = min(range(len(values)), key=lambda index: (math.isnan(values[index]), values[index]))
    return patience is not None and len(values) - 1 - best >= patience


@final
class _Told:
    """What was told so far; hands each event on to every listener."""

    def __init__(self, listeners: Iterable[Listener]) -> None:
        self.steps: list[Step] = []
        self.validations: list[Validation] = []
        self._listeners = tuple(listeners)

    def __call__(self, event: Event) -> None:
        if isinstance(event, Step):
            self.steps.append(event)
        elif isinstance(event, Validation):
            self.validations.append(event)
        for listener in self._listeners:
            listener(event)

    def end(self, stopped: str) -> History:
        history = History(steps=tuple(self.steps), validations=tuple(self.validations), stopped=stopped)
        self(End(history=history))
        return history
