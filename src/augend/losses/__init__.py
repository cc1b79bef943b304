"""Losses as tallies: a sum and a count for every row, never a mean."""

from __future__ import annotations

from augend.losses._classification import binary_cross_entropy as binary_cross_entropy
from augend.losses._classification import causal_lm as causal_lm
from augend.losses._classification import cross_entropy as cross_entropy
from augend.losses._classification import kl_div as kl_div
from augend.losses._elementwise import from_reduction_none as from_reduction_none
from augend.losses._elementwise import l1 as l1
from augend.losses._elementwise import mean as mean
from augend.losses._elementwise import mse as mse
from augend.losses._elementwise import sum as sum  # noqa: A004  the public name is `losses.sum`, beside `losses.mean`

__all__ = [
    "binary_cross_entropy",
    "causal_lm",
    "cross_entropy",
    "from_reduction_none",
    "kl_div",
    "l1",
    "mean",
    "mse",
    "sum",
]
