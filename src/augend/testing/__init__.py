"""Checks that a user can run on their own model and data."""

from augend.testing._cuts import Cut, CutReport, check_cuts

__all__ = ["Cut", "CutReport", "check_cuts"]
