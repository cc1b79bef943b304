"""Tell people and programs what checkpoints hold, and whether they are whole."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from augend import Inspection, inspect, verify
from augend._cli._console import Output, in_units
from augend._cli._directory import checkpoints_of
from augend.errors import CheckpointError, ConfigError


def print_json(path: Path) -> bool:
    """Print what a checkpoint holds as one JSON object, and return whether it is whole.

    Raises:
        ConfigError: There is no such path.
        CheckpointError: There is no good checkpoint.
    """
    _check_exists(path)
    found = inspect(path)
    Output().say(json.dumps(found.to_plain(), allow_nan=False))
    return found.complete


def print_table(path: Path) -> bool:
    """Print what a checkpoint holds as a few aligned lines, and return whether it is whole.

    Raises:
        ConfigError: There is no such path.
        CheckpointError: There is no good checkpoint.
    """
    _check_exists(path)
    found = inspect(path)
    console = Output()
    for label, text in _lines(found):
        console.say(f"{label:<15}{text}")
    return found.complete


def print_verified(path: Path) -> bool:
    """Print a line for each checkpoint, and return whether all are whole.

    Raises:
        ConfigError: There is no such path.
        CheckpointError: There is no checkpoint.
    """
    _check_exists(path)
    checkpoints = checkpoints_of(path)
    if not checkpoints:
        verify(path)
    console = Output()
    whole = True
    for checkpoint in checkpoints:
        try:
            verify(checkpoint)
            console.say(f"ok       {checkpoint}, {in_units(inspect(checkpoint).bytes)}")
        except CheckpointError as error:
            if checkpoint.exists():  # else a running job has removed it since
                whole = False
                console.say(f"damaged  {error}")
    return whole


def _check_exists(path: Path) -> None:
    if not path.exists():
        raise ConfigError(f"{path}: no such path; give a run directory, such as runs/digits-1, or a checkpoint in it")


def _lines(found: Inspection) -> Iterator[tuple[str, str]]:
    yield "checkpoint", str(found.path)
    for name in ("step", "epoch", "rows_done", "microbatch", "count", "updates", "world"):
        yield name, f"{getattr(found, name):,}"
    for name, part in found.parts.items():
        yield f"part {name}", f"{part.tensors:,} {'tensor' if part.tensors == 1 else 'tensors'}, {in_units(part.bytes)}"
    yield "size", in_units(found.bytes)
    yield "created", found.created
    yield "versions", f"augend {found.augend}, torch {found.torch}"
    if found.digest is not None:
        yield "digest", found.digest
    if found.bits is not None:
        yield "bits", ", ".join(f"{name} {value}" for name, value in found.bits.items())
    if found.problem is not None:
        yield "damaged", found.problem
    for problem in found.damaged:
        yield "damaged newer", problem
