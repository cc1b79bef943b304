"""From a run file to a model, data, an optimizer and a schedule."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final, final

import torch
from torch import nn

from augend import Accumulator, Batches, models, schedules, sources, split
from augend._cli._adjust import adjust_model, adjusted_source
from augend._cli._base import base_model, base_path, base_tokenizer
from augend._cli._call import called, made, refused
from augend._cli._names import Function, find
from augend._config import RunFile, refuse
from augend.errors import ContractError, SplitError

_MODELS: Mapping[str, Function] = {"llama": models.Llama, "mlp": models.MLP}
_SOURCES: Mapping[str, Function] = {
    "digits": sources.digits,
    "docstrings": sources.docstrings,
    "pairs": sources.pairs,
    "text": sources.text,
}
_UNSUITED: Mapping[str, str] = {  # optimizers of torch
    "lbfgs": "computes the loss several times a step, and a batch of micro-batches is computed once; set adamw, say",
    "sparseadam": "takes sparse gradients, and the sums of an accumulator are dense; set adam, say",
}
_IN_PYTHON: Final = "use fused=False, or give such parameters a group of their own with 'fused': False"
_IN_A_RUN_FILE: Final = "set optimizer.fused = false, or name a factory that gives such parameters a group of their own"
_SCHEDULES: Mapping[str, Function] = {
    name: getattr(schedules, name) for name in schedules.__all__ if name not in {"apply", "chain"}
}


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """What a run trains on, and what it holds out.

    Args:
        source: Rows with their loss, metrics, collation and tokenizer.
        train: Rows to train on.
        held_out: Rows to validate on; None for none.
    """

    source: sources.Source
    train: Any
    held_out: Any | None


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """What ``fit`` is called with."""

    model: nn.Module
    data: Batches
    validation: Batches | None
    optimizer: torch.optim.Optimizer
    accumulator: Accumulator
    schedule: Callable[[int], float]
    steps: int


def build_rows(run: RunFile) -> Rows:
    """Read the rows and split them.

    Raises:
        ConfigError: The source, its arguments, the packing of its rows or the split cannot be used.
    """
    function = find("data.source", run.data.source, _SOURCES)
    tokenizer = base_tokenizer(run, function)
    source = called("data.source", run.data.source, function, run.data.arguments, **tokenizer)
    if not isinstance(source, sources.Source):
        raise refuse("data.source", run.data.source, f"must return an augend.sources.Source; got {_kind(source)}")
    source = adjusted_source(run, source)
    if run.data.validation == 0:
        return Rows(source=source, train=source.rows, held_out=None)
    try:
        train, held_out = split(source.rows, fraction=run.data.validation, seed=run.seed)
    except SplitError as error:
        raise refuse("data.validation", run.data.validation, str(error)) from error
    return Rows(source=source, train=train, held_out=held_out)


def use_threads(run: RunFile) -> None:
    """Let torch compute with as many threads as the run says, if it does: bits depend on it."""
    if run.parallel.threads is not None:
        torch.set_num_threads(run.parallel.threads)


def build_model(run: RunFile, source: sources.Source) -> nn.Module:
    """Build the model from the run's seed, with its adapters, and frozen as the run says.

    A ``llama`` has the vocabulary of the source where ``vocab_size`` is not given; that of a GGUF file has its weights.

    Raises:
        ConfigError: The model, its arguments, its adapters or what is to be frozen cannot be used.
    """
    arguments = dict(run.model.arguments)
    if run.model.name == "llama" and source.tokenizer is not None:
        needed = source.tokenizer.vocab_size
        size = arguments.setdefault("vocab_size", needed)
        if isinstance(size, int) and size < needed:
            raise refuse("model.vocab_size", size, f"the source has {needed} tokens; leave it out or set {needed}")
    torch.manual_seed(run.seed)
    base = base_path(run)
    if base is not None:
        model: object = base_model(run, base, source)
    else:
        model = made("model.name", run.model.name, _MODELS, arguments)
    if not isinstance(model, nn.Module):
        raise refuse("model.name", run.model.name, f"must return an nn.Module; got {_kind(model)}")
    adjust_model(run, model)
    return model


def build_training(run: RunFile, rows: Rows, model: nn.Module, *, strict_bits: bool) -> Training:
    """Build all that ``fit`` needs around a model, which lies where it is to be trained.

    Collective.

    Args:
        run: The run.
        rows: Its rows.
        model: Its model.
        strict_bits: Whether to refuse, and not only to say, what would change the bits of a run that was begun.

    Raises:
        ConfigError: A name or an argument of the run file cannot be used.
    """
    data = batches(run, rows.source, rows.train)
    steps = run.steps if run.steps is not None else (run.epochs or 1) * data.steps_per_epoch
    optimizer, accumulator = _optimizer(run, model), _accumulator(run, model, strict_bits=strict_bits)
    _check_optimizer(run, optimizer, accumulator)
    return Training(
        model=model,
        data=data,
        validation=None if rows.held_out is None else batches(run, rows.source, rows.held_out),
        optimizer=optimizer,
        accumulator=accumulator,
        schedule=_schedule(run, steps),
        steps=steps,
    )


def batches(run: RunFile, source: sources.Source, rows: object) -> Batches:
    """Return the batches of a run over some of its rows."""
    size = run.microbatch_size or run.batch_size
    return Batches(rows, batch_size=run.batch_size, microbatch_size=size, seed=run.seed, collate_fn=source.collate)


def _optimizer(run: RunFile, model: nn.Module) -> torch.optim.Optimizer:
    name, arguments = run.optimizer.name, run.optimizer.arguments
    if name in _UNSUITED:
        raise refuse("optimizer.name", name, _UNSUITED[name])
    optimizer = made("optimizer.name", name, _optimizers(), arguments, model.parameters(), lr=run.optimizer.lr)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise refuse("optimizer.name", name, f"must return an optimizer; got {_kind(optimizer)}")
    return optimizer


def _accumulator(run: RunFile, model: nn.Module, *, strict_bits: bool) -> Accumulator:
    table: dict[str, Any] = asdict(run.accumulator)
    strictly: dict[str, Any] = {"other_bits": "error"} if strict_bits else {}
    try:
        return Accumulator(model, **table, **strictly)
    except ContractError as error:
        raise refused("model.name", run.model.name, table, error, table="accumulator") from error


def _check_optimizer(run: RunFile, optimizer: torch.optim.Optimizer, accumulator: Accumulator) -> None:
    try:
        accumulator.check_optimizer(optimizer)
    except ContractError as error:
        told = ContractError(str(error).replace(_IN_PYTHON, _IN_A_RUN_FILE))
        raise refused("optimizer.name", run.optimizer.name, run.optimizer.arguments, told, table="optimizer") from error


def _schedule(run: RunFile, steps: int) -> Callable[[int], float]:
    function = find("schedule.name", run.schedule.name, _SCHEDULES)
    arguments = dict(run.schedule.arguments)
    if "steps" in inspect.signature(function).parameters:
        arguments.setdefault("steps", steps)
    schedule = called("schedule.name", run.schedule.name, function, arguments, run.optimizer.lr)
    if not callable(schedule):
        raise refuse("schedule.name", run.schedule.name, f"must return a function of the step; got {_kind(schedule)}")
    return schedule


def _optimizers() -> dict[str, Function]:
    """Return the optimizers of torch.optim that fit, by their names in lower case."""
    base = torch.optim.Optimizer
    classes = {name: value for name, value in vars(torch.optim).items() if inspect.isclass(value)}
    fit = {name.lower(): kind for name, kind in classes.items() if issubclass(kind, base) and kind is not base}
    return {name: kind for name, kind in fit.items() if name not in _UNSUITED}


def _kind(value: object) -> str:
    return type(value).__name__
