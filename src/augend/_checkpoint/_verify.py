"""Is a checkpoint what was written? Every file, every byte, every element of every tensor; nothing is believed."""

from __future__ import annotations

import hashlib
import json
import math
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Final, final

import msgspec
import torch

from augend._checkpoint._manifest import FILE, STATE_FILE, FileRecord, Manifest, PartRecord, Whole, from_bytes
from augend._checkpoint._ranks import ALONE, patiently, told
from augend._checkpoint._safetensors import NAMES, OFFSETS
from augend._checkpoint._tree import DTYPES
from augend._group import Group
from augend.errors import CheckpointError, ContractError

_MANIFEST_BYTES: Final = 1 << 30  # more than any manifest needs: about 200 bytes a tensor
_HEADER_BYTES: Final = 100_000_000  # the limit of the safetensors format itself
_DTYPE_OF: Final = {name: str(dtype).removeprefix("torch.") for dtype, name in NAMES.items()}
Box = list[tuple[int, int]]  # begin and end in each dim


@final
@dataclass(frozen=True, slots=True)
class _Entry:
    """One tensor in the header of a safetensors file."""

    dtype: str
    shape: list[Whole]
    data_offsets: tuple[Whole, Whole]


@final
@dataclass(frozen=True, slots=True)
class _Place:
    """Where it begins in the whole tensor."""

    saved_offsets: list[Whole]


def verified(path: Path, group: Group = ALONE) -> Manifest:
    """Return the manifest of a checkpoint after reading every byte of it.

    Collective over the group, whose ranks share the reading.

    Raises:
        CheckpointError: A file is missing, too many, no plain file, of another size or content, or a tensor is not
            covered exactly once; names it. The same on all ranks.
        ContractError: It was written by an augend with another format.
    """

    def listed() -> str:
        text = _manifest_text(path)
        _check_names(path, _parsed(path, text))
        return text.decode()

    what = f"rank 0 to look into {path}"
    manifest = _parsed(path, told(group, what, listed).encode())

    def hashed() -> None:
        for name, file in [*manifest.files.items()][group.rank :: group.world]:
            _check_file(path, name, file)

    def covered() -> None:
        for part, record in [*manifest.parts.items()][group.rank :: group.world]:
            _check_coverage(path, part, record, [name for name in manifest.files if name.startswith(f"{part}/")])

    patiently(group, f"every rank to hash its share of {path}", hashed)
    patiently(group, f"every rank to read its share of the headers in {path}", covered)
    return manifest


def read_manifest(path: Path) -> Manifest:
    """Return the manifest of a checkpoint, which is checked, while the files that it names are not.

    Raises:
        CheckpointError: There is none, or it is not as it was written.
        ContractError: It was written by an augend with another format.
    """
    return _parsed(path, _manifest_text(path))


def _manifest_text(path: Path) -> bytes:
    with _named(path):
        if path.is_symlink() or not path.is_dir():
            raise CheckpointError("it is no directory, and a checkpoint is one")
        with plain_file(path / FILE) as file:
            if os.fstat(file.fileno()).st_size > _MANIFEST_BYTES:
                raise CheckpointError(f"{FILE} is larger than any manifest")
            return file.read()


def _parsed(path: Path, text: bytes) -> Manifest:
    with _named(path):
        return from_bytes(text)


@contextmanager
def plain_file(path: Path, name: str = "") -> Iterator[BufferedReader]:
    """Open a file to read it: no link, no device, nothing that waits.

    Args:
        path: The file.
        name: What messages call it; by default as it is called in its directory.

    Raises:
        CheckpointError: It is missing, something else than a file, or cannot be opened.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        missing = isinstance(error, FileNotFoundError)
        what = "is missing" if missing else f"cannot be opened as a plain file: {error.strerror}"
        raise CheckpointError(f"{name or path.name} {what}") from error
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise CheckpointError(f"{name or path.name} is not a plain file")
    with open(handle, "rb") as file:  # noqa: PTH123  # a handle, not a path
        yield file


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Put the checkpoint's own path in front of what is wrong with it."""
    try:
        yield
    except (CheckpointError, ContractError) as error:
        raise type(error)(f"{path}: {error}") from error
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error


def _check_names(path: Path, manifest: Manifest) -> None:
    """The directory holds the files of the manifest, and nothing else: a reader takes whatever lies there."""
    directories = sorted({name.partition("/")[0] for name in manifest.files if "/" in name})
    expected = {FILE, *manifest.files}
    with _named(path):
        if STATE_FILE not in manifest.files:
            raise CheckpointError(f"{STATE_FILE} is not in the manifest")
        found = _entries(path, "")
        for directory in directories:
            if (path / directory).is_dir():
                found |= _entries(path, directory)
        for name in sorted(expected - found):
            raise CheckpointError(f"{name} is missing")
        for name in sorted(found - expected - {*directories}):
            raise CheckpointError(f"{name!r} does not belong to this checkpoint")


