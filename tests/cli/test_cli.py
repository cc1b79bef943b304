"""The command augend: what it prints, what it leaves behind, and how it ends."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch

from augend import __version__
from augend._cli import main
from augend._cli._build import batches, build_model, build_rows
from augend._cli._trial import try_out
from augend._config import Setting, read
from augend.errors import CheckpointError

VERBS = ["fit", "resume", "evaluate", "generate", "check", "inspect", "verify", "diff", "export"]


def metrics(run: Path) -> list[dict]:
    """Read the numbers of a run."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def refused(capsys, *arguments: str) -> str:
    """Run a command that must end with 2, print nothing, leave nothing, and say why in one line; return that."""
    assert 2 == main(arguments)
    output, message = capsys.readouterr()
    assert "" == output
    assert message.startswith("augend: ")
    assert 1 == message.count("\n")
    assert not Path("runs").exists()
    return message


def test_fit_trains_and_leaves_its_numbers(folder, capsys):
    """augend fit prints sizes, steps, held-out loss with its error, a sample, and the directory of its numbers."""
    assert 0 == main(["fit", "llama.toml"])
    output, message = capsys.readouterr()
    assert "" == message
    assert re.search(r"^model       llama, [\d,]+ parameters$", output, re.MULTILINE)
    assert "data        docstrings, 32 rows, 8 held out\n" in output
    assert "training    3 steps of 8 rows in micro-batches of 3, adamw, cosine schedule\n" in output
    assert re.search(r"^step 3/3  epoch 1  loss \d\.\d+ ± \d\.\d+  norm .* left$", output, re.MULTILINE)
    assert re.search(r"^validation after step 2: loss \d\.\d+ ± \d\.\d+  accuracy", output, re.MULTILINE)
    assert re.search(r"^finished    all 3 steps are done, \d+\.\d s of training$", output, re.MULTILINE)
    assert re.search(r"^held out    loss \d\.\d+ ± \d\.\d+$", output, re.MULTILINE)
    assert re.search(r"^prompt      def .*\n            +\"\"\"\ncompletion  ", output, re.MULTILINE)
    assert output.endswith("run         runs/llama-1\n")
    run = folder / "runs" / "llama-1"
    assert {"checkpoints", "config.toml", "metrics.jsonl"} == {path.name for path in run.iterdir()}
    assert ["00000001-step-3"] == [path.name for path in (run / "checkpoints").iterdir() if path.is_dir()]
    assert [0, 1, 1, 2, 2] == [line["step"] for line in metrics(run)]
    assert [False, False, True, False, True] == ["validation" in line for line in metrics(run)]


def test_a_run_can_be_repeated_from_its_config(folder):
    """The config of a run is a run file whose losses, norms and rates are the same to the bit."""
    assert 0 == main(["fit", "llama.toml", "--set", "optimizer.lr=0.01", "--set", "seed=3"])
    assert 0 == main(["fit", "runs/llama-1/config.toml"])
    assert 0 == main(["fit", "llama.toml", "--run-dir", "elsewhere/again"])
    first, second, other = (metrics(folder / place) for place in ("runs/llama-1", "runs/config-1", "elsewhere/again"))
    for lines in (first, second):
        for line in lines:
            line.pop("seconds")
            line.pop("memory_bytes", None)
    assert first == second
    assert first[0]["loss"] != other[0]["loss"]
    assert 0.01 == first[0]["lr"]


def test_the_seed_decides_the_weights(folder):
    """Initial weights are those of the run's seed, whatever was drawn before, and others for another seed."""
    weights = []
    for seed in (5, 5, 6):
        run = read(Path("linear.toml"), [Setting(("seed",), seed)])
        torch.rand(3)
        weights.append(build_model(run, build_rows(run).source).weight.tolist())
    assert weights[0] == weights[1]
    assert weights[0] != weights[2]


def test_a_name_that_leads_nowhere_is_taken(folder):
    """A dangling link in the place of the next run's directory does not stop it."""
    Path("runs").mkdir()
    Path("runs/linear-1").symlink_to("nowhere")
    assert 0 == main(["fit", "linear.toml"])
    assert Path("runs/linear-2/metrics.jsonl").is_file()


def test_runs_are_numbered(folder):
    """A second run of the same name gets the next free number."""
    for _ in range(2):
        assert 0 == main(["fit", "linear.toml"])
    (folder / "runs" / "linear-1" / "metrics.jsonl").unlink()
    assert 0 == main(["fit", "linear.toml"])
    assert ["linear-1", "linear-2", "linear-3"] == sorted(path.name for path in (folder / "runs").iterdir())


