"""What does one rank of thousands pay? One JSON line: planning and restoring by time, everything else by formula.

A fake process group makes this one process rank r of any world, so that what a rank does by itself can be measured at
world 4,096. ``data`` is one batch of eight micro-batches a rank, out of ten billion rows: dealing it, fetching it, and
going to a saved position. ``checkpoint`` is what decides who writes what: torch's global plan, which rank 0 makes of
every rank's items, and the plan that each rank makes of its own. ``tables`` are bytes, computed by the functions below.

``--markdown`` prints the tables as they stand in ``docs/scale.md``; ``--quick`` measures less often and smaller.
"""

from __future__ import annotations

import argparse
import json
import pickle
import platform
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import augend
from augend._checkpoint._chunks import Chunk, Layout, chunk_of
from augend._checkpoint._manifest import FileRecord, Manifest, PartRecord, TensorRecord, from_bytes, to_bytes
from augend._checkpoint._ranks import ALONE
from augend._checkpoint._safetensors import pieces
from augend._checkpoint._save import _Captured, _written_here
from augend._checkpoint._storage import read_part, shard_name
from augend._numerics._limbs import LIMBS
from augend.data._deal import Rounds

WORLDS = (4, 64, 4096)
ROUNDS = 8  # micro-batches of a rank
MICROBATCH_ROWS = 16
ALL_ROWS = 10**10
PARTS = ("grads", "model", "optimizer")  # of a checkpoint, those that have tensors


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="measure less often and smaller")
    parser.add_argument("--markdown", action="store_true", help="print the tables of docs/scale.md, measure nothing")
    arguments = parser.parse_args()
    print(markdown() if arguments.markdown else json.dumps(measured(quick=arguments.quick)))


