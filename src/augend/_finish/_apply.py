"""Handing a mean gradient over: narrow once, write ``.grad``, step. The only caller of ``optimizer.step()``."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from augend._placement import Placement
from augend.errors import ContractError
from augend.optim import MasterWeights

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]


def as_optimizers(given: Optimizers, parameters: Mapping[str, nn.Parameter]) -> list[torch.optim.Optimizer]:
    """Return the optimizers as a list, after checking that together they hold every parameter exactly once.

    Raises:
        ContractError: One is no ``torch.optim.Optimizer``, needs a closure or carries another scaler's factor, or a
            parameter is held by none or by two.
    """
    optimizers = [given] if isinstance(given, torch.optim.Optimizer) else list(given)
    holders: dict[int, int] = {}
    for optimizer in optimizers:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ContractError(f"step takes torch optimizers; got a {type(optimizer).__name__}")
        if _needs_arguments(optimizer):
            kind = type(optimizer).__name__
            raise ContractError(
                f"{kind} evaluates the model again in its step and needs a closure; use finish() instead"
            )
        if getattr(optimizer, "grad_scale", None) is not None:
            raise ContractError("the optimizer carries a torch GradScaler's grad_scale; use loss_scale= instead of it")
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                holders[id(parameter)] = holders.get(id(parameter), 0) + 1
    for name, parameter in parameters.items():
        if holders.get(id(parameter), 0) != 1:
            held = "no optimizer holds it" if id(parameter) not in holders else "two optimizers hold it"
            raise ContractError(f"parameter {name!r} is trained, but {held}; freeze it, or give each to exactly one")
    return optimizers


def _needs_arguments(optimizer: torch.optim.Optimizer) -> bool:
    fixed = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    _, *parameters = inspect.signature(type(optimizer).step).parameters.values()  # the object's may be wrapped
    return any(one.default is inspect.Parameter.empty and one.kind not in fixed for one in parameters)


def targets_of(
    parameters: Mapping[str, nn.Parameter], optimizers: Sequence[torch.optim.Optimizer]
) -> dict[str, nn.Parameter]:
    """Return where each mean gradient goes: the parameter itself, or its float32 master."""
    masters = [optimizer for optimizer in optimizers if isinstance(optimizer, MasterWeights)]
    targets = dict(parameters)
    for name, parameter in parameters.items():
        for optimizer in masters:
            targets[name] = optimizer.masters.get(parameter, targets[name])
    return targets


def write_gradients(
    gradients: Mapping[str, Tensor], targets: Mapping[str, nn.Parameter], placement: Placement
) -> dict[str, Tensor]:
    """Set ``.grad`` of every target: rounded once to its dtype, in its memory layout. Returns what was written.

    Torch's fused optimizers are silently wrong where strides of gradient and parameter differ, hence the layout.
    """
    written = {}
    for name, gradient in gradients.items():
        target = targets[name]
        target.grad = written[name] = placement.formed(gradient, target)
    return written


def take_step(optimizers: Sequence[torch.optim.Optimizer], targets: Mapping[str, nn.Parameter]) -> None:
    """Step every optimizer once, and leave no gradient behind."""
    try:
        for optimizer in optimizers:
            optimizer.step()
    finally:
        for target in targets.values():
            target.grad = None