def test_a_run_without_held_out_rows_tells_only_of_training(folder, capsys):
    """With data.validation = 0 nothing is held out, and the sample's prompt is of the training rows."""
    assert 0 == main(["fit", "llama.toml", "--set", "data.validation=0", "--set", "validate={}"])
    output = capsys.readouterr().out
    assert "40 rows, none held out" in output
    assert "held out    loss" not in output
    assert "completion" in output


def test_text_without_a_prompt_gets_a_short_one(folder, capsys):
    """For rows that are all supervised, the sample begins with the first tokens of a row."""
    (folder / "text.txt").write_text("0123456789" * 40, encoding="utf-8")
    run = (
        Path("llama.toml")
        .read_text("utf-8")
        .replace('"docstrings"\nmax_bytes = 64\nlimit = 40', '"text"\npath = "text.txt"\nlength = 40')
    )
    (folder / "text.toml").write_text(run, encoding="utf-8")
    assert 0 == main(["fit", "text.toml"])
    assert re.search(r"^prompt      \d{32}$", capsys.readouterr().out, re.MULTILINE)


def test_a_dry_run_trains_nothing(folder, capsys):
    """--dry-run prints the resolved run and its sizes, and leaves no directory."""
    assert 0 == main(["fit", "linear.toml", "--dry-run", "--set", "epochs=5"])
    output = capsys.readouterr().out
    resolved, _, sizes = output.partition("\nmodel       ")
    assert 5 == tomllib.loads(resolved)["epochs"]
    assert 4 == tomllib.loads(resolved)["microbatch_size"]
    assert "nets_of_the_cli:make, 3 parameters" in sizes
    assert "10 steps of 4 rows in micro-batches of 4" in sizes
    assert not (folder / "runs").exists()


def test_check_compares_the_cuts(folder, capsys):
    """augend check prints the whole batch, and for each cut how far augend and the mean of means are from it."""
    assert 0 == main(["check", "llama.toml"])
    output = capsys.readouterr().out
    assert re.search(r"^The first batch, whole, in float64: 8 rows, \d+ supervised items, loss", output)
    lines = [line.split() for line in output.splitlines() if re.match(r" *\d+ rows? ", line)]
    assert ["4", "3", "1"] == [line[0] for line in lines]
    assert all("%" not in line[2] + line[3] for line in lines)
    assert all(line[4].endswith("%") for line in lines)
    assert not (folder / "runs").exists()


