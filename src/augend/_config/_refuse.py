"""One line for each mistake in a run file: the key, its value, what was expected, and the remedy."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Final

from augend.errors import ConfigError

_SHOWN_CHARACTERS: Final = 60


def refuse(key: str, value: object, remedy: str) -> ConfigError:
    """Return the error that says ``key = value`` cannot be used.

    Args:
        key: The dotted key, as ``--set`` takes it.
        value: What was found there.
        remedy: What was expected, and what to write instead.
    """
    return ConfigError(f"{key} = {shown(value)}: {remedy}")


def shown(value: object) -> str:
    """Return a value as one short line, in the spelling of TOML where the two differ from Python."""
    text = str(value).lower() if isinstance(value, bool) else repr(value)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return ``"did you mean X? "`` for the nearest known name, or nothing, and then all the known names."""
    names = sorted(known)
    near = get_close_matches(name.lower(), names, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    return f"{hint}known here: {', '.join(names) or 'none'}"
