"""Save, second half: files, then the manifest, then the name. Each on disk before the next."""

from __future__ import annotations

import functools
import json
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import final

import torch

from augend._checkpoint._directory import check_owner, prune, sweep, unfinished
from augend._checkpoint._files import Files, remove_tree, write_file
from augend._checkpoint._manifest import FILE, STATE_FILE, FileRecord, Manifest, random_file, record_of, to_bytes
from augend._checkpoint._ranks import first_alone, patiently
from augend._checkpoint._save import Snapshot
from augend._checkpoint._storage import shard_name, write_part
from augend._group import Group
from augend.errors import CheckpointError


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where checkpoints go, and who writes them.

    Attributes:
        files: The file system.
        directory: It exists, and rank 0 holds its lock.
        token: Of the lock.
        group: All ranks.
    """

    files: Files
    directory: Path
    token: str
    group: Group


def write_checkpoint(place: Place, name: str, snapshot: Snapshot, *, keep: int, damaged: Collection[str]) -> None:
    """Write a checkpoint beside the others, give it its name, and remove those that are too many. Collective.

    Every rank writes its own chunks; rank 0 learns of each file its size and hash, and does the rest.

    Args:
        place: Where.
        name: What the checkpoint will be called once it is whole.
        snapshot: What it holds, of this rank.
        keep: How many good ones to keep.
        damaged: Names of those that are not good.

    Raises:
        CheckpointError: A write failed, on any rank; what was there before is untouched.
    """
    group = place.group
    run = _Save(place, name, snapshot)
    try:
        first_alone(group, "rank 0 to begin the files", run.begin)
        records = _gathered(patiently(group, "every rank to write its files", run.write), group)
        first_alone(group, "rank 0 to publish", lambda: run.publish(records))
    except CheckpointError:
        if group.rank == 0:
            with suppress(OSError):  # what is left is swept by the next save
                remove_tree(place.files, run.begun)
        raise
    first_alone(group, "rank 0 to remove old checkpoints", lambda: run.prune(keep, damaged))


@final
class _Save:
    """One checkpoint on its way to the disk, as far as one rank has to do with it."""

    def __init__(self, place: Place, name: str, snapshot: Snapshot) -> None:
        self._place = place
        self._name = name
        self._snapshot = snapshot
        self.begun = unfinished(place.directory, name, place.token)

    def begin(self) -> None:
        """Make the directories that all ranks write to."""
        files = self._place.files
        with self._told():
            sweep(files, self._place.directory)
            files.make_directory(self.begun)
            for part, record in self._snapshot.parts.items():
                if record.tensors:
                    files.make_directory(self.begun / part)

    def write(self) -> dict[str, FileRecord]:
        """Write this rank's files, and return what they are."""
        place, rank = self._place, self._place.group.rank
        records: dict[str, FileRecord] = {}
        with self._told():
            if self._snapshot.own_random is not None:
                text = json.dumps(self._snapshot.own_random, allow_nan=False).encode()
                write_file(place.files, self.begun / random_file(rank), text)
                records[random_file(rank)] = record_of(text)
            for part, chunks in self._snapshot.chunks.items():
                if chunks:
                    name = f"{part}/{shard_name(rank)}"
                    records[name] = write_part(place.files, self.begun / name, chunks)
                    place.files.fsync_directory(self.begun / part)
        return records

    def publish(self, records: Mapping[str, FileRecord]) -> None:
        """Write what is no tensor, then the manifest, and give it all its name."""
        files, directory = self._place.files, self._place.directory
        with self._told():
            state = json.dumps(self._snapshot.state, allow_nan=False).encode()
            write_file(files, self.begun / STATE_FILE, state)
            all_records = {**records, STATE_FILE: record_of(state)}
            manifest = _manifest(self._snapshot, all_records, self._place.group.world)
            write_file(files, self.begun / FILE, to_bytes(manifest))
            files.fsync_directory(self.begun)
            check_owner(directory, self._place.token)  # as late as can be
            files.rename(self.begun, directory / self._name)
            files.fsync_directory(directory)

    def prune(self, keep: int, damaged: Collection[str]) -> None:
        """Remove the checkpoints that are too many."""
        directory = self._place.directory
        check_owner(directory, self._place.token)
        try:
            prune(self._place.files, directory, keep, damaged)
        except OSError as error:
            told = f"{directory / self._name} is saved, but an older one cannot be removed: {error}"
            raise CheckpointError(told) from error

    @contextmanager
    def _told(self) -> Iterator[None]:
        """Write only where it is still this job's, and say what became of the checkpoint where the disk refuses."""
        check_owner(self._place.directory, self._place.token)
        try:
            yield
        except OSError as error:
            raise CheckpointError(
                f"{self._place.directory / self._name} could not be saved: {error.strerror or error}; the checkpoints "
                "before it are untouched"
            ) from error


def _gathered(mine: Mapping[str, FileRecord], group: Group) -> dict[str, FileRecord]:
    """Return the records of every rank's files."""
    text = json.dumps({name: [one.bytes, one.sha256] for name, one in mine.items()}).encode()
    every = [json.loads(one) for one in group.exchange("every rank's list of files", text)]
    return {name: FileRecord(*one) for some in every for name, one in some.items()}


@functools.cache
def _own_version() -> str:
    return version("augend")  # reads and parses a file


def _manifest(snapshot: Snapshot, records: Mapping[str, FileRecord], world: int) -> Manifest:
    position = snapshot.position
    return Manifest(
        epoch=position.epoch,
        step=position.step,
        rows_done=position.rows_done,
        microbatch=position.microbatch,
        count=snapshot.count,
        updates=snapshot.updates,
        world=world,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        augend=_own_version(),
        torch=str(torch.__version__),
        parts=snapshot.parts,
        files=dict(records),
    )