def measured(*, quick: bool) -> dict[str, object]:
    """Return every measurement and every table."""
    repeats, worlds = (5, (4, 64)) if quick else (25, WORLDS)
    ranks = {world: (0, world // 2, world - 1) for world in WORLDS}
    return {
        "question": "what one rank of thousands pays",
        "rounds": ROUNDS,
        "microbatch_rows": MICROBATCH_ROWS,
        "rows": ALL_ROWS,
        "data": {world: {rank: data_of(rank, world, repeats) for rank in ranks[world]} for world in WORLDS},
        "checkpoint": {
            "torch": {world: torch_plan(world, tensors=20) for world in worlds},
            "own": {world: own_plan(world, tensors=20 if quick else 320, repeats=repeats) for world in WORLDS},
            "rank_0": {world: rank_0(world, tensors=320, repeats=min(repeats, 5)) for world in WORLDS},
            "opened_files": {world: opened_files(world, tensors=20) for world in worlds},
        },
        "tables": tables(),
        "threads": torch.get_num_threads(),
        "augend": augend.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}",
    }


# ------------------------------------------------------------------ one rank of many, in one process


@contextmanager
def fake_world(rank: int, world: int) -> Iterator[None]:
    """Be one rank of a world whose others do not exist: collectives return at once, with meaningless values."""
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def milliseconds(call: Callable[[], object], repeats: int) -> float:
    """Return the least time of a call: what else the machine does only adds to it."""
    times = []
    for _ in range(repeats):
        begun = time.perf_counter()
        call()
        times.append(time.perf_counter() - begun)
    return round(1000 * min(times), 4)


def peak_bytes(call: Callable[[], object]) -> int:
    """Return the most memory that Python and numpy held at once in a call, beyond what they had."""
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


class Numbers(torch.utils.data.Dataset[int]):
    """Ten billion rows that take no memory: row i is i."""

    def __len__(self) -> int:
        return ALL_ROWS

    def __getitem__(self, index: int) -> int:
        return index

    def __getitems__(self, indices: Sequence[int]) -> list[int]:
        return list(indices)


def data_of(rank: int, world: int, repeats: int) -> dict[str, object]:
    """Measure what dealing, fetching and restoring one batch cost a rank whose share is always eight micro-batches."""
    with fake_world(rank, world):
        batch_rows = world * ROUNDS * MICROBATCH_ROWS
        fresh, data = (
            augend.Batches(Numbers(), batch_size=batch_rows, microbatch_size=MICROBATCH_ROWS, seed_random=False)
            for _ in range(2)
        )
        onward, batches = iter(fresh), iter(data)
        state = data.state_dict()
        state["step"] = data.steps_per_epoch // 2
        owner = Owner()
        data.register(owner)
        state["ledger"] = [[batch_rows // 2, False]]

        def deal() -> list[object]:
            return list(Rounds(batch_rows, 0, MICROBATCH_ROWS, rank, world))

        def fetch() -> int:
            return sum(len(microbatch[0]) for microbatch in next(onward))

        def restore() -> int:
            data.load_state_dict(state)
            return sum(len(microbatch[0]) for microbatch in next(batches).remaining(owner))

        share = ROUNDS * MICROBATCH_ROWS
        if (fetch(), restore()) != (share, share // 2):
            raise RuntimeError(f"rank {rank} of {world} did not get its share of {share} rows, and half of it")
        return {
            "deal_ms": milliseconds(deal, repeats),
            "fetch_ms": milliseconds(fetch, repeats),
            "fetch_peak_bytes": peak_bytes(fetch),
            "restore_ms": milliseconds(restore, repeats),
            "restore_peak_bytes": peak_bytes(restore),
            "state_bytes": len(json.dumps(state)),
        }


class Owner:
    """Stands for an accumulator in the ledger of the data."""


# ------------------------------------------------------------------ who writes what


def torch_plan(world: int, tensors: int) -> dict[str, object]:
    """Measure torch's global plan, which rank 0 makes of the items of every rank, for so many sharded tensors."""
    plans = [SavePlan([item(name, rank, world) for name in range(tensors)], planner_data={}) for rank in range(world)]
    planner = DefaultSavePlanner()
    planner.set_up_planner({}, is_coordinator=True)
    begun = time.perf_counter()
    _, metadata = planner.create_global_plan(plans)
    seconds = time.perf_counter() - begun
    return {
        "items": world * tensors,
        "rank_0_ms": round(1000 * seconds, 2),
        "rank_0_gathers_bytes": len(pickle.dumps(plans)),
        "rank_0_metadata_bytes": len(pickle.dumps(metadata)),
    }


def item(name: int, rank: int, world: int) -> WriteItem:
    """Return what a rank tells torch's planner about its part of one tensor: a row of it."""
    offsets, sizes = torch.Size([rank, 0]), torch.Size([1, 8])
    data = TensorWriteData(
        ChunkStorageMetadata(offsets, sizes), TensorProperties(torch.float32), torch.Size([world, 8])
    )
    return WriteItem(MetadataIndex(f"layers.{name}.weight", offsets), WriteItemType.SHARD, tensor_data=data)


def own_plan(world: int, tensors: int, repeats: int) -> dict[str, object]:
    """Measure how a rank finds, and copies, what it writes of so many tensors, of eight elements on each rank.

    Ranks tell each other one number a tensor, who is the first that holds it; the fake group leaves that out.
    """
    with fake_world(world - 1, world):
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
        sharded = spread_over(mesh, (Shard(0), Shard(0)), tensors)
        replicas = spread_over(mesh, (Replicate(), Shard(0)), tensors)
        if (len(chunks_to_write(sharded)), len(chunks_to_write(replicas))) != (tensors, 0):
            raise RuntimeError(f"the last rank of {world} does not write all of its shards, and nothing of a replica")
        return {
            "tensors": tensors,
            "rank_ms": milliseconds(lambda: chunks_to_write(sharded), repeats),
            "rank_peak_bytes": peak_bytes(lambda: chunks_to_write(sharded)),
            "rank_without_a_part_ms": milliseconds(lambda: chunks_to_write(replicas), repeats),
        }


def spread_over(mesh: DeviceMesh, placements: tuple[Placement, ...], tensors: int) -> dict[str, DTensor]:
    """Return tensors of a row for each rank."""
    layout = Layout(mesh, placements)
    shape = [mesh.size(), 8]
    return {f"layers.{each}.weight": layout.spread(torch.zeros(layout.cut(shape)[0]), shape) for each in range(tensors)}


def chunks_to_write(state: dict[str, DTensor]) -> dict[str, Chunk]:
    """Return what this rank writes of a part."""
    captured = _Captured(None, PartRecord("", {}, []), {name: (one, chunk_of(one)) for name, one in state.items()})
    return _written_here({"part": captured}, ALONE)["part"]


def rank_0(world: int, tensors: int, repeats: int) -> dict[str, object]:
    """Measure what rank 0 makes of every rank's record of each of its files, and what every rank reads of it later."""
    record = FileRecord(2**30, "0" * 64)
    files = {f"{part}/{shard_name(rank)}": record for part in PARTS for rank in range(world)}
    shapes = {f"layers.{index}.weight": TensorRecord("float32", [8192, 8192]) for index in range(tensors)}
    manifest = Manifest(
        **dict.fromkeys(("epoch", "step", "rows_done", "microbatch", "count", "updates"), 0),
        **dict.fromkeys(("created", "augend", "torch"), ""),
        world=world,
        parts={part: PartRecord("sums", shapes, []) for part in PARTS},
        files=files,
    )
    text = to_bytes(manifest)
    return {
        "files": len(files),
        "tensors_of_a_part": tensors,
        "manifest_bytes": len(text),
        "bytes_a_file": round((len(text) - len(to_bytes(replace(manifest, files={})))) / len(files), 1),
        "write_ms": milliseconds(lambda: to_bytes(manifest), repeats),
        "read_ms": milliseconds(lambda: from_bytes(text), repeats),
    }


def opened_files(world: int, tensors: int) -> dict[str, object]:
    """Measure how long a rank looks for its own parts of a few tensors in the files of as many ranks."""
    names = [f"layers.{index}.weight" for index in range(tensors)]
    own = {name: torch.zeros(1, 8) for name in names}
    with tempfile.TemporaryDirectory() as folder, fake_world(world // 2, world):
        for rank in range(world):
            with (Path(folder) / shard_name(rank)).open("wb") as file:
                file.writelines(pieces(own, {name: [rank, 0] for name in names}))
        layout = Layout(init_device_mesh("cpu", (world,)), (Shard(0),))
        targets = {name: layout.spread(torch.ones(1, 8), [world, 8]) for name in names}
        took = milliseconds(lambda: read_part(Path(folder), targets), 3)
        if any(bool(target.to_local().any()) for target in targets.values()):
            raise RuntimeError(f"the parts of rank {world // 2} of {world} were not found in the files")
    return {"files": world, "tensors": tensors, "rank_ms": took, "microseconds_a_file": round(1000 * took / world, 1)}


# ------------------------------------------------------------------ bytes, by formula


@dataclass(frozen=True)
class Job:
    """A model and the ranks that train it.

    Args:
        name: How it is called in the tables.
        parameters: How many; all trained, stored in float32.
        tensors: How many they are.
        largest: Parameters of the largest module that is wrapped by itself: what is whole at once under FSDP2.
        world: All ranks.
        shard: Ranks of one whole copy of the model under HSDP.
    """

    name: str
    parameters: int
    tensors: int
    largest: int
    world: int
    shard: int


JOBS = (
    Job("1 B", 10**9, 147, 50 * 10**6, world=8, shard=4),
    Job("70 B", 70 * 10**9, 723, 856 * 10**6, world=512, shard=64),
    Job("1 T", 10**12, 1155, 8 * 10**9, world=4096, shard=512),
)
MODES = ("replicated, every", "replicated, last", "FSDP2", "HSDP")
WORK_BYTES = {"float32": 4, "float64": 8}
STORED = 4  # bytes of a float32 parameter, of its gradient, and of each of AdamW's two moments
COMPUTE = 2  # bytes of a parameter on its way to a bfloat16 forward
BUCKET = 2**23  # elements that replicated ranks add up at a time
INT64 = 8
SLOTS = 16  # int64 of one message between ranks


def share(size: int, ranks: int) -> int:
    """Return the largest part of ``size`` bytes that one of so many ranks holds."""
    return -(-size // ranks)


def scattered(size: int, ranks: int) -> int:
    """Return what each rank sends in a ring reduce-scatter, or all-gather, of ``size`` bytes (Patarasuk, Yuan 2009)."""
    return size - share(size, ranks)


def ranks_of_a_copy(job: Job, mode: str) -> int:
    """Return how many ranks hold one copy of parameters and moments together."""
    return {"FSDP2": job.world, "HSDP": job.shard}.get(mode, 1)


def held(job: Job, mode: str, work: int) -> dict[str, int]:
    """Return the bytes that a rank holds: always, in a micro-batch beside that, and at the end of a batch beside that.

    Activations, and what PyTorch's allocator keeps, are not in it.
    """
    copies = ranks_of_a_copy(job, mode)
    parts = {
        "parameters": share(STORED * job.parameters, copies),
        "moments": share(2 * STORED * job.parameters, copies),
        "sums": share(work * job.parameters, job.world if mode == "replicated, every" else copies),
    }
    in_a_microbatch = {
        "replicated, every": STORED * job.parameters + 2 * work * BUCKET,  # all gradients, until ranks are added up
        "replicated, last": STORED * job.largest,  # each gradient goes into its sum at once
    }.get(mode, (3 * COMPUTE + work) * job.largest)  # two modules whole, one's gradient, and that in the sums' dtype
    # Complete sums: gathered, or added over replicas in a copy; the only ones of FSDP2 are already there.
    complete = {"FSDP2": 0, "replicated, every": work * job.parameters}.get(mode, share(work * job.parameters, copies))
    narrowed = share(STORED * job.parameters, copies) if work != STORED else 0  # else .grad is the sum itself, divided
    most = sum(parts.values()) + max(in_a_microbatch, complete + narrowed)
    return {**parts, "in_a_microbatch": in_a_microbatch, "at_the_end": complete + narrowed, "most": most}


def moved(job: Job, mode: str, work: int) -> dict[str, int]:
    """Return the bytes that a rank sends for each of its micro-batches, and once for each batch."""
    whole, copies = work * job.parameters, ranks_of_a_copy(job, mode)
    if mode == "replicated, every":
        return {"microbatch": scattered(whole, job.world), "batch": scattered(whole, job.world)}
    if mode == "replicated, last":
        return {"microbatch": 0, "batch": 2 * scattered(whole, job.world)}
    microbatch = 2 * scattered(COMPUTE * job.parameters, copies) + scattered(whole, copies)
    return {"microbatch": microbatch, "batch": 2 * scattered(share(whole, copies), job.world // copies)}


def written(job: Job, mode: str, work: int) -> dict[str, int]:
    """Return the bytes of a checkpoint in the middle of a batch, and how many of them the busiest rank writes."""
    copies = ranks_of_a_copy(job, mode)
    state, sums = 3 * STORED * job.parameters, work * job.parameters
    if mode == "replicated, every":
        return {"all": state + sums, "busiest_rank": state + share(sums, job.world)}
    return {"all": state + sums, "busiest_rank": share(state, copies) + share(sums, copies)}


def control(job: Job, terms: int = 1) -> dict[str, int]:
    """Return the bytes of what ranks tell each other: what one sends into each reduction, and gets of the others.

    A question of up to 14 numbers is one message of a fixed size, with a mark of what is asked in front, so that ranks
    that ask different things find out; a longer one comes behind such a message. One is asked where a batch begins, one
    in each micro-batch under FSDP2, and three at the end: whether a rank has an error, whether all ask for the same,
    and which parameters were used. Then come the moments of every term as fixed-point numbers, and one
    float64 of every rank, from which each forms the norm.
    """
    question = INT64 * SLOTS
    used = 2 * terms * job.tensors
    return {
        "begin_maximum": question,
        "microbatch_maximum": question,
        "end_maximum": 3 * question + (INT64 * used if used > SLOTS - 2 else 0),
        "end_total": INT64 * (2 + terms * LIMBS),
        "end_gather": INT64 * job.world,
    }


def tables() -> list[dict[str, object]]:
    """Return every number of the tables, in bytes."""
    return [
        {
            "job": job.name,
            "world": job.world,
            "mode": mode,
            "sums": dtype,
            "held": held(job, mode, work),
            "sent": moved(job, mode, work),
            "written": written(job, mode, work),
            "control": control(job),
        }
        for job in JOBS
        for mode in MODES
        for dtype, work in WORK_BYTES.items()
    ]


def readable(size: int) -> str:
    """Return bytes in decimal units, to three digits."""
    for power, unit in ((12, "TB"), (9, "GB"), (6, "MB"), (3, "kB")):
        if size >= 10**power:
            return f"{size / 10**power:.3g} {unit}" if size < 999.5 * 10**power else f"{size / 10**power:.0f} {unit}"
    return f"{size} B"


def markdown() -> str:
    """Return the tables of the page."""
    return "\n\n".join([*(table(job) for job in JOBS), control_table()])


COLUMNS = (
    *("sums in", "parameters", "moments", "sums", "micro-batch", "end", "most"),
    *("sent a micro-batch", "sent a batch", "written"),
)


def table(job: Job) -> str:
    """Return the table of one job."""
    lines = [
        f"**{job.name} parameters, {job.world:,} ranks, HSDP {job.world // job.shard} x {job.shard}**",
        "",
        f"| mode | {' | '.join(COLUMNS)} |",
        "| --- " * (1 + len(COLUMNS)) + "|",
    ]
    for mode in MODES:
        for dtype, work in WORK_BYTES.items():
            sent = moved(job, mode, work)
            sizes = [*held(job, mode, work).values(), *sent.values(), written(job, mode, work)["busiest_rank"]]
            lines.append(f"| {mode} | {dtype} | {' | '.join(map(readable, sizes))} |")
    return "\n".join(lines)


def control_table() -> str:
    """Return the table of control traffic."""
    head = "| job | tensors | begin, MAX | micro-batch, MAX | end, MAX | end, SUM | end, gather |"
    sizes = {job: " | ".join(map(readable, control(job).values())) for job in JOBS}
    lines = [f"| {job.name} | {job.tensors:,} | {row} |" for job, row in sizes.items()]
    return "\n".join([head, "| --- " * 7 + "|", *lines])


if __name__ == "__main__":
    main()
