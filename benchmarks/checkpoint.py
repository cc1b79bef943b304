"""What does a checkpoint cost the loop? One JSON line: how long a background save stalls it, and how fast it writes.

The model is that of ``make demo``, saved in the middle of a batch, so that pending sums are in it too. ``call`` is what
the loop waits for: the copy of everything. ``slowdown`` is how much longer the steps take in which the files are
written, all together; part of it is processor time that training would have used where all cores are busy. Steps with
and without a save alternate. ``dd conv=fsync`` writes as many bytes to the same place, for comparison.
"""

from __future__ import annotations

import argparse
import json
import os
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
        print(json.dumps(measured(Path(directory) / "checkpoints", arguments.pairs)))


def measured(directory: Path, pairs: int) -> dict[str, object]:
    """Return the medians of many pairs."""
    loop = Loop(directory)
    for _ in range(3):  # warm up
        loop.steps(save=True)
    plain, saved, calls = [], [], []
    for _ in range(pairs):
        plain.append(loop.steps(save=False))
        saved.append(loop.steps(save=True))
        calls.append(loop.call_seconds)
    loop.run.wait()
    size = augend.inspect(directory).bytes
    writes = [loop.write_seconds() for _ in range(9)]
    copies = [dd(directory / "dd", size) for _ in range(9)]
    loop.run.close()
    step = statistics.median(plain) / STEPS
    slowdown = statistics.median(after - before for after, before in zip(saved, plain, strict=True))
    return {
        "question": "the cost of a background save",
        "pairs": pairs,
        "bytes": size,
        "step_ms": round(1000 * step, 2),
        "call_ms": round(1000 * statistics.median(calls), 2),
        "call_in_steps": round(statistics.median(calls) / step, 4),
        "slowdown_in_steps": round(slowdown / step, 4),
        "write_ms": round(1000 * statistics.median(writes), 2),
        "dd_ms": round(1000 * statistics.median(copies), 2),
        "write_mb_per_second": round(size / statistics.median(writes) / 1e6, 1),
        "dd_mb_per_second": round(size / statistics.median(copies) / 1e6, 1),
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "augend": augend.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}",
    }


class Loop:
    """The demo's loop, and a checkpoint in the middle of a batch where it is asked for."""

    def __init__(self, directory: Path) -> None:
        torch.manual_seed(0)
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

    def write_seconds(self) -> float:
        """Save and wait for the disk, in the middle of a batch; return the seconds of the writing alone."""
        self.run.wait()
        for microbatch in self.grads.microbatches(next(self.batches)):
            self.grads.backward(augend.losses.causal_lm(self.model(microbatch[0]), microbatch[0]))
            break
        self.run.save()
        begun = time.perf_counter()
        self.run.wait()
        seconds = time.perf_counter() - begun
        self.grads.reset()
        return seconds


def dd(target: Path, size: int) -> float:
    """Return the seconds that dd takes to write so many bytes to disk."""
    begun = time.perf_counter()
    command = ["dd", "if=/dev/zero", f"of={target}", f"bs={size}", "count=1", "conv=fsync"]
    subprocess.run(command, check=True, capture_output=True)  # noqa: S603  # a fixed command
    seconds = time.perf_counter() - begun
    target.unlink()
    return seconds


if __name__ == "__main__":
    main()
