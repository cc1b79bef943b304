"""What is pending: parameters, contract, sums, counts, moments, and their saved form."""

from augend._accumulate._arguments import check_words
from augend._accumulate._contract import WORK_DTYPES, Contract
from augend._accumulate._course import BatchLike, MicrobatchLike
from augend._accumulate._pending import Pending, offer
from augend._accumulate._state import AccumulatorState, plain_count, read_state, state_of_sums, write_state
from augend._accumulate._window import Window

__all__ = [
    "WORK_DTYPES",
    "AccumulatorState",
    "BatchLike",
    "Contract",
    "MicrobatchLike",
    "Pending",
    "Window",
    "check_words",
    "offer",
    "plain_count",
    "read_state",
    "state_of_sums",
    "write_state",
]
