"""augend resume: a run that was stopped anywhere goes on as if nothing had happened."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import augend
import augend._cli._train
from augend._cli import main
from augend._cli._directory import keep_config
from augend._cli._signals import _second
from augend._config import Setting, read
from augend.errors import ContractError

MOMENTS = [
    ("loss 1", "step 0, 2 rows done"),
    ("loss 5", "step 1, 4 rows done"),
    ("loss 6", "step 1, 6 rows done"),  # the last micro-batch, before the step
    ("schedule 2", "step 2"),  # the rate is set, the step is next
    ("step 3", "step 3"),
    ("step 6", "step 6"),  # the very last, before the validation
    ("validation 1", "step 2"),
    ("validation 2", "step 2"),
    ("validation 8", "step 6"),
]


def order(text: str) -> None:
    """Say what the next run of stopped.toml does to itself."""
    Path("stop").write_text(text, "utf-8")


def metrics(run: Path) -> list[dict]:
    """Read the numbers of a run without those that no two runs share."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text("utf-8").splitlines()]
    return [{key: value for key, value in line.items() if key not in OF_THE_PROCESS} for line in lines]


OF_THE_PROCESS = {"seconds", "memory_bytes", "restarts"}


@pytest.fixture
def whole(folder) -> Path:
    """Train stopped.toml without an interruption."""
    assert 0 == main(["fit", "stopped.toml", "--run-dir", "whole"])
    return Path("whole")


def check_equal(expected: Path, actual: Path) -> None:
    """Compare all that two runs came to, to the bit."""
    assert metrics(expected) == metrics(actual)
    first, second = augend.inspect(expected), augend.inspect(actual)
    assert (first.digest, first.step, first.updates) == (second.digest, second.step, second.updates)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
@pytest.mark.parametrize(("moment", "position"), MOMENTS)
def test_a_signal_at_any_moment_is_a_pause(whole, capsys, moment, position, name):
    """SIGTERM and Ctrl-C at any moment of training end with 3, and the resumed run has the bits of one without."""
    capsys.readouterr()
    order(f"{moment} {name}")
    assert 3 == main(["fit", "stopped.toml"])
    output, message = capsys.readouterr()
    assert f"stopped     {position}; go on with: augend resume runs/stopped-1" == output.splitlines()[-1]
    found = augend.inspect("runs/stopped-1")
    assert position == f"step {found.step}" + (f", {found.rows_done} rows done" if found.rows_done else "")
    assert 0 == main(["resume", "runs/stopped-1"])
    output, message = capsys.readouterr()
    assert f"resumed     {position}, from {found.path.name}\n" in output
    assert "" == message
    assert output.endswith("run         runs/stopped-1\n")
    check_equal(whole, Path("runs/stopped-1"))


def test_a_signal_at_the_very_end_finds_a_finished_run(whole, capsys):
    """In the last rows of the last validation there is nothing left to stop: the run ends well."""
    order("validation 9 SIGTERM")
    assert 0 == main(["fit", "stopped.toml"])
    assert "finished    all 6 steps are done" in capsys.readouterr().out
    check_equal(whole, Path("runs/stopped-1"))


def test_every_stop_of_many_is_a_pause(whole):
    """A run that is stopped again and again, by turns in a batch, at its end and after it, still has the same bits."""
    order("loss 2 SIGTERM")
    assert 3 == main(["fit", "stopped.toml", "--run-dir", "often"])
    for text in ("loss 1 SIGINT", "loss 3 SIGTERM", "step 1 SIGINT", "validation 1 SIGTERM", "loss 2 SIGTERM"):
        order(text)
        assert 3 == main(["resume", "often"])
    assert 0 == main(["resume", "often"])
    check_equal(whole, Path("often"))
    assert 6 == json.loads(Path("often/metrics.jsonl").read_text("utf-8").splitlines()[-2])["restarts"]


def test_the_first_signal_says_what_it_does(folder, capfd):
    """At the first signal a line on standard error says that it is finished and saved, and what a second one does."""
    order("loss 4 SIGTERM")
    assert 3 == main(["fit", "stopped.toml"])
    message = capfd.readouterr().err
    assert "augend: stopping: this micro-batch is finished and saved; once more ends at once\n" == message


