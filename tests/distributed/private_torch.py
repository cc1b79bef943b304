"""Cases of test_private_torch: what torch keeps private and augend relies on, on a sharded module."""

from __future__ import annotations

import torch
import torch.distributed
from placed import mesh
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard

import augend

SWITCHES = {
    "gradient_divide_factor": 1.0,
    "force_sum_reduction_for_comms": True,
    "reduce_scatter_unused_params": True,
    "reduce_grads": True,
    "all_reduce_grads": False,
}


def shard(shape: tuple[int, ...]) -> nn.Module:
    """Shard two parameters of 3 and 1 rows, one that is never used, and a frozen one."""
    made = nn.Module()
    made.first = nn.Parameter(torch.ones(3, 2))
    made.frozen = nn.Parameter(torch.ones(5), requires_grad=False)
    made.idle = nn.Parameter(torch.ones(2))
    made.last = nn.Parameter(torch.ones(1))
    made.forward = lambda: (made.first.sum() + made.frozen.sum()) * made.last
    return fully_shard(made, mesh=mesh(shape, ("replicate", "shard")[-len(shape) :]))


def switched(module: FSDPModule) -> dict[str, object]:
    """Switch to sums by torch's public calls, and return what the group then says."""
    module.set_gradient_divide_factor(1.0)
    module.set_force_sum_reduction_for_comms(True)
    module.set_reduce_scatter_unused_params(True)
    module.set_requires_gradient_sync(True)
    module.set_requires_all_reduce(False)
    (group,) = module._get_fsdp_state()._fsdp_param_groups
    return {name: getattr(group, name) for name in SWITCHES}


def layout(shape: tuple[int, ...]) -> tuple[dict[str, object], list[Tensor], list[Tensor], int]:
    """Return switches, this rank's parts by the layout, those by torch's public gradients, and what is left over."""
    module = shard(shape)
    found = switched(module)
    (group,) = module._get_fsdp_state()._fsdp_param_groups
    flats: list[Tensor] = []
    hybrid = len(shape) > 1
    if not hybrid:
        module.set_all_reduce_hook(lambda flat: flats.append(flat.clone()))
    total = module()
    gathered = [one._unsharded_param for one in group.fsdp_params]
    assert [tuple(one.shape) for one in gathered] == [(3, 2), (5,), (2,), (1,)]
    total.backward()
    if hybrid:
        flats = [group._partial_reduce_output]
        group._partial_reduce_output = None
        module.set_requires_all_reduce(True)
        module().backward()
    (flat,) = flats
    parts, begin = [], 0
    for one in group.fsdp_params:
        if one.sharded_param.requires_grad:
            parts.append(flat[begin : begin + one.sharded_size.numel()].view(one.sharded_size))
            begin += one.padded_sharded_param_size.numel()
    public = [one.grad.to_local() for one in (module.first, module.idle, module.last)]
    return found, parts, public, flat.numel() - begin


class Recorder:
    """A reduce-scatter of the shape that torch asks for, which keeps what it is given and gives back ones."""

    def __init__(self) -> None:
        self.inputs: list[Tensor] = []

    def allocate(self, size: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory that is full of what must be overwritten."""
        return torch.full(size, torch.nan, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: object, op: object) -> None:
        """Keep the gradients of this rank."""
        assert torch.distributed.ReduceOp.SUM == op
        self.inputs.append(input_tensor.view(group.size(), -1).clone())
        output_tensor.fill_(1.0)


def scatter(shape: tuple[int, ...]) -> tuple[list[Tensor], list[Tensor], list[int]]:
    """Return what a reduce-scatter of ours is given, what torch makes of its output, and the padded sizes."""
    module = shard(shape)
    switched(module)
    comm = Recorder()
    module.set_custom_reduce_scatter(comm)
    if len(shape) > 1:
        module.set_requires_all_reduce(True)
    module().backward()
    (group,) = module._get_fsdp_state()._fsdp_param_groups
    assert group.mesh_info.shard_mesh_size == shape[-1]
    assert group._reduce_scatter_comm is comm
    trained = [one for one in group.fsdp_params if one.sharded_param.requires_grad]
    widths = [one.padded_sharded_param_size.numel() for one in trained]
    return comm.inputs, [one.sharded_param.grad.to_local() for one in trained], widths


def kept() -> tuple[bool, int]:
    """Return whether a user's own reduce-scatter is there after an exact backward, and how often it was called."""
    module = shard((2,))
    comm = Recorder()
    module.set_custom_reduce_scatter(comm)
    grads = augend.Accumulator(module, dtype="exact")
    grads.backward(augend.Tally(module().reshape(1), torch.ones(1, dtype=torch.int64)))
    (group,) = module._get_fsdp_state()._fsdp_param_groups
    return group._reduce_scatter_comm is comm, len(comm.inputs)
