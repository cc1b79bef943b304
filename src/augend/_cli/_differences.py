"""Tell people and programs where two runs, or two checkpoints, part."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from augend import Comparison
from augend._cli._console import Output
from augend._cli._differ import Found, find
from augend._cli._directory import METRICS
from augend._cli._metrics import Parting, bits_of

_LABEL: Final = 15
_DIGITS: Final = {"float32": ".9g", "bfloat16": ".4g", "float16": ".5g"}  # enough to tell all of them apart


def print_json(first: Path, second: Path) -> bool:
    """Print what was found as one JSON object, and return whether no difference was.

    Raises:
        ConfigError: They cannot be compared.
    """
    found = find(first, second)
    Output().say(json.dumps(_plain(found), allow_nan=False))
    return found.equal


def print_lines(first: Path, second: Path) -> bool:
    """Print what was found as a few aligned lines, and return whether no difference was.

    Raises:
        ConfigError: They cannot be compared.
    """
    found = find(first, second)
    console = Output()
    for label, text in _lines(found):
        console.say(f"{label:<{_LABEL}}{text}")
    return found.equal


def _lines(found: Found) -> Iterator[tuple[str, str]]:
    for label, run in zip("AB", found.runs, strict=True):
        yield label, str(run.path)
    if found.steps:
        yield "steps", f"{len(found.steps):,} in both, {found.steps[0]} to {found.steps[-1]} (from 0, as in {METRICS})"
        yield from _lines_of_steps(found)
    yield from _lines_of_checkpoints(found)
    for label, pairs in (("bits", found.bits), ("config", found.config)):
        for name, (one, other) in pairs.items():
            yield label, f"{name}: {_shown(one)} in A, {_shown(other)} in B"
    for note in found.notes:
        yield "note", note
    yield "result", f"no difference was found {_over(found)}" if found.equal else "they differ"


def _over(found: Found) -> str:
    """Say over what no difference was found."""
    numbers = f"in the numbers of {_counts((len(found.steps),))}" if found.steps else ""
    comparison = found.comparison
    tensors = "no checkpoint was compared" if comparison is None else f"in {comparison.tensors:,} tensors, bit by bit"
    return ", ".join(filter(None, (numbers, tensors)))


def _lines_of_steps(found: Found) -> Iterator[tuple[str, str]]:
    told = found.digests
    if found.parting is None:
        yield "equal", "loss, norm and all other numbers of every step and validation, to the bit"
    else:
        yield "parting", f"step {found.parting.step} is the first that differs"
        for name, (one, other) in found.parting.numbers.items():
            bits = f"; bits {bits_of(one)} and {bits_of(other)}" if bits_of(one) and bits_of(other) else ""
            yield f"  {name}", f"{_shown(one)} and {_shown(other)}{bits}"
    before = f"all digests are equal after {_steps(told.equal)}" if told.equal else ""
    if told.step is not None:
        many = len(told.tensors)
        others = f", and {many - 1} more" if many > 1 else ""
        yield "digests", f"{before and f'{before}; '}first different after step {told.step}: {told.tensors[0]}{others}"
    else:
        yield "digests", before or "no step has them in both; set digest.every_steps"


def _lines_of_checkpoints(found: Found) -> Iterator[tuple[str, str]]:
    comparison = found.comparison
    if comparison is None:
        return
    if found.equal_after:
        what = f"{comparison.tensors:,} tensors of weights and optimizer, {comparison.elements:,} elements"
        yield "checkpoints", f"after {_counts(found.equal_after)}: every bit is equal ({what})"
    if comparison.equal:
        if not found.equal_after:
            yield (
                "checkpoints",
                f"every bit is equal ({comparison.tensors:,} tensors, {comparison.elements:,} elements)",
            )
        return
    later = f", {_counts((found.later_steps,))} after the parting" if found.later_steps else ""
    first, second = comparison.steps
    where = "" if first == second else f" in A and {second:,} in B"
    yield "checkpoints", f"after {_counts((first,))}{where}{later}:"
    for path in comparison.paths:
        yield "", str(path)
    if comparison.differences:
        one = comparison.differences[0]
        place = f"{one.tensor}[{', '.join(map(str, one.index))}], element {one.flat:,}"
        values = " and ".join(_number(value, one.dtype) for value in one.values)
        yield "  tensor", f"{one.part} {place} of {one.elements:,} ({one.dtype})"
        yield "  values", f"{values}; bits {one.bits[0]} and {one.bits[1]}"
        yield "  elements", f"{one.differing:,} of {one.elements:,} of this tensor differ"
        elements = sum(each.differing for each in comparison.differences)
        common = " that both have" if comparison.unlike else ""
        many = f"{len(comparison.differences):,} of {comparison.tensors:,} tensors{common}"
        yield "  all", f"{many}, {elements:,} of {comparison.elements:,} elements differ"
    for text in comparison.unlike:
        yield "  unlike", text.replace("in the first", "in A").replace("in the second", "in B")


def _steps(numbers: tuple[int, ...]) -> str:
    if len(numbers) == 1:
        return f"step {numbers[0]}"
    return f"{len(numbers)} steps from {numbers[0]} to {numbers[-1]}"


def _counts(counts: tuple[int, ...]) -> str:
    return f"{', '.join(map(str, counts))} {'step' if counts == (1,) else 'steps'}"


def _shown(value: object) -> str:
    return "none" if value is None else repr(value) if isinstance(value, float) else str(value)


def _number(value: float, dtype: str) -> str:
    return format(value, _DIGITS[dtype]) if dtype in _DIGITS else str(value)


def _plain(found: Found) -> dict[str, Any]:
    """Return what JSON can say: nan and inf as text."""
    comparison = found.comparison
    return {
        "equal": found.equal,
        "paths": [str(run.path) for run in found.runs],
        "steps": list(found.steps),
        "parting": None if found.parting is None else _plain_parting(found.parting),
        "digests": asdict(found.digests),
        "checkpoints": None if comparison is None else _plain_comparison(found, comparison),
        "bits": {name: list(pair) for name, pair in found.bits.items()},
        "config": {name: [str(one) for one in pair] for name, pair in found.config.items()},
        "notes": list(found.notes),
    }


def _plain_parting(found: Parting) -> dict[str, Any]:
    numbers = {
        name: {"values": list(pair), "bits": [bits_of(one) for one in pair]} for name, pair in found.numbers.items()
    }
    return {"step": found.step, "numbers": numbers}


def _plain_comparison(found: Found, comparison: Comparison) -> dict[str, Any]:
    differences = [
        {**asdict(one), "values": [_finite(value) for value in one.values]} for one in comparison.differences
    ]
    return {
        "paths": [str(path) for path in comparison.paths],
        "steps": list(comparison.steps),
        "steps_after_parting": found.later_steps,
        "equal_after": list(found.equal_after),
        "tensors": comparison.tensors,
        "elements": comparison.elements,
        "differences": differences,
        "unlike": list(comparison.unlike),
    }


def _finite(value: float) -> float | int | str:
    return value if math.isfinite(value) else str(value)