@pytest.fixture
def handlers() -> Iterator[None]:
    """Put signal handlers back that a test sets."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_an_ignored_signal_stays_ignored(whole, handlers):
    """Under nohup and in the background of a shell, where Ctrl-C is ignored, the run goes on to its end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    order("loss 4 SIGINT")
    assert 0 == main(["fit", "stopped.toml"])
    assert signal.SIG_IGN == signal.getsignal(signal.SIGINT)
    check_equal(whole, Path("runs/stopped-1"))


def test_a_handler_of_the_user_s_own_is_given_back(folder, handlers):
    """Whoever had SIGTERM before has it again after the first one, which is ours, and at the end."""
    heard = []

    def hear(number: int, frame: object) -> None:
        heard.append(number)

    signal.signal(signal.SIGTERM, hear)
    order("loss 4 SIGTERM SIGTERM")
    assert 3 == main(["fit", "stopped.toml"])
    assert ([signal.SIGTERM], hear) == (heard, signal.getsignal(signal.SIGTERM))


def test_the_second_sigterm_is_said_and_raised_again(monkeypatch, capfd, handlers):
    """What a second SIGTERM does: one line, the default handler, and the signal once more."""
    raised = []
    monkeypatch.setattr("augend._cli._signals.signal.raise_signal", raised.append)
    _second("augend resume a", signal.SIGTERM, None)
    assert ([signal.SIGTERM], signal.SIG_DFL) == (raised, signal.getsignal(signal.SIGTERM))
    said = "augend: ended at once; the last checkpoint is kept; go on with: augend resume a\n"
    assert ("", said) == capfd.readouterr()


def test_the_second_sigterm_brings_back_the_cursor(monkeypatch, handlers):
    """On a terminal, whose cursor a progress bar hides, it is shown again before the process ends, whatever is lost."""
    terminal, other = os.openpty()
    os.set_blocking(terminal, False)
    kept = os.dup(1)
    monkeypatch.setattr("augend._cli._signals.signal.raise_signal", lambda number: None)
    try:
        os.dup2(other, 1)
        _second("augend resume a", signal.SIGTERM, None)
        assert b"\x1b[?25h\r\n" == os.read(terminal, 100)
        os.close(terminal)
        _second("augend resume a", signal.SIGTERM, None)  # a terminal that went away
    finally:
        os.dup2(kept, 1)
        for number in (kept, other):
            os.close(number)


def test_a_second_interrupt_ends_at_once(whole, capsys):
    """Ctrl-C twice ends with 130, says that the last checkpoint is kept, and the run goes on from that."""
    order("loss 8 SIGINT SIGINT")
    every_batch = ["--set", "checkpoint.every_steps=1"]
    assert 130 == main(["fit", "stopped.toml", *every_batch])
    message = capsys.readouterr().err
    assert "augend: ended at once; the last checkpoint is kept; go on with: augend resume runs/stopped-1\n" == message
    assert 0 == main(["resume", "runs/stopped-1"])
    assert "resumed     step 2, from 00000002-step-2\n" in capsys.readouterr().out
    check_equal(whole, Path("runs/stopped-1"))


def test_an_interrupt_before_training_saves_nothing(folder, capsys):
    """Ctrl-C while the run is tried out ends with 130 and leaves no directory."""
    order("trial 1 SIGINT")
    assert 130 == main(["fit", "stopped.toml"])
    assert "augend: interrupted\n" == capsys.readouterr().err
    assert not Path("runs").exists()


def test_what_the_user_s_code_exits_with_is_not_ours(folder, capsys):
    """A SystemExit of the user's own passes through, even one with 3; nothing is said of a saved run."""
    order("loss 4 exit")
    with pytest.raises(SystemExit) as caught:
        main(["fit", "stopped.toml"])
    assert 3 == caught.value.code
    assert "go on with" not in capsys.readouterr().out


def test_a_run_without_a_checkpoint_begins(whole, capsys):
    """A run that was killed before its first checkpoint is begun, and that is said; what metrics it has are redone."""
    shutil.copytree(whole, "killed")
    for checkpoint in Path("killed/checkpoints").glob("*-step-*"):
        shutil.rmtree(checkpoint)
    assert 0 == main(["resume", "killed"])
    output, message = capsys.readouterr()
    assert "resumed     at the beginning: nothing was saved yet\n" in output
    assert "" == message
    check_equal(whole, Path("killed"))


