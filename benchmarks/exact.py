"""What do exact sums cost? One JSON line: time by size of micro-batches, memory by parameter, bytes between ranks.

``steps``: the same loop with float32 and with exact sums, in one run, their steps alternating; medians. A batch is two
micro-batches of a Llama of 3.3 million parameters, one thread. The optimizer is AdamW, fused for the matrices, which
are cut between rows of a multiple of 16 elements, and not for the vectors; so it is the same in both loops. ``ratio``
is the median of exact over float32 of each pair, and ``ratio_of_fastest`` that of the fastest step of each. What is
added costs time for each parameter and not for each token, so the ratio falls as the micro-batch grows. Times are
those of the processor: the clock's, where nothing else runs, and less disturbed where something does.

``parts``: adding one micro-batch's gradients; the end of the batch without the optimizer (mean, norm, clip); the
optimizer, fused or not. ``memory``: the sums, and the most that a process held beyond the parameters, for a large
model of square layers: while it adds up micro-batches, and at the end of the batch, ``.grad`` included. ``wire``: what
each of two ranks sends to add up one micro-batch.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import augend

DTYPES = ("float32", "exact")
TOKENS = (256, 1024, 4096)  # of a micro-batch
LENGTH = 256
MICROBATCHES = 2
LARGE = {"layers": 8, "width": 3072}  # 75 million parameters; each layer is so large that what it frees is free at once
STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")  # Linux alone tells how much a process held
KIBIBYTE = 1024
SETTLED = 3  # steps before the first that counts; in the first, exact sums take their scales


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=9, help="at 4,096 tokens; more where steps are shorter")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    result = {
        "question": "the cost of exact sums",
        "parameters": sum(one.numel() for one in llama().parameters()),
        "steps": [steps(tokens, arguments.pairs * min(4, TOKENS[-1] // tokens)) for tokens in TOKENS],
        "parts_ms": {dtype: parts(dtype) for dtype in DTYPES},
        "memory_bytes_per_parameter": {dtype: apart(memory, dtype) for dtype in DTYPES} if STATUS.exists() else None,
        "wire_bytes_per_parameter": {
            dtype: {kind: wire(dtype, kind) for kind in ("replicated", "FSDP2")} for dtype in DTYPES
        },
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "augend": augend.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}",
    }
    print(json.dumps(result))


def llama() -> torch.nn.Module:
    """Return the model, with the same weights each time."""
    torch.manual_seed(0)
    return augend.models.Llama(width=256, layers=5, heads=8, hidden=512, max_length=LENGTH)


def adamw(model: torch.nn.Module, *, fused: bool) -> torch.optim.Optimizer:
    """Return AdamW, fused where it is asked for and exact mode lets it."""
    every = list(model.parameters())
    matrices, vectors = [one for one in every if one.ndim > 1], [one for one in every if one.ndim == 1]
    return torch.optim.AdamW([{"params": matrices, "fused": fused}, {"params": vectors, "fused": False}], lr=1e-3)


class Loop:
    """The demo's loop, with one kind of sums."""

    def __init__(self, dtype: str, tokens: int, *, fused: bool = True) -> None:
        self.model = llama()
        self.optimizer = adamw(self.model, fused=fused)
        self.grads = augend.Accumulator(self.model, dtype=dtype)
        rows = tokens // LENGTH
        texts = torch.randint(0, 256, (8 * MICROBATCHES * rows, LENGTH))
        self.batches = iter(augend.Batches(texts, batch_size=MICROBATCHES * rows, microbatch_size=rows))
        for _ in range(SETTLED):
            self.step()

    def step(self) -> float:
        """Take a step; return its seconds."""
        batch = next(self.batches)
        begun = time.process_time()
        for microbatch in self.grads.microbatches(batch):
            tokens = microbatch[0]
            self.grads.backward(augend.losses.causal_lm(self.model(tokens), tokens))
        done = self.grads.step(self.optimizer, max_norm=1.0)
        seconds = time.process_time() - begun
        return seconds if done.offers == 1 else self.step()  # a batch that was offered again would be twice as long


def steps(tokens: int, pairs: int) -> dict[str, object]:
    """Return the medians of alternating steps."""
    loops = {dtype: Loop(dtype, tokens) for dtype in DTYPES}
    seconds: dict[str, list[float]] = {dtype: [] for dtype in DTYPES}
    for pair in range(pairs):
        for dtype in DTYPES if pair % 2 else reversed(DTYPES):
            seconds[dtype].append(loops[dtype].step())
    ratios = [exact / plain for plain, exact in zip(seconds["float32"], seconds["exact"], strict=True)]
    medians = {f"{dtype}_ms": milliseconds(seconds[dtype]) for dtype in DTYPES}
    lower, middle, upper = (round(one, 3) for one in statistics.quantiles(ratios, n=4))
    fastest = round(min(seconds["exact"]) / min(seconds["float32"]), 3)
    counts = {"tokens": tokens, "pairs": pairs}
    return {**counts, **medians, "ratio": middle, "ratio_quartiles": [lower, upper], "ratio_of_fastest": fastest}


