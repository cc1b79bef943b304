"""Is a checkpoint what was written? Every file, every byte, every element of every tensor; nothing is believed."""

from __future__ import annotations

import hashlib
import json
import math
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import Any, Final

from augend._checkpoint._manifest import FILE, STATE_FILE, FileRecord, Manifest, PartRecord, from_bytes
from augend._checkpoint._tree import DTYPES
from augend.errors import CheckpointError

_MANIFEST_BYTES: Final = 1 << 30  # more than any manifest needs: about 200 bytes a tensor
_HEADER_BYTES: Final = 100_000_000  # the limit of the safetensors format itself
_SAFETENSORS_DTYPES: Final = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "int16": "I16",
    "int32": "I32",
    "int64": "I64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}


def verified(path: Path) -> Manifest:
    """Return the manifest of a checkpoint after reading every byte of it.

    Raises:
        CheckpointError: A file is missing, too many, no plain file, of another size or content, or a tensor is not
            covered exactly once; names it.
        ContractError: It was written by an augend with another format.
    """
    manifest = read_manifest(path)
    _check_names(path, manifest)
    for name, file in manifest.files.items():
        _check_file(path, name, file)
    for part, record in manifest.parts.items():
        _check_coverage(path, part, record, [name for name in manifest.files if name.startswith(f"{part}/")])
    return manifest


def read_manifest(path: Path) -> Manifest:
    """Return the manifest of a checkpoint, which is checked, while the files that it names are not.

    Raises:
        CheckpointError: There is none, or it is not as it was written.
        ContractError: It was written by an augend with another format.
    """
    if path.is_symlink() or not path.is_dir():
        raise CheckpointError(f"{path} is no directory, and a checkpoint is one")
    with _named(path), plain_file(path / FILE) as file:
        content = file.read(_MANIFEST_BYTES + 1)
        if len(content) > _MANIFEST_BYTES:
            raise CheckpointError(f"{FILE} is larger than any manifest")
        return from_bytes(content)


@contextmanager
def plain_file(path: Path) -> Iterator[BufferedReader]:
    """Open a file to read it: no link, no device, nothing that waits.

    Raises:
        CheckpointError: It is missing, something else than a file, or cannot be opened.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        missing = isinstance(error, FileNotFoundError)
        what = "is missing" if missing else f"cannot be opened as a plain file: {error.strerror}"
        raise CheckpointError(f"{path.name} {what}") from error
    with open(handle, "rb") as file:  # noqa: PTH123  # a handle, not a path
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise CheckpointError(f"{path.name} is not a plain file")
        yield file


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Put the checkpoint's own path in front of what is wrong with it."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error


def _check_names(path: Path, manifest: Manifest) -> None:
    """The directory holds the files of the manifest, and nothing else: a reader takes whatever lies there."""
    expected = {FILE, *manifest.files}
    found = set()
    with _named(path):
        for root, directories, names in os.walk(path, onerror=_raise):
            for name in (*directories, *names):
                inner = Path(root) / name
                relative = inner.relative_to(path).as_posix()
                if inner.is_symlink():
                    raise CheckpointError(f"{relative} is a link, and a checkpoint holds plain files only")
                if name in names:
                    found.add(relative)
        for name in sorted(expected - found):
            raise CheckpointError(f"{name} is missing")
        for name in sorted(found - expected):
            raise CheckpointError(f"{name} does not belong to this checkpoint")
        if STATE_FILE not in manifest.files:
            raise CheckpointError(f"{STATE_FILE} is not in the manifest")


def _raise(error: OSError) -> None:
    raise error


def _check_file(path: Path, name: str, record: FileRecord) -> None:
    with _named(path), plain_file(path / name) as file:
        size = os.fstat(file.fileno()).st_size
        if size != record.bytes:
            raise CheckpointError(f"{name} has {size} bytes, and {record.bytes} were written")
        if hashlib.file_digest(file, "sha256").hexdigest() != record.sha256:
            raise CheckpointError(f"{name} is not as it was written: its SHA-256 is another")


def _check_coverage(path: Path, part: str, record: PartRecord, names: list[str]) -> None:
    """Every tensor of a part is in its files, with its dtype, every element exactly once."""
    chunks: dict[str, list[tuple[list[int], list[int]]]] = {key: [] for key in record.tensors}
    with _named(path):
        for name in names:
            try:
                for key, dtype, offsets, shape in _header(path / name):
                    if dtype != _SAFETENSORS_DTYPES[record.tensors[key].dtype]:
                        raise CheckpointError(f"{name}: the tensor {key!r} is {dtype}, not {record.tensors[key].dtype}")
                    chunks[key].append((offsets, shape))
            except (KeyError, ValueError, TypeError, AttributeError, RecursionError) as error:
                raise CheckpointError(f"{name}: its header is not that of the manifest: {error!r:.200}") from error
        for key, tensor in record.tensors.items():
            if tensor.dtype not in DTYPES or not _exactly_once(tensor.shape, chunks[key]):
                raise CheckpointError(f"{part}: the tensor {key!r} is not in the files, every element exactly once")


def _header(path: Path) -> Iterator[tuple[str, str, list[int], list[int]]]:
    """Yield name, dtype, offsets in the whole tensor, and shape of each tensor in a safetensors file."""
    with plain_file(path) as file:
        length = int.from_bytes(file.read(8), "little")
        if length > _HEADER_BYTES:
            raise CheckpointError(f"{path.name} claims a header of {length} bytes")
        header: dict[str, Any] = json.loads(file.read(length))
    offsets: dict[str, Any] = json.loads(header.pop("__metadata__")["DCP_SHARDING_INFO"])
    for key, entry in header.items():
        yield key, entry["dtype"], offsets[key]["saved_offsets"], entry["shape"]


def _exactly_once(shape: list[int], chunks: list[tuple[list[int], list[int]]]) -> bool:
    """Tell whether boxes fill a shape: all inside, none over another, as many elements as it has."""
    boxes = [[(begin, begin + size) for begin, size in zip(*chunk, strict=True)] for chunk in chunks]
    inside = all(
        len(box) == len(shape) and all(0 <= begin <= end <= size for (begin, end), size in zip(box, shape, strict=True))
        for box in boxes
    )
    elements = sum(math.prod(end - begin for begin, end in box) for box in boxes)
    filled = sorted(box for box in boxes if math.prod(end - begin for begin, end in box))
    apart = all(
        any(a[1] <= b[0] or b[1] <= a[0] for a, b in zip(one, other, strict=True))
        for index, one in enumerate(filled)
        for other in filled[index + 1 :]
    )
    return bool(boxes) and inside and apart and elements == math.prod(shape)
