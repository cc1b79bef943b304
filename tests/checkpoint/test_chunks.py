"""Which chunk of a tensor each of many ranks has: by construction, in one process that plays all of them in turn."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from augend._checkpoint._chunks import Layout, chunk_of, empty, kept, layout_of, layouts_of
from augend._checkpoint._save import _is_written
from augend._checkpoint._verify import _exactly_once
from augend.errors import ContractError


@contextmanager
def rank_of(rank: int, shape: tuple[int, ...]) -> Iterator[DeviceMesh]:
    """Be one rank of a mesh, whose other ranks do not exist."""
    dist.init_process_group("fake", rank=rank, world_size=math.prod(shape), store=FakeStore())
    try:
        yield DeviceMesh("cpu", torch.arange(math.prod(shape)).reshape(shape))
    finally:
        dist.destroy_process_group()


def spread(mesh: DeviceMesh, ways: tuple[Placement, ...], whole: Tensor) -> Tensor:
    """Return this rank's view of a whole tensor, cut by torch itself."""
    local = whole
    for place, way in enumerate(ways):
        if isinstance(way, Shard | _StridedShard):
            parts, _ = way._split_tensor(local, mesh.size(place), with_padding=False, contiguous=True)
            local = parts[mesh.get_local_rank(place)]
    return DTensor.from_local(local, mesh, ways, run_check=False, shape=whole.shape, stride=whole.stride())


@st.composite
def cuts(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[Placement, ...], list[int]]:
    """Draw a mesh, how a tensor lies on it, and the tensor's shape."""
    mesh = draw(st.sampled_from([(1,), (2,), (3,), (5,), (2, 2), (3, 2), (1, 4)]))
    shape = draw(st.lists(st.integers(0, 7), min_size=1, max_size=3))
    dims = st.integers(0, len(shape) - 1)
    ways = draw(st.tuples(*[st.one_of(st.just(Replicate()), st.builds(Shard, dims)) for _ in mesh]))
    if len(mesh) == 2 and shape[0] and shape[0] % mesh[1] == 0 and draw(st.booleans()):
        ways = (_StridedShard(0, split_factor=mesh[1]), Shard(0))  # FSDP2 on top of tensor parallelism
    return mesh, ways, shape


@settings(max_examples=60)
@given(cuts())
def test_the_ranks_together_write_every_element_once(drawn) -> None:
    """Sharded in any dims over any mesh, with replicas, uneven and empty shards: each element is one rank's."""
    mesh_shape, ways, shape = drawn
    whole = torch.arange(math.prod(shape)).reshape(shape)
    boxes, found = [], torch.full(shape, -1)
    for rank in range(math.prod(mesh_shape)):
        with rank_of(rank, mesh_shape) as mesh:
            tensor = spread(mesh, ways, whole)
            chunk = chunk_of(tensor)
            if _is_written(tensor, chunk):
                place = [(begin, begin + size) for begin, size in zip(chunk.offsets, chunk.tensor.shape, strict=True)]
                boxes.append(place)
                found[tuple(slice(*side) for side in place)] = chunk.tensor
    assert _exactly_once(shape, boxes)
    assert torch.equal(whole, found)


@settings(max_examples=30)
@given(cuts(), st.sampled_from([torch.float32, torch.bfloat16]))
def test_what_is_read_into_lies_as_the_live_one(drawn, dtype: torch.dtype) -> None:
    """Of the same shape and placements, this rank's part alone in memory."""
    mesh_shape, ways, shape = drawn
    for rank in {0, math.prod(mesh_shape) - 1}:
        with rank_of(rank, mesh_shape) as mesh:
            live = spread(mesh, ways, torch.zeros(shape, dtype=dtype))
            target = empty(shape, dtype, layout_of(live))
            assert layout_of(live) == layout_of(target)
            assert (live.shape, live.dtype) == (target.shape, target.dtype)
            assert live.to_local().shape == target.to_local().shape == chunk_of(target).tensor.shape
            assert kept(live).to_local().data_ptr() != live.to_local().data_ptr() or not live.to_local().numel()


def test_a_plain_tensor_is_whole_on_the_cpu() -> None:
    """It has no layout, begins at the beginning, and is copied to go back to."""
    tensor = torch.ones(2, 3)
    chunk = chunk_of(tensor)
    assert ((0, 0), tensor.data_ptr()) == (chunk.offsets, chunk.tensor.data_ptr())
    assert layout_of(tensor) is None
    assert {} == layouts_of({"a": tensor})
    assert _is_written(tensor, chunk)
    assert torch.equal(tensor, kept(tensor))
    assert kept(tensor).data_ptr() != tensor.data_ptr()
    assert (2, 3) == empty([2, 3], torch.float32, None).shape


def test_what_a_file_cannot_say_is_refused() -> None:
    """A sum that is still to be added up, parts of other sizes than the placements', a part that is in strides."""
    with rank_of(1, (2,)) as mesh:
        for local, ways, shape, message in (
            (torch.ones(3), (Partial(),), (3,), "to be added up yet"),
            (torch.ones(3), (Shard(0),), (5,), r"its part on this rank is \[3\], and .* one piece of \[2\]"),
            (torch.ones(4), (_StridedShard(0, split_factor=2),), (8,), r"should give one piece of \[4\]"),
        ):
            tensor = DTensor.from_local(local, mesh, ways, run_check=False, shape=torch.Size(shape), stride=(1,))
            with pytest.raises(ContractError, match=message):
                chunk_of(tensor)


def test_a_rank_outside_of_the_mesh_has_nothing() -> None:
    """It writes nothing of the tensor, and reads nothing."""
    dist.init_process_group("fake", rank=3, world_size=4, store=FakeStore())
    try:
        layout = Layout(DeviceMesh("cpu", torch.arange(2)), (Shard(0),))
        tensor = empty([4], torch.float32, layout)
        chunk = chunk_of(tensor)
        assert 0 == chunk.tensor.numel()
        assert not layout.is_first
        assert not _is_written(tensor, chunk)
        assert not _is_written(empty([0], torch.float32, layout), chunk)
    finally:
        dist.destroy_process_group()


def test_thousands_of_chunks_are_checked_in_no_time() -> None:
    """Of 4,096 ranks, and of a grid of 1,024 by 8; one that lies over another, or is missing, is found."""
    rows = [[(3 * rank, 3 * rank + 3), (0, 5)] for rank in range(4096)]
    assert _exactly_once([3 * 4096, 5], rows)
    assert not _exactly_once([3 * 4096, 5], [*rows[:-1], rows[7]])
    assert not _exactly_once([3 * 4096, 5], rows[:-1])
    grid = [[(a, a + 1), (2 * b, 2 * b + 2)] for a, b in itertools.product(range(1024), range(8))]
    assert _exactly_once([1024, 16], grid)
    grid[5] = [(0, 1), (9, 11)]
    assert not _exactly_once([1024, 16], grid)
