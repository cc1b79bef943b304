"""Exact integer moments, exact counts, and norms with a bound: torch and numpy only."""

from augend._numerics._exact import COUNT_LIMIT, exact_sum, fixed, nearest, on_grid, root, scaled
from augend._numerics._limbs import LIMBS, from_limbs, to_limbs
from augend._numerics._moments import Moments, fraction
from augend._numerics._norm import NORM_RELATIVE_ERROR, norm

__all__ = [
    "COUNT_LIMIT",
    "LIMBS",
    "NORM_RELATIVE_ERROR",
    "Moments",
    "exact_sum",
    "fixed",
    "fraction",
    "from_limbs",
    "nearest",
    "norm",
    "on_grid",
    "root",
    "scaled",
    "to_limbs",
]
