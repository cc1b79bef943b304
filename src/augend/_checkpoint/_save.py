"""Save, first half: a copy of everything at one moment, of each rank only what it will write."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from augend._accumulator import Accumulator
from augend._checkpoint._chunks import Chunk, chunk_of, layout_of
from augend._checkpoint._collection import Parts
from augend._checkpoint._manifest import PartRecord, TensorRecord
from augend._checkpoint._parts import Part
from augend._checkpoint._position import Position, check_agreement, position_of
from augend._checkpoint._random import capture_random
from augend._checkpoint._ranks import all_equal, check_equal, fingerprint, patiently
from augend._checkpoint._tree import split
from augend._group import Group, Mesh
from augend.data import Batches
from augend.errors import ContractError, StateError


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """What one rank knows of a checkpoint, copied: training may go on while it is written.

    Attributes:
        position: Where the run is.
        count: Items in the open batch of the first accumulator.
        updates: Steps that it has taken.
        state: All that is no tensor; but for the random state, the same on all ranks.
        own_random: The random state of a rank after the first, where the ranks' differ.
        chunks: The parts of tensors that this rank writes, by part and name; on the CPU.
        parts: What is saved, of all ranks together.
    """

    position: Position
    count: int | float
    updates: int
    state: dict[str, Any]
    own_random: dict[str, Any] | None
    chunks: dict[str, dict[str, Chunk]]
    parts: dict[str, PartRecord]


@final
@dataclass(frozen=True, slots=True)
class _Captured:
    """The state of one part: what is no tensor, and every tensor, live, with what of it is here."""

    plain: Any
    record: PartRecord
    tensors: dict[str, tuple[Tensor, Chunk]]


def take_snapshot(parts: Parts, group: Group) -> Snapshot:
    """Copy the state of all parts. Collective.

    Args:
        parts: What is saved. The first `Batches` among them tell the position; with only one, the accumulators must
            agree with it.
        group: All ranks.

    Raises:
        StateError: Accumulator and data do not agree, or a gradient waits in ``.grad`` for its step.
        ContractError: A state holds something that cannot be saved, or is not the same on all ranks.
    """
    check_equal(group, "a save", parts.kinds())
    trees = _trees(parts, group)
    accumulators = parts.owners(Accumulator)
    states = {name: trees[name] for name in accumulators}
    batches = list(parts.owners(Batches).values())

    def captured() -> dict[str, _Captured]:
        if len(batches) == 1:
            check_agreement(batches[0], accumulators, states)
        return {part.name: _captured(part, trees[part.name]) for part in parts}

    all_parts = group.agreed("every rank to read its state", captured)
    state = {"ordinals": parts.ordinals(), "parts": {name: one.plain for name, one in all_parts.items()}}
    if group.world > 1:
        texts = {f"the part {name}": json.dumps([one.plain, _plain(one)]) for name, one in all_parts.items()}
        check_equal(group, "a save", {**texts, "the order of the accumulators": json.dumps(state["ordinals"])})
    updates = next((accumulator.updates for accumulator in accumulators.values()), 0)
    random = capture_random()
    shared = group.world == 1 or all_equal(group, "every rank's random state", fingerprint(json.dumps(random)))
    return Snapshot(
        position=position_of(batches, list(states.values()), updates),
        count=next((accumulator.state.count for accumulator in accumulators.values()), 0),
        updates=updates,
        state={"random": [random], **state},
        own_random=None if shared or group.rank == 0 else random,
        chunks=_written_here(all_parts, group),
        parts={name: one.record for name, one in all_parts.items()},
    )


def _trees(parts: Parts, group: Group) -> dict[str, Any]:
    """Read the states; those that need all ranks only after no rank has refused anything."""

    def alone() -> dict[str, Any]:
        parts.check_whole()
        for name, accumulator in parts.owners(Accumulator).items():
            if accumulator.gradients_left:
                raise StateError(
                    f"{name} wrote its mean to .grad with finish(), and .grad is not saved: save before finish(), or "
                    "after optimizer.step() and optimizer.zero_grad(); step() does all of it"
                )
        return {part.name: part.capture() for part in parts if part.alone}

    trees = group.agreed("every rank to begin a save", alone)
    for part in parts:
        if not part.alone:
            trees[part.name] = group.agreed(f"every rank to read the state of {part.name}", part.capture)
    return trees


def _captured(part: Part, tree: object) -> _Captured:
    plain, live = split(tree, part.name)
    tensors = {}
    for key, tensor in live.items():
        try:
            tensors[key.removeprefix(part.root)] = tensor, chunk_of(tensor)
        except ContractError as error:
            raise ContractError(f"{part.name}: the tensor {key!r} cannot be saved: {error}") from error
    records = {key: TensorRecord.of(tensor) for key, (tensor, _) in tensors.items()}
    return _Captured(plain, PartRecord(part.kind, records, part.parameters), tensors)


def _plain(one: _Captured) -> list[Any]:
    """Return what must be the same on all ranks of a part's tensors."""
    tensors = {key: [tensor.dtype, tensor.shape] for key, tensor in one.record.tensors.items()}
    return [one.record.kind, tensors, one.record.parameters]


def _written_here(parts: Mapping[str, _Captured], group: Group) -> dict[str, dict[str, Chunk]]:
    """Copy the chunks that this rank writes: each is written by the first of the ranks that hold it.

    Of several meshes that hold a tensor whole (a plain one is a mesh of one rank), that with the lowest rank writes.
    """
    lowest_of: dict[Mesh, int] = {}
    holders = []
    for one in parts.values():
        for tensor, _ in one.tensors.values():
            layout = layout_of(tensor)
            if layout is not None and layout.mesh not in lowest_of:
                lowest_of[layout.mesh] = layout.lowest
            holders.append(group.rank if layout is None else lowest_of[layout.mesh])
    writers = iter(group.maximum("every rank to say which tensors it holds", [-rank for rank in holders]))
    mine = iter(holders)
    chunks = {
        name: {
            key: chunk
            for key, (tensor, chunk) in one.tensors.items()
            if next(mine) == -next(writers) and _is_written(tensor, chunk)
        }
        for name, one in parts.items()
    }
    return patiently(
        group, "every rank to copy its state", lambda: {name: _copied(one) for name, one in chunks.items()}
    )


def _is_written(tensor: Tensor, chunk: Chunk) -> bool:
    """Tell whether the ranks that hold a tensor leave a chunk to this one: one of no elements is the first rank's."""
    layout = layout_of(tensor)
    if layout is None:
        return True
    if tensor.numel():
        return layout.is_first and bool(chunk.tensor.numel())
    coordinate = layout.mesh.get_coordinate()
    return coordinate is not None and not any(coordinate)


def _copied(chunks: Mapping[str, Chunk]) -> dict[str, Chunk]:
    return {
        key: Chunk(one.offsets, torch.empty(one.tensor.shape, dtype=one.tensor.dtype, device="cpu").copy_(one.tensor))
        for key, one in chunks.items()
    }
