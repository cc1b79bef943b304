"""Try a run's model on its rows before anything is trained or written."""

from __future__ import annotations

import inspect
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final

import numpy as np
import torch
from torch import nn

from augend import Batches, models, sources
from augend._cli._failures import placed
from augend._cli._names import Function
from augend._config import RunFile, refuse
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
        ConfigError: The model does not take the rows.
    """
    if isinstance(model, models.Llama) and run.data.source in _LONGEST:
        _check_lengths(run, source, model.max_length)
    with _untouched(model), torch.no_grad():
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


def _check_lengths(run: RunFile, source: sources.Source, max_length: int) -> None:
    """Refuse a row longer than the model takes; rows are only looked at where their source does not bound them."""
    function, argument = _LONGEST[run.data.source]
    bound = run.data.arguments.get(argument, inspect.signature(function).parameters[argument].default)
    if isinstance(bound, int) and bound <= max_length:
        return
    for index in range(len(source.rows)):
        length = len(source.rows[index]["tokens"])
        if length > max_length:
            remedy = f"row {index} of the data has {length} tokens; raise it, or set data.{argument} = {max_length}"
            raise refuse("model.max_length", max_length, remedy)


@contextmanager
def _untouched(model: nn.Module) -> Iterator[None]:
    """Put back, also after an exception, buffers, train/eval modes, and the random state of torch, numpy and Python."""
    modes = [(module, module.training) for module in model.modules()]
    buffers = [
        (module, name, buffer, buffer.clone())
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
    ]
    python, legacy = random.getstate(), np.random.get_state()  # noqa: NPY002 - the global generator is what we guard
    accelerators = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    try:
        with torch.random.fork_rng(devices=range(accelerators)):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(legacy)  # noqa: NPY002 - the global generator is what we guard
        for module, training in modes:
            module.training = training
        for module, name, buffer, value in buffers:
            setattr(module, name, buffer.copy_(value))
