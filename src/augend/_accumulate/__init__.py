"""What is pending: parameters, contract, sums, counts, moments, and their saved form."""

from augend._accumulate._arguments import check_numbers, check_words
from augend._accumulate._contract import DTYPES, Contract
from augend._accumulate._course import BatchLike, MicrobatchLike
from augend._accumulate._grids import check_grids, check_limits
from augend._accumulate._offer import offer
from augend._accumulate._pending import Pending
from augend._accumulate._reduce import Reduced, Unused, reduce_window
from augend._accumulate._scales import all_finite
from augend._accumulate._state import (
    AccumulatorState,
    complete_sums,
    plain_count,
    read_state,
    state_of_sums,
    write_state,
)
from augend._accumulate._window import Window

__all__ = [
    "DTYPES",
    "AccumulatorState",
    "BatchLike",
    "Contract",
    "MicrobatchLike",
    "Pending",
    "Reduced",
    "Unused",
    "Window",
    "all_finite",
    "check_grids",
    "check_limits",
    "check_numbers",
    "check_words",
    "complete_sums",
    "offer",
    "plain_count",
    "read_state",
    "reduce_window",
    "state_of_sums",
    "write_state",
]
