"""A program of several real processes that ends while it is saved in the background: a forked rank ends otherwise."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import augend

SECONDS = 120
PROGRAM = """
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

import augend

dist.init_process_group("gloo", timeout=timedelta(seconds=30))
torch.manual_seed(0)
model = torch.nn.Linear(3000, 3000)
run = augend.Checkpoint(sys.argv[1], model=model)  # held until the interpreter ends: else its own end would wait
run.save()
if sys.argv[2] == "by an error":
    raise ValueError("on all ranks")
"""


@pytest.mark.long
@pytest.mark.parametrize("ends", ["as it should", "by an error"])
def test_a_save_outlives_its_program(tmp_path: Path, ends: str) -> None:
    """What save() began is there, whole, although nobody called wait() or close() before the interpreters ended."""
    (tmp_path / "program.py").write_text(PROGRAM, encoding="utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "program.py"]
    done = subprocess.run(
        [*command, "saved", ends],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert (ends == "as it should") == (done.returncode == 0), done.stderr
    torch.manual_seed(0)
    expected, found = nn.Linear(3000, 3000), nn.Linear(3000, 3000)
    run = augend.Checkpoint(tmp_path / "saved", model=found)
    position = run.load_latest()
    run.close()
    assert position is not None, done.stderr
    assert () == tuple(position.damaged)
    assert torch.equal(expected.weight, found.weight)