def test_check_says_undefined_where_a_mean_is_none(folder, capsys):
    """A loss that is not a number is shown as undefined, not as a number."""
    assert 0 == main(["check", "linear.toml", "--set", "data.label=nan"])
    assert "undefined" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["none.toml"], ["none.toml: no such file"]),
        (["linear.toml", "--set", "stepz=3"], ["linear.toml: stepz = 3: unknown key"]),
        (["linear.toml", "--set", "batch_size=0"], ["batch_size = 0", ">= 1", "batch_size = 64"]),
        (["linear.toml", "--set", "microbatch_size=8"], ["microbatch_size = 8", "batch_size = 4"]),
        (["linear.toml", "--set", "optimizer.lr=-0.1"], ["optimizer.lr = -0.1", "lr = 0.001"]),
        (["linear.toml", "--set", "optimizer.lr=inf"], ["optimizer.lr = inf", "finite", "lr = 0.001"]),
        (["linear.toml", "--set", "steps=many"], ["steps = 'many'", "expected int"]),
        (["linear.toml", "--set", "steps"], ["--set steps", "optimizer.lr=3e-4"]),
        (["linear.toml", "--ranks", "0"], ["parallel.ranks = 0", "int >= 1"]),
        (["linear.toml", "--set", "optimizer.name=adamv"], ["optimizer.name = 'adamv'", "did you mean adam?"]),
        (["linear.toml", "--set", "optimizer.betaz=1"], ["optimizer.betaz = 1", "did you mean betas?"]),
        (["linear.toml", "--set", "optimizer.weight_decay=-1"], ["optimizer.weight_decay = -1: ", "leave it out"]),
        (["linear.toml", "--set", "optimizer.betas=0.9"], ["optimizer.betas = 0.9: expected list, got float"]),
        (["linear.toml", "--set", "optimizer.betas=[0.9]"], ["optimizer.betas = [0.9]: expected list of length 2"]),
        (["linear.toml", "--set", "optimizer.betas=[0.9, 0.9, 0.9]"], ["expected list of length 2, got 3"]),
        (["linear.toml", "--set", "optimizer.betas=[2.0, 0.9]"], ["optimizer.betas = [2.0, 0.9]: Invalid beta"]),
        (["linear.toml", "--set", "optimizer.eps=-1"], ["optimizer.eps = -1: Invalid epsilon"]),
        (
            ["linear.toml", "--set", "optimizer.foreach=true", "--set", "optimizer.fused=true"],
            ["optimizer.fused = true: ", "foreach", "correct it or leave it out"],
        ),
        (
            ["linear.toml", "--set", "optimizer.name=lbfgs"],
            ["optimizer.name = 'lbfgs': ", "several times", "set adamw"],
        ),
        (["linear.toml", "--set", "optimizer.name=sparseadam"], ["optimizer.name = 'sparseadam': ", "set adam"]),
        (["linear.toml", "--set", "optimizer.name=muon"], ["optimizer.name = 'muon': ", "2D", "or name another"]),
        (["linear.toml", "--set", "schedule.name=cosin"], ["schedule.name = 'cosin'", "did you mean cosine?"]),
        (["linear.toml", "--set", "schedule.name=chain"], ["schedule.name = 'chain'", "known here: constant, cosine"]),
        (["linear.toml", "--set", "schedule.warmup_steps=-1"], ["schedule.warmup_steps = -1: "]),
        (
            ["linear.toml", "--set", "schedule.name=nets_of_the_cli:refuse"],
            ["schedule.name = ", "is a bad one", "[schedule]"],
        ),
        (["linear.toml", "--set", "schedule.name=math:exp2"], ["schedule.name = 'math:exp2'", "function of the step"]),
        (["linear.toml", "--set", "model.name=lama"], ["model.name = 'lama'", "did you mean llama?"]),
        (
            ["linear.toml", "--set", "model.depth=2"],
            ["model.depth = 2", "no argument of make", "known here: frozen, width"],
        ),
        (["linear.toml", "--set", "model.name=nets_of_the_cli:refuse"], ["model.name = ", "width 1 is a bad one"]),
        (["linear.toml", "--set", "model.name=nets_of_the_cli:number"], ["must return an nn.Module; got int"]),
        (["linear.toml", "--set", "data.source=digitz"], ["data.source = 'digitz'", "did you mean digits?"]),
        (["linear.toml", "--set", "data.source=nets_of_the_cli:number"], ["must return an augend.sources.Source"]),
        (["linear.toml", "--set", "data.validation=0.01"], ["data.validation = 0.01", "0 for validation"]),
        (
            ["linear.toml", "--set", "optimizer.name=nets_of_the_cli:make"],
            ["optimizer.name = ", "make cannot be called", "unexpected keyword argument 'lr'"],
        ),
        (["linear.toml", "--set", "optimizer.name=nets_of_the_cli:none"], ["must return an optimizer; got NoneType"]),
        (["linear.toml", "--set", "accumulator.loss_scale=1e39"], ["accumulator.loss_scale = 1e+39: "]),
        (["linear.toml", "--set", "model.frozen=true"], ["model.name = ", "nothing to train"]),
        (["linear.toml", "--set", "model.name=builtins:dict"], ["model.name = 'builtins:dict'", "arguments"]),
        (["llama.toml", "--set", "model={name='mlp',sizes=[2,2],activation='foo'}"], ["one of 'relu', 'gelu'"]),
        (
            ["linear.toml", "--set", "model={name='mlp',sizes=[3,1]}"],
            ["model.name = 'mlp'", "shapes", "correct [model]"],
        ),
        (["linear.toml", "--set", "model={name='mlp',sizes=[3,1]}", "--dry-run"], ["model.name = 'mlp'", "shapes"]),
        (
            ["llama.toml", "--set", "model.max_length=40", "--dry-run"],
            ["model.max_length = 40: row ", " tokens", "data.max_bytes = 40"],
        ),
        (["linear.toml", "--set", "data.unread=true"], ["such as a file that went away"]),
        (["llama.toml", "--set", "model.vocab_size=100"], ["model.vocab_size = 100", "258 tokens"]),
        (["llama.toml", "--set", "model.heads=3"], ["model.width = 16: ", "3 heads"]),
        (["llama.toml", "--set", "data.max_bytes=0"], ["data.max_bytes = 0: "]),
        (["linear.toml", "--bad"], ["No such option: --bad", "augend --help"]),
        ([], ["Missing argument 'RUN.TOML'"]),
    ],
)
def test_what_cannot_be_used_is_one_line_and_exit_2(folder, capsys, arguments, parts):
    """Every wrong run file or option ends with 2 and one line naming key, value and remedy; nothing is left behind."""
    message = refused(capsys, "fit", *arguments)
    assert [] == [part for part in parts if part not in message]


