"""A run that is killed twenty times comes to the same weights, to the bit."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import augend
from augend._cli import main

KILLS = 20
STEPS = 240
SETTINGS = [
    f"--set=steps={STEPS}",
    "--set=model.dropout=0.2",
    "--set=checkpoint.every_seconds=1e-3",
    "--set=validate.every_steps=40",
]
SECONDS = 120


def newest() -> augend.Inspection | None:
    """Return what the killed run has saved so far."""
    try:
        return augend.inspect("killed")
    except augend.errors.CheckpointError:
        return None


def train_until(target: int, *arguments: str) -> str:
    """Run a command until it has saved a part of a batch of its own making, at the target step or after it; kill it.

    Returns:
        What it has printed.
    """
    before = newest()
    command = [sys.executable, "-m", "augend", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        end = time.monotonic() + SECONDS
        while (now := newest()) is None or now == before or now.microbatch == 0 or now.step < target:
            assert None is process.poll(), process.communicate()
            assert time.monotonic() < end
        time.sleep(random.uniform(0, 0.1))  # noqa: S311 - any moment will do
        process.kill()
        output, message = process.communicate(timeout=SECONDS)
    assert (-signal.SIGKILL, "") == (process.returncode, message)
    return output


def check_resumed(output: str, found: augend.Inspection) -> None:
    """Compare the position that a resume printed with what was on disk before it."""
    (line,) = re.findall(r"^resumed     (.*)$", output, re.MULTILINE)
    rows = f", {found.rows_done} rows done" if found.rows_done else ""
    assert f"step {found.step}{rows}, from {found.path.name}" == line


def steps(run: str) -> list[dict]:
    """Return the lines of a run's steps, without what no two runs share."""
    lines = [json.loads(line) for line in Path(run, "metrics.jsonl").read_text("utf-8").splitlines()]
    own = {"seconds", "memory_bytes", "restarts"}
    return [{key: value for key, value in line.items() if key not in own} for line in lines if "rows" in line]


@pytest.mark.long
def test_twenty_kills_change_no_bit(folder, capsys):
    """A llama with dropout, killed 20 times: each resume says where it is; weights, losses, counts are as without."""
    assert 0 == main(["fit", "llama.toml", "--run-dir", "whole", *SETTINGS])
    targets = sorted(random.sample(range(STEPS * 2 // 5), KILLS))
    train_until(targets[0], "fit", "llama.toml", "--run-dir", "killed", *SETTINGS)
    for target in targets[1:]:
        found = newest()
        check_resumed(train_until(target, "resume", "killed"), found)
    found = newest()
    capsys.readouterr()
    assert 0 == main(["resume", "killed"])
    check_resumed(capsys.readouterr().out, found)
    assert augend.inspect("whole").digest == augend.inspect("killed").digest
    assert list(range(STEPS)) == [line["step"] for line in steps("killed")]
    assert sum(line["count"] for line in steps("whole")) == sum(line["count"] for line in steps("killed"))
    assert steps("whole") == steps("killed")
    restarts = json.loads(Path("killed/metrics.jsonl").read_text("utf-8").splitlines()[-2])["restarts"]
    assert KILLS == restarts
