"""augend resume refuses what would be another run, in one line, and leaves every byte of it as it was."""

from __future__ import annotations

import re
import shutil
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import augend
from augend._cli import main


def order(text: str) -> None:
    """Say what the next run of stopped.toml does to itself."""
    Path("stop").write_text(text, "utf-8")


@pytest.fixture
def stopped(folder, capsys) -> str:
    """Stop stopped.toml in the middle of its second batch, and give its directory."""
    order("loss 5 SIGTERM")
    assert 3 == main(["fit", "stopped.toml", "--run-dir", "stopped"])
    capsys.readouterr()
    return "stopped"


@pytest.fixture
def whole(folder, capsys) -> str:
    """Train stopped.toml to its end, and give its directory."""
    assert 0 == main(["fit", "stopped.toml", "--run-dir", "whole"])
    capsys.readouterr()
    return "whole"


@contextmanager
def unchanged(run: str) -> Iterator[None]:
    """Compare every file of a run before and after."""
    before = content(run)
    yield
    assert before == content(run)


def content(run: str) -> dict[Path, bytes]:
    """Return the bytes of every file."""
    return {path: path.read_bytes() for path in Path(run).rglob("*") if path.is_file()}


def refused(capsys, run: str, *settings: str) -> str:
    """Resume a run that must be refused with one line and no change; return the line."""
    with unchanged(run):
        assert 2 == main(["resume", run, *(f"--set={setting}" for setting in settings)])
    output, message = capsys.readouterr()
    assert ("", True, 1) == (output, message.startswith("augend: "), message.count("\n"))
    return message.removeprefix("augend: ").rstrip("\n")


AGAIN = "; set it back, or begin a new run"


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("batch_size=3", f"batch_size = 3: the run was begun with 6{AGAIN}"),
        ("seed=1", f"seed = 1: the run was begun with 0{AGAIN}"),
        ("data.validation=0.5", f"data.validation = 0.5: the run was begun with 0.25{AGAIN}"),
        (
            "model={name='mlp',sizes=[2,1]}",
            f"model.name = 'mlp': the run was begun with 'stops_of_the_cli:make'{AGAIN}",
        ),
        (
            "optimizer={name='adamw'}",
            f"optimizer.name = 'adamw': the run was begun with 'stops_of_the_cli:Sgd'{AGAIN}",
        ),
        (
            "optimizer={name='stops_of_the_cli:Sgd'}",
            f"optimizer.momentum: missing now; the run was begun with 0.9{AGAIN}",
        ),
        ("optimizer.momentum=0.5", f"optimizer.momentum = 0.5: the run was begun with 0.9{AGAIN}"),
        (
            "optimizer.weight_decay=0.9",
            "optimizer.weight_decay = 0.9: the run was begun without it; leave it out, or begin a new run",
        ),
        ("accumulator.dtype=float64", f"accumulator.dtype = 'float64': the run was begun with 'float32'{AGAIN}"),
        ("accumulator.loss_scale=2", f"accumulator.loss_scale = 2.0: the run was begun with 1.0{AGAIN}"),
    ],
)
def test_what_the_run_depends_on_cannot_change(stopped, capsys, setting, expected):
    """A change of rows, order, model, sums or optimizer is named with the saved value, and nothing happens."""
    assert expected == refused(capsys, stopped, setting)
    assert 0 == main(["resume", stopped])


def test_a_config_that_was_changed_by_hand_is_no_other(stopped, capsys):
    """What may not be set may not be written into config.toml either."""
    config = Path(stopped, "config.toml")
    config.write_text(config.read_text("utf-8").replace("momentum = 0.9", "momentum = 0.5"), "utf-8")
    assert f"optimizer.momentum = 0.5: the run was begun with 0.9{AGAIN}" == refused(capsys, stopped)


def test_all_else_can_change(stopped):
    """Length, cut, rate, schedule, and how it is checked, saved and validated may change, and are kept."""
    settings = ["epochs=3", "microbatch_size=3", "optimizer.lr=0.01", "schedule={name='cosine'}", "step.max_norm=1.0"]
    settings += ["checkpoint.keep=3", "checkpoint.every_steps=2", "validate.every_steps=3", "validate.patience=9"]
    settings += ["step.empty=skip", "step.nonfinite=skip", "parallel.ranks=1", "checkpoint.every_seconds=9.0"]
    settings += ["digest.every_steps=2", "accumulator.max_microbatches=9"]
    assert 0 == main(["resume", stopped, *(f"--set={setting}" for setting in settings)])
    config = tomllib.loads(Path(stopped, "config.toml").read_text("utf-8"))
    assert (3, 0.01, "cosine", 3) == (
        config["epochs"],
        config["optimizer"]["lr"],
        config["schedule"]["name"],
        config["checkpoint"]["keep"],
    )


