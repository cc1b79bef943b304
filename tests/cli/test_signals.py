"""Signals from outside to a process of its own: the command ends as it says, and the run goes on."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import augend
from augend._cli import main

SECONDS = 60


def wait_for(what: Callable[[], object], process: subprocess.Popen) -> None:
    """Wait until something is so, as long as the process lives and a minute has not gone by."""
    end = time.monotonic() + SECONDS
    while not what():
        assert None is process.poll(), process.communicate()
        assert time.monotonic() < end
        time.sleep(0.02)


@contextmanager
def running(*arguments: str) -> Iterator[subprocess.Popen]:
    """Run a command in a process that does not outlive the block."""
    command = [sys.executable, "-m", "augend", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


@contextmanager
def held_at(moment: str, *arguments: str) -> Iterator[subprocess.Popen]:
    """Run a command on stopped.toml up to a moment, and hold it there until the file ``waiting`` is removed."""
    Path("stop").write_text(f"{moment} wait", "utf-8")
    with running(*arguments) as process:
        wait_for(Path("waiting").exists, process)
        yield process


def inspected(capsys: pytest.CaptureFixture) -> dict:
    """Return what ``augend inspect --json`` says of the run now; nothing while nothing is saved."""
    capsys.readouterr()
    code = main(["inspect", "runs/stopped-1", "--json"])
    output = capsys.readouterr().out
    return json.loads(output) if code == 0 else {}


@pytest.fixture
def digest(folder) -> str:
    """Return what the weights of stopped.toml come to without an interruption."""
    assert 0 == main(["fit", "stopped.toml", "--run-dir", "whole"])
    return augend.inspect("whole").digest


def counts(run: str) -> list[tuple[int, int]]:
    """Return step and count of each step's line."""
    lines = [json.loads(line) for line in Path(run, "metrics.jsonl").read_text("utf-8").splitlines()]
    return [(line["step"], line["count"]) for line in lines if "rows" in line]


def test_one_signal_saves_and_ends_with_3(folder, capsys, digest):
    """A signal in a micro-batch: it is finished, saved, said, and the exit code is 3; the resumed run has all bits."""
    with held_at("loss 4", "fit", "stopped.toml") as process:
        process.send_signal(signal.SIGTERM)
        assert "augend: stopping: this micro-batch is finished" in process.stderr.readline()
        Path("waiting").unlink()
        output, message = process.communicate(timeout=SECONDS)
    assert (3, "") == (process.returncode, message)
    assert "stopped     step 1, 2 rows done; go on with: augend resume runs/stopped-1" == output.splitlines()[-1]
    capsys.readouterr()
    assert 0 == main(["resume", "runs/stopped-1"])
    assert "resumed     step 1, 2 rows done, from " in capsys.readouterr().out
    assert digest == augend.inspect("runs/stopped-1").digest
    assert [(step, 6) for step in range(6)] == counts("runs/stopped-1")


def test_a_second_signal_kills_and_leaves_the_last_checkpoint(folder, capsys, digest):
    """SIGTERM after Ctrl-C: said, ended by the signal itself, and the run goes on from the checkpoint before it."""
    with held_at("loss 8", "fit", "stopped.toml", "--set", "checkpoint.every_steps=1") as process:
        wait_for(lambda: inspected(capsys).get("step") == 2, process)
        process.send_signal(signal.SIGINT)
        assert "augend: stopping: " in process.stderr.readline()
        process.send_signal(signal.SIGTERM)
        _, message = process.communicate(timeout=SECONDS)
    assert -signal.SIGTERM == process.returncode
    said = "augend: ended at once; the last checkpoint is kept; go on with: augend resume runs/stopped-1\n"
    assert said == message
    assert 0 == main(["resume", "runs/stopped-1"])
    assert "resumed     step 2, from " in capsys.readouterr().out
    assert digest == augend.inspect("runs/stopped-1").digest


def test_a_killed_run_goes_on(folder, capsys, digest):
    """SIGKILL while part of a batch is on disk: refused to others until then, resumed with all bits, no row twice."""
    Path("slow").touch()
    with running("fit", "stopped.toml", "--set", "checkpoint.every_seconds=1e-9") as process:
        wait_for(lambda: inspected(capsys), process)
        assert 1 == main(["resume", "runs/stopped-1"])
        assert "in use by another job" in capsys.readouterr().err
        wait_for(lambda: inspected(capsys).get("microbatch", 0) > 0, process)
        process.kill()
        process.wait(SECONDS)
    assert -signal.SIGKILL == process.returncode
    Path("slow").unlink()
    assert 0 == main(["resume", "runs/stopped-1"])
    assert re.search(r"^resumed     step \d(, \d rows done)?, from \d+-step-\d", capsys.readouterr().out, re.MULTILINE)
    assert digest == augend.inspect("runs/stopped-1").digest
    assert [(step, 6) for step in range(6)] == counts("runs/stopped-1")
