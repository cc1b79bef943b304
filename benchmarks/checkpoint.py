"""What does a checkpoint cost the loop? One JSON line: the stall of a background save in steps, and the writing speed.

The model is that of ``make demo``. Steps with and without a save alternate; a pair is one of each, three steps long,
so that all of the writing falls into it. The save is made in the middle of a batch: sums are in it, too.
``dd conv=fsync`` writes as many bytes to the same place, for comparison.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

import torch

import augend

BATCH_ROWS, MICROBATCH_ROWS, LENGTH = 16, 8, 192
STEPS = 3  # of one measurement: longer than a save takes


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--directory", type=Path, default=None, help="where to write; a temporary one if not given")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
        print(json.dumps(measured(Path(directory), arguments.pairs)))


def measured(directory: Path, pairs: int) -> dict[str, object]:
    """Return the medians of many pairs."""
    loop = Loop(directory / "checkpoints")
    for _ in range(3):  # warm up, and let the first save make its buffers
        loop.steps(save=True)
    plain, saved, calls, writes = [], [], [], []
    for _ in range(pairs):
        plain.append(loop.steps(save=False))
        saved.append(loop.steps(save=True))
        calls.append(loop.call_seconds)
    loop.run.close()
    with_sums = loop.directory
    for _ in range(5):
        begun = time.perf_counter()
        path = loop.run.save()
        loop.run.wait()
        writes.append(time.perf_counter() - begun)
    size = augend.inspect(path).bytes
    loop.run.close()
    step = statistics.median(plain) / STEPS
    stall = statistics.median(after - before for after, before in zip(saved, plain, strict=True))
    return {
        "benchmark": "checkpoint",
        "pairs": pairs,
        "step_seconds": round(step, 5),
        "call_seconds": round(statistics.median(calls), 5),
        "call_in_steps": round(statistics.median(calls) / step, 4),
        "stall_in_steps": round(stall / step, 4),
        "bytes": size,
        "save_bytes_per_second": round(size / statistics.median(writes)),
        "dd_bytes_per_second": round(size / statistics.median(dd(with_sums, size) for _ in range(5))),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "machine": platform.machine(),
        "processor": platform.processor(),
    }


class Loop:
    """The demo's loop, and a checkpoint in the middle of a batch where it is asked for."""

    def __init__(self, directory: Path) -> None:
        torch.manual_seed(0)
        self.directory = directory
        self.model = augend.models.Llama(width=192, layers=3, heads=6, kv_heads=2, hidden=384, max_length=256)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3)
        self.grads = augend.Accumulator(self.model)
        tokens = torch.randint(0, 256, (256, LENGTH))
        self.data = augend.Batches(tokens, batch_size=BATCH_ROWS, microbatch_size=MICROBATCH_ROWS)
        self.batches = iter(self.data)
        self.run = augend.Checkpoint(
            directory, model=self.model, optimizer=self.optimizer, grads=self.grads, data=self.data
        )
        self.call_seconds = 0.0

    def steps(self, *, save: bool) -> float:
        """Take a few steps, the first with a save after its first micro-batch or without; return the seconds."""
        self.run.wait()
        begun = time.perf_counter()
        for index in range(STEPS):
            for number, microbatch in enumerate(self.grads.microbatches(next(self.batches))):
                tokens = microbatch[0]
                self.grads.backward(augend.losses.causal_lm(self.model(tokens), tokens))
                if save and index == 0 and number == 0:
                    called = time.perf_counter()
                    self.run.save()
                    self.call_seconds = time.perf_counter() - called
            self.grads.step(self.optimizer, max_norm=1.0)
        return time.perf_counter() - begun


def dd(directory: Path, size: int) -> float:
    """Return the seconds that dd takes to write so many bytes to disk."""
    target = directory / "dd"
    begun = time.perf_counter()
    command = ["dd", "if=/dev/zero", f"of={target}", f"bs={size}", "count=1", "conv=fsync"]
    subprocess.run(command, check=True, capture_output=True)  # noqa: S603  # a fixed command
    seconds = time.perf_counter() - begun
    target.unlink()
    return seconds


if __name__ == "__main__":
    main()
