"""Save: a copy of everything at once, then files, then the manifest, then the name. Each on disk before the next."""

from __future__ import annotations

import functools
import json
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from augend._accumulator import Accumulator
from augend._checkpoint._collection import Parts
from augend._checkpoint._directory import prune, sweep, unfinished
from augend._checkpoint._files import Files, remove_tree, write_file
from augend._checkpoint._manifest import (
    FILE,
    STATE_FILE,
    FileRecord,
    Manifest,
    PartRecord,
    TensorRecord,
    record_of,
    to_bytes,
)
from augend._checkpoint._position import Position, check_agreement, position_of
from augend._checkpoint._random import capture_random
from augend._checkpoint._storage import write_part
from augend._checkpoint._tree import split
from augend.data import Batches
from augend.errors import CheckpointError, StateError


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Everything that a checkpoint will hold, copied: training may go on while it is written."""

    position: Position
    count: int | float
    updates: int
    state: dict[str, Any]
    tensors: dict[str, dict[str, Tensor]]
    kinds: dict[str, tuple[str, list[str]]]


def take_snapshot(parts: Parts) -> Snapshot:
    """Copy the state of all parts.

    Args:
        parts: What is saved. The first `Batches` among them tell the position; with only one, the accumulators must
            agree with it.

    Raises:
        StateError: Accumulator and data do not agree, or a gradient waits in ``.grad`` for its step.
        ContractError: A state holds something that cannot be saved.
    """
    parts.check_whole()
    accumulators = parts.owners(Accumulator)
    for name, accumulator in accumulators.items():
        if accumulator.gradients_left:
            raise StateError(
                f"{name} wrote its mean to .grad with finish(), and .grad is not saved: save before finish(), or "
                "after optimizer.step() and optimizer.zero_grad(); step() does all of it"
            )
    trees = {part.name: part.capture() for part in parts}
    states = {name: trees[name] for name in accumulators}
    batches = list(parts.owners(Batches).values())
    if len(batches) == 1:
        check_agreement(batches[0], accumulators, states)
    plains: dict[str, Any] = {}
    tensors: dict[str, dict[str, Tensor]] = {}
    for part in parts:
        plains[part.name], live = split(trees[part.name], part.name)
        tensors[part.name] = {key.removeprefix(part.root): _staged(tensor) for key, tensor in live.items()}
    updates = next((accumulator.updates for accumulator in accumulators.values()), 0)
    return Snapshot(
        position=position_of(batches, list(states.values()), updates),
        count=next((accumulator.state.count for accumulator in accumulators.values()), 0),
        updates=updates,
        state={"random": [capture_random()], "ordinals": parts.ordinals(), "parts": plains},
        tensors=tensors,
        kinds={part.name: (part.kind, part.parameters) for part in parts},
    )


def _staged(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu").copy_(tensor)


def write_checkpoint(
    files: Files, directory: Path, name: str, snapshot: Snapshot, *, keep: int, damaged: Collection[str]
) -> None:
    """Write a checkpoint beside the others, give it its name, and remove those that are too many.

    Args:
        files: The file system.
        directory: Where; it exists, and its lock is held.
        name: What the checkpoint will be called once it is whole.
        snapshot: What it holds.
        keep: How many good ones to keep.
        damaged: Names of those that are not good.

    Raises:
        CheckpointError: A write failed; what was there before is untouched.
    """
    begun = unfinished(directory, name)
    try:
        sweep(files, directory)
        _write(files, begun, snapshot)
        files.rename(begun, directory / name)
        files.fsync_directory(directory)
    except OSError as error:
        with suppress(OSError):  # what is left is swept by the next save
            remove_tree(files, begun)
        raise CheckpointError(
            f"{directory / name} could not be saved: {error.strerror or error}; the checkpoints before it are untouched"
        ) from error
    try:
        prune(files, directory, keep, damaged)
    except OSError as error:
        raise CheckpointError(f"{directory / name} is saved, but an older one cannot be removed: {error}") from error


def _write(files: Files, begun: Path, snapshot: Snapshot) -> None:
    files.make_directory(begun)
    records: dict[str, FileRecord] = {}
    for part, tensors in snapshot.tensors.items():
        if tensors:
            written = write_part(files, begun / part, tensors)
            files.fsync_directory(begun / part)
            records.update({f"{part}/{name}": record for name, record in written.items()})
    state = json.dumps(snapshot.state, allow_nan=False).encode()
    write_file(files, begun / STATE_FILE, state)
    records[STATE_FILE] = record_of(state)
    write_file(files, begun / FILE, to_bytes(_manifest(snapshot, records)))
    files.fsync_directory(begun)


@functools.cache
def _own_version() -> str:
    return version("augend")  # reads and parses a file


def _manifest(snapshot: Snapshot, records: Mapping[str, FileRecord]) -> Manifest:
    parts = {}
    for name, (kind, parameters) in snapshot.kinds.items():
        tensors = {key: TensorRecord.of(tensor) for key, tensor in snapshot.tensors[name].items()}
        parts[name] = PartRecord(kind, tensors, parameters)
    position = snapshot.position
    return Manifest(
        epoch=position.epoch,
        step=position.step,
        rows_done=position.rows_done,
        microbatch=position.microbatch,
        count=snapshot.count,
        updates=snapshot.updates,
        world=1,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        augend=_own_version(),
        torch=str(torch.__version__),
        parts=parts,
        files=dict(records),
    )