@pytest.mark.parametrize(("arguments", "part"), [([], "Missing command"), (["fot"], "Did you mean 'fit'?")])
def test_an_unknown_verb_is_refused(folder, capsys, arguments, part):
    """No verb, or a wrong one, is answered with one line."""
    assert part in refused(capsys, *arguments)


def test_a_directory_that_holds_something_is_not_touched(folder, capsys):
    """--run-dir names an empty or new directory; anything else is refused before training."""
    assert "--run-dir .: holds something already" in refused(capsys, "fit", "linear.toml", "--run-dir", ".")
    assert "--run-dir linear.toml: cannot be made" in refused(capsys, "fit", "linear.toml", "--run-dir", "linear.toml")
    (folder / "runs").write_text("not a directory", encoding="utf-8")
    assert 2 == main(["fit", "linear.toml"])
    assert "--run-dir runs: cannot be made" in capsys.readouterr().err


def test_your_own_optimizer_model_and_source_are_called(folder, capsys):
    """module:factory works for the optimizer too, with its arguments from the run file."""
    settings = ["optimizer.name=nets_of_the_cli:sgd", "optimizer.again=true", "model.width=1"]
    assert 0 == main(["fit", "linear.toml", *(part for one in settings for part in ("--set", one))])
    assert "nets_of_the_cli:sgd, constant schedule" in capsys.readouterr().out


def test_a_fault_of_your_own_factory_is_no_wrong_configuration(folder, capsys):
    """What a user's factory raises beside a ValueError ends with 1 and the place; a library's is a refusal."""
    assert 1 == main(["fit", "linear.toml", "--set", "optimizer.name=nets_of_the_cli:broken"])
    assert "RuntimeError: a fault (at nets_of_the_cli.py:" in capsys.readouterr().err


def test_trying_out_leaves_no_trace(folder):
    """The trial before training changes no weight, buffer, mode, or random state, and no position in the data."""
    run = read(Path("linear.toml"), [Setting(("model", "name"), "nets_of_the_cli:noisy")])
    rows = build_rows(run)
    model = build_model(run, rows.source)
    data = batches(run, rows.source, rows.train)
    model.layer.train()

    def state() -> list[object]:
        weights = [(name, value.tolist()) for name, value in model.state_dict().items()]
        modes = [module.training for module in model.modules()]
        legacy = str(np.random.get_state())  # noqa: NPY002 - numpy's global generator is part of the claim
        return [weights, modes, torch.get_rng_state().tolist(), random.getstate(), legacy]

    before = state()
    try_out(run, rows.source, model, data)
    assert before == state()
    assert 0 == data.state_dict()["step"]


def test_rows_that_only_could_be_too_long_are_taken(folder):
    """A bound of the source above the model's max_length is no mistake where every row fits."""
    (folder / "text.txt").write_text("0123456789" * 4, encoding="utf-8")
    run = (
        Path("llama.toml")
        .read_text("utf-8")
        .replace('"docstrings"\nmax_bytes = 64\nlimit = 40', '"text"\npath = ["text.txt", "text.txt"]')
    )
    (folder / "text.toml").write_text(run.replace("0.2", "0.5"), encoding="utf-8")
    assert 0 == main(["fit", "text.toml", "--dry-run"])