def test_a_finished_run_has_nothing_left_to_do(capsys, whole):
    """Resuming a finished run says so, tells its last numbers again, ends with 0, and changes none of them."""
    before = (whole / "metrics.jsonl").read_bytes()
    saved = augend.inspect(whole)
    held_out = re.findall("^held out .*$", capsys.readouterr().out, re.MULTILINE)
    assert 0 == main(["resume", "whole"])
    output = capsys.readouterr().out
    assert "resumed     no step was left to do: all 6 steps are done; to train on: --set steps=N\n" in output
    assert "finished    all 6 steps are done" in output
    assert held_out == re.findall("^held out .*$", output, re.MULTILINE)
    assert (before, saved) == ((whole / "metrics.jsonl").read_bytes(), augend.inspect(whole))


@pytest.mark.parametrize(
    ("steps", "keys"), [(6, "--set validate.patience=N"), (4, "--set steps=N --set validate.patience=N")]
)
def test_a_run_that_lost_patience_says_what_goes_on(folder, capsys, steps, keys):
    """Where patience ended the run, more patience is what trains on, alone or beside more steps."""
    settings = ["schedule={name='constant'}", "optimizer.lr=1e-30", "validate.patience=1", f"steps={steps}"]
    assert 0 == main(["fit", "stopped.toml", "--run-dir", "tired", *(f"--set={setting}" for setting in settings)])
    capsys.readouterr()
    assert 0 == main(["resume", "tired"])
    output = capsys.readouterr().out
    why = "no lower validation loss in 1 validations"
    assert f"resumed     no step was left to do: {why}; to train on: {keys}\n" in output
    assert f"finished    {why}" in output
    assert 0 == main(["resume", "tired", "--set", "validate.patience=9", "--set", "steps=7"])
    assert 7 == augend.inspect("tired").step


def test_more_steps_go_on_and_are_kept(whole, capsys):
    """--set steps= trains a finished run on, to the bits of one that was longer from the start, and is remembered."""
    assert 0 == main(["fit", "stopped.toml", "--run-dir", "longer", "--set", "steps=9"])
    assert 0 == main(["resume", "whole", "--set", "steps=9", "--set", "checkpoint.keep=5"])
    assert augend.inspect("longer").digest == augend.inspect("whole").digest
    config = tomllib.loads((whole / "config.toml").read_text("utf-8"))
    assert (9, 5) == (config["steps"], config["checkpoint"]["keep"])
    assert ["config.toml"] == [path.name for path in whole.glob("config*")]
    capsys.readouterr()
    assert 0 == main(["resume", "whole"])
    assert "no step was left to do" in capsys.readouterr().out


def test_another_cut_goes_on(folder, capsys):
    """microbatch_size may change in the middle of a batch: each row is counted once, each step is there once."""
    order("loss 5 SIGTERM")
    assert 3 == main(["fit", "stopped.toml"])
    assert 0 == main(["resume", "runs/stopped-1", "--set", "microbatch_size=5"])
    assert "resumed     step 1, 4 rows done, from 00000001-step-1-rows-4\n" in capsys.readouterr().out
    steps = [line for line in metrics(Path("runs/stopped-1")) if "rows" in line]
    assert [(step, 6, 6) for step in range(6)] == [(line["step"], line["rows"], line["count"]) for line in steps]


def test_a_refusal_in_training_is_a_failure(folder, capsys):
    """A run file's fault that shows only in training is no wrong --set: it ends with 1 as in fit."""
    order("loss 5 SIGTERM")
    assert 3 == main(["fit", "stopped.toml"])
    source = Path("stops_of_the_cli.py").read_text("utf-8")
    broken = source.replace('    happens("step")', "    raise augend.errors.ContractError('not at all')")
    Path("stops_of_the_cli.py").write_text(broken, "utf-8")
    del sys.modules["stops_of_the_cli"]
    capsys.readouterr()
    assert 1 == main(["resume", "runs/stopped-1"])
    assert "augend: failed: not at all\n" == capsys.readouterr().err


