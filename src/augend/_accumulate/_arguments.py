"""What an accumulator may be asked for."""

from __future__ import annotations

import math
from typing import Final

import torch

from augend._accumulate._contract import DTYPES, EXACT
from augend.errors import ContractError

_MOST_EXACT: Final = 2**20  # leaves a grid of 2^-30 of the largest gradient


def check_words(**given: tuple[str, tuple[str, ...]]) -> None:
    """Raise ContractError for the first argument that is not one of its allowed words.

    Args:
        **given: The value and the allowed words of each argument.
    """
    for name, (value, allowed) in given.items():
        if value not in allowed:
            raise ContractError(f"{name} must be one of {', '.join(map(repr, allowed))}; got {value!r}")


def check_numbers(dtype: str, loss_scale: float, terms: tuple[str, ...], max_microbatches: int) -> None:
    """Raise ContractError for the first argument out of its domain."""
    check_words(dtype=(dtype, tuple(DTYPES)))
    held = float(torch.tensor(loss_scale, dtype=torch.float64, device="cpu").to(DTYPES[dtype].work))
    if not 0 < held < math.inf:
        raise ContractError(f"loss_scale must be positive and finite, also in {dtype}; got {loss_scale!r}")
    if not terms or len(set(terms)) != len(terms):
        raise ContractError(f"terms must be different names, at least one; got {terms!r}")
    if max_microbatches < 1:
        raise ContractError(f"max_microbatches must be at least 1; got {max_microbatches!r}")
    if dtype == EXACT and max_microbatches > _MOST_EXACT:
        raise ContractError(
            f'max_microbatches must be at most {_MOST_EXACT:,} with dtype="exact", whose head-room is taken from the '
            f"precision of the sums; got {max_microbatches!r}"
        )
