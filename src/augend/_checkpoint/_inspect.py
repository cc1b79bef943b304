"""inspect and verify: what is in a checkpoint, and whether it is whole. They take no lock and change nothing."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from os import PathLike
from pathlib import Path
from typing import Any, Final, final

import torch

from augend._checkpoint._directory import is_checkpoint, names_in
from augend._checkpoint._load import read_state, read_tensors
from augend._checkpoint._manifest import Manifest, TensorRecord
from augend._checkpoint._ranks import ALONE, told
from augend._checkpoint._verify import read_manifest, verified
from augend._group import Group
from augend.errors import CheckpointError

_RUN: Final = "checkpoints"  # where a run directory keeps them
_TRIES: Final = 5
_ELEMENTS_HELD: Final = 2**26  # of a model that is read to be hashed
_RESTLESS: Final = "{} is being written to faster than it can be read; try again, or let the run keep more checkpoints"


@final
@dataclass(frozen=True, slots=True)
class PartSummary:
    """One part of a checkpoint.

    Attributes:
        tensors: How many it has.
        bytes: Size of its files.
    """

    tensors: int
    bytes: int


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """What is in one checkpoint.

    Attributes:
        path: The checkpoint.
        complete: Whether every byte is as it was written.
        problem: What is wrong with it; None if nothing is.
        damaged: Newer checkpoints of the directory that are not complete, each with the reason.
        epoch: Of the batch that training goes on with, from 0.
        step: Of that batch, over all epochs; so many steps are done.
        microbatch: Micro-batches of it that are done, their gradients saved.
        rows_done: Rows of it that are done.
        count: Supervised items (or weight) in these micro-batches.
        updates: Steps really taken: those that were not skipped.
        world: How many ranks wrote it; any number can read it.
        digest: SHA-256 over all parameters of all modules, whole, in the order of part and name, each as part, name,
            dtype, shape and little-endian bytes: equal weights, equal digest, on any number of ranks. None if the
            checkpoint is not complete.
        created: When, in UTC.
        augend: Version of augend that wrote it.
        torch: Version of torch that wrote it.
        bytes: Size of its files.
        parts: What was saved, by name.
        bits: What the bits of exact sums depended on, see ``Accumulator.bits``; None where there are none, or the
            checkpoint is not complete.
    """

    path: Path
    complete: bool
    problem: str | None
    damaged: tuple[str, ...]
    epoch: int
    step: int
    microbatch: int
    rows_done: int
    count: int | float
    updates: int
    world: int
    digest: str | None
    created: str
    augend: str
    torch: str
    bytes: int
    parts: Mapping[str, PartSummary]
    bits: Mapping[str, str | int | bool] | None

    def to_plain(self) -> dict[str, Any]:
        """Return it as what JSON can say."""
        return {**asdict(self), "path": str(self.path), "damaged": list(self.damaged)}


def inspect(path: str | PathLike[str]) -> Inspection:
    """Read what is in a checkpoint, and whether it is whole. Reads all of it.

    Not collective.

    Args:
        path: One checkpoint; or a run directory, or a directory of checkpoints, whose newest good one is taken.

    Raises:
        CheckpointError: There is none, or none whose manifest can be read.
        ContractError: It was written by an augend with another format.
    """
    place = Path(path)
    if is_checkpoint(place):
        try:
            return _inspection(place, verified(place), None, ())
        except CheckpointError as error:
            return _inspection(place, read_manifest(place), str(error), ())
    for _ in range(_TRIES):
        found, manifest, damaged = newest_good(place)
        try:
            return _inspection(found, manifest, None, tuple(damaged.values()))
        except CheckpointError:
            if found.exists():
                raise
    raise CheckpointError(_RESTLESS.format(place))


def verify(path: str | PathLike[str]) -> None:
    """Do nothing if a checkpoint is whole: every byte as it was written.

    Not collective.

    Args:
        path: One checkpoint; or a run directory, or a directory of checkpoints, all of which must be whole.

    Raises:
        CheckpointError: One is not; names each file that differs. Or there is none.
        ContractError: One was written by an augend with another format.
    """
    place = Path(path)
    paths = [place] if is_checkpoint(place) else all_in(place)
    problems = []
    for one in paths:
        try:
            verified(one)
        except CheckpointError as error:
            if one == place or one.exists():  # else a running job has removed it since
                problems.append(str(error))
    if problems:
        raise CheckpointError("; ".join(problems))


def all_in(place: Path) -> list[Path]:
    """Return the checkpoints of a run directory or a directory of checkpoints, the newest first.

    Raises:
        CheckpointError: There is none.
    """
    for directory in (place, place / _RUN):
        if names := names_in(directory):
            return [directory / name for name in names]
    what = "holds no checkpoint" if place.is_dir() else "does not exist" if not place.exists() else "is no checkpoint"
    raise CheckpointError(f"{place} {what}; give a run directory or one of its checkpoints")


def newest_good(place: Path, group: Group = ALONE) -> tuple[Path, Manifest, dict[str, str]]:
    """Return the newest checkpoint that is whole, its manifest, and what is wrong with newer ones, by name.

    Collective over the group.

    Raises:
        CheckpointError: There is none.
        ContractError: The newest was written by an augend with another format.
    """
    what = f"rank 0 to look for checkpoints in {place}"
    if told(group, what, lambda: is_checkpoint(place)):
        return place, verified(place, group), {}
    for _ in range(_TRIES):
        damaged: dict[str, str] = {}
        for path in map(Path, told(group, what, lambda: [str(one) for one in all_in(place)])):
            try:
                return path, verified(path, group), damaged
            except CheckpointError as error:
                if told(group, what, path.exists):  # else a running job has removed it since
                    damaged[path.name] = str(error)
        if damaged:
            raise CheckpointError("no checkpoint is good: " + "; ".join(damaged.values()))
    raise CheckpointError(_RESTLESS.format(place))


def _inspection(path: Path, manifest: Manifest, problem: str | None, damaged: tuple[str, ...]) -> Inspection:
    sizes = {name: record.bytes for name, record in manifest.files.items()}
    parts = {
        name: PartSummary(len(part.tensors), sum(size for file, size in sizes.items() if file.startswith(f"{name}/")))
        for name, part in manifest.parts.items()
    }
    return Inspection(
        path=path,
        complete=problem is None,
        problem=problem,
        damaged=damaged,
        epoch=manifest.epoch,
        step=manifest.step,
        microbatch=manifest.microbatch,
        rows_done=manifest.rows_done,
        count=manifest.count,
        updates=manifest.updates,
        world=manifest.world,
        digest=_digest(path, manifest) if problem is None else None,
        created=manifest.created,
        augend=manifest.augend,
        torch=manifest.torch,
        bytes=sum(sizes.values()),
        parts=parts,
        bits=fingerprint_in(read_state(path, manifest)) if problem is None else None,
    )


def fingerprint_in(state: Mapping[str, Any]) -> Mapping[str, str | int | bool] | None:
    """Return what the bits of the first exact sums among saved states depend on; None if there are none."""
    for plain in state["parts"].values():
        match plain:
            case {"contract": dict(), "sums": dict(), "bits": dict(bits)}:
                return {str(name): one for name, one in bits.items() if isinstance(one, str | int)}
    return None


def _digest(path: Path, manifest: Manifest) -> str:
    digest = hashlib.sha256()
    for part in sorted(manifest.parts):
        records = manifest.parts[part].tensors
        for names in in_memory(sorted(manifest.parts[part].parameters), records):
            for name, tensor in sorted(read_tensors(path, manifest, part, names).items()):
                digest.update(f"{part}\0{name}\0{records[name].dtype}\0{records[name].shape}\0".encode())
                digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def in_memory(names: list[str], records: Mapping[str, TensorRecord]) -> Iterator[list[str]]:
    """Yield the names in groups whose tensors are not too much to hold at a time, one at least."""
    group: list[str] = []
    elements = 0
    for name in names:
        size = math.prod(records[name].shape)
        if group and elements + size > _ELEMENTS_HELD:
            yield group
            group, elements = [], 0
        group.append(name)
        elements += size
    if group:
        yield group
