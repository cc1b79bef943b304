"""A file of lines, cut back to what is known to belong there, so that a crash at any moment loses no line."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any, Final

_OF_THE_PROCESS: Final = frozenset({"world", "restarts", "memory_bytes"})  # what a line has and its record has not

_OF_BEFORE: Final = {"offers": 1}  # what a line that an earlier augend wrote leaves out


def cut_back(path: Path, expected: Sequence[Mapping[str, Any]], *, first_step: int = 0) -> None:
    """Leave in a file one line for each expected one, in their order, and move all other lines aside.

    A line that is there stays as it is, to the byte; one that is not is written. What belongs to no expected line, a
    torn one included, goes to a new file beside it, which is on disk before the first one is replaced.

    Args:
        path: The file; one that does not exist has no lines.
        expected: The lines, which need not agree in ``world``, ``restarts`` and ``memory_bytes``.
        first_step: Lines of steps before this one are none of the expected ones, and stay in front.
    """
    before = path.read_bytes() if path.exists() else b""
    lines = before.splitlines(keepends=True)
    found: dict[str, int] = {}
    said = [_plain(line) for line in lines]
    for index, (line, plain) in enumerate(zip(lines, said, strict=True)):
        found.setdefault(repr(line) if plain is None else _key(plain), index)
    kept = {index for index, plain in enumerate(said) if plain is not None and _step(plain) < first_step}
    after = bytearray(b"".join(lines[index] for index in sorted(kept)))
    for record in expected:
        place = found.get(_key(record))
        if place is None:
            after += json.dumps(record, allow_nan=False).encode() + b"\n"
        else:
            kept.add(place)
            after += lines[place]
    if after == before:
        return
    rest = b"".join(line for index, line in enumerate(lines) if index not in kept)
    if rest:
        _set_aside(path, rest)
    _replace(path, after)


def _plain(line: bytes) -> dict[str, Any] | None:
    """Return what a line says; None where it is torn or no JSON object."""
    try:
        plain = json.loads(line) if line.endswith(b"\n") else None
    except ValueError:  # of JSON or of UTF-8
        plain = None
    return plain if isinstance(plain, dict) else None


def _step(plain: Mapping[str, Any]) -> float:
    """Return the step that a line is of; infinity where it is of none."""
    step = plain.get("step")
    return step if isinstance(step, int) else math.inf


def _key(line: Mapping[str, Any]) -> str:
    said = {name: value for name, value in line.items() if name not in _OF_THE_PROCESS}
    return json.dumps({**_OF_BEFORE, **said}, sort_keys=True)


def _set_aside(path: Path, rest: bytes) -> None:
    """Write the rest to the first free name, unless a crash came between doing just that and replacing the file."""
    number = next(number for number in count(1) if not _lost(path, number).exists())
    if number == 1 or _lost(path, number - 1).read_bytes() != rest:
        _replace(_lost(path, number), rest)


def _lost(path: Path, number: int) -> Path:
    return path.with_name(f"{path.stem}.lost-{number}{path.suffix}")


def _replace(path: Path, data: bytes | bytearray) -> None:
    """Give a file new content at once, durably."""
    new = path.with_name(f"{path.name}.new")
    with new.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
