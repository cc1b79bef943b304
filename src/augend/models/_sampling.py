"""The next token, by chance."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from augend.errors import ContractError


def check_chances(temperature: float, top_p: float) -> None:
    """Refuse what makes no distribution.

    Raises:
        ContractError: ``temperature`` is negative or not finite, or ``top_p`` not above 0 and at most 1.
    """
    if not 0 <= temperature < math.inf:
        raise ContractError(f"temperature must be at least 0 and finite; got {temperature}")
    if not 0 < top_p <= 1:
        raise ContractError(f"top_p must be above 0 and at most 1; got {top_p}")


def chosen(logits: Tensor, temperature: float, top_p: float, generator: torch.Generator) -> int:
    """Return the most likely token at temperature 0, else one drawn from the fewest that together have ``top_p``.

    Source: nucleus sampling of Holtzman et al. 2020.

    Args:
        logits: ``[vocab_size]``, on any device.
        temperature: What logits are divided by; at least 0.
        top_p: Above 0, at most 1.
        generator: Of the CPU, so that every device draws the same.
    """
    if temperature == 0:
        return int(logits.argmax())
    wide = logits.double().cpu()
    chances = torch.softmax((wide - wide.max()) / temperature, dim=0)
    ordered, tokens = chances.sort(descending=True, stable=True)
    before = ordered.cumsum(0) - ordered
    kept = ordered * (before < top_p)
    return int(tokens[torch.multinomial(kept, 1, generator=generator)])
