"""Which rank this is, of how many; and the opening of groups."""

from __future__ import annotations

import datetime as dt

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh as Mesh

from augend._group._group import Group
from augend._group._link import Link, first_line
from augend.errors import LostRankError, PlacementError

__all__ = ["Mesh", "open_group", "rank_and_world"]


def rank_and_world(mesh: Mesh | None = None) -> tuple[int, int]:
    """Return the rank of this process and the number of ranks that share a batch.

    Not collective: it only reads what torch knows already.

    Args:
        mesh: The axes that share a batch, in row-major order; None for the default process group. A process without
            one is rank 0 of 1.

    Returns:
        Rank and world: ``0 <= rank < world``.

    Raises:
        PlacementError: It is no mesh, or this process is no part of it.
    """
    if mesh is not None:
        if not isinstance(mesh, Mesh):
            raise PlacementError(f"mesh must be a torch DeviceMesh, as init_device_mesh() makes them; got {mesh!r}")
        coordinate = mesh.get_coordinate()
        if coordinate is None:
            raise PlacementError(f"rank {dist.get_rank()} is no part of the mesh {mesh}; give every rank one it is in")
        rank = 0
        for dim, index in enumerate(coordinate):
            rank = rank * mesh.size(dim) + index
        return rank, mesh.size()
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def open_group(mesh: Mesh | None = None, *, purpose: str) -> Group:
    """Return a group of all ranks of a mesh; of one process alone it needs no torch.distributed.

    Collective over these ranks, if there are several, but for the limit on waiting, which is the default group's.

    Args:
        mesh: Who belongs to it; None for the default process group.
        purpose: What it is for: groups are told apart by it, by their ranks, and by how many of a kind there were.
    """
    _, world = rank_and_world(mesh)
    if world == 1:
        return Group(None, 0, world)
    ranks = sorted(range(world) if mesh is None else mesh.mesh.reshape(-1).tolist())
    rank = ranks.index(dist.get_rank())
    store = dist.distributed_c10d._get_default_store()  # noqa: SLF001  # torch has no other way
    kind = f"augend/{purpose}/{hash(tuple(ranks))}"
    try:
        number = store.add(f"{kind}/{rank}", 1)
        link = Link(store, f"{kind}/{number}", rank, world, _timeout())
    except RuntimeError as error:
        raise LostRankError(
            f"rank {rank} waits for the others of {world} in vain, to make a group for {purpose}: {first_line(error)}"
        ) from error
    return Group(link, rank, world)


def _timeout() -> dt.timedelta:
    """Return the limit that the default process group has for every wait."""
    group = dist.distributed_c10d._get_default_group()  # noqa: SLF001  # torch tells the limit nowhere else
    backend = group._get_backend(group._device_types[0])  # noqa: SLF001  # the same
    limit: dt.timedelta = backend.options._timeout  # noqa: SLF001  # the same
    return limit