def test_damaged_checkpoints_are_passed_over_by_name(whole, capsys, recwarn):
    """What is wrong with a newer checkpoint is said in augend's words, not as a warning, and an older one serves."""
    order("loss 17 SIGTERM")
    assert 3 == main(["fit", "stopped.toml", "--set", "checkpoint.every_steps=1"])
    newest = augend.inspect("runs/stopped-1").path
    (newest / "state.json").write_text("{}", "utf-8")
    capsys.readouterr()
    assert 0 == main(["resume", "runs/stopped-1"])
    output, message = capsys.readouterr()
    assert message.startswith("augend: passed over a damaged checkpoint: ")
    assert f"{newest}: state.json" in message
    assert 1 == message.count("\n")
    assert re.search(r"^resumed     step 5, from \d+-step-5$", output, re.MULTILINE)
    assert [] == list(recwarn)
    check_equal(whole, Path("runs/stopped-1"))
    for checkpoint in Path("whole/checkpoints").glob("*-step-*"):
        (checkpoint / "state.json").write_text("{}", "utf-8")
    assert 1 == main(["resume", "whole"])
    message = capsys.readouterr().err
    assert message.startswith("augend: failed: no checkpoint is good: whole/")
    assert message.endswith("bring a good one back from a copy, or begin a new run: augend fit whole/config.toml\n")


def test_a_directory_in_use_is_refused(whole, capsys):
    """While another job has the checkpoints, resume ends with 1 and says so in one line."""
    capsys.readouterr()
    with augend.Checkpoint(whole / "checkpoints", other=torch.nn.Linear(1, 1)) as other:
        with pytest.raises(ContractError):
            other.load_latest()
        assert 1 == main(["resume", "whole"])
    message = capsys.readouterr().err
    assert message.startswith("augend: failed: ")
    assert "whole/checkpoints is in use by another" in message
    assert 1 == message.count("\n")


def test_what_is_no_run_is_refused(folder, capsys):
    """A path that is no run directory, and a config that cannot be read, end with 2 and one line."""
    Path("empty").mkdir()
    Path("broken").mkdir()
    Path("broken/config.toml").write_text("steps =", "utf-8")
    for path, part in (
        ("nowhere", "nowhere: no such directory"),
        ("linear.toml", "linear.toml: no such directory"),
        ("empty", "empty: not the directory of a run, it has no config.toml"),
        ("broken", "broken/config.toml: not valid TOML"),
    ):
        assert 2 == main(["resume", path])
        output, message = capsys.readouterr()
        assert ("", True, 1) == (output, message.startswith(f"augend: {part}"), message.count("\n"))
    assert 2 == main(["resume", "empty", "--ranks", "2"])
    assert [] == list(Path("empty").iterdir())


def test_ranks_are_those_of_fit(whole, capsys):
    """--ranks says the same as in fit: none at all are refused, one is this process."""
    assert 2 == main(["resume", "whole", "--ranks", "0"])
    assert "whole/config.toml: parallel.ranks = 0: " in capsys.readouterr().err
    assert 0 == main(["resume", "whole", "--ranks", "1"])


def test_a_config_is_replaced_whole_or_not_at_all(folder, monkeypatch):
    """A crash while the config is replaced leaves the old one; a crash in a new directory leaves none."""
    run = read(Path("linear.toml"))
    keep_config(folder, run)
    before = (folder / "config.toml").read_bytes()

    def crash(*_: object) -> None:
        raise OSError(28, "No space left on device")

    for name in ("augend._cli._directory.os.fsync", "pathlib.Path.replace"):
        with monkeypatch.context() as patched:
            patched.setattr(name, crash)
            with pytest.raises(OSError, match="No space"):
                keep_config(folder, read(Path("linear.toml"), [Setting(("steps",), 7)]))
        assert before == (folder / "config.toml").read_bytes()
    keep_config(folder, read(Path("linear.toml"), [Setting(("steps",), 7)]))
    assert 7 == read(folder / "config.toml").steps


def test_the_config_is_there_before_anything_else(folder, monkeypatch):
    """The config is complete and on disk before any other file of a run: a kill leaves a run, or plainly none."""
    seen = []
    original = augend._cli._train.keep_config

    def keep(directory: Path, run: object) -> None:
        seen.append([path.name for path in directory.iterdir()])
        original(directory, run)
        raise KeyboardInterrupt

    monkeypatch.setattr("augend._cli._train.keep_config", keep)
    assert 130 == main(["fit", "linear.toml"])
    assert [[]] == seen
    monkeypatch.undo()
    assert ["config.toml"] == [path.name for path in (folder / "runs" / "linear-1").iterdir()]
