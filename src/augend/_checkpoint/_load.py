"""Load: only what was verified, prepared in full before anything live is touched."""

from __future__ import annotations

import functools
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from augend._checkpoint._chunks import Layout, empty
from augend._checkpoint._collection import Parts
from augend._checkpoint._manifest import STATE_FILE, Manifest, TensorRecord, random_file
from augend._checkpoint._parts import Commit, Part, commit_all
from augend._checkpoint._position import Position
from augend._checkpoint._random import prepare_random
from augend._checkpoint._ranks import patiently
from augend._checkpoint._storage import read_part
from augend._checkpoint._tree import DTYPES, join
from augend._checkpoint._verify import plain_file
from augend._group import Group
from augend.errors import AugendError, CheckpointError, ContractError


def prepare_parts(path: Path, manifest: Manifest, parts: Parts, only: Collection[str], group: Group) -> Commit:
    """Read some parts of a verified checkpoint, and check them against their objects; nothing is changed yet.

    Collective, as is what it returns.

    Returns:
        What loads them: all, or where one refuses, none.

    Raises:
        ContractError, StateError: A part is missing, or does not fit its live object; names what.
        CheckpointError: A state cannot be read.
    """
    names = set(only)

    def chosen() -> tuple[list[Part], dict[str, Any]]:
        _check_saved(manifest, names)
        return parts.chosen(names), read_state(path, manifest)

    some, state = group.agreed(f"every rank to choose parts of {path}", chosen)
    prepared = _prepared(path, manifest, some, state["parts"], group)
    return lambda: _commit(prepared, group)


def prepare_all(path: Path, manifest: Manifest, parts: Parts, group: Group) -> Commit:
    """Read every part and the random state, and check them; nothing is changed yet.

    Collective, as is what it returns.

    Returns:
        What loads them: all, or where one refuses, none.

    Raises:
        ContractError, StateError: The checkpoint has other parts, or one does not fit its live object.
        CheckpointError: A state cannot be read.
    """

    def read() -> dict[str, Any]:
        _check_saved(manifest, set(parts.names))
        if extra := manifest.parts.keys() - set(parts.names):
            name = min(extra)
            raise ContractError(
                f"{path} has a part {name!r} that is not loaded; give it to Checkpoint(..., {name}=...), or choose "
                "the parts to load with load(path, only=...)"
            )
        return read_state(path, manifest)

    state = group.agreed(f"every rank to read {STATE_FILE} of {path}", read)
    prepared = _prepared(path, manifest, list(parts), state["parts"], group)

    def rest() -> tuple[Commit, Commit]:
        with _loading():
            own = random_file(group.rank)
            random = _read_json(path, own) if own in manifest.files else state["random"][0]
            restore_random = prepare_random(random)
            with _understood(f"{path}: the order of the accumulators"):
                return parts.prepare_ordinals(state["ordinals"]), restore_random

    arrange, restore_random = group.agreed(f"every rank to check what else is in {path}", rest)

    def commit() -> None:
        _commit(prepared, group)
        arrange()
        restore_random()

    return commit


def _commit(prepared: Sequence[tuple[Part, Commit]], group: Group) -> None:
    with _loading():
        commit_all(prepared, group)


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
    return _read(path, part, {key: one for key, one in records.items() if keys is None or key in keys}, {})


def _read(
    path: Path, part: str, records: Mapping[str, TensorRecord], layouts: Mapping[str, Layout]
) -> dict[str, Tensor]:
    targets = {key: empty(one.shape, DTYPES[one.dtype], layouts.get(key)) for key, one in records.items()}
    if targets:
        try:
            with torch.device("cpu"):  # safetensors would make its tensors on the program's default device
                read_part(path / part, targets)
        except (OSError, KeyError, ValueError, RuntimeError, AssertionError, SafetensorError) as error:
            raise CheckpointError(f"{path / part} cannot be read: {error!r}") from error
    return targets


def _read_json(path: Path, name: str) -> Any:
    with plain_file(path / name) as file:
        try:
            return json.load(file)
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{path / name} cannot be read: {error!r:.200}") from error


def read_state(path: Path, manifest: Manifest) -> dict[str, Any]:
    state = _read_json(path, STATE_FILE)
    match state:
        case {"parts": dict(parts), "random": [_, *_], "ordinals": dict()} if parts.keys() == manifest.parts.keys():
            return {**state}
    raise CheckpointError(f"{path / STATE_FILE} has not the states of the parts {', '.join(manifest.parts)}")


def _prepared(
    path: Path, manifest: Manifest, parts: Sequence[Part], plains: Mapping[str, Any], group: Group
) -> list[tuple[Part, Commit]]:
    prepared = []
    with _loading():
        for part in parts:
            read = functools.partial(_read_for, part, path, manifest)
            tensors = patiently(group, f"every rank to read the part {part.name} of {path}", read)
            prepare = functools.partial(_prepare, part, path, plains[part.name], tensors)
            prepared.append((part, group.agreed(f"every rank to check the part {part.name} of {path}", prepare)))
    return prepared


def _read_for(part: Part, path: Path, manifest: Manifest) -> dict[str, Tensor]:
    """Read the tensors of a part as its object has them: whole, or this rank's share."""
    record = manifest.parts[part.name]
    if record.kind != part.kind:
        kind = type(part.owner).__name__
        raise ContractError(f"{part.name} was saved as a {record.kind}, and is a {part.kind} ({kind})")
    layouts = part.layouts({part.root + key: one.shape for key, one in record.tensors.items()})
    here = {key.removeprefix(part.root): layout for key, layout in layouts.items()}
    return {part.root + key: one for key, one in _read(path, part.name, record.tensors, here).items()}


def _prepare(part: Part, path: Path, plain: Any, tensors: Mapping[str, Tensor]) -> Commit:
    with _understood(f"{path}: {part.name}"):
        return part.prepare(join(plain, tensors))
