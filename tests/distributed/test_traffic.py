"""What ranks hold and tell each other is what ``benchmarks/scale.py`` says by formula."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks
from safetensors import safe_open
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import augend
from augend._group import Group

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "scale.py"
WORK = {"float32": torch.float32, "float64": torch.float64}
MODES = ("replicated, every", "replicated, last", "FSDP2", "HSDP")
COLLECTIVES = (  # by their names in old and new torch
    *("all_reduce", "reduce_scatter", "reduce_scatter_single", "reduce_scatter_tensor"),
    *("all_gather", "all_gather_single", "all_gather_into_tensor"),
)


def benchmark() -> ModuleType:
    """Import the benchmark for its formulas."""
    spec = importlib.util.spec_from_file_location("scale", BENCHMARK)
    module = importlib.util.module_from_spec(spec)
    sys.modules["scale"] = module  # its dataclasses look for it there
    spec.loader.exec_module(module)
    return module


def bytes_of(argument: object) -> int:
    """Return how many bytes of tensors an argument has."""
    if isinstance(argument, list):
        return sum(map(bytes_of, argument))
    return argument.nbytes if isinstance(argument, torch.Tensor) else 0


@contextmanager
def noted() -> Iterator[dict[str, list[int]]]:
    """Note the bytes that go into each collective of the control groups in this block, and into all others.

    Of the others it is what a rank sends in a ring: a share of what is reduced or gathered for each other rank.
    """
    sent: dict[str, list[int]] = {"maximum": [], "total": [], "gather": [], "moved": []}
    reduce, every = Group._reduce, Group._all
    plain = {name: getattr(dist, name) for name in COLLECTIVES if name in dir(dist)}

    def noted_reduce(self: Group, what: str, tensor: torch.Tensor, operation: Any) -> Any:
        sent["maximum" if operation == dist.ReduceOp.MAX else "total"].append(tensor.nbytes)
        return reduce(self, what, tensor, operation)

    def noted_all(self: Group, what: str, mine: torch.Tensor) -> list[torch.Tensor]:
        sent["gather"].append(mine.nbytes * self.world)
        return every(self, what, mine)

    def noting(name: str) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            given = (*arguments, *options.values())
            (group,) = (one for one in given if isinstance(one, dist.ProcessGroup))
            if not group.group_desc.startswith("augend"):  # the control group's are noted above
                size = max(bytes_of(one) for one in given)
                sent["moved"].append((2 if name == "all_reduce" else 1) * size * (group.size() - 1) // group.size())
            return plain[name](*arguments, **options)

        return call

    Group._reduce, Group._all = noted_reduce, noted_all
    for name in plain:
        setattr(dist, name, noting(name))
    try:
        yield sent
    finally:
        Group._reduce, Group._all = reduce, every
        for name, function in plain.items():
            setattr(dist, name, function)


def placed(mode: str, work: torch.dtype) -> torch.nn.Module:
    """Return a small model, where a mode wants it."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 4))
    shape, names = {"FSDP2": ((2,), ("shard",)), "HSDP": ((2, 1), ("replicate", "shard"))}.get(mode, ((), ()))
    if shape:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        for part in (*model, model):
            fully_shard(part, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=work))
    return model


def one_batch(mode: str, dtype: str) -> dict[str, Any]:
    """Run one batch; return what was told where it began, in its micro-batches and at its end, and the sums held."""
    model = placed(mode, WORK[dtype])
    grads = augend.Accumulator(model, dtype=dtype, sync="last" if mode == "replicated, last" else "every")
    batch = next(iter(augend.Batches(torch.randn(16, 8), batch_size=16, microbatch_size=4)))
    with noted() as sent:
        stages = []
        for microbatch in grads.microbatches(batch):
            stages.append({kind: list(sizes) for kind, sizes in sent.items()})
            total = model(microbatch[0]).square().sum(dim=1)  # [rows]
            grads.backward(augend.Tally(total, torch.ones(len(total), dtype=torch.int64)))
        stages.append({kind: list(sizes) for kind, sizes in sent.items()})
        held = sum(one.nbytes for one in grads.pending.values())
        grads.finish()
    return {"begun": stages[0], "between": stages[-1], "ended": sent, "rounds": len(stages) - 1, "held": held}


