"""Tensors that are spread over ranks in a checkpoint: which are kept, where they are when they are back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import placed
import pytest
import torch
import torch.distributed as dist
from jobs_on_ranks import Job, Net
from ranks import Ranks
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import augend
import reference
from augend._checkpoint import _load, _save
from augend.errors import ContractError

World = Callable[[int], Ranks]


class Box:
    """A part whose state is tensors, which it takes as they come."""

    def __init__(self, **tensors: Tensor) -> None:
        self.tensors = tensors

    def state_dict(self) -> dict[str, Tensor]:
        return dict(self.tensors)

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.tensors = dict(state)


def boxed(factor: float) -> Box:
    """Return tensors of all kinds and placements: sharded, replicated, on a mesh that not all ranks share, plain."""
    world = dist.get_world_size()
    line = placed.mesh((world,), ("shard",))
    pairs = placed.mesh((1, world), ("data", "tensor"))
    long = torch.arange(7.0) * factor
    flat = torch.arange(12.0).reshape(3, 4) * factor
    return Box(
        rows=distribute_tensor(flat, line, [Shard(0)]),
        columns=distribute_tensor(flat.bfloat16(), line, [Shard(1)]),
        everywhere=distribute_tensor(long, line, [Replicate()]),
        number=distribute_tensor(torch.tensor(3.0 * factor), line, [Replicate()]),
        nothing=distribute_tensor(torch.zeros(0, 3), line, [Shard(1)]),
        both=distribute_tensor(flat.double(), pairs, [Replicate(), Shard(0)]),
        of_one=distribute_tensor(long.long(), pairs["data"], [Shard(0)]),
        plain=long.to(torch.float8_e4m3fn),
        whole_number=torch.tensor(2**62 + 1),
    )


def told(box: Box) -> dict[str, tuple[str, list[int], str]]:
    """Return dtype, shape and hash of every tensor, whole."""
    every = {name: placed.whole(one) for name, one in box.tensors.items()}
    return {name: (str(one.dtype), list(one.shape), reference.digest(one)) for name, one in every.items()}


def save_boxed(directory: Path) -> dict[str, tuple[str, list[int], str]]:
    """Save them, and tell what they are."""
    box = boxed(1.0)
    run = augend.Checkpoint(directory, box=box, background=False)
    run.save()
    run.close()
    return told(box)


def load_boxed(directory: Path) -> tuple[dict[str, tuple[str, list[int], str]], dict[str, str], dict[str, str]]:
    """Load them, and tell what they are, and how each lay before and after."""
    box = boxed(0.0)
    before = {name: lies(one) for name, one in box.tensors.items()}
    run = augend.Checkpoint(directory, box=box, background=False)
    run.load_latest()
    run.close()
    return told(box), before, {name: lies(one) for name, one in box.tensors.items()}


def lies(tensor: Tensor) -> str:
    """Say how a tensor lies."""
    return f"{tensor.device_mesh} {tensor.placements}" if isinstance(tensor, DTensor) else "plain"


@pytest.mark.parametrize(("there", "here"), [(2, 2), (2, 3), (3, 2), (1, 2), (2, 1)])
def test_every_tensor_comes_back_where_it_was(ranks: World, tmp_path: Path, there: int, here: int) -> None:
    """Whatever its dtype, and however it is spread here, not there: the same elements, to the bit."""
    expected = ranks(there).run(save_boxed, tmp_path)[0]
    for found, before, after in ranks(here).run(load_boxed, tmp_path):
        assert before == after
        assert expected == found


def save_refused(directory: Path, case: str) -> str:
    """Save what no file can say."""
    line = placed.mesh((2,), ("shard",))
    local = torch.ones(3)
    tensor = {
        "partial": DTensor.from_local(local, line, [Partial()], run_check=False),
        "uneven": DTensor.from_local(local, line, [Shard(0)], run_check=False, shape=torch.Size([5]), stride=(1,)),
    }[case]
    run = augend.Checkpoint(directory, box=Box(x=tensor), background=False)
    with pytest.raises(ContractError) as caught:
        run.save()
    run.close()
    return str(caught.value)


@pytest.mark.parametrize(
    ("case", "where", "what"), [("partial", "", "to be added up yet"), ("uneven", "rank 1: ", "one piece of")]
)
def test_a_tensor_that_is_not_what_it_says_is_named(
    ranks2: Ranks, tmp_path: Path, case: str, where: str, what: str
) -> None:
    """A sum whose parts are not added up, a shard of another size: refused on all ranks, before anything is written."""
    first, second = ranks2.run(save_refused, tmp_path, case)
    assert first == second
    assert first.startswith(f"{where}box: the tensor 'x' cannot be saved: ")
    assert what in first


class Scalar(nn.Module):
    """A parameter without dims, buffers of two kinds, a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.one, self.other = nn.Linear(4, 4), nn.Linear(4, 4)
        self.other.weight = self.one.weight
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return (self.norm(self.other(self.one(x))) * self.scale).sum(dim=1)


