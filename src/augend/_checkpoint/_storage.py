"""The tensors of one part, through the planner and the safetensors storage of torch.distributed.checkpoint.

The steps of ``torch.distributed.checkpoint.save`` and ``load`` are taken one by one: those functions warn wherever
there is no process group, and a filter for warnings is no business of a background thread.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import cast, final

from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from augend._checkpoint._files import Files, write_all
from augend._checkpoint._manifest import FileRecord
from augend._checkpoint._safetensors import pieces


def write_part(files: Files, directory: Path, tensors: Mapping[str, Tensor]) -> dict[str, FileRecord]:
    """Write tensors into a new directory, and wait until the files, but not yet their names, are on disk.

    Args:
        files: The file system.
        directory: Must not exist.
        tensors: Contiguous, on the CPU; at least one.

    Returns:
        Size and hash of every file, by its name.
    """
    writer = _Writer(files, directory)
    planner = DefaultSavePlanner(flatten_state_dict=False)
    planner.set_up_planner(dict(tensors), storage_meta=None, is_coordinator=True)
    writer.set_up_storage_writer(is_coordinator=True)
    plans, metadata = planner.create_global_plan([writer.prepare_local_plan(planner.create_local_plan())])
    (plan,) = writer.prepare_global_plan(plans)
    results = writer.write_data(planner.finish_plan(plan), planner).wait()
    writer.finish(metadata, [results])
    return writer.records


def read_part(directory: Path, targets: Mapping[str, Tensor]) -> None:
    """Fill tensors from a directory; only what they need of each file is read.

    The reader takes what it finds, so the directory must have been verified.

    Args:
        directory: What ``write_part`` wrote.
        targets: Tensors of the saved shapes and dtypes, by name.
    """
    reader = HuggingFaceStorageReader(str(directory))
    planner = DefaultLoadPlanner(flatten_state_dict=False)
    metadata = reader.read_metadata()
    planner.set_up_planner(dict(targets), metadata, is_coordinator=True)
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    plans = planner.create_global_plan([reader.prepare_local_plan(planner.create_local_plan())])
    (plan,) = reader.prepare_global_plan(plans)
    reader.read_data(planner.finish_plan(plan), planner).wait()


@final
class _Writer(HuggingFaceStorageWriter):
    """torch's writer, but that every byte goes through our files, hashed, and none is copied to be written."""

    def __init__(self, files: Files, directory: Path) -> None:
        super().__init__(str(directory), save_distributed=True)
        self._files = files
        self._directory = directory
        self.records: dict[str, FileRecord] = {}

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Make the directory, which torch would take if it were there already."""
        self._files.make_directory(self._directory)
        return plan

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write what the plan gives to this rank into one file, called as torch calls it."""
        tensors: dict[str, Tensor] = {}
        offsets: dict[str, list[int]] = {}
        results: list[WriteResult] = []
        name = f"shard-{plan.storage_data['shard_index']:05d}-model-00001-of-00001.safetensors"
        for item in plan.items:
            key = item.index.fqn
            tensors[key] = cast("Tensor", planner.resolve_data(item)).detach()
            offsets[key] = [] if item.tensor_data is None else list(item.tensor_data.chunk.offsets)
            results.append(WriteResult(index=item.index, size_in_bytes=tensors[key].nbytes, storage_data=name))
        self.records[name] = _written(self._files, self._directory / name, tensors, offsets)
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future


def _written(files: Files, path: Path, tensors: Mapping[str, Tensor], offsets: Mapping[str, list[int]]) -> FileRecord:
    """Write a file, wait until it is on disk, and return its record."""
    digest, size = hashlib.sha256(), 0
    file = files.create(path)
    try:
        for piece in pieces(tensors, offsets):
            write_all(files, file, piece)
            digest.update(piece)
            size += len(piece)
        files.fsync(file)
    finally:
        files.close(file)
    return FileRecord(size, digest.hexdigest())
