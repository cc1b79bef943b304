"""How many datapoints a second does ggml's MNIST network train, in ggml_opt_fit and in augend.ggml.fit?

python benchmarks/ggml_mnist.py [DIRECTORY] [--rows 20000] [--rounds 7]

Both train 784-500-10 with ReLU, cross entropy and AdamW on the same rows in shards of 10, from the same weights, in
physical batches of 500 and logical ones of 1000, with 5 % of the rows for validation. Each runs in a process of its
own, ggml by ctypes from the wheel libggml-python; they take turns, and while one works the other waits. Prints one line
of JSON: the median over rounds of the datapoints (of both parts) that went through in a second, on the clock and of
processors, which other processes disturb less; with one thread and with two; and the median of the rounds' own ratios.
Where there is no wheel, augend is measured alone, and the line says so.

DIRECTORY has Fashion-MNIST (Debian: dataset-fashion-mnist); without it images are noise of the same size.
"""

from __future__ import annotations

import argparse
import gzip
import importlib.metadata
import importlib.util
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

import augend
from augend.ggml import Dataset, Fit, Graph, Loss, Training, fit

ROOT = Path(__file__).parent.parent
DEBIAN = Path("/usr/share/datasets/fashion-mnist")
WIDTHS = (784, 500, 10)
PHYSICAL, LOGICAL, SHARD, SPLIT = 500, 1000, 10, 0.05
CROSS_ENTROPY, ADAMW = 2, 0  # ggml's numbers
PARAMETERS = [1e-3, 0.9, 0.999, 1e-8, 0.0, 1e-3, 0.0]  # ggml's defaults
# ggml's threads wait for each other without sleeping. Where another process wants a core, or there is none for each,
# two of them are hardly faster than one, and say nothing about ggml.
SPINS_BELOW = 1.2
THREADS = (1, 2)

Floats = npt.NDArray[np.float32]
Epochs = Callable[[int], object]  # trains an epoch, with so many threads


@dataclass(frozen=True)
class Problem:
    """Rows and first weights.

    Args:
        images: ``[rows, 784]``, from 0 to 1.
        labels: ``[rows, 10]``, one-hot.
        weights: Matrix ``[out, in]`` and bias ``[out]`` of each layer.
    """

    images: Floats
    labels: Floats
    weights: list[Floats]

    @staticmethod
    def read(path: Path, rows: int) -> Problem:
        """Read rows of Fashion-MNIST, or make some; the weights are drawn as in ggml's example, from a seed."""
        random = np.random.default_rng(0)
        if path.is_dir():
            packed = [(path / f"train-{kind}-ubyte.gz").read_bytes() for kind in ("images-idx3", "labels-idx1")]
            pixels, classes = (np.frombuffer(gzip.decompress(one), np.uint8) for one in packed)
            pixels, classes = pixels[16:].reshape(-1, WIDTHS[0])[:rows], classes[8:][:rows]
        else:
            pixels = random.integers(0, 256, (rows, WIDTHS[0]), dtype=np.uint8)
            classes = random.integers(0, WIDTHS[-1], rows)
        shapes = [shape for n, m in itertools.pairwise(WIDTHS) for shape in ((m, n), (m,))]
        return Problem(
            images=np.float32(pixels) / np.float32(255),
            labels=np.eye(WIDTHS[-1], dtype=np.float32)[classes],
            weights=[np.float32(0.01) * random.standard_normal(shape, dtype=np.float32) for shape in shapes],
        )


# --------------------------------------------------------------- both sides


def augend_epochs(problem: Problem) -> Epochs:
    """Return what trains the network in augend for an epoch, with so many threads."""
    graph = Graph()
    x = outputs = graph.tensor((WIDTHS[0], PHYSICAL))
    nodes = [graph.tensor(one.shape[::-1], parameter=True) for one in problem.weights]
    for node, values in zip(nodes, problem.weights, strict=True):
        graph.set_values(node, values)
    for place in range(0, len(nodes), 2):
        hidden = graph.relu(outputs) if place else outputs
        outputs = graph.add(graph.mul_mat(nodes[place], hidden), nodes[place + 1])
    training = Training(inputs=x, outputs=outputs, loss=Loss.CROSS_ENTROPY)
    dataset = Dataset(problem.images, problem.labels, shard=SHARD)
    options = Fit(epochs=1, logical_batch=LOGICAL, validation_split=SPLIT)

    def epoch(threads: int) -> None:
        torch.set_num_threads(threads)
        fit(graph, training, dataset, options)

    return epoch


