"""Exact integer moments, exact counts, fixed point, and norms with a bound: torch and numpy only."""

from augend._numerics._exact import COUNT_LIMIT, exact_sum, fixed, nearest, on_grid, root, scaled
from augend._numerics._exact_norm import exact_norm
from augend._numerics._fixed_point import (
    Addend,
    add_fixed_,
    exceeds,
    fits,
    headroom,
    largest,
    mean_of_fixed,
    scale_of,
    write_fixed,
)
from augend._numerics._limbs import LIMBS, from_limbs, to_limbs
from augend._numerics._moments import Moments, fraction
from augend._numerics._norm import NORM_RELATIVE_ERROR, norm

__all__ = [
    "COUNT_LIMIT",
    "LIMBS",
    "NORM_RELATIVE_ERROR",
    "Addend",
    "Moments",
    "add_fixed_",
    "exact_norm",
    "exact_sum",
    "exceeds",
    "fits",
    "fixed",
    "fraction",
    "from_limbs",
    "headroom",
    "largest",
    "mean_of_fixed",
    "nearest",
    "norm",
    "on_grid",
    "root",
    "scale_of",
    "scaled",
    "to_limbs",
    "write_fixed",
]
