"""Checkpoints: saved after any micro-batch, whole or not there at all, readable without augend."""

from augend._checkpoint._checkpoint import Checkpoint
from augend._checkpoint._compare import Comparison, Difference, compare
from augend._checkpoint._inspect import Inspection, PartSummary, inspect, verify
from augend._checkpoint._position import Position

__all__ = [
    "Checkpoint",
    "Comparison",
    "Difference",
    "Inspection",
    "PartSummary",
    "Position",
    "compare",
    "inspect",
    "verify",
]
