"""Cases of test_refusals: what an Accumulator says to a model or to arguments that it cannot serve."""

from __future__ import annotations

import torch
import torch.distributed
from placed import mesh
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Partial, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import augend
from augend.errors import AugendError


def model(seed: int = 0, *, width: int = 3) -> nn.Module:
    """Return two small layers."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(2, width), nn.Linear(width, 1))


def over() -> torch.distributed.device_mesh.DeviceMesh:
    """Return a mesh of all ranks."""
    return mesh((torch.distributed.get_world_size(),), ("shard",))


def rank() -> int:
    """Return this rank."""
    return torch.distributed.get_rank()


def refused(made: nn.Module, **options: object) -> str:
    """Return the kind and the words of the refusal; nothing is refused on one rank alone."""
    try:
        augend.Accumulator(made, **options)
    except AugendError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was refused"


def narrow(policy: dict[str, torch.dtype], dtype: str) -> str:
    """Shard with a policy that rounds gradients before they are summed."""
    return refused(fully_shard(model(), mesh=over(), mp_policy=MixedPrecisionPolicy(**policy)), dtype=dtype)


def last_of_shards() -> str:
    """Ask for whole sums of a sharded model."""
    return refused(fully_shard(model(), mesh=over()), sync="last")


def old_fsdp() -> str:
    """Wrap a part as FSDP of old does."""
    made = model()
    made[0] = FullyShardedDataParallel(made[0], device_id=torch.device("cpu"))
    return refused(made)


def inner_wrapper() -> str:
    """Wrap a part into DistributedDataParallel."""
    level = torch.distributed.get_debug_level()
    torch.distributed.set_debug_level(torch.distributed.DebugLevel.OFF)  # on a watched gloo group, torch 2.13 crashes
    try:
        group = torch.distributed.new_group()
    finally:
        torch.distributed.set_debug_level(level)
    made = model()
    made[0] = DistributedDataParallel(made[0], process_group=group)
    return refused(made)


def own_hook() -> str:
    """Set an all-reduce hook before."""
    made = fully_shard(model(), mesh=over())
    made.set_all_reduce_hook(lambda flat: None)
    return refused(made)


def unequal_replicas() -> str:
    """Build another model on rank 1."""
    made = model()
    if rank() == 1:
        with torch.no_grad():
            made[1].bias.add_(1e-7)
    return refused(made)


def unequal_replicas_of_shards() -> str:
    """Build other shards in the second replica."""
    made = model()
    if rank() == 1:
        with torch.no_grad():
            made[1].bias.add_(1e-7)
    full = mesh((2, 1), ("replicate", "shard"))
    return refused(fully_shard(made, mesh=full["shard"]), mesh=full)


def no_memory() -> str:
    """Leave the parameters on the meta device of one rank."""
    return refused(model().to("meta") if rank() == 1 else model())


def other_shape() -> str:
    """Build a wider model on rank 1."""
    return refused(model(width=4 if rank() == 1 else 3))


def other_argument() -> str:
    """Ask for another loss scale on rank 1."""
    return refused(model(), loss_scale=2.0 if rank() == 1 else 1.0)


def other_policy() -> str:
    """Ask for another treatment of unused parameters on rank 1."""
    return refused(model(), unused="zero" if rank() == 1 else "error")


def part_of_the_ranks() -> str:
    """Shard over one rank each, and do not say how the others belong to it."""
    full = mesh((2, 1), ("replicate", "shard"))
    return refused(fully_shard(model(), mesh=full["shard"]))


def strange_mesh() -> str:
    """Pass a mesh that does not know the axes of the parameters."""
    full = mesh((2, 1), ("replicate", "shard"))
    return refused(fully_shard(model(), mesh=full["shard"]), mesh=mesh((2, 1), ("one", "other")))


def split_over_data() -> str:
    """Split a parameter over an axis whose ranks share a batch."""
    full = over()
    made = fully_shard(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), mesh=full, ignored_params={*()})
    other = nn.Module()
    other.sharded = made
    other.split = nn.Parameter(distribute_tensor(torch.ones(2, 2), full, [Shard(0)]))
    return refused(other)


def sparse_kind() -> str:
    """Make a parameter of a tensor class that nobody knows."""
    made = model()

    class Strange(torch.Tensor):
        """No plain tensor."""

    made.strange = nn.Parameter(torch.ones(2).as_subclass(Strange))
    return refused(made)


def partial_parameter() -> str:
    """Make a parameter whose parts are still to be added."""
    made = nn.Module()
    summed = torch.distributed.tensor.DTensor.from_local(torch.ones(2), over(), [Partial()])
    made.weight = nn.Parameter(summed)
    return refused(made)


def switched_back(switch: str) -> str:
    """Set the sharded module to averages after the accumulator was made."""
    made = fully_shard(model(), mesh=over())
    grads = augend.Accumulator(made)
    {
        "factor": lambda: made.set_gradient_divide_factor(2.0),
        "force": lambda: made.set_force_sum_reduction_for_comms(False),
        "unused": lambda: made.set_reduce_scatter_unused_params(False),
        "sync": lambda: made.set_requires_gradient_sync(False),
        "all-reduce": lambda: made.set_requires_all_reduce(True),
    }[switch]()
    try:
        grads.backward(augend.Tally(made(torch.ones(1, 2))[:, 0], torch.ones(1, dtype=torch.int64)))
    except AugendError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was refused"


def other_deal() -> str:
    """Deal batches over one axis of two, and add up over both."""
    full = mesh((2, 1), ("replicate", "shard"))
    made = model()
    grads = augend.Accumulator(made, mesh=full)
    data = augend.Batches(torch.ones(4, 2), batch_size=4, microbatch_size=1, mesh=full["shard"])
    try:
        for _ in grads.microbatches(next(iter(data))):
            pass
    except AugendError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was refused"


def no_graph() -> str:
    """Give a sharded model's accumulator a total that came from nowhere."""
    grads = augend.Accumulator(fully_shard(model(), mesh=over()))
    try:
        grads.backward(augend.Tally(torch.ones(1), torch.zeros(1, dtype=torch.int64)))
    except AugendError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was refused"
