"""What a run file changes of a source and of a model when they are made: packing, 16 bits, adapters, frozen parts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from fnmatch import fnmatchcase
from typing import TypeVar

import torch
from torch import nn

from augend import models, sources
from augend._cli._call import refused
from augend._config import RunFile, refuse
from augend.data import Microbatch
from augend.errors import ConfigError, ContractError

R = TypeVar("R")


def adjusted_source(run: RunFile, source: sources.Source) -> sources.Source:
    """Return a source with its rows packed, and its loss and metrics computed in 16 bits, as far as the run says so.

    Raises:
        ConfigError: Its rows cannot be packed.
    """
    if run.data.pack is not None:
        try:
            source = sources.packed(source, run.data.pack)
        except ConfigError as error:
            remedy = f"{error}; leave it out with data.source = {run.data.source!r}"
            raise refuse("data.pack", run.data.pack, remedy) from error
    if run.model.dtype is None:
        return source
    dtype = getattr(torch, run.model.dtype)
    metrics = {name: _computed_in(dtype, metric) for name, metric in source.metrics.items()}
    return replace(source, loss=_computed_in(dtype, source.loss), metrics=metrics)


def adjust_model(run: RunFile, model: nn.Module) -> None:
    """Give a model the adapters of the run, and freeze what is not to be trained, in place.

    Raises:
        ConfigError: A name fits nothing, or nothing is left to be trained.
    """
    if run.adapter is not None:
        table = asdict(run.adapter)
        try:
            models.lora(model, **table)
        except ContractError as error:
            raise refused("adapter.rank", str(run.adapter.rank), table, error, table="adapter") from error
    parameters = dict(model.named_parameters())
    for pattern in run.model.freeze or ():
        chosen = [parameter for name, parameter in parameters.items() if fnmatchcase(name, pattern)]
        if not chosen:
            known = f"the model has {len(parameters)}, such as {next(iter(parameters), 'none')}"
            raise refuse("model.freeze", list(run.model.freeze or ()), f"{pattern!r} fits no parameter; {known}")
        for parameter in chosen:
            parameter.requires_grad = False
    if run.model.freeze and not any(parameter.requires_grad for parameter in parameters.values()):
        raise refuse("model.freeze", list(run.model.freeze), "nothing is left to be trained; freeze less")


def _computed_in(
    dtype: torch.dtype, function: Callable[[nn.Module, Microbatch], R]
) -> Callable[[nn.Module, Microbatch], R]:
    """Return a loss or a metric that computes its matrix products in 16 bits.

    By autocast, and not in a model of 16 bits beside its copy in 32: the parameters themselves stay the ones that are
    summed for, updated, saved, digested and exported, so that nothing else has to know of it.
    """

    def computed(model: nn.Module, microbatch: Microbatch) -> R:
        device = next(model.parameters()).device.type
        with torch.autocast(device, dtype=dtype):
            return function(model, microbatch)

    return computed
