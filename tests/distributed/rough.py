"""Cases of test_rough: models, meshes and moments that are allowed and went wrong once, and mistakes of one rank."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import placed
import torch
import torch.distributed
import zoo
from placed import mesh
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

import augend
from augend.errors import AugendError

KIND = zoo.KINDS["narrow"]
Made = dict[str, Tensor]


def over(shape: tuple[int, ...]) -> DeviceMesh:
    """Return a mesh of one axis of shards, or one of replicas before it."""
    return mesh(shape, ("replicate", "shard")[-len(shape) :])


def model() -> nn.Module:
    """Return the integer model of narrow layers."""
    return KIND.build()


def told(call: Callable[[], object]) -> str:
    """Return the kind and the words of what a call raises."""
    try:
        call()
    except AugendError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def gradients(
    made: nn.Module, grads: augend.Accumulator | None = None, between: Callable[[], None] | None = None
) -> Made:
    """Go through one batch, do something before each backward, and return whole gradients."""
    grads = augend.Accumulator(made) if grads is None else grads
    data = augend.Batches(zoo.rows(), batch_size=zoo.BATCH, microbatch_size=zoo.MICROBATCH, shuffle=False)
    for microbatch in grads.microbatches(next(iter(data))):
        grads.backward(KIND.loss(made, microbatch))
    grads.finish()
    return placed.gradients(made)


def alone() -> Made:
    """Return what one process makes of the batch."""
    return gradients(model())


def grouped(shape: tuple[int, ...]) -> Made:
    """Shard two modules as one group."""
    made = model()
    fully_shard([made.first, made.second], mesh=over(shape))
    fully_shard(made, mesh=over(shape))
    return gradients(made)


def failed_midway(shape: tuple[int, ...]) -> Made:
    """Let a backward fail in the midst of sharded modules, drop the window, and begin anew."""
    made = model()
    for block in (made.first, made.second, made.third):
        fully_shard(block, mesh=over(shape))
    fully_shard(made, mesh=over(shape))
    grads = augend.Accumulator(made)

    def fail(gradient: Tensor) -> None:
        raise ValueError("midway")

    handle = made.second.register_forward_hook(lambda module, inputs, output: output.register_hook(fail) and None)
    try:
        grads.backward(KIND.loss(made, {name: column[:3] for name, column in zoo.rows().items()}))
    except ValueError:
        handle.remove()
    grads.reset()
    return gradients(made, grads)


def made_while_gathered(how: str) -> Made:
    """Make the accumulator after a forward without a backward, or an ``unshard()``: parameters are gathered then."""
    made = fully_shard(model(), mesh=over((2,)))
    if how == "forward":
        with torch.no_grad():
            made(zoo.rows()["x"])
    else:
        made.unshard()
    return gradients(made)


def partly_resharded() -> Made:
    """Reshard to fewer ranks after each forward."""
    made = model()
    for block in (made.first, made.second):
        fully_shard(block, mesh=over((4,)), reshard_after_forward=2)
    return gradients(fully_shard(made, mesh=over((4,))))


def unsynced_foreign(foreign: str) -> str | Made:
    """Run another backward without syncing, whose gradients torch keeps inside."""
    made = fully_shard(model(), mesh=over((2,)))
    grads = augend.Accumulator(made, foreign=foreign)
    made.set_requires_gradient_sync(False)
    made(zoo.rows()["x"]).sum().backward()
    made.set_requires_gradient_sync(True)
    made.set_requires_all_reduce(False)
    if foreign == "error":
        return told(lambda: gradients(made, grads))
    return gradients(made, grads)


def slow_rows() -> Iterator[Tensor]:
    """Fail as a data loader does."""
    yield from ()
    raise RuntimeError("a data loader timed out")


def inside_except() -> Made:
    """Run forwards where an error that speaks of a time-out is being handled."""
    made = fully_shard(model(), mesh=over((2,)))
    grads = augend.Accumulator(made)
    try:
        next(slow_rows())
    except RuntimeError:
        return gradients(made, grads)


def frozen_base() -> Made:
    """Shard a frozen bfloat16 base, and train float32 layers on it."""
    made = model()
    for parameter in made.first.to(torch.bfloat16).parameters():
        parameter.requires_grad_(False)
    inner = made.first.forward
    made.first.forward = lambda x: inner(x.to(torch.bfloat16)).float()
    made.forward = lambda x: made.last(torch.relu(made.third(torch.relu(made.second(torch.relu(made.first(x)))))))
    if torch.distributed.is_initialized():
        fully_shard(made.first, mesh=over((2,)))
        fully_shard(made, mesh=over((2,)))
    return gradients(made)


def frozen_that_differ() -> str:
    """Freeze a layer that is another one on rank 1."""
    made = model()
    for parameter in made.first.parameters():
        parameter.requires_grad_(False)
    if torch.distributed.get_rank() == 1:
        with torch.no_grad():
            made.first.bias.add_(1)
    return told(lambda: augend.Accumulator(made))


def out_of_order() -> str:
    """Pass a mesh whose ranks are not ascending."""
    return told(lambda: augend.Accumulator(model(), mesh=DeviceMesh("cpu", [1, 0], mesh_dim_names=("data",))))


def no_names() -> str:
    """Pass a mesh of two axes without names."""
    return told(lambda: augend.Accumulator(model(), mesh=DeviceMesh("cpu", [[0, 1]])))


def two_meshes() -> str:
    """Shard over meshes that share a name and not the ranks."""
    made = model()
    fully_shard(made.first, mesh=over((2,)))
    fully_shard(made, mesh=over((2, 1)))
    return told(lambda: augend.Accumulator(made))


class Gain(nn.Module):
    """A factor a feature, held whole by each rank of tensor parallelism."""

    def __init__(self, width: int, tensor: DeviceMesh) -> None:
        super().__init__()
        self.gain = nn.Parameter(distribute_tensor(torch.arange(1.0, width + 1), tensor, [Replicate()]))


def split_gradient(width: int) -> tuple[list[float], list[float]]:
    """Return a gradient that torch leaves split though its parameter is not, and what it should be."""
    full = mesh((1, 2), ("data", "tensor"))
    made = Gain(width, full["tensor"])
    grads = augend.Accumulator(made, mesh=full)
    rows = torch.arange(1.0, 3 * width + 1).reshape(3, width)
    split = distribute_tensor(rows, full["tensor"], [Shard(1)]) * made.gain
    total = split.redistribute(placements=[Replicate()]).to_local().sum(1)  # [rows]
    assert made.gain.grad is None
    grads.backward(augend.Tally(total, torch.ones(3, dtype=torch.int64)))
    grads.finish()
    return placed.whole(made.gain.grad).tolist(), (rows.sum(0) / 3).tolist()


def given_split_otherwise() -> list[float]:
    """Give a gradient that is split otherwise than its parameter."""
    full = mesh((1, 2), ("data", "tensor"))
    made = Gain(4, full["tensor"])
    grads = augend.Accumulator(made, mesh=full)
    grads.add({"gain": distribute_tensor(torch.arange(4.0), full["tensor"], [Shard(0)])}, 1)
    grads.finish()
    return placed.whole(made.gain.grad).tolist()


def spread_tally() -> str:
    """Give a tally whose rows are spread over the mesh."""
    full = mesh((1, 2), ("data", "tensor"))
    made = Gain(2, full["tensor"])
    grads = augend.Accumulator(made, mesh=full)
    total = made.gain * 1.0
    assert isinstance(total, DTensor)
    count = distribute_tensor(torch.ones(2, dtype=torch.int64), full["tensor"], [Replicate()])
    return told(lambda: grads.backward(augend.Tally(total, count)))


def mistake(which: str) -> str:
    """Make a mistake on rank 1 alone."""
    wrong = torch.distributed.get_rank() == 1
    made = model()
    if which == "construction":
        return told(lambda: augend.Accumulator(made, loss_scale=-1.0 if wrong else 1.0))
    grads = augend.Accumulator(made)
    if which == "count":
        given = {name: torch.ones_like(one) for name, one in made.named_parameters()}
        return told(lambda: grads.add(given, -1 if wrong else 1))
    grads.add({name: torch.ones_like(one) for name, one in made.named_parameters()}, 1)
    if which == "policy":
        return told(lambda: grads.finish(eps=-1.0 if wrong else 0.0))
    optimizer = torch.optim.SGD([made.first.weight] if wrong else made.parameters(), lr=1.0)
    return told(lambda: grads.step(optimizer))


def looked_at_in_inference_mode(shape: tuple[int, ...]) -> Made:
    """Look at the sums, and save them, where torch records nothing."""
    made = fully_shard(model(), mesh=over(shape))
    grads = augend.Accumulator(made)
    grads.backward(KIND.loss(made, {name: column[:3] for name, column in zoo.rows().items()}))
    with torch.inference_mode():
        assert grads.norm() >= 0
        assert grads.state_dict()["microbatches"] == torch.distributed.get_world_size()
    grads.reset()
    return gradients(made, grads)


def beside_the_model() -> str:
    """Give a total that the model has nothing to do with, on rank 1."""
    made = fully_shard(model(), mesh=over((2,)))
    grads = augend.Accumulator(made)
    tally = KIND.loss(made, {name: column[:3] for name, column in zoo.rows().items()})
    if torch.distributed.get_rank() == 1:
        tally = augend.Tally(torch.zeros(3, requires_grad=True) * 1.0, tally.count)
    return told(lambda: grads.backward(tally))


def different_places() -> str:
    """Be at the end of the batch on rank 1, and at a save on rank 0."""
    grads = augend.Accumulator(model(), sync="last")
    grads.add({name: torch.ones_like(one) for name, one in grads._pending.slots.parameters.items()}, 1)
    return told(grads.finish if torch.distributed.get_rank() == 1 else grads.state_dict)


def most_microbatches() -> list[str]:
    """Hold as many micro-batches as are allowed, go on from a save, and add one more."""
    made = model()
    given = {name: torch.ones_like(one) for name, one in made.named_parameters()}
    grads = augend.Accumulator(made, max_microbatches=2)
    grads.add(given, 1)
    state = grads.state_dict()
    grads.load_state_dict(state)
    return [told(lambda: grads.add(given, 1)), str(grads.state.microbatches)]


def two_jobs() -> tuple[Made, int]:
    """Train two models in one world, each over two of four ranks, beside a group of two leaders."""
    grid = mesh((2, 2), ("job", "data"))
    torch.distributed.new_group([0, 2])
    made = model()
    for _ in range(grid.get_local_rank("job")):
        augend.Accumulator(made, mesh=grid["data"])  # one job has made more of them before
    grads = augend.Accumulator(made, mesh=grid["data"])
    data = augend.Batches(
        zoo.rows(), batch_size=zoo.BATCH, microbatch_size=zoo.MICROBATCH, shuffle=False, mesh=grid["data"]
    )
    for microbatch in grads.microbatches(next(iter(data))):
        grads.backward(KIND.loss(made, microbatch))
    count = grads.finish().count
    return placed.gradients(made), count


def left_behind() -> tuple[int, int, int]:
    """Return how many files are open after 3 and after 13 accumulators, and how many hooks a gathered parameter has."""
    made = fully_shard(model(), mesh=over((2,)))
    open_files = []
    for number in range(13):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            gradients(made)
        for parameter in made.parameters():
            parameter.grad = None
        gc.collect()
        if number in (2, 12):
            open_files.append(len(list(Path("/proc/self/fd").iterdir())))
    (group,) = made._get_fsdp_state()._fsdp_param_groups
    return open_files[0], open_files[1], len(group.fsdp_params[0]._unsharded_param._post_accumulate_grad_hooks)


def other_data(option: str) -> list[str]:
    """Build other batches on each rank: by seed, order, cut or rows; train and evaluate."""
    rank = torch.distributed.get_rank()
    options = {"batch_size": 4, "microbatch_size": 2, "shuffle": True, "seed": 0}
    changed = {"seed": rank, "shuffle": rank == 0, "microbatch_size": 1 + rank, "batch_size": 4 + rank}
    total = 12 + rank if option == "rows" else 12
    data = augend.Batches(zoo.rows(total), **{**options, **({option: changed[option]} if option in changed else {})})
    made = model()
    grads = augend.Accumulator(made)
    return [
        told(lambda: next(grads.microbatches(next(iter(data))))),
        told(lambda: augend.evaluate(made, data, loss=KIND.loss)),
    ]


def spread_on_one_rank() -> str:
    """Give a gradient that is spread over the mesh on rank 0, and none on rank 1."""
    made = fully_shard(model(), mesh=over((2,)))
    grads = augend.Accumulator(made)
    bias = distribute_tensor(torch.ones(7), over((2,)), [Shard(0)])
    return told(lambda: grads.add({"first.bias": bias} if torch.distributed.get_rank() == 0 else {}, 0))


class Twice(nn.Module):
    """Calls a layer twice, each time recomputed in the backward by a backward of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Return what the second call gives."""
        for _ in range(2):
            x = checkpoint(self.layer, x, use_reentrant=True)
        return x


def in_pieces(dtype: str, shape: tuple[int, ...] | None) -> str:
    """Return what is said of a gradient that comes in pieces."""
    torch.manual_seed(0)
    made = Twice()
    if shape is not None:
        fully_shard(made.layer, mesh=over(shape))
        fully_shard(made, mesh=over(shape))
    grads = augend.Accumulator(made, dtype=dtype)
    total = made(torch.ones(2, 3, requires_grad=True)).sum(dim=1)
    return told(lambda: grads.backward(augend.Tally(total, torch.ones(2, dtype=torch.int64))))
