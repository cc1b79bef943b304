"""fit: what it takes, what it refuses, and what stands around its loop. Built on the public API alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from numbers import Integral
from typing import Literal, cast

import torch
from torch import nn

from augend import Accumulator, Checkpoint
from augend._fit._evaluate import NO_METRICS, LossFunction, MetricFunction, check_batches
from augend._fit._history import Begin, History, Listener
from augend._fit._told import Told
from augend._fit._training import HeldOut, Training, Unkept
from augend.data import Batches
from augend.errors import ContractError
from augend.metrics import Ranks


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
    checkpoint: Checkpoint | None = None,
    accumulator: Accumulator | None = None,
    listeners: Iterable[Listener] = (),
    compile: bool = False,  # noqa: A002 - the word torch uses
    empty: Literal["raise", "skip"] = "raise",
    nonfinite: Literal["raise", "skip"] = "raise",
    digest_every: int | None = None,
) -> History:
    """Train ``model`` on ``data``, in the train/eval mode it is in, and tell what happened.

    Collective: every rank, with equal arguments. What is returned is equal on all of them, and listeners are called
    on the first one alone.

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
        checkpoint: Where model, optimizer, sums, position and history are saved when it is due, after any micro-batch,
            and at the end. What is there already is loaded first, and training goes on from it: the result is that of
            training that was never interrupted. Where training had ended, only a larger ``steps`` or ``epochs`` (or
            ``patience``) goes on. A validation that was interrupted is done again.
        accumulator: What sums the gradients; None takes the checkpoint's, or makes ``Accumulator(model)``. Needed for
            named terms, for other than float32 sums, and to go on with the random draws and the schedule of an
            earlier call.
        listeners: Called on rank 0 with every ``Begin``, ``Step``, ``Validation`` and ``End``, in order.
        compile: Whether to run the model, and nothing else, through ``torch.compile``.
        empty: What a batch without any supervised item does: raise, or skip the update.
        nonfinite: What an inf or a nan in the summed gradients does: raise, or skip the update.
        digest_every: Steps between two whose ``Step.digests`` tell every trained parameter after them in 64 bits, by
            which ``augend diff`` finds the first step where two runs part; None for none. Reads each parameter once.

    Returns:
        Every step, every validation, and why it stopped; with a checkpoint, those of earlier calls too.

    Raises:
        SystemExit: A stop was requested of the checkpoint, by a signal or by ``request_stop``. All is saved; the code
            is 3.
        CheckpointError: There are only damaged checkpoints, or another process has the directory.
        StateError: The history in the checkpoint is none.
        ContractError: Arguments that do not fit each other, as said above, or do not fit the checkpoint.
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
    _check_options(checkpoint, validation, validate_every, patience, digest_every)
    every = data.steps_per_epoch if validate_every is None else validate_every
    told = Told(listeners, Ranks(data.mesh))
    with (
        _accumulating(model, data, accumulator or _accumulator_of(checkpoint)) as grads,
        _kept(checkpoint, told, limit, model=model, optimizer=optimizer, grads=grads, data=data) as keeper,
    ):
        stopped = Training(
            model=cast("nn.Module", torch.compile(model)) if compile else model,
            data=data,
            loss=loss,
            optimizer=optimizer,
            grads=grads,
            finish=partial(grads.step, optimizer, max_norm=max_norm, empty=empty, nonfinite=nonfinite),
            schedule=schedule,
            held_out=None if validation is None else HeldOut(validation, every, patience, metrics),
            limit=limit,
            digest_every=digest_every,
            told=told,
            keeper=keeper,
        ).run()
    return told.end(stopped)


def _accumulator_of(checkpoint: Checkpoint | None) -> Accumulator | None:
    """Return the accumulator that the checkpoint has already, if it is the only one."""
    parts = () if checkpoint is None else checkpoint.parts.values()
    found = [part for part in parts if isinstance(part, Accumulator)]
    return found[0] if len(found) == 1 else None


@contextmanager
def _accumulating(model: nn.Module, data: Batches, given: Accumulator | None) -> Iterator[Accumulator]:
    """Lend the given accumulator, or one of our own; what an exception leaves in ours is offered again later."""
    if given is not None:
        yield given
        return
    own = Accumulator(model)
    try:
        yield own
    finally:
        own.reset()
        data.unregister(own)


@contextmanager
def _kept(
    checkpoint: Checkpoint | None, told: Told, limit: int, data: Batches, **parts: object
) -> Iterator[Checkpoint | Unkept]:
    """Go on from the latest checkpoint, tell where training begins, and save what it came to."""
    if checkpoint is None:
        told(Begin(steps=limit, world=told.ranks.world))
        yield Unkept()
        return
    with checkpoint.attached(**parts, data=data, history=told):
        position = checkpoint.load_latest()
        if position is not None and position.step > limit:
            raise ContractError(f"training would end after step {limit}, and {position.step} are done already")
        checkpoint.save_if_due()  # from here on a signal is a request to stop
        earlier = told.history("so far")
        begun = position is not None or data.state_dict()["step"] == 0
        told(
            Begin(
                steps=limit,
                history=earlier if begun else None,
                restarts=checkpoint.restarts,
                position=position,
                world=told.ranks.world,
            )
        )
        yield checkpoint
        if position is None or earlier != told.history("so far"):
            checkpoint.save()
        checkpoint.wait()


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


def _check_options(
    checkpoint: Checkpoint | None,
    validation: Batches | None,
    validate_every: int | None,
    patience: int | None,
    digest_every: int | None,
) -> None:
    if checkpoint is not None and not isinstance(checkpoint, Checkpoint):
        raise ContractError(f"checkpoint must be an augend.Checkpoint; got {checkpoint!r:.80}")
    if validation is not None:
        check_batches("validation", validation)
    for name, value in (("validate_every", validate_every), ("patience", patience)):
        if value is not None and validation is None:
            raise ContractError(f"{name} = {value} needs validation=, the held-out rows")
    for name, value in (("validate_every", validate_every), ("patience", patience), ("digest_every", digest_every)):
        if value is not None and value < 1:
            raise ContractError(f"{name} must be at least 1; got {value}")
