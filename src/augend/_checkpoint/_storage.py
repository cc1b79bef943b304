"""The tensors of one part, through the planner and the safetensors storage of torch.distributed.checkpoint.

The steps of ``torch.distributed.checkpoint.save`` and ``load`` are taken one by one: those functions warn wherever
there is no process group, and a filter for warnings is no business of a background thread.
"""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import cast, final

from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter

from augend._checkpoint._files import Files, write_all
from augend._checkpoint._manifest import FileRecord


def write_part(files: Files, directory: Path, tensors: Mapping[str, Tensor]) -> dict[str, FileRecord]:
    """Write tensors into a new directory, and wait until the files, but not yet their names, are on disk.

    Args:
        files: The file system.
        directory: Must not exist.
        tensors: Contiguous, on the CPU, none sharing memory with another; at least one.

    Returns:
        Size and hash of every file, by its name.
    """
    through = _Through(files)
    writer = HuggingFaceStorageWriter(str(directory), save_distributed=True)
    writer.fs = through
    writer.sync_files = False  # done by the sink: torch would sync the whole machine where it has no file descriptor
    planner = DefaultSavePlanner(flatten_state_dict=False)
    planner.set_up_planner(dict(tensors), storage_meta=None, is_coordinator=True)
    writer.set_up_storage_writer(is_coordinator=True)
    plans, metadata = planner.create_global_plan([writer.prepare_local_plan(planner.create_local_plan())])
    (plan,) = writer.prepare_global_plan(plans)
    results = writer.write_data(planner.finish_plan(plan), planner).wait()
    writer.finish(metadata, [results])
    return through.records


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
class _Through(FileSystem):
    """torch's file system, but that everything written goes through ours."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self.records: dict[str, FileRecord] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[io.IOBase, None, None]:  # noqa: ARG002  # torch's signature
        """Lend a stream into a new file, which is on disk when the stream is closed."""
        sink = _Sink(self._files, Path(path))
        try:
            yield sink
            sink.close()
            self.records[Path(path).name] = sink.record()
        finally:
            sink.abandon()

    def mkdir(self, path: str | os.PathLike[str]) -> None:
        """Make a new directory."""
        self._files.make_directory(Path(path))


@final
class _Sink(io.RawIOBase):
    """A file that counts and hashes what is written to it."""

    def __init__(self, files: Files, path: Path) -> None:
        super().__init__()
        self._files = files
        self._hash = hashlib.sha256()
        self._bytes = 0
        self._file: int | None = None  # the base class closes what could not be opened, too
        self._file = files.create(path)

    def write(self, data: object) -> int:
        """Write all of the data."""
        view = memoryview(cast("bytes", data)).cast("B")
        write_all(self._files, cast("int", self._file), view)
        self._hash.update(view)
        self._bytes += len(view)
        return len(view)

    def tell(self) -> int:
        """Return how many bytes were written."""
        return self._bytes

    def close(self) -> None:
        """Wait until all is on disk."""
        if self._file is not None:
            self._files.fsync(self._file)
        self.abandon()

    def abandon(self) -> None:
        """Give the handle back, whatever happened."""
        file, self._file = self._file, None
        if file is not None:
            self._files.close(file)
        super().close()

    def record(self) -> FileRecord:
        """Return size and hash of what was written."""
        return FileRecord(self._bytes, self._hash.hexdigest())
