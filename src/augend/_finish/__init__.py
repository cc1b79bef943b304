"""The end of a batch: reduce, divide once, measure the norm, apply the policies, hand over to the optimizer."""

from augend._finish._apply import Optimizers, as_optimizers
from augend._finish._end import end_batch
from augend._finish._exact import check_sums
from augend._finish._mean import judge_narrowing, mean_of
from augend._finish._policy import Empty, FinishOptions, NonFinite, Policy
from augend._finish._proven import Proven
from augend._finish._results import Finished, Means, Sums

__all__ = [
    "Empty",
    "FinishOptions",
    "Finished",
    "Means",
    "NonFinite",
    "Optimizers",
    "Policy",
    "Proven",
    "Sums",
    "as_optimizers",
    "check_sums",
    "end_batch",
    "judge_narrowing",
    "mean_of",
]
