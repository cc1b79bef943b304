"""A run on several ranks loses some of them at any moment, and comes to its end with each row counted once."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

import augend
from augend._cli import main
from augend._cli._crew import is_alive

SECONDS = 120
STEPS = 24

MODULE = """
import os, time
from pathlib import Path
import torch
import augend

def make():
    return torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1))

def rows():
    x = torch.arange(96.0).reshape(48, 2) / 96
    def loss(model, microbatch):
        if torch.is_grad_enabled():
            with Path("ticks").open("a") as file:  # one for each micro-batch, whoever runs it
                file.write("x")
            time.sleep(float(Path("pause").read_text()))
        return augend.losses.mse(model(microbatch["x"]), microbatch["x"].sum(dim=1, keepdim=True))
    return augend.sources.Source(rows={"x": x}, loss=loss)
"""

RUN = f"""
steps = {STEPS}
batch_size = 14
microbatch_size = 2
[model]
name = "elastic_of_the_cli:make"
[data]
source = "elastic_of_the_cli:rows"
validation = 0.25
[optimizer]
name = "sgd"
momentum = 0.9
lr = 0.05
[checkpoint]
every_seconds = 0.2
[validate]
every_steps = 10
[parallel]
timeout_seconds = 20
"""


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """Work in an empty directory with a run file, and a module that counts micro-batches and takes its time."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    monkeypatch.delitem(sys.modules, "elastic_of_the_cli", raising=False)
    Path("elastic_of_the_cli.py").write_text(MODULE, "utf-8")
    Path("run.toml").write_text(RUN, "utf-8")
    Path("pause").write_text("0", "utf-8")
    return tmp_path


@pytest.fixture
def counted(folder) -> list[tuple[int, int, int]]:
    """Return step, rows and count of each line of a run by one process that nothing happens to."""
    assert 0 == main(["fit", "run.toml", "--run-dir", "alone"])
    Path("ticks").unlink()
    return steps_of("alone")


def steps_of(run: str) -> list[tuple[int, int, int]]:
    """Return step, rows and count of each step's line, in the order of the file."""
    return [(line["step"], line["rows"], line["count"]) for line in lines_of(run)]


def lines_of(run: str) -> list[dict]:
    """Return the lines of a run's steps."""
    lines = [json.loads(line) for line in Path(run, "metrics.jsonl").read_text("utf-8").splitlines()]
    return [line for line in lines if "rows" in line]


@contextmanager
def running(*arguments: str) -> Iterator[subprocess.Popen]:
    """Run the command in a process of its own; nobody outlives the block."""
    command = [sys.executable, "-m", "augend", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            family = family_of(process.pid)
            process.kill()
            end = time.monotonic() + 10
            while any(map(is_alive, family)) and time.monotonic() < end:
                time.sleep(0.02)
            assert [] == [pid for pid in family if is_alive(pid)]


def children_of(pid: int) -> list[int]:
    """Return the processes that a process has started and that are there still, in their order."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # gone in the meantime
            state, parent = entry.read_text("utf-8", "replace").rpartition(") ")[2].split()[:2]
            if (int(parent), state != "Z") == (pid, True):
                found.append(int(entry.parent.name))
    return sorted(found)


def family_of(pid: int) -> list[int]:
    """Return the processes below one, and those below them."""
    return [each for child in children_of(pid) for each in (child, *family_of(child))]


def wait_for_ticks(process: subprocess.Popen, number: int) -> None:
    """Wait until so many micro-batches were begun on all ranks together."""
    end = time.monotonic() + SECONDS
    while not Path("ticks").exists() or Path("ticks").stat().st_size < number:
        assert None is process.poll(), process.communicate()
        assert time.monotonic() < end
        time.sleep(0.005)


def killed_at(number: int, whom: str, ranks: int) -> tuple[str, str]:
    """Run on some ranks, kill one at a micro-batch, and return what the command prints until its good end."""
    Path("pause").write_text("0.03", "utf-8")
    with running("fit", "run.toml", "--ranks", str(ranks), "--run-dir", "lossy") as process:
        wait_for_ticks(process, number)
        agents = children_of(process.pid)
        assert ranks == len(agents)
        agent = random.choice(agents)  # noqa: S311 - any will do
        victims = [agent, *children_of(agent)] if whom == "agent" else children_of(agent)
        for pid in victims:
            os.kill(pid, signal.SIGKILL)
        Path("pause").write_text("0", "utf-8")
        output, message = process.communicate(timeout=SECONDS)
        assert (0, []) == (process.returncode, family_of(process.pid)), (output, message)
    return output, message


def check_lossy(counted: list, worlds: set[int], output: str) -> None:
    """Check that each step was counted once, that the numbers are those of one process, and that all of it is saved."""
    assert counted == steps_of("lossy")
    assert worlds == {line["world"] for line in lines_of("lossy")}
    first, alone = lines_of("lossy")[0], lines_of("alone")[0]
    assert (alone["loss"], alone["loss_error"]) == (first["loss"], first["loss_error"])
    assert (STEPS, 0, True) == (
        (found := augend.inspect("lossy")).step,
        found.rows_done,
        found.complete,
    )
    assert 1 == output.count(f"all {STEPS} steps are done")


def test_a_killed_worker_costs_no_row(counted):
    """SIGKILL to one of two workers in the middle: a new pair goes on, and every step is counted once."""
    output, message = killed_at(40, "worker", 2)
    check_lossy(counted, {2}, output)
    assert "was killed; the run goes on from its newest checkpoint\n" in message
    assert 1 == output.count("resumed     ")


@pytest.mark.long
@pytest.mark.parametrize("seed", range(3))
def test_three_agents_lose_one_at_a_random_micro_batch(counted, seed):
    """The run completes with two ranks, and the counts of all steps are exact: each step was counted once."""
    random.seed(seed)
    number = random.randrange(8, 7 * (STEPS - 6))  # noqa: S311 - 7 micro-batches a step
    output, message = killed_at(number, "agent", 3)
    check_lossy(counted, {3, 2}, output)
    assert "with 2 left\n" in message
    assert "ranks       2 share the model\n" in output


@pytest.mark.long
@pytest.mark.parametrize("mode", ["replicated", "hsdp"])
def test_a_stopped_run_goes_on_with_other_ranks(counted, mode):
    """Four ranks are stopped in the middle of a batch, then one process goes on, then two: each step once."""
    Path("pause").write_text("0.03", "utf-8")
    with running("fit", "run.toml", "--ranks=4", f"--set=parallel.mode={mode}", "--run-dir", "lossy") as process:
        wait_for_ticks(process, 30)
        process.send_signal(signal.SIGINT)
        output, message = process.communicate(timeout=SECONDS)
        assert 3 == process.returncode, (output, message)
    assert "go on with: augend resume lossy" in output.splitlines()[-1]
    Path("pause").write_text("0", "utf-8")
    assert 0 == main(["resume", "lossy", "--ranks", "1", "--set", "steps=12"])
    with running("resume", "lossy", "--ranks", "2", "--set", f"steps={STEPS}") as process:
        output, message = process.communicate(timeout=SECONDS)
        assert 0 == process.returncode, (output, message)
    assert counted == [line for line in steps_of("lossy") if line[0] < STEPS]
    assert {1, 2, 4} == {line["world"] for line in lines_of("lossy")}