def test_a_model_that_became_another_is_refused(stopped, capsys):
    """A factory that makes another model than it did is refused by what was saved; metrics and config stay."""
    source = Path("stops_of_the_cli.py")
    source.write_text(
        source.read_text("utf-8").replace("Linear(2, 8)", "Linear(2, 9)").replace("8, 1", "9, 1"), "utf-8"
    )
    del sys.modules["stops_of_the_cli"]
    lock = Path(stopped, "checkpoints", "lock")  # taken for this one, with the time in it
    before = {path: data for path, data in content(stopped).items() if path != lock}
    assert 2 == main(["resume", stopped])
    message = capsys.readouterr().err
    assert re.match("augend: stopped: cannot go on from what was saved: .*model", message)
    assert 1 == message.count("\n")
    assert before == {path: data for path, data in content(stopped).items() if path != lock}


def test_rows_that_became_others_are_refused(stopped, capsys):
    """The user's own rows are compared by their number, and the first and the last by their content."""
    source = Path("stops_of_the_cli.py")
    text = source.read_text("utf-8")
    for changed, numbers in (
        (text.replace("/ 48", "/ 47"), ""),
        (text.replace("48", "40").replace("24, ", "20, "), "24 then, 20 now"),
    ):
        source.write_text(changed, "utf-8")
        sys.modules.pop("stops_of_the_cli", None)
        message = refused(capsys, stopped)
        assert message.startswith("data.source: its rows are others than those the run was begun with")
        assert numbers in message


def text_run(tmp_path: Path) -> str:
    """Begin a run on a text, and give its directory."""
    Path("a.txt").write_text("what a text it is, this one\n" * 20, "utf-8")
    data = "data={source='text',path='a.txt',length=32,validation=0.2}"
    assert 0 == main(["fit", "llama.toml", "--run-dir", "text", "--set", data, "--set", "model.max_length=32"])
    return "text"


def test_another_text_of_equal_length_is_refused(folder, capsys):
    """One other letter in one row of a text, in place or in another file, is another run."""
    run = text_run(folder)
    capsys.readouterr()
    text = Path("a.txt").read_text("utf-8")
    Path("b.txt").write_text(text[:300] + "X" + text[301:], "utf-8")
    others = "data.source: its rows are others than those the run was begun with; bring those back, or begin a new run"
    assert others == refused(capsys, run, "data.path='b.txt'")
    shutil.copy("b.txt", "a.txt")
    assert others == refused(capsys, run)
    assert 0 == main(["evaluate", run])
    assert 0 == main(["generate", run, "--prompt", "what", "--max-tokens", "1"])
    assert 0 == main(["export", run, "--to", "safetensors"])


def test_a_text_may_move(folder, capsys):
    """The same rows from another place are the same run, and the place is kept."""
    run = text_run(folder)
    Path("a.txt").rename("moved.txt")
    assert 0 == main(["resume", run, "--set", "data.path='moved.txt'", "--set", "steps=4"])
    assert 4 == augend.inspect(run).step
    assert 0 == main(["resume", run])


@pytest.mark.parametrize("setting", ["steps=5", "epochs=1"])
def test_fewer_steps_than_are_done_are_refused(whole, capsys, setting):
    """A run cannot be made shorter than it is: refused with the number of steps done, and no byte changes."""
    found = re.fullmatch(r"steps = [53]: 6 are done already; set it to that or more", refused(capsys, whole, setting))
    assert found


@pytest.mark.parametrize("part", ["checkpoints", "checkpoints/lock"])
def test_a_run_that_lost_its_checkpoints_is_refused(whole, capsys, part):
    """Where there are metrics and no place that was ever saved to, nothing begins again behind the user's back."""
    path = Path(whole, part)
    if path.is_dir():
        shutil.rmtree(path)
    else:  # as where a disk is not mounted
        shutil.rmtree(path.parent)
        path.parent.mkdir()
    expected = (
        "whole/checkpoints: the run's checkpoints are gone (a disk that is not mounted?); bring them back, or begin a "
        "new run with: augend fit whole/config.toml"
    )
    assert expected == refused(capsys, whole)


def test_metrics_that_are_no_file_are_refused(whole, capsys):
    """A directory in the place of the metrics is named, with what to do."""
    Path(whole, "metrics.jsonl").unlink()
    Path(whole, "metrics.jsonl").mkdir()
    assert refused(capsys, whole).startswith("whole/metrics.jsonl: no file, ")


def test_a_run_without_this_part_is_refused(saved, capsys):
    """Checkpoints in which nothing says what the run is are none of a run that the command line made."""
    message = refused(capsys, str(saved))
    assert message.startswith("runs/linear-1: cannot go on from what was saved: the checkpoint has no part 'run'")


def test_a_run_that_was_never_begun_can_be_begun(folder, capsys):
    """A crash before the first config leaves a directory that resume explains, and that fit takes."""
    Path("new").mkdir()
    Path("new/config.toml.partial").write_text("steps", "utf-8")
    expected = "new: this run was never begun; begin it with: augend fit RUN.TOML --run-dir new"
    assert expected == refused(capsys, "new")
    assert 0 == main(["fit", "linear.toml", "--run-dir", "new"])
    assert {"config.toml", "metrics.jsonl", "checkpoints"} == {path.name for path in Path("new").iterdir()}
