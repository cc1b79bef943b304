"""compare: where the weights and the optimizer states of two checkpoints differ, to the bit. Changes nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, Final, final

import torch
from torch import Tensor

from augend._checkpoint._inspect import fingerprint_in, in_memory, newest_good
from augend._checkpoint._load import read_state, read_tensors
from augend._checkpoint._manifest import Manifest, TensorRecord
from augend._checkpoint._parts import ModulePart, OptimizerPart
from augend._checkpoint._tree import tensors_in
from augend.errors import CheckpointError

Bits = Mapping[str, str | int | bool]

_TRIES: Final = 5
_ELEMENTS: Final = 2**20  # compared at a time
_VIEWS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_KINDS: Final = (ModulePart.kind, OptimizerPart.kind)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One tensor that differs, and its first element that does.

    Attributes:
        part: Of the checkpoint, such as ``model``.
        tensor: Its name there.
        dtype: Its dtype, without ``torch.``.
        index: Of the first element that differs, in each dim.
        flat: The same in row-major order.
        values: What each checkpoint has there.
        bits: The bits of the values, as hexadecimal digits.
        differing: How many elements differ.
        elements: How many there are.
    """

    part: str
    tensor: str
    dtype: str
    index: tuple[int, ...]
    flat: int
    values: tuple[float | int | bool, float | int | bool]
    bits: tuple[str, str]
    differing: int
    elements: int


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Two checkpoints, compared.

    Attributes:
        paths: Those that were compared.
        steps: How many steps each has behind it.
        tensors: How many tensors both have, of modules and optimizers.
        elements: How many elements these have.
        differences: Tensors that differ, those of modules first, in the order in which a model has them.
        unlike: Tensors that only one has, or has with another dtype or shape, in words.
        fingerprints: What the bits of each run depended on, see ``augend.Accumulator.bits``; None where the checkpoint
            has no exact sums.
    """

    paths: tuple[Path, Path]
    steps: tuple[int, int]
    tensors: int
    elements: int
    differences: tuple[Difference, ...]
    unlike: tuple[str, ...]
    fingerprints: tuple[Bits | None, Bits | None]

    @property
    def equal(self) -> bool:
        """Whether every bit is the same."""
        return not self.differences and not self.unlike


@final
@dataclass(frozen=True, slots=True)
class _Saved:
    """A verified checkpoint and its states."""

    path: Path
    manifest: Manifest
    state: Mapping[str, Any]

    def names(self) -> Iterator[tuple[str, str]]:
        """Yield part and name of every tensor of a module or an optimizer, in the order of the states."""
        for kind in _KINDS:
            root = ModulePart.root if kind == ModulePart.kind else ""
            for part, plain in self.state["parts"].items():
                record = self.manifest.parts[part]
                if record.kind == kind:
                    marked = (name.removeprefix(root) for name in tensors_in(plain))
                    for name in dict.fromkeys([*(one for one in marked if one in record.tensors), *record.tensors]):
                        yield part, name

    def records(self) -> dict[tuple[str, str], TensorRecord]:
        """Return the record of every one of them."""
        return {(part, name): self.manifest.parts[part].tensors[name] for part, name in self.names()}


def compare(first: str | PathLike[str], second: str | PathLike[str]) -> Comparison:
    """Compare every parameter, buffer and optimizer state of two checkpoints bit by bit, of any worlds.

    Not collective. Reads all of both; holds a part of them at a time.

    Args:
        first: A checkpoint; or a run directory, or a directory of checkpoints, whose newest good one is taken.
        second: As the first.

    Raises:
        CheckpointError: There is none, or it is damaged.
        ContractError: One was written by an augend with another format.
    """
    places = Path(first), Path(second)
    for _ in range(_TRIES):
        found = [newest_good(place)[:2] for place in places]
        try:
            one, other = (_Saved(path, manifest, read_state(path, manifest)) for path, manifest in found)
            return _compared(one, other)
        except CheckpointError:
            if all(path.exists() for path, _ in found):  # else a running job has removed one since
                raise
    raise CheckpointError(f"checkpoints of {places[0]} or {places[1]} are removed faster than they can be read")


def _compared(one: _Saved, other: _Saved) -> Comparison:
    here, there = one.records(), other.records()
    both = [key for key, record in here.items() if there.get(key) == record]
    differences = []
    for part in dict.fromkeys(part for part, _ in both):
        names = [name for each, name in both if each == part]
        for group in in_memory(names, one.manifest.parts[part].tensors):
            mine, others = (read_tensors(each.path, each.manifest, part, group) for each in (one, other))
            differences += [found for name in group if (found := _difference(part, name, mine[name], others[name]))]
    return Comparison(
        paths=(one.path, other.path),
        steps=(one.manifest.step, other.manifest.step),
        tensors=len(both),
        elements=sum(torch.Size(here[key].shape).numel() for key in both),
        differences=tuple(differences),
        unlike=tuple(
            _told(key, here.get(key), there.get(key)) for key in dict.fromkeys([*here, *there]) if key not in both
        ),
        fingerprints=(fingerprint_in(one.state), fingerprint_in(other.state)),
    )


def _difference(part: str, name: str, mine: Tensor, other: Tensor) -> Difference | None:
    """Return the first element whose bits differ, and how many do; None if none does."""
    size = mine.element_size()
    flats = [tensor.reshape(-1) for tensor in (mine, other)]
    bits = [flat.view(_VIEWS[size]) for flat in flats]
    flat, differing = None, 0
    for begin in range(0, mine.numel(), _ELEMENTS):
        unequal = bits[0][begin : begin + _ELEMENTS] != bits[1][begin : begin + _ELEMENTS]
        count = int(unequal.sum())
        if count and flat is None:
            flat = begin + int(unequal.to(torch.uint8).argmax())
        differing += count
    if flat is None:
        return None
    index, rest = [], flat
    for length in reversed(mine.shape):
        rest, here = divmod(rest, length)
        index.append(here)
    first, second = (each[flat].item() for each in flats)
    shown = [f"{int(each[flat]) % 2 ** (8 * size):0{2 * size}x}" for each in bits]
    return Difference(
        part=part,
        tensor=name,
        dtype=str(mine.dtype).removeprefix("torch."),
        index=tuple(reversed(index)),
        flat=flat,
        values=(first, second),
        bits=(shown[0], shown[1]),
        differing=differing,
        elements=mine.numel(),
    )


def _told(key: tuple[str, str], one: TensorRecord | None, other: TensorRecord | None) -> str:
    what = f"{key[0]} {key[1]}"
    if one is None or other is None:
        return f"{what} is only in the {'second' if one is None else 'first'}"
    return f"{what} is {one.dtype} {one.shape} in the first and {other.dtype} {other.shape} in the second"
