"""What the bits of a run depend on: said in its file, used by every process of it, and compared when it goes on."""

from __future__ import annotations

import json
import os
import tomllib
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from augend._cli import main
from augend._cli._directory import keep_config
from augend._config import Setting, read

EXACT = Setting(("accumulator", "dtype"), "exact")
WARNS = """
import warnings
import nets_of_the_cli

def make():
    for _ in range(2):
        warnings.warn("a thing\\nto know", stacklevel=1)
    return nets_of_the_cli.make()
"""


@pytest.fixture
def threads() -> Iterator[None]:
    """Put back the number of threads."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def metrics(run: str) -> list[dict]:
    """Read the lines of steps."""
    lines = [json.loads(line) for line in Path(run, "metrics.jsonl").read_text("utf-8").splitlines()]
    return [line for line in lines if "loss" in line]


@pytest.mark.usefixtures("threads")
def test_a_run_computes_with_its_own_threads(folder):
    """parallel.threads is what torch uses, in fit, in a dry run, in resume and in evaluate, and stays in the config."""
    commands = [
        ["fit", "linear.toml", "--dry-run", "--set=parallel.threads=3"],
        ["fit", "linear.toml", "--set=parallel.threads=3"],
        ["resume", "runs/linear-1", "--set=steps=3"],
        ["evaluate", "runs/linear-1"],
    ]
    for command in commands:
        torch.set_num_threads(1)
        assert 0 == main(command)
        assert 3 == torch.get_num_threads()
    assert 3 == tomllib.loads((folder / "runs/linear-1/config.toml").read_text("utf-8"))["parallel"]["threads"]


def test_without_a_number_of_threads_those_of_the_process_stay(folder):
    """A run file that says nothing of threads leaves them alone, and its config says nothing either."""
    before = torch.get_num_threads()
    assert 0 == main(["fit", "linear.toml"])
    assert before == torch.get_num_threads()
    assert "threads" not in (folder / "runs/linear-1/config.toml").read_text("utf-8")


def test_ranks_are_started_with_the_threads_of_the_run(folder, monkeypatch):
    """Each worker finds the number in OMP_NUM_THREADS, whatever the user's shell has there; else the shell's own."""
    seen = []

    def supervise(program: list[str], ranks: int, directory: Path | None, environment: dict[str, str]) -> int:
        seen.append((program, ranks, directory, environment.get("OMP_NUM_THREADS")))
        return 0

    monkeypatch.setattr("augend._cli._supervisor.supervise", supervise)
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    exact = ["--set=accumulator.dtype=exact"]
    assert 0 == main(["fit", "linear.toml", "--ranks=2", "--strict-bits", *exact])
    assert 0 == main(["fit", "linear.toml", "--ranks=2"])
    (folder / "here").mkdir()
    keep_config(folder / "here", read(Path("linear.toml"), [Setting(("parallel",), {"threads": 2}), EXACT]))
    assert 0 == main(["resume", "here", "--ranks=3", "--strict-bits"])
    assert [
        (["augend", "fit", "linear.toml", *exact, "--ranks=2", "--strict-bits"], 2, None, "1"),
        (["augend", "fit", "linear.toml", "--ranks=2"], 2, None, "7"),
        (["augend", "resume", "here", "--ranks=3", "--strict-bits"], 3, Path("here"), "2"),
    ] == seen
    assert "7" == os.environ["OMP_NUM_THREADS"]


def test_strict_bits_is_for_runs_that_promise_any(folder, capsys):
    """--strict-bits for sums that are rounded is refused in one line, before anything is made."""
    assert 2 == main(["fit", "linear.toml", "--strict-bits"])
    says = "augend: accumulator.dtype = 'float32': --strict-bits is for runs whose bits do not depend on the cut"
    assert capsys.readouterr().err.startswith(says)
    assert not (folder / "runs").exists()
    assert 0 == main(["fit", "linear.toml"])
    capsys.readouterr()
    assert 2 == main(["resume", "runs/linear-1", "--strict-bits"])
    assert capsys.readouterr().err.startswith(says)


def test_digests_are_in_the_metrics_where_they_are_asked_for(folder):
    """[digest] every_steps = 2: the second and the fourth step; without the table none has any."""
    assert 0 == main(["fit", "linear.toml", "--set=steps=5", "--set=digest.every_steps=2"])
    assert 0 == main(["fit", "linear.toml", "--set=steps=5"])
    first, second = metrics("runs/linear-1"), metrics("runs/linear-2")
    assert [1, 3] == [line["step"] for line in first if "digests" in line]
    assert {("weight", "bias")} == {tuple(line["digests"]) for line in first if "digests" in line}
    assert [] == [line["step"] for line in second if "digests" in line]
    assert [1] * 5 == [line["offers"] for line in second]


def test_a_warning_is_a_line_like_all_others(folder, capsys):
    """In one process, too, a warning of the library or of the user's model is one line on standard error, said once."""
    Path("warns_of_the_cli.py").write_text(WARNS, "utf-8")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        assert 0 == main(["fit", "linear.toml", "--set=model.name=warns_of_the_cli:make"])
    assert "augend: warning: a thing to know\n" == capsys.readouterr().err
