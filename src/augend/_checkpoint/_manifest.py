"""The manifest: what a checkpoint is, and which bytes it consists of. Written last; nothing is read before it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, final

import msgspec
from torch import Tensor

from augend.errors import CheckpointError, ContractError

FILE: Final = "manifest.json"
STATE_FILE: Final = "state.json"
VERSION: Final = 1
_FORMAT: Final = "augend checkpoint"

Whole = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Weight = Annotated[float, msgspec.Meta(ge=0)]
PartName = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z_][A-Za-z0-9_]*\Z")]
FilePath = Annotated[
    str,
    msgspec.Meta(pattern=r"^(state\.json|random-[0-9]{5,}\.json|[A-Za-z_][A-Za-z0-9_]*/[A-Za-z0-9_-]+\.safetensors)\Z"),
]
Sha256 = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]


@final
@dataclass(frozen=True, slots=True)
class FileRecord:
    """One file of a checkpoint."""

    bytes: Whole
    sha256: Sha256


@final
@dataclass(frozen=True, slots=True)
class TensorRecord:
    """One whole tensor, however many files it is spread over."""

    dtype: str
    shape: list[Whole]

    @staticmethod
    def of(tensor: Tensor) -> TensorRecord:
        """Return the record of a tensor."""
        return TensorRecord(str(tensor.dtype).removeprefix("torch."), list(tensor.shape))


@final
@dataclass(frozen=True, slots=True)
class PartRecord:
    """One object whose state was saved: its kind, its tensors, and which of them are parameters of a module."""

    kind: str
    tensors: dict[str, TensorRecord]
    parameters: list[str]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Position, parts and files of one checkpoint."""

    epoch: Whole
    step: Whole
    rows_done: Whole
    microbatch: Whole
    count: Whole | Weight
    updates: Whole
    world: Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]
    created: str
    augend: str
    torch: str
    parts: dict[PartName, PartRecord]
    files: dict[FilePath, FileRecord]
    format: Literal["augend checkpoint"] = _FORMAT
    version: Whole = VERSION


def random_file(rank: int) -> str:
    """Return the name of the file with a rank's random state, where it is not that of rank 0."""
    return f"random-{rank + 1:05d}.json"


def record_of(content: bytes) -> FileRecord:
    """Return the record of a file with this content."""
    return FileRecord(len(content), hashlib.sha256(content).hexdigest())


def to_bytes(manifest: Manifest) -> bytes:
    """Return the one text that a manifest has, with the SHA-256 of the rest of it inside."""
    return _sealed(msgspec.to_builtins(manifest))


def from_bytes(text: bytes) -> Manifest:
    """Read a manifest.

    Raises:
        CheckpointError: It is not, to the byte, what ``to_bytes`` wrote.
        ContractError: It is whole, but of a version that this augend does not read.
    """
    try:
        plain: dict[str, Any] = msgspec.json.decode(text, type=dict)
        checksum = plain.pop("checksum")
        whole = _sealed(plain) == text
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise CheckpointError(f"{FILE} cannot be read: {error!r:.200}") from error
    if not whole:
        raise CheckpointError(f"{FILE} is not as it was written: its checksum {checksum!r:.80} is not that of its text")
    if plain.get("format") != _FORMAT:
        raise CheckpointError(f"{FILE} does not describe a checkpoint: its format is {plain.get('format')!r:.80}")
    if plain.get("version") != VERSION:
        raise ContractError(
            f"{FILE} has version {plain.get('version')!r:.80}, and this augend reads version {VERSION}: use the augend "
            f"that wrote it, {plain.get('augend')!r:.80}"
        )
    try:
        return msgspec.convert(plain, Manifest)
    except ValueError as error:
        raise CheckpointError(f"{FILE} does not describe a checkpoint: {error}") from error


def _sealed(plain: dict[str, Any]) -> bytes:
    checksum = hashlib.sha256(_text({**plain, "checksum": ""})).hexdigest()
    return _text({**plain, "checksum": checksum})


def _text(plain: dict[str, Any]) -> bytes:
    return msgspec.json.format(msgspec.json.encode(plain, order="sorted"), indent=1) + b"\n"