@pytest.mark.parametrize("dtype", WORK)
@pytest.mark.parametrize("mode", MODES)
def test_ranks_hold_and_tell_what_the_formulas_say(ranks2: Ranks, mode: str, dtype: str) -> None:
    """On two ranks: bytes of the sums, and of every collective where a batch begins, goes on and ends."""
    scale = benchmark()
    parameters = 8 * 16 + 16 + 16 * 4 + 4
    job = scale.Job("small", parameters, 4, parameters, world=2, shard=1)
    said = scale.control(job)
    for one in ranks2.run(one_batch, mode, dtype):
        begun, between, ended = one["begun"], one["between"], one["ended"]
        assert scale.held(job, mode, scale.WORK_BYTES[dtype])["sums"] == one["held"]
        assert {"maximum": [said["begin_maximum"]], "total": [], "gather": [], "moved": []} == begun
        order = [said["microbatch_maximum"]] * one["rounds"] if mode in {"FSDP2", "HSDP"} else []
        assert (2, [said["begin_maximum"], *order]) == (one["rounds"], between["maximum"])
        assert said["end_maximum"] == sum(ended["maximum"]) - sum(between["maximum"])
        assert ([said["end_total"]], [said["end_gather"]]) == (ended["total"], ended["gather"])
        sent = scale.moved(job, mode, scale.WORK_BYTES[dtype])
        assert one["rounds"] * sent["microbatch"] == sum(between["moved"])
        assert sent["batch"] == sum(ended["moved"]) - sum(between["moved"])


def one_checkpoint(mode: str, dtype: str, directory: str) -> None:
    """Take one step, and save in the middle of the next batch."""
    model = placed(mode, WORK[dtype])
    optimizer = torch.optim.AdamW(model.parameters())
    grads = augend.Accumulator(model, dtype=dtype, sync="last" if mode == "replicated, last" else "every")
    data = augend.Batches(torch.randn(32, 8), batch_size=16, microbatch_size=4)
    run = augend.Checkpoint(directory, model=model, optimizer=optimizer, grads=grads, data=data, background=False)
    for batch in data:
        for microbatch in grads.microbatches(batch):
            total = model(microbatch[0]).square().sum(dim=1)  # [rows]
            grads.backward(augend.Tally(total, torch.ones(len(total), dtype=torch.int64)))
            if batch.step == 1:
                run.save()
                run.close()
                return
        grads.step(optimizer)


def bytes_by_rank(directory: Path) -> dict[str, int]:
    """Return the bytes of tensors that each rank wrote, AdamW's step counters left out."""
    written: dict[str, int] = {}
    for path in directory.glob("0*/*/*.safetensors"):
        with safe_open(path, "pt") as file:
            sizes = [file.get_tensor(name).nbytes for name in file.keys() if not name.endswith(".step")]  # noqa: SIM118  no mapping
        written[path.name] = written.get(path.name, 0) + sum(sizes)
    return written


@pytest.mark.parametrize("dtype", WORK)
@pytest.mark.parametrize("mode", MODES)
def test_ranks_write_what_the_formulas_say(ranks2: Ranks, tmp_path: Path, mode: str, dtype: str) -> None:
    """A checkpoint in the middle of a batch: bytes in all, and those of the rank that writes most."""
    ranks2.run(one_checkpoint, mode, dtype, str(tmp_path))
    scale = benchmark()
    parameters = 8 * 16 + 16 + 16 * 4 + 4
    job = scale.Job("small", parameters, 4, parameters, world=2, shard=1)
    written = bytes_by_rank(tmp_path)
    said = scale.written(job, mode, scale.WORK_BYTES[dtype])
    assert (said["all"], said["busiest_rank"]) == (sum(written.values()), max(written.values()))