def parts(dtype: str) -> dict[str, float]:
    """Return the medians of what a batch consists of besides forward and backward."""
    loop = Loop(dtype, LENGTH)
    gradients = {name: torch.randn_like(one) for name, one in loop.model.named_parameters()}
    adding, ending = [], []
    for _ in range(21):
        offered = loop.grads.microbatches(next(loop.batches))
        adding += [timed(lambda: loop.grads.add(gradients, 1)) for _ in offered]
        ending.append(timed(lambda: loop.grads.finish(max_norm=1.0)))
    result = {"adding": milliseconds(adding), "end_without_optimizer": milliseconds(ending)}
    for fused in (True, False):
        optimizer = adamw(loop.model, fused=fused)
        result["optimizer_fused" if fused else "optimizer"] = milliseconds(
            [timed(optimizer.step) for _ in range(21)][1:]
        )
    return result


def timed(call: Callable[[], object]) -> float:
    """Return the seconds of a call."""
    begun = time.process_time()
    call()
    return time.process_time() - begun


def milliseconds(seconds: list[float]) -> float:
    """Return a median."""
    return round(1000 * statistics.median(seconds), 2)


def apart(function: Callable[..., Any], *arguments: object) -> Any:
    """Call a function in a process of its own, whose memory is its own too."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        return process.submit(function, *arguments).result()


def memory(dtype: str) -> dict[str, float]:
    """Return bytes for each parameter, beyond the parameters themselves."""
    torch.set_num_threads(1)
    width = LARGE["width"]
    model = torch.nn.Sequential(*[torch.nn.Linear(width, width, bias=False) for _ in range(LARGE["layers"])])
    parameters = sum(one.numel() for one in model.parameters())
    grads = augend.Accumulator(model, dtype=dtype)
    batches = iter(augend.Batches(torch.randn(8, width), batch_size=4, microbatch_size=2))
    result, before = {}, held()
    for _ in range(2):  # the second counts: in the first, exact sums take their scales
        model.zero_grad()
        held()
        batch = next(batches)
        for microbatch in grads.microbatches(batch):
            grads.backward(augend.losses.mse(model(microbatch[0]), microbatch[0]))
        result["sums"] = round(sum(one.nbytes for one in grads.pending.values()) / parameters, 2)
        result["most_while_adding"] = round((peak() - before) / parameters, 2)
        held()
        grads.finish(max_norm=1.0)
        result["most_at_the_end"] = round((peak() - before) / parameters, 2)
    return result


def held() -> int:
    """Forget the peak; return the bytes that the process holds now."""
    CLEAR.write_text("5", "ascii")
    return status("VmRSS")


def peak() -> int:
    """Return the most bytes that the process held since then."""
    return status("VmHWM")


def status(name: str) -> int:
    """Return a size that Linux tells of this process, in bytes."""
    line = next(line for line in STATUS.read_text("ascii").splitlines() if line.startswith(name))
    return KIBIBYTE * int(line.split()[1])


def wire(dtype: str, kind: str) -> float:
    """Return the bytes that each of two ranks sends in one micro-batch, for each parameter."""
    with (
        tempfile.TemporaryDirectory() as directory,
        ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as ranks,
    ):
        results = [ranks.submit(sent, rank, str(Path(directory) / "store"), dtype, kind) for rank in range(2)]
        return max(one.result() for one in results)


def sent(rank: int, store: str, dtype: str, kind: str) -> float:
    """Run the second batch of a small model, in which exact sums have their grids, and count."""
    torch.set_num_threads(1)
    limit = timedelta(seconds=60)
    dist.init_process_group("gloo", rank=rank, world_size=2, store=dist.FileStore(store, 2), timeout=limit)
    model = torch.nn.Sequential(torch.nn.Linear(32, 64, bias=False), torch.nn.Linear(64, 32, bias=False))
    for parameter in model.parameters():
        torch.nn.init.ones_(parameter)
    parameters = sum(one.numel() for one in model.parameters())
    if kind == "FSDP2":
        fully_shard(model)
    grads = augend.Accumulator(model, dtype=dtype)
    moved = 0
    for batch in augend.Batches(torch.randn(16, 32), batch_size=8, microbatch_size=4, epochs=1):
        with counted() as sizes:
            for microbatch in grads.microbatches(batch):
                grads.backward(augend.losses.mse(model(microbatch[0]), microbatch[0]))
            moved = sum(sizes)
        grads.finish()
    dist.destroy_process_group()
    return round(moved / parameters, 2)


@contextmanager
def counted() -> Iterator[list[int]]:
    """Note the bytes that a rank sends in each reduce-scatter of this block: all of its gradients but its own part."""
    sizes: list[int] = []
    plain = {name: getattr(dist, name) for name in ("reduce_scatter", "reduce_scatter_single", "reduce_scatter_tensor")}

    def noting(name: str) -> Callable[..., Any]:
        def call(output: torch.Tensor, *arguments: Any, **options: Any) -> Any:
            sizes.append(output.nbytes)  # of two ranks, the other's part is as large
            return plain[name](output, *arguments, **options)

        return call

    for name in plain:
        setattr(dist, name, noting(name))
    try:
        yield sizes
    finally:
        for name, function in plain.items():
            setattr(dist, name, function)


if __name__ == "__main__":
    main()
