"""Checks of plain arguments, with messages that name the argument, the value and the remedy."""

from __future__ import annotations

from numbers import Integral

from augend.errors import SplitError


def whole_number(name: str, value: object, *, remedy: str) -> int:
    """Return ``value`` as a plain int.

    Raises:
        SplitError: It is not an integer (numpy's count; booleans, floats and text do not).
    """
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise SplitError(f"{name} must be a whole number; got {value!r} ({type(value).__name__}); {remedy}")
    return int(value)


def positive(name: str, value: object, *, remedy: str) -> int:
    """Return ``value`` as a plain int of at least 1.

    Raises:
        SplitError: It is not an integer, or less than 1.
    """
    number = whole_number(name, value, remedy=remedy)
    if number < 1:
        raise SplitError(f"{name} must be at least 1; got {number}; {remedy}")
    return number


def yes_or_no(name: str, value: object) -> bool:
    """Return ``value`` if it is a boolean.

    Raises:
        SplitError: It is anything else, also 0, 1 and None.
    """
    if not isinstance(value, bool):
        raise SplitError(f"{name} must be True or False; got {value!r} ({type(value).__name__})")
    return value