def ggml_epochs(problem: Problem) -> Epochs:
    """Return what trains the network in ggml for an epoch, with so many threads."""
    sys.path.insert(0, str(ROOT / "tests" / "peers"))
    library = import_module("ggml_library")
    made = {
        threads: library.Training(
            data=problem.images,
            labels=problem.labels,
            weights=problem.weights,
            loss=CROSS_ENTROPY,
            kind=ADAMW,
            physical=PHYSICAL,
            logical=LOGICAL,
            split=SPLIT,
            schedule=[PARAMETERS],
            shard=SHARD,
            threads=threads,
        )
        for threads in THREADS
    }
    return lambda threads: made[threads].fit()


SIDES: dict[str, Callable[[Problem], Epochs]] = {"ggml": ggml_epochs, "augend": augend_epochs}


def serve(epoch: Epochs) -> None:
    """Train an epoch for each line that asks for one, and print its seconds, on the clock and of processors."""
    for line in sys.stdin:
        wall, processor = time.perf_counter(), time.process_time()
        epoch(int(line))
        print(json.dumps([time.perf_counter() - wall, time.process_time() - processor]), flush=True)


# ----------------------------------------------------------------- measure


class Side:
    """One of the two, in a process of its own."""

    def __init__(self, name: str, arguments: argparse.Namespace) -> None:
        command = [sys.executable, __file__, str(arguments.directory), "--rows", str(arguments.rows), "--serve", name]
        self.process = subprocess.Popen(  # noqa: S603  # this very file
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def epoch(self, threads: int) -> list[float]:
        """Return the seconds that an epoch took, on the clock and of processors."""
        print(threads, file=self.process.stdin, flush=True)
        times: list[float] = json.loads(self.process.stdout.readline())
        return times

    def close(self) -> None:
        """End the process."""
        self.process.communicate()


def measured(sides: dict[str, Side], threads: int, arguments: argparse.Namespace) -> dict[str, float]:
    """Return datapoints a second of both, which take turns, after a round that does not count."""
    taken: dict[str, list[list[float]]] = {name: [] for name in sides}
    for turn in range(arguments.rounds + 1):
        for name, side in sides.items():
            times = side.epoch(threads)
            if turn:
                taken[name].append(times)
    result: dict[str, float] = {}
    for place, clock in enumerate(("second", "processor_second")):
        for name, each in taken.items():
            median = statistics.median(times[place] for times in each)
            result[f"{name}_datapoints_per_{clock}"] = round(arguments.rows / median)
        if "ggml" in taken:
            ratios = [one[place] / other[place] for one, other in zip(taken["ggml"], taken["augend"], strict=True)]
            result[f"times_as_many_per_{clock}"] = round(statistics.median(ratios), 2)
    return result


def main(arguments: argparse.Namespace) -> None:
    """Measure and print, or be one of the two sides."""
    if arguments.serve:
        serve(SIDES[arguments.serve](Problem.read(arguments.directory, arguments.rows)))
        return
    has_ggml = importlib.util.find_spec("libggml") is not None
    sides = {name: Side(name, arguments) for name in SIDES if has_ggml or name != "ggml"}
    results: dict[int, dict[str, float | bool]] = {count: {**measured(sides, count, arguments)} for count in THREADS}
    for side in sides.values():
        side.close()
    if has_ggml:
        first, second = (results[count]["ggml_datapoints_per_second"] for count in THREADS)
        results[THREADS[1]]["ggml_spins"] = second < SPINS_BELOW * first
    result = {
        "question": "datapoints a second of ggml's MNIST network, augend.ggml.fit against ggml_opt_fit",
        "rows": arguments.rows,
        "data": "Fashion-MNIST" if arguments.directory.is_dir() else "noise",
        "rounds": arguments.rounds,
        "threads": results,
        "processors": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
        "ggml": importlib.metadata.version("libggml-python") if has_ggml else "libggml-python is not installed",
        "augend": augend.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}",
    }
    print(json.dumps(result))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", nargs="?", type=Path, default=DEBIAN)
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--serve", choices=[*SIDES], help="be the process of one side")
    main(parser.parse_args())
