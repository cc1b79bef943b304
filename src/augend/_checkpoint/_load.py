"""Load: only what was verified, prepared in full before anything live is touched."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from augend._checkpoint._collection import Parts
from augend._checkpoint._manifest import STATE_FILE, Manifest
from augend._checkpoint._parts import Commit, Part, commit_all
from augend._checkpoint._position import Position
from augend._checkpoint._random import prepare_random
from augend._checkpoint._storage import read_part
from augend._checkpoint._tree import DTYPES, join
from augend._checkpoint._verify import plain_file
from augend.errors import AugendError, CheckpointError, ContractError


def prepare_parts(path: Path, manifest: Manifest, parts: Parts, only: Collection[str]) -> Commit:
    """Read some parts of a verified checkpoint, and check them against their objects; nothing is changed yet.

    Returns:
        What loads them: all, or where one refuses, none.

    Raises:
        ContractError, StateError: A part is missing, or does not fit its live object; names what.
        CheckpointError: A state cannot be read.
    """
    names = set(only)
    _check_saved(manifest, names)
    chosen = parts.chosen(names)
    with _loading():
        prepared = _prepared(path, manifest, chosen, _read_state(path, manifest)["parts"])
    return lambda: _commit(prepared)


def prepare_all(path: Path, manifest: Manifest, parts: Parts) -> Commit:
    """Read every part and the random state, and check them; nothing is changed yet.

    Returns:
        What loads them: all, or where one refuses, none.

    Raises:
        ContractError, StateError: The checkpoint has other parts, or one does not fit its live object.
        CheckpointError: A state cannot be read.
    """
    _check_saved(manifest, set(parts.names))
    if extra := manifest.parts.keys() - set(parts.names):
        name = min(extra)
        raise ContractError(
            f"{path} has a part {name!r} that is not loaded; give it to Checkpoint(..., {name}=...), or choose the "
            "parts to load with load(path, only=...)"
        )
    state = _read_state(path, manifest)
    with _loading():
        prepared = _prepared(path, manifest, list(parts), state["parts"])
        restore_random = prepare_random(state["random"][0])
        with _understood(f"{path}: the order of the accumulators"):
            arrange = parts.prepare_ordinals(state["ordinals"])

    def commit() -> None:
        _commit(prepared)
        arrange()
        restore_random()

    return commit


def _commit(prepared: Sequence[tuple[Part, Commit]]) -> None:
    with _loading():
        commit_all(prepared)


@contextmanager
def _loading() -> Iterator[None]:
    """Make ordinary tensors without a history, whatever mode the program is in."""
    with torch.inference_mode(mode=False), torch.no_grad():
        yield


@contextmanager
def _understood(what: str) -> Iterator[None]:
    """Turn whatever a state runs into that is none into a refusal."""
    try:
        yield
    except AugendError:
        raise
    except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError, RuntimeError) as error:
        raise CheckpointError(f"{what} cannot be read from its saved state: {error!r:.200}") from error


def _check_saved(manifest: Manifest, names: set[str]) -> None:
    if missing := names - manifest.parts.keys():
        saved = ", ".join(manifest.parts)
        raise ContractError(
            f"the checkpoint has no part {min(missing)!r}; it has {saved}: leave the part out, or choose the parts to "
            "load with load(path, only=...)"
        )


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
        key: torch.empty(record.shape, dtype=DTYPES[record.dtype], device="cpu")
        for key, record in records.items()
        if keys is None or key in keys
    }
    if targets:
        try:
            with torch.device("cpu"):  # the reader would make its tensors on the program's default device
                read_part(path / part, targets)
        except (OSError, KeyError, ValueError, RuntimeError, AssertionError, SafetensorError) as error:
            raise CheckpointError(f"{path / part} cannot be read: {error!r}") from error
    return targets


def _read_state(path: Path, manifest: Manifest) -> dict[str, Any]:
    with plain_file(path / STATE_FILE) as file:
        try:
            state = json.load(file)
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{path / STATE_FILE} cannot be read: {error!r:.200}") from error
    match state:
        case {"parts": dict(parts), "random": [_, *_], "ordinals": dict()} if parts.keys() == manifest.parts.keys():
            return {**state}
    raise CheckpointError(f"{path / STATE_FILE} has not the states of the parts {', '.join(manifest.parts)}")


def _prepared(
    path: Path, manifest: Manifest, parts: Sequence[Part], plains: Mapping[str, Any]
) -> list[tuple[Part, Commit]]:
    prepared = []
    for part in parts:
        saved = manifest.parts[part.name].kind
        if saved != part.kind:
            kind = type(part.owner).__name__
            raise ContractError(f"{part.name} was saved as a {saved}, and is a {part.kind} ({kind})")
        tensors = {part.root + key: one for key, one in read_tensors(path, manifest, part.name).items()}
        with _understood(f"{path}: {part.name}"):
            prepared.append((part, part.prepare(join(plains[part.name], tensors))))
    return prepared
