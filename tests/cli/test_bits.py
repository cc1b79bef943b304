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


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (["optimizer.name=muon"], "augend: optimizer.name = 'muon': "),
        (["optimizer.fused=true"], "augend: optimizer.fused = true: "),
    ],
)
def test_an_optimizer_whose_bits_depend_on_the_cut_is_refused_first(folder, capsys, settings, says):
    """With exact sums it is refused in one line by name, before anything is made; else it trains."""
    given = [f"--set={setting}" for setting in settings]
    bias = "--set=model.name=nets_of_the_cli:matrix"
    Path("nets_of_the_cli.py").write_text(
        Path("nets_of_the_cli.py").read_text("utf-8")
        + "\ndef matrix():\n    return torch.nn.Linear(2, 1, bias=False)\n",
        "utf-8",
    )
    assert 2 == main(["fit", "linear.toml", "--set=accumulator.dtype=exact", bias, *given])
    output, message = capsys.readouterr()
    assert ("", 1) == (output, message.count("\n"))
    assert message.startswith(says)
    assert not (folder / "runs").exists()
    assert 0 == main(["fit", "linear.toml", bias, *given])


@pytest.mark.usefixtures("threads")
def test_other_bits_are_said_or_refused_on_resume(folder, capsys):
    """Another number of threads: one warning, in a line that names it; with --strict-bits exit 2, no change."""
    assert 0 == main(["fit", "linear.toml", "--set=accumulator.dtype=exact"])
    config = Path("runs/linear-1/config.toml")
    before = config.read_bytes()
    capsys.readouterr()
    more = ["resume", "runs/linear-1", "--set=steps=4", "--set=parallel.threads=2"]
    assert 2 == main([*more, "--strict-bits"])
    message = capsys.readouterr().err
    assert message.startswith("augend: runs/linear-1: cannot go on from what was saved: ")
    assert "parallel.threads was 1 and is 2" in message
    assert message.endswith("depend on it: bring back what it was, or leave out --strict-bits\n")
    assert 1 == message.count("\n")
    assert 2 == main([*more[:3], "--set=microbatch_size=2", "--strict-bits"])
    message = capsys.readouterr().err
    assert message.startswith("augend: microbatch_size = 2: the bits depend on it, and it was 4; set it back")
    assert before == config.read_bytes()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        assert 0 == main(more)
    message = capsys.readouterr().err
    assert message.startswith("augend: warning: ")
    assert "threads was 1 and is 2" in message
    assert 1 == message.count("\n")
    assert 0 == main([*more[:2], "--set=steps=5", "--strict-bits"])


def test_inspect_shows_what_the_bits_depend_on(folder, capsys):
    """A line for people, an object for programs; neither of a run whose sums are rounded."""
    assert 0 == main(["fit", "linear.toml", "--set=accumulator.dtype=exact"])
    assert 0 == main(["fit", "linear.toml"])
    capsys.readouterr()
    shown = []
    for run in ("runs/linear-1", "runs/linear-2"):
        assert 0 == main(["inspect", run])
        assert 0 == main(["inspect", run, "--json"])
        lines, plain = capsys.readouterr().out.rsplit("\n{", 1)
        shown.append((lines.splitlines()[-1], json.loads("{" + plain)["bits"]))
    (line, bits), (other, none) = shown
    assert f"bits           {', '.join(f'{name} {value}' for name, value in bits.items())}" == line
    assert ("1", 4) == (str(bits["threads"]), bits["microbatch_size"])
    assert (True, None) == (other.startswith("digest "), none)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:deterministic was")  # of this process it is, and of the workers not
def test_an_exact_run_on_two_ranks_and_then_one_is_that_of_one(folder, capsys):
    """With dropout, momentum and clipping: augend diff finds no bit that differs, over metrics, digests and tensors."""
    steps = ["--set=accumulator.dtype=exact", "--set=step.max_norm=0.1", "--set=digest.every_steps=1"]
    kept = ["--set=checkpoint.every_steps=1", "--set=checkpoint.keep=9"]
    assert 0 == main(["fit", "stopped.toml", "--run-dir=one", *steps, *kept])
    assert 0 == main(["fit", "stopped.toml", "--run-dir=two", "--ranks=2", "--set=steps=3", *steps, *kept])
    assert 0 == main(["resume", "two", "--ranks=1", "--set=steps=6"])
    assert [2, 2, 2, 1, 1, 1] == [line["world"] for line in metrics("two")]
    capsys.readouterr()
    assert 0 == main(["diff", "one", "two"])
    output = capsys.readouterr().out
    assert "steps          6 in both, 0 to 5 " in output
    assert "digests        all digests are equal after 6 steps from 0 to 5\n" in output
    assert "checkpoints    after 1, 2, 3, 4, 5, 6 steps: every bit is equal (8 tensors" in output


def test_a_model_that_changes_a_buffer_is_refused_first(folder, capsys):
    """With exact sums it is refused in one line by the buffer's name, before anything is made; else it trains."""
    noisy = "--set=model.name=nets_of_the_cli:noisy"
    assert 2 == main(["fit", "linear.toml", "--set=accumulator.dtype=exact", noisy])
    output, message = capsys.readouterr()
    assert ("", 1) == (output, message.count("\n"))
    assert message.startswith("augend: accumulator.dtype = 'exact': the model changes its buffer 'seen' in a forward")
    assert not (folder / "runs").exists()
    assert 0 == main(["fit", "linear.toml", noisy])
