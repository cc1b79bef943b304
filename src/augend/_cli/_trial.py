"""Try a run's model on its rows before anything is trained or written."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Final

import torch
from torch import nn

from augend import Batches, models, sources
from augend._cli._failures import placed
from augend._cli._names import Function
from augend._config import RunFile, refuse
from augend._fit import undisturbed
from augend.errors import AugendError, ConfigError

_LONGEST: Final[Mapping[str, tuple[Function, str]]] = {  # the argument of a source that bounds its rows
    "docstrings": (sources.docstrings, "max_bytes"),
    "pairs": (sources.pairs, "max_tokens"),
    "text": (sources.text, "length"),
}


def try_out(run: RunFile, source: sources.Source, model: nn.Module, data: Batches) -> None:
    """Compute the loss of the first micro-batch, and leave no trace: weights, buffers, modes, random state, position.

    Rows of the named sources are compared with the ``max_length`` of a Llama, too, all of them.

    Raises:
        ConfigError: The model does not take the rows, or changes a buffer where exact sums are asked for.
    """
    if isinstance(model, models.Llama) and run.data.source in _LONGEST:
        _check_lengths(run, source, model.max_length)
    elif run.data.pack is not None and run.data.source in _LONGEST:
        _check_lengths(run, source, run.data.pack)
    with undisturbed(model), _kept_buffers(model) as changed, torch.no_grad():
        microbatch = next(iter(next(iter(data.fresh(shuffle=True)))))
        try:
            source.loss(model, microbatch)
        except ConfigError:
            raise
        except (TypeError, ValueError, IndexError, RuntimeError) as error:
            what = str(error) if isinstance(error, AugendError) else placed(error)
            rows = f"data.source = {run.data.source!r}"
            remedy = f"its loss on the first micro-batch of {rows} failed; correct [model] or [data]: {what}"
            raise refuse("model.name", run.model.name, remedy) from error
        if run.accumulator.dtype == "exact" and (name := changed()):
            remedy = f"the model changes its buffer {name!r} in a forward, so that a micro-batch depends on those"
            remedy = f"{remedy} before it: take another layer (a layer norm for a batch norm), or set 'float32'"
            raise refuse("accumulator.dtype", run.accumulator.dtype, remedy)


def _check_lengths(run: RunFile, source: sources.Source, max_length: int) -> None:
    """Refuse a row longer than the model takes; rows are only looked at where their source does not bound them."""
    longest = max_length if run.data.pack is None else run.data.pack
    if longest > max_length:
        raise refuse("data.pack", longest, f"model.max_length = {max_length} is less; raise that, or lower this")
    function, argument = _LONGEST[run.data.source]
    bound = run.data.arguments.get(argument, inspect.signature(function).parameters[argument].default)
    if isinstance(bound, int) and bound <= longest:
        return
    key = "model.max_length" if run.data.pack is None else "data.pack"
    for index in range(len(source.rows)):
        length = len(source.rows[index]["tokens"])
        if length > longest:
            remedy = f"row {index} of the data has {length} tokens; raise it, or set data.{argument} = {longest}"
            raise refuse(key, longest, remedy)


@contextmanager
def _kept_buffers(model: nn.Module) -> Iterator[Callable[[], str]]:
    """Put back, also after an exception, what a forward writes into buffers; lend what names the first one changed."""
    buffers = [
        (path, module, name, buffer, buffer.clone())
        for path, module in model.named_modules()
        for name, buffer in module.named_buffers(recurse=False)
    ]

    def changed() -> str:
        pairs = ((f"{path}.{name}", getattr(module, name), value) for path, module, name, _, value in buffers)
        return next(
            (where.lstrip(".") for where, now, value in pairs if not torch.equal(_bytes(now), _bytes(value))), ""
        )

    try:
        yield changed
    finally:
        for _, module, name, buffer, value in buffers:
            setattr(module, name, buffer.copy_(value))


def _bytes(buffer: torch.Tensor) -> torch.Tensor:
    return buffer.detach().contiguous().reshape(-1).view(torch.uint8)