def _entries(path: Path, directory: str) -> set[str]:
    found = set()
    with os.scandir(path / directory) as entries:
        for entry in entries:
            name = f"{directory}/{entry.name}" if directory else entry.name
            if entry.is_symlink():
                raise CheckpointError(f"{name!r} is a link, and a checkpoint holds plain files only")
            found.add(name)
    return found


def _check_file(path: Path, name: str, record: FileRecord) -> None:
    with _named(path), plain_file(path / name, name) as file:
        size = os.fstat(file.fileno()).st_size
        if size != record.bytes:
            raise CheckpointError(f"{name} has {size} bytes, and {record.bytes} were written")
        if hashlib.file_digest(file, "sha256").hexdigest() != record.sha256:
            raise CheckpointError(f"{name} is not as it was written: its SHA-256 is another")


def _check_coverage(path: Path, part: str, record: PartRecord, names: list[str]) -> None:
    """Every tensor of a part is in its files, with its dtype, every element exactly once."""
    chunks: dict[str, list[Box]] = {key: [] for key in record.tensors}
    with _named(path):
        for name in names:
            try:
                for key, dtype, box in _header(path / name, name):
                    if dtype != record.tensors[key].dtype:
                        raise CheckpointError(f"{name}: the tensor {key!r} is {dtype}, not {record.tensors[key].dtype}")
                    chunks[key].append(box)
            except (KeyError, ValueError, AttributeError, RecursionError) as error:
                raise CheckpointError(f"{name}: its header is not that of the manifest: {error!r:.200}") from error
        for key, tensor in record.tensors.items():
            if not _exactly_once(tensor.shape, chunks[key]):
                raise CheckpointError(f"{part}: the tensor {key!r} is not in the files, every element exactly once")


def _header(path: Path, name: str) -> Iterator[tuple[str, str, Box]]:
    """Yield name, dtype, and place in the whole tensor of each tensor in a safetensors file, whose bytes it has."""
    with plain_file(path, name) as file:
        length = int.from_bytes(file.read(8), "little")
        if length > _HEADER_BYTES:
            raise CheckpointError(f"{name} claims a header of {length} bytes")
        header = json.loads(file.read(length))
        data = os.fstat(file.fileno()).st_size - 8 - length
    tensors = {key: msgspec.convert(entry, _Entry) for key, entry in header.items() if key != "__metadata__"}
    metadata = msgspec.convert(header.get("__metadata__"), dict[str, str])
    places = msgspec.convert(json.loads(metadata[OFFSETS]), dict[str, _Place])
    for key, entry in tensors.items():
        dtype = _DTYPE_OF[entry.dtype]
        begin, end = entry.data_offsets
        if not begin <= end <= data or end - begin != math.prod(entry.shape) * DTYPES[dtype].itemsize:
            raise ValueError(f"{key!r} has the bytes {begin} to {end} of {data}")
        box = [(first, first + size) for first, size in zip(places[key].saved_offsets, entry.shape, strict=True)]
        yield key, dtype, box


def _exactly_once(shape: list[int], boxes: list[Box]) -> bool:
    """Tell whether boxes fill a shape: all inside, none over another, as many elements as it has."""
    inside = all(
        len(box) == len(shape) and all(end <= size for (_, end), size in zip(box, shape, strict=True)) for box in boxes
    )
    if not (boxes and inside and _possible(shape)):
        return False
    filled = [box for box in boxes if math.prod(end - begin for begin, end in box)]
    if math.prod(shape) != sum(math.prod(end - begin for begin, end in box) for box in filled):
        return False
    wide = [dim for dim, size in enumerate(shape) if size > 1]  # in the others, every box that is filled has all
    return not filled or _fill([shape[dim] for dim in wide], [[box[dim] for dim in wide] for box in filled])


def _fill(shape: list[int], boxes: list[Box]) -> bool:
    """Tell the same of boxes that are inside and not empty: slab by slab between their edges in the first dim.

    In a grid each box is in one slab, so that thousands of ranks are no matter; a wilder cut costs more.
    """
    if not shape or len(boxes) == 1:
        return len(boxes) == 1 and boxes[0] == [(0, size) for size in shape]
    beginning: dict[int, list[Box]] = {}
    for box in boxes:
        beginning.setdefault(box[0][0], []).append(box)
    edges = sorted({edge for box in boxes for edge in box[0]})
    if (edges[0], edges[-1]) != (0, shape[0]):
        return False
    slab: list[Box] = []
    for edge in edges[:-1]:
        slab = [box for box in slab if box[0][1] > edge] + beginning.get(edge, [])
        if not _fill(shape[1:], [box[1:] for box in slab]):
            return False
    return True


def _possible(shape: list[int]) -> bool:
    """Tell whether torch can have a tensor of a shape: one of no element may still have sizes beyond its reach."""
    try:
        torch.empty(shape, device="meta")
    except RuntimeError:
        return False
    return True
