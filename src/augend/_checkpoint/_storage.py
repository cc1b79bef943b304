"""The tensors of one part in safetensors files: each rank writes its own chunks, and reads what it needs of all files.

The files are those of ``torch.distributed.checkpoint``: one for each rank, named as it names them, with the place of
every chunk in its metadata. Nothing is planned together: who writes a chunk, and who needs it, every rank knows itself.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from safetensors import safe_open
from torch import Tensor

from augend._checkpoint._chunks import Chunk, chunk_of
from augend._checkpoint._files import Files, write_all
from augend._checkpoint._manifest import FileRecord
from augend._checkpoint._safetensors import OFFSETS, pieces


def shard_name(rank: int) -> str:
    """Return the name of the file that a rank writes."""
    return f"shard-{rank + 1:05d}-model-00001-of-00001.safetensors"


def write_part(files: Files, path: Path, chunks: Mapping[str, Chunk]) -> FileRecord:
    """Write chunks into a new file, and wait until it, but not yet its name, is on disk.

    Args:
        files: The file system.
        path: Must not exist.
        chunks: By the name of the tensor; contiguous, on the CPU.

    Returns:
        Size and hash of the file.
    """
    tensors = {name: chunk.tensor for name, chunk in chunks.items()}
    offsets = {name: list(chunk.offsets) for name, chunk in chunks.items()}
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


def read_part(directory: Path, targets: Mapping[str, Tensor]) -> None:
    """Fill tensors from the files of a directory; only what is needed of each file is read.

    Whatever lies there is taken, so the directory must have been verified.

    Args:
        directory: Where the files are, of however many ranks.
        targets: Tensors of the saved shapes and dtypes, by name; of those that are spread, this rank's part is read.

    Raises:
        ValueError: The files do not have all of them.
    """
    wanted = {name: chunk_of(tensor) for name, tensor in targets.items()}
    left = {name: chunk.tensor.numel() for name, chunk in wanted.items() if chunk.tensor.numel()}
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, "pt", device="cpu") as file:
            places = json.loads(file.metadata()[OFFSETS])
            for name in file.keys() & left.keys():
                saved = file.get_slice(name)
                left[name] -= _copy_overlap(saved, saved.get_shape(), places[name]["saved_offsets"], wanted[name])
    if lacking := [name for name, elements in left.items() if elements]:
        raise ValueError(f"{left[lacking[0]]} elements of {lacking[0]!r} are in no file")


def _copy_overlap(saved: object, sizes: list[int], begins: list[int], chunk: Chunk) -> int:
    """Copy what a saved chunk and a wanted one have in common; return how many elements these are."""
    there, here = [], []
    for size, begin, length, offset in zip(sizes, begins, chunk.tensor.shape, chunk.offsets, strict=True):
        first, last = max(begin, offset), min(begin + size, offset + length)
        if first >= last:
            return 0
        there.append(slice(first - begin, last - begin))
        here.append(slice(first - offset, last - offset))
    part = chunk.tensor[tuple(here)]
    part.copy_(saved[tuple(there)])  # type: ignore[index]  # safetensors tells no types
    return part.numel()
