"""The door to torch.distributed: which rank this is, and of how many."""

from __future__ import annotations

import torch.distributed
from torch.distributed.device_mesh import DeviceMesh as Mesh

from augend.errors import PlacementError

__all__ = ["Mesh", "rank_and_world"]


def rank_and_world(mesh: Mesh | None = None) -> tuple[int, int]:
    """Return the rank of this process and the number of ranks that share a batch.

    Not collective: it only reads what torch knows already.

    Args:
        mesh: None for the default process group; a process without one is rank 0 of 1.

    Returns:
        Rank and world: ``0 <= rank < world``.

    Raises:
        PlacementError: A mesh was given, which this version cannot serve.
    """
    if mesh is not None:
        raise PlacementError(
            f"mesh must be None, the default process group or one process alone; got {mesh!r}; "
            "leave mesh= away: batches over the axes of a mesh are not possible in this version"
        )
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return 0, 1
