"""Train the same model in many ways and compare where it ends: ``python benchmarks/proof`` or ``make proof``.

Prints one line for each way, with the SHA-256 of all weights and of all optimizer state, and one line at the end that
says whether all are the same. Exit status 1 if not. ``--full`` is ``make proof-full``: every way that is promised.
"""

from __future__ import annotations

import argparse
import platform
import sys
import time
from dataclasses import replace

import tasks
import torch
from compare import prove
from runs import CONTROL, DEMO, MATRIX, MATRIX_CONTROL

import augend

STEPS, STEPS_OF_MATRIX = 30, 50
ROW_BYTES = 96  # of the demo's rows
ROWS_OF_MATRIX = 21  # of a batch: eleven micro-batches, so that eight ranks are in mid-batch after a round


def main() -> int:
    """Compare, and return the exit status."""
    parser = argparse.ArgumentParser(prog="benchmarks/proof", description=__doc__)
    parser.add_argument("--full", action="store_true", help="every placement, dealing, number of ranks and kill")
    full = parser.parse_args().full
    torch.set_num_threads(1)
    warm_up()
    began = time.monotonic()
    print(f"torch {torch.__version__}, Python {platform.python_version()}, {platform.machine()}, {capability()}")
    right = prove_all() if full else prove_demo()
    print(f"{time.monotonic() - began:.0f} s")
    return 0 if right else 1


def warm_up() -> None:
    """Import here, once for all forks, all of augend, and what torch imports at the first step of an optimizer."""
    for name in augend.__all__:
        getattr(augend, name)
    parameter = torch.nn.Parameter(torch.ones(1))
    parameter.grad = torch.ones(1)
    torch.optim.AdamW([parameter]).step()


def capability() -> str:
    """Return which vector instructions torch uses."""
    return f"CPU capability {torch.backends.cpu.get_cpu_capability()}, one thread a rank"


def prove_demo() -> bool:
    """Train the demo's model on one to four ranks, killed and resumed, and shuffled."""
    task = replace(tasks.demo(ROW_BYTES), batch_size=12, microbatch_size=2)
    parameters = sum(one.numel() for one in task.build().parameters())
    print(
        f"{tasks.DEMO.name}: {parameters:,} parameters, {STEPS} clipped steps of AdamW, each of {task.batch_size} "
        f"rows in micro-batches of {task.microbatch_size}.\nThe demo has 16 rows in micro-batches of 8, and rows of "
        f"more than {ROW_BYTES} bytes: this is for the time, and so that four ranks have something to do."
    )
    return prove(task, STEPS, DEMO, CONTROL)


def prove_all() -> bool:
    """Train a Llama and an MLP in every way that is promised."""
    right = []
    for make in (tasks.llama, tasks.mlp):
        task = replace(make(), batch_size=ROWS_OF_MATRIX)
        print(
            f"\n{make.__name__}: {make.__doc__.removeprefix('Return ')}\n{STEPS_OF_MATRIX} steps of AdamW, clipped, "
            f"each of {task.batch_size} rows in micro-batches of {task.microbatch_size}"
        )
        right.append(prove(task, STEPS_OF_MATRIX, MATRIX, MATRIX_CONTROL))
    return all(right)


if __name__ == "__main__":
    sys.exit(main())