def test_a_reader_that_goes_away_ends_the_command_quietly(folder):
    """Like any command in a pipe: 141, and not a word, where nobody reads the output."""
    command = [sys.executable, "-m", "augend", "fit", "linear.toml"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert b"" == process.stderr.read()
    assert 141 == process.returncode


def test_failed_training_is_one_line_and_exit_1(folder, capsys):
    """A NaN in training ends with 1 and augend's own line, without a traceback."""
    assert 1 == main(["fit", "linear.toml", "--set", "data.label=nan"])
    message = capsys.readouterr().err
    assert message.startswith("augend: failed: ")
    assert message.endswith(
        "; leave such batches out with: augend resume runs/linear-1 --set step.nonfinite=skip; or go on from the last "
        "checkpoint with a lower rate: --set optimizer.lr=RATE\n"
    )
    assert 1 == message.count("\n")
    assert "reset()" not in message


def test_a_batch_of_nothing_is_one_line_with_the_way_on(folder, capsys):
    """A batch without a supervised item ends with 1, and the line's own command goes on with the run."""
    assert 1 == main(["fit", "linear.toml", "--set", "data.counted=false"])
    message = capsys.readouterr().err
    skip = "augend resume runs/linear-1 --set step.empty=skip"
    no_mean = "augend: failed: a batch has no supervised item, so it has no mean"
    assert f"{no_mean}; leave such batches out with: {skip}\n" == message
    assert 0 == main(skip.split()[1:])


def test_a_save_that_fails_is_one_line_with_the_way_on(folder, capsys, monkeypatch):
    """A checkpoint that cannot be written ends with 1 and the command that goes on."""

    def fail(*_: object, **__: object) -> None:
        raise CheckpointError("the disk is full")

    monkeypatch.setattr("augend._cli._course.Checkpoint.save", fail)
    assert 1 == main(["fit", "linear.toml"])
    line = "augend: failed: the disk is full; when that is mended, go on with: augend resume runs/linear-1\n"
    assert line == capsys.readouterr().err


def test_skipping_goes_on_where_raising_stops(folder, capsys):
    """step.nonfinite = "skip" reaches the loop: the same run ends well, with every update skipped."""
    settings = ["--set", "data.label=nan", "--set", "step.nonfinite=skip"]
    assert 0 == main(["fit", "linear.toml", *settings])
    assert [True, True] == [line["skipped"] for line in metrics(folder / "runs" / "linear-1") if "rows" in line]


def test_a_fault_in_the_user_s_code_names_its_place(folder, capsys):
    """An error that augend did not raise ends with 1 and says type, first line and place; --traceback shows the way."""
    assert 1 == main(["fit", "linear.toml", "--set", "data.broken=true"])
    message = capsys.readouterr().err
    assert re.fullmatch(r"augend: failed: KeyError: .*a label.*\(at nets_of_the_cli.py:13\); --traceback .*\n", message)
    assert 1 == main(["fit", "linear.toml", "--set", "data.broken=true", "--traceback"])
    assert "Traceback (most recent call last)" in capsys.readouterr().err


def test_an_error_without_words_is_named_by_its_type(folder, capsys, monkeypatch):
    """An exception with no message is still told from another."""

    def fail(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr("augend._cli._course.augend_fit", fail)
    assert 1 == main(["fit", "linear.toml"])
    assert "augend: failed: MemoryError (at test_cli.py:" in capsys.readouterr().err


def test_traceback_shows_what_is_behind_a_refusal(folder, capsys):
    """With --traceback a refused argument shows the error it came from, and still ends with 2."""
    assert 2 == main(["fit", "linear.toml", "--set", "model.name=nets_of_the_cli:refuse", "--traceback"])
    message = capsys.readouterr().err
    assert "ValueError: width 1 is a bad one" in message
    assert message.splitlines()[-1].startswith("augend: ")


def test_an_interrupt_before_there_is_something_to_save(folder, capsys, monkeypatch):
    """Ctrl-C before training begins ends with 130; where the run has its directory, how to begin it is said."""

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("augend._cli._course.augend_fit", interrupted)
    assert 130 == main(["fit", "linear.toml"])
    message = capsys.readouterr().err
    assert "augend: interrupted before training began; begin with: augend resume runs/linear-1\n" == message
    monkeypatch.setattr("augend._cli._compare.check_cuts", interrupted)
    assert 130 == main(["check", "linear.toml"])
    assert "augend: interrupted\n" == capsys.readouterr().err


def test_the_version_is_printed(capsys):
    """augend --version prints the version and nothing else."""
    assert 0 == main(["--version"])
    assert f"{__version__}\n" == capsys.readouterr().out


@pytest.mark.parametrize(
    "commands",
    [
        [["--help"], ["--version"], *([verb, "--help"] for verb in VERBS)],
        [["fit", "no"], ["fit"], ["resume", "no"], ["resume", "."], ["export", "."], ["export", ".", "--to", "zip"]],
    ],
    ids=["help", "refusals"],
)
def test_help_and_refusals_do_not_wait_for_torch(tmp_path, commands):
    """--help of every verb, --version and what cannot be read at all are answered without importing torch or numpy."""
    code = (
        "import sys\nfrom augend.__main__ import main\n"
        f"for arguments in {commands!r}:\n    main(arguments)\n"
        "print([name for name in ('torch', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert "[]" == done.stdout.splitlines()[-1]


def test_python_m_augend_is_the_command(tmp_path):
    """python -m augend runs the same command and ends with its exit code."""
    command = [sys.executable, "-m", "augend", "fit", str(tmp_path / "none.toml")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert 2 == done.returncode
    assert "" == done.stdout
    assert f"augend: {tmp_path}/none.toml: no such file; give the path of a run file, such as run.toml\n" == done.stderr
