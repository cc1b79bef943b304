"""Does FSDP2 add up here, or does it average? Asked with numbers, once for each kind of sharding in a model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import final

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from augend._placement._fsdp import FullySharded, groups_of
from augend.errors import PlacementError


def prove_sums(modules: Iterable[FSDPModule], work: torch.dtype, held: torch.dtype) -> None:
    """Send ones through modules that are sharded as the given ones are, and see that their number comes back.

    Collective over the mesh of every module, in their order.

    Raises:
        PlacementError: The sum of ones over the shards is not their number.
    """
    proven: list[tuple[object, object]] = []
    faults: list[PlacementError] = []
    for module in modules:
        for group in groups_of(module):
            dtypes = [one.sharded_param.dtype for one in group.fsdp_params if one.sharded_param.requires_grad]
            kind = (group.mesh_info.mesh, group.mp_policy)
            if dtypes and kind not in proven:
                proven.append(kind)
                try:
                    _prove(group, dtypes[0], work, held)
                except PlacementError as fault:  # others may have none: they are waited for
                    faults.append(fault)
    if faults:
        raise faults[0]


def _prove(group: object, dtype: torch.dtype, work: torch.dtype, held: torch.dtype) -> None:
    mesh, policy, device = group.mesh_info.mesh, group.mp_policy, group.device  # type: ignore[attr-defined]  # torch's own
    with torch.inference_mode(mode=False), torch.enable_grad():
        model = _Ones(dtype, device)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        weight = next(model.parameters())
        sharded = FullySharded({"probe": model}, {id(weight): "weight"}, work, held)  # type: ignore[dict-item]  # fully_shard makes it one
        taken = _Taken()
        total = model().float().sum()
        with sharded.received_by(taken):
            total.backward()
    expected = float(mesh.size(group.mesh_info.shard_mesh_dim))  # type: ignore[attr-defined]  # torch's own
    found = [float(value) for part in taken.parts for value in part.reshape(-1)]
    if taken.used != ["weight"] or any(value != expected for value in found):
        raise PlacementError(
            f"a gradient of 1 on each of {expected:.0f} ranks came back as {found} (seen before: {taken.used}): this "
            "torch does not add up where augend asks it to; use a release that augend was tested with"
        )


@final
class _Ones(nn.Module):
    """One element that passes a gradient of one on."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, dtype=dtype, device=device))

    def forward(self) -> Tensor:
        return self.weight * 1.0


@final
class _Taken:
    """Keeps what a backward gave."""

    def __init__(self) -> None:
        self.used: list[str] = []
        self.parts: list[Tensor] = []

    def use(self, name: str, gradient: Tensor) -> None:  # noqa: ARG002  # the shape of a receiver
        self.used.append(name)

    def write(self, name: str, gradient: Tensor, whole: Tensor) -> None:  # noqa: ARG002  # the same
        whole.copy_(gradient)

    def take(self, name: str, local: Tensor) -> None:  # noqa: ARG002  # the same
        self.parts.append(local.clone())