def scalars(directory: Path, sync: str, load: bool) -> dict[str, Any]:
    """Save, or load, a replicated model with a parameter without dims."""
    torch.manual_seed(2 + load)
    model = Scalar()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    grads = augend.Accumulator(model, sync=sync)
    data = augend.Batches(torch.arange(24.0).reshape(6, 4), batch_size=6, microbatch_size=1, seed=1)
    run = augend.Checkpoint(directory, model=model, optimizer=optimizer, grads=grads, data=data, background=False)
    if load:
        run.load_latest()
    else:
        model.eval()
        for microbatch in grads.microbatches(next(iter(data))):
            grads.backward(augend.losses.sum(model(microbatch[0])))
            break
        run.save()
    run.close()
    sums = grads.state_dict()["sums"]["loss"]
    return {**model.state_dict(), **{f"sum of {name}": placed.whole(one) for name, one in sums.items()}}


@pytest.mark.parametrize("sync", ["every", "last"])
def test_parameters_without_dims_and_tied_ones(ranks: World, tmp_path: Path, sync: str) -> None:
    """Replicated on 2 ranks, then on 3 and 1: values and sums are the same to the bit."""
    expected = ranks(2).run(scalars, tmp_path, sync, False)[0]
    assert "sum of scale" in expected
    for world in (3, 1):
        for found in ranks(world).run(scalars, tmp_path, sync, True):
            assert expected.keys() == found.keys()
            assert all(torch.equal(one, found[name]) for name, one in expected.items())


class Factored(torch.optim.Optimizer):
    """Keeps a moment of the rows of each matrix on all ranks, one that lies as the matrix, and a count."""

    def step(self) -> None:
        """Count, and fill the moments."""
        for group in self.param_groups:
            for one in group["params"]:
                slots = self.state[one]
                slots["count"] = torch.tensor(2.0 + slots.get("count", 0.0))
                slots["same"] = one.detach() * 3
                mesh, every = one.device_mesh, [Replicate()] * one.device_mesh.ndim
                slots["rows"] = distribute_tensor(torch.arange(1.0 + one.shape[0]), mesh, every)


class Own(torch.optim.AdamW):
    """Keeps its state in a way of its own."""

    def state_dict(self) -> dict[str, Any]:
        """Add something."""
        return {**super().state_dict(), "more": 3}


OPTIMIZERS = {"factored": lambda parameters: Factored(parameters, {}), "own": Own}


def step_once(directory: Path, kind: str, load: bool) -> tuple[str, set[str]]:
    """Step an optimizer of one's own and save it, or load it into a new one; return all it has, and how it lies."""
    torch.manual_seed(4)
    model = placed.PLACES["fsdp"](Net(), ("up", "down")).model
    optimizer = OPTIMIZERS[kind](list(model.parameters()))
    run = augend.Checkpoint(directory, model=model, optimizer=optimizer, background=False)
    if load:
        run.load_latest()
    else:
        for one in model.parameters():
            one.grad = one.detach() * 2
        optimizer.step()
        run.save()
    run.close()
    slots = [optimizer.state[one] for one in model.parameters()]
    kinds = {
        f"{name}: {one.placements if isinstance(one, DTensor) else 'plain'}"
        for each in slots
        for name, one in each.items()
    }
    return reference.digest([{name: placed.whole(one) for name, one in each.items()} for each in slots]), kinds


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_an_optimizer_of_ones_own(ranks: World, tmp_path: Path, kind: str) -> None:
    """Its moments lie where they did: as the parameter, or where they have another shape, all on each rank."""
    expected = ranks(2).run(step_once, tmp_path, kind, False)[0]
    assert 3 == len(expected[1])
    for world in (2, 3):
        assert [expected] * world == ranks(world).run(step_once, tmp_path, kind, True)


def elements(directory: Path, place: str) -> tuple[int, int, int]:
    """Return how many elements this rank holds copies of in a save, how many it reads, and how many there are."""
    job = Job(directory, place)
    job.advance(4)  # moments, and a batch that is open
    snapshot = _save.take_snapshot(job.run._parts, job.run._tenancy.meet())
    copied = sum(chunk.tensor.numel() for part in snapshot.chunks.values() for chunk in part.values())
    every = sum(torch.Size(one.shape).numel() for part in snapshot.parts.values() for one in part.tensors.values())
    path = job.run.save()
    read: list[int] = []
    with pytest.MonkeyPatch.context() as patch:

        def counted(*arguments: Any) -> Tensor:
            target = whole_empty(*arguments)
            read.append((target.to_local() if isinstance(target, DTensor) else target).numel())
            return target

        whole_empty = _load.empty
        patch.setattr(_load, "empty", counted)
        job.run.load(path)
    job.run.close()
    return copied, sum(read), every


def test_no_rank_holds_more_than_its_share(ranks: World, tmp_path: Path) -> None:
    """Of a sharded model each element is copied by one rank and read by one; the first also has what is plain."""
    shares = ranks(3).run(elements, tmp_path, "fsdp")
    (total,) = {every for _, _, every in shares}
    assert total == sum(copied for copied, _, _ in shares)
    plain = 3 + sum(1 for _ in Net().parameters())  # a buffer of 3, and AdamW's counters
    rows = sum(-(-one.shape[0] // 3) * one[0].numel() for one in Net().parameters())
    learned = sum(-(-one.shape[0] // 3) * one[0].numel() for one in Net().parameters() if one.requires_grad)
    most = plain + rows + 3 * learned  # the model, two moments, the sums
    assert all(max(copied, read) <= most for copied, read, _ in shares)
    assert most < total
