"""Gradients that were made elsewhere: checked, and cut into what this rank adds to its sums."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from augend._accumulate._slots import Slots
from augend._accumulate._terms import Gradients
from augend._accumulate._window import Window
from augend._numerics import largest
from augend.errors import GradientError


def check_given(gradients: Mapping[str, Tensor], slots: Slots) -> None:
    """Check gradients that were made elsewhere; reads no values.

    Raises:
        GradientError: One is of an unknown or frozen parameter, of another shape or device, sparse, quantised,
            complex or no tensor; names it.
    """
    for name, gradient in gradients.items():
        parameter = slots.parameters.get(name)
        if parameter is None:
            kind = "frozen" if name in slots.tensors else "unknown"
            raise GradientError(f"a gradient was given for the {kind} parameter {name!r}")
        if not isinstance(gradient, Tensor):
            raise GradientError(f"the gradient of {name!r} must be a tensor; got {type(gradient).__name__}")
        if gradient.layout != torch.strided or gradient.is_quantized or not gradient.is_floating_point():
            kind = f"{gradient.dtype}, {gradient.layout}"
            raise GradientError(f"the gradient of {name!r} must be dense and real floating; got {kind}")
        slots.placement.check_spread(name, gradient)
        if gradient.shape != parameter.shape or gradient.device != parameter.device:
            expected = f"shape {list(parameter.shape)} on {parameter.device}"
            got = f"{list(gradient.shape)} on {gradient.device}"
            raise GradientError(f"the gradient of {name!r} must have {expected}; got {got}")


def agreed_names(gradients: Mapping[str, Gradients], slots: Slots, what: str) -> dict[str, tuple[str, ...]]:
    """Return for each term the parameters of which any rank brings a gradient. Collective.

    Raises:
        GradientError: Some ranks bring one that is spread over a mesh, and others do not; on all ranks.
    """
    placement = slots.placement
    keys = [(term, name) for term in gradients for name in slots.parameters]
    brought = [name in gradients[term] for term, name in keys]
    spread = [name in gradients[term] and placement.is_spread(gradients[term][name]) for term, name in keys]
    told = placement.group.maximum(what, [*brought, *spread, *(not one for one in spread)])
    some, all_of, none_of = (told[begin : begin + len(keys)] for begin in range(0, 3 * len(keys), len(keys)))
    for (_, name), one, other in zip(keys, all_of, none_of, strict=True):
        if one and other:
            raise GradientError(
                f"the gradient of {name!r} is spread over a mesh on some ranks and not on others: give it on every "
                "rank alike, or each rank's own as a plain tensor"
            )
    used = [key for key, one in zip(keys, some, strict=True) if one]
    return {term: tuple(name for one, name in used if one == term) for term in gradients}


def parts_of(
    named: Mapping[str, Tensor | None], term: str, window: Window, slots: Slots, *, summed: bool
) -> dict[str, Tensor]:
    """Return this rank's parts of given gradients: of those already summed, or of the sum of every rank's own.

    Collective; takes note of how large they are, where the window wants to know.

    Args:
        named: The same names on every rank; None where this rank brings nothing.
        term: The loss term.
        window: What they are for.
        slots: The parameters.
        summed: Whether they are summed over ranks already.
    """
    placement = slots.placement
    wholes = {}
    for name, given in named.items():
        parameter = slots.parameters[name]
        if given is None:
            wholes[name] = torch.zeros(parameter.shape, dtype=window.work, device=parameter.device)
        else:
            wholes[name] = given.detach() if window.scales is None else given.detach().to(window.work)
    if summed:
        parts = {name: placement.part(name, one) for name, one in wholes.items()}
        return _measured({name: one for name, one in parts.items() if one is not None}, term, window)
    spread = {name: placement.local(name, one) for name, one in wholes.items() if placement.is_spread(one)}
    plain = {name: one.to(window.work) for name, one in wholes.items() if name not in spread}
    mine = {name: window.shared(term, name, one) for name, one in _measured(plain, term, window).items()}
    return {**_measured(spread, term, window), **placement.shared(mine)}


def _measured(gradients: dict[str, Tensor], term: str, window: Window) -> dict[str, Tensor]:
    """Return gradients as they are, their sizes seen."""
    if window.scales is not None:
        for name, one in gradients.items():
            if one.numel():
                window.see(term, name, largest(one))
    return gradients
