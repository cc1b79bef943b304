"""Rank and world: of a process alone, of a process group, and the refusal of a mesh."""

from __future__ import annotations

import pytest
import torch.distributed

from augend._group import rank_and_world
from augend.errors import PlacementError


def test_a_process_alone_is_rank_0_of_1():
    """Without a process group nothing is asked of torch.distributed."""
    assert not torch.distributed.is_initialized()
    assert (0, 1) == rank_and_world()


def test_the_default_group_is_read(monkeypatch):
    """With a default group its rank and size are returned."""
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 2)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 5)
    assert (2, 5) == rank_and_world()


def test_a_real_group_of_one():
    """A gloo group of this process alone is rank 0 of 1."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        assert (0, 1) == rank_and_world()
    finally:
        torch.distributed.destroy_process_group()


def test_what_is_no_mesh_is_refused():
    """The message says what a mesh is."""
    with pytest.raises(PlacementError, match=r"mesh must be a torch DeviceMesh.*got 'mesh'"):
        rank_and_world("mesh")
