"""fit and evaluate, and what they tell: built on the public API alone."""

from augend._fit._evaluate import LossFunction, MetricFunction, evaluate
from augend._fit._fit import fit
from augend._fit._history import Begin, End, Event, History, Listener, Step, Validation
from augend._fit._random import undisturbed

__all__ = [
    "Begin",
    "End",
    "Event",
    "History",
    "Listener",
    "LossFunction",
    "MetricFunction",
    "Step",
    "Validation",
    "evaluate",
    "fit",
    "undisturbed",
]
