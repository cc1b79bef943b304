"""The numbers of two runs, step by step: where they part, to the bit."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

from augend.errors import ConfigError

Line = Mapping[str, Any]

# What two runs need not share: time, ranks and memory; and digests, which are compared one by one.
_OWN: Final = frozenset({"seconds", "world", "restarts", "memory_bytes", "offers", "digests"})
_VALIDATION: Final = "validation"


@final
@dataclass(frozen=True, slots=True)
class Metrics:
    """The lines of a run, by the number of their step.

    Args:
        steps: Of steps.
        validations: Of validations.
    """

    steps: Mapping[int, Line]
    validations: Mapping[int, Line]


@final
@dataclass(frozen=True, slots=True)
class Parting:
    """The first step at which two runs differ.

    Args:
        step: Its number, from 0.
        numbers: What differs in its lines, each with both values; none where only digests do.
    """

    step: int
    numbers: Mapping[str, tuple[Any, Any]]


@final
@dataclass(frozen=True, slots=True)
class Digests:
    """What the digests of two runs say.

    Args:
        equal: Numbers of the steps after which all are equal.
        step: Number of the first step after which some differ; None if there is none.
        tensors: Those that differ then, in the model's order.
    """

    equal: tuple[int, ...]
    step: int | None
    tensors: tuple[str, ...]


def read_metrics(path: Path) -> Metrics:
    """Read the lines of a run; a last one that is being written is left out.

    Raises:
        ConfigError: The file cannot be read, or a line is none of a run.
    """
    try:
        lines = path.read_bytes().split(b"\n")[:-1]
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    steps: dict[int, Line] = {}
    validations: dict[int, Line] = {}
    for number, line in enumerate(lines, start=1):
        try:
            plain = json.loads(line)
            (validations if _VALIDATION in plain else steps)[int(plain["step"])] = plain
        except (ValueError, TypeError, LookupError) as error:
            shown = repr(line[:40].decode(errors="replace"))
            raise ConfigError(
                f"{path}: line {number} is no JSON object with a step, perhaps cut off: {shown}; remove it, or compare "
                "checkpoints alone"
            ) from error
    return Metrics(steps, validations)


def parting(first: Metrics, second: Metrics) -> Parting | None:
    """Return the first step that both have and that differs in a number or a digest; None if there is none."""
    for step in sorted(first.steps.keys() & second.steps.keys()):
        numbers = _differing(first.steps[step], second.steps[step])
        if step in first.validations and step in second.validations:
            pair = (one.validations[step][_VALIDATION] for one in (first, second))
            numbers |= {f"{_VALIDATION}.{name}": values for name, values in _differing(*pair).items()}
        if numbers or any(_digests_at(step, first, second)):
            return Parting(step, numbers)
    return None


def digests(first: Metrics, second: Metrics) -> Digests:
    """Compare the digests of every step that both have them of."""
    equal: list[int] = []
    for step in sorted(first.steps.keys() & second.steps.keys()):
        pairs = _digests_at(step, first, second)
        if any(pairs):
            return Digests(tuple(equal), step, tuple(name for name in pairs if name))
        if pairs:
            equal.append(step)
    return Digests(tuple(equal), None, ())


def bits_of(value: object) -> str | None:
    """Return the 64 bits of a number that has a fraction as hexadecimal digits; None of anything else."""
    return struct.pack(">d", value).hex() if isinstance(value, float) else None


def _digests_at(step: int, first: Metrics, second: Metrics) -> list[str]:
    """Return for every digest that both have the name of what differs, empty where nothing does."""
    here, there = (one.steps[step].get("digests", {}) for one in (first, second))
    return [name if here[name] != there[name] else "" for name in here if name in there]


def _differing(first: Line, second: Line) -> dict[str, tuple[Any, Any]]:
    """Return what both say of a step, and differently; nested objects by dotted names."""
    found: dict[str, tuple[Any, Any]] = {}
    for name, value in first.items():
        if name in _OWN or name not in second:
            continue
        other = second[name]
        if isinstance(value, dict) and isinstance(other, dict):
            found |= {f"{name}.{key}": pair for key, pair in _differing(value, other).items()}
        elif repr(value) != repr(other):  # -0.0 is not 0.0, and 1 is not 1.0
            found[name] = value, other
    return found
