"""Load: only what was verified, prepared in full before anything live is touched."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from augend._checkpoint._manifest import STATE_FILE, Manifest
from augend._checkpoint._parts import Part, commit_all
from augend._checkpoint._position import Position
from augend._checkpoint._random import prepare_random
from augend._checkpoint._storage import read_part
from augend._checkpoint._tree import DTYPES, join
from augend._checkpoint._verify import plain_file
from augend.errors import AugendError, CheckpointError, ContractError


def load_parts(path: Path, manifest: Manifest, parts: Sequence[Part]) -> None:
    """Load some parts of a verified checkpoint into their objects; a refused one leaves all as they were.

    Raises:
        ContractError, StateError: A state does not fit its live object; names what.
        CheckpointError: A state cannot be read.
    """
    plains, _ = _read_state(path, manifest)
    commit_all(_prepared(path, manifest, parts, plains))


def load_all(path: Path, manifest: Manifest, parts: Sequence[Part]) -> None:
    """Load every part and the random state; a refused one leaves all as they were.

    Raises:
        ContractError, StateError: The checkpoint has other parts, or a state does not fit its live object.
        CheckpointError: A state cannot be read.
    """
    check_parts(manifest, [part.name for part in parts])
    if extra := manifest.parts.keys() - {part.name for part in parts}:
        name = min(extra)
        raise ContractError(
            f"{path} has a part {name!r} that is not loaded; give it to Checkpoint(..., {name}=...), or choose the "
            "parts to load with load(path, only=...)"
        )
    plains, random = _read_state(path, manifest)
    prepared = _prepared(path, manifest, parts, plains)
    restore_random = prepare_random(random[0])
    commit_all(prepared)
    restore_random()


def check_parts(manifest: Manifest, names: Collection[str]) -> None:
    """Refuse names of parts that were not saved.

    Raises:
        ContractError: Names the first one.
    """
    if missing := set(names) - manifest.parts.keys():
        saved = ", ".join(manifest.parts)
        raise ContractError(f"the checkpoint has no part {min(missing)!r}; it has {saved}")


def position_in(manifest: Manifest, path: Path, damaged: Sequence[str] = ()) -> Position:
    """Return the position that a manifest tells."""
    return Position(
        epoch=manifest.epoch,
        step=manifest.step,
        rows_done=manifest.rows_done,
        microbatch=manifest.microbatch,
        path=path,
        damaged=tuple(damaged),
    )


def read_tensors(path: Path, manifest: Manifest, part: str, keys: Collection[str] | None = None) -> dict[str, Tensor]:
    """Return tensors of one part of a verified checkpoint, whole, on the CPU; all of them if no keys are given.

    Raises:
        CheckpointError: They cannot be read.
    """
    records = manifest.parts[part].tensors
    targets = {
        key: torch.empty(record.shape, dtype=DTYPES[record.dtype])
        for key, record in records.items()
        if keys is None or key in keys
    }
    if targets:
        try:
            read_part(path / part, targets)
        except (OSError, KeyError, ValueError, RuntimeError, AssertionError, SafetensorError) as error:
            raise CheckpointError(f"{path / part} cannot be read: {error!r}") from error
    return targets


def _read_state(path: Path, manifest: Manifest) -> tuple[dict[str, Any], list[Any]]:
    """Return the states of all parts, and the random states."""
    with plain_file(path / STATE_FILE) as file:
        try:
            match json.load(file):
                case {"parts": dict(parts), "random": [_, *_] as random} if parts.keys() == manifest.parts.keys():
                    return parts, random
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{path / STATE_FILE} cannot be read: {error!r:.200}") from error
    raise CheckpointError(f"{path / STATE_FILE} has not the states of the parts {', '.join(manifest.parts)}")


def _prepared(
    path: Path, manifest: Manifest, parts: Sequence[Part], plains: Mapping[str, Any]
) -> list[tuple[Part, Any]]:
    prepared = []
    for part in parts:
        saved = manifest.parts[part.name].kind
        if saved != part.kind:
            raise ContractError(
                f"{part.name} was saved as a {saved}, and is a {part.kind} ({type(part.owner).__name__})"
            )
        tensors = read_tensors(path, manifest, part.name)
        try:
            prepared.append((part, part.prepare(join(plains[part.name], tensors))))
        except AugendError:
            raise
        except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError, RuntimeError) as error:
            raise CheckpointError(f"{path}: the state of {part.name} is not one: {error!r:.200}") from error
    return prepared
