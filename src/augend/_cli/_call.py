"""Call what a run file names with the arguments of its table, and refuse by its key what cannot be called so."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from typing import Final

from augend._cli._names import Function, bound, find, name_of
from augend._config import refuse
from augend.errors import AugendError, ConfigError

_SHORTEST_STEM: Final = 3
_FROM_A_LIBRARY: Final = (TypeError, ValueError, IndexError, RuntimeError)


def made(
    key: str,
    name: str,
    known: Mapping[str, Function],
    arguments: Mapping[str, object],
    *positional: object,
    **named: object,
) -> object:
    """Find what a key names, and call it with the arguments of the key's table.

    Args:
        key: The dotted key, such as ``model.name``.
        name: Its value.
        known: Functions by name.
        arguments: TOML values by name.
        positional: What the run gives, in front.
        named: What the run gives by name.

    Raises:
        ConfigError: There is no such function, or it cannot be called so; see ``called``.
    """
    return called(key, name, find(key, name, known), arguments, *positional, **named)


def called(
    key: str,
    name: str,
    function: Function,
    arguments: Mapping[str, object],
    *positional: object,
    **named: object,
) -> object:
    """Call a function with the arguments of a key's table.

    Raises:
        ConfigError: They do not fit, the function cannot be called so, or refuses them: the user's own with a
            ``ValueError``, a library's with whatever a wrong argument runs into there.
    """
    given = (*tuple(inspect.signature(function).parameters)[: len(positional)], *named)
    table = key.partition(".")[0]
    checked = bound(table, function, arguments, given=given)
    try:
        inspect.signature(function).bind(*positional, **named, **checked)
    except TypeError as error:
        remedy = f"{name_of(function)} cannot be called with what the run gives it: {error}; correct it or name another"
        raise refuse(key, name, remedy) from error
    refusals = (ValueError,) if ":" in name else _FROM_A_LIBRARY
    try:
        return function(*positional, **named, **checked)
    except refusals as error:
        raise refused(key, name, {**named, **arguments}, error, table=table) from error


def refused(key: str, name: str, given: Mapping[str, object], error: Exception, *, table: str) -> ConfigError:
    """Return an error as the refusal of the argument that it speaks of, in the words of a run file.

    Args:
        key: What is to blame where the error speaks of no argument.
        name: The value of that key.
        given: Arguments by name.
        error: What came of them; the remedy is in it where it is augend's own.
        table: The table where the arguments are.
    """
    argument = _blamed(str(error), given)
    remedy = (
        f"correct the arguments in [{table}], or name another" if argument is None else "correct it or leave it out"
    )
    message = str(error) if isinstance(error, AugendError) else f"{str(error).rstrip('.')}; {remedy}"
    return refuse(key, name, message) if argument is None else refuse(f"{table}.{argument}", given[argument], message)


def _blamed(message: str, given: Mapping[str, object]) -> str | None:
    """Return the argument that a message speaks of first: by its name, else by a form of it, as epsilon for eps."""
    words: list[str] = re.findall(r"\w+", message.lower())
    for word in words:
        if word in given:
            return word
    for word in words:
        for name in given:
            if name == f"{word}s" or (len(name) >= _SHORTEST_STEM and word.startswith(name)):
                return name
    return None
