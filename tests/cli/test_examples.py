"""The examples: short, runnable, and as good as they say."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from augend._cli import main
from augend._config import Setting, read

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize("path", sorted(EXAMPLES.iterdir()), ids=lambda path: path.name)
def test_examples_are_short(path):
    """No example has more than 80 lines."""
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 80


def test_digits_are_read_with_96_percent_accuracy():
    """fit on the 1,797 digits reaches at least 96 % on held-out ones, and says so with an interval."""
    spec = importlib.util.spec_from_file_location("digits_example", EXAMPLES / "digits.py")
    digits = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(digits)
    accuracy = digits.main(epochs=10)
    assert 0.96 <= accuracy.value
    assert 0 < accuracy.error < 0.02
    assert 359 == accuracy.count


def test_two_models_in_one_loop(capsys):
    """The GAN trains a few steps; its losses are of the whole batch, so another cut reports the same first step."""
    spec = importlib.util.spec_from_file_location("gan_example", EXAMPLES / "gan.py")
    gan = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(gan)
    radii, critic, generator = gan.main(steps=3, microbatch_size=100)
    assert (1000, 512, 256) == (len(radii), critic.count, generator.count)
    assert (3, 3) == (critic.update, generator.update)
    assert "step    0  critic 0.70" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["digits", "docstrings"])
def test_run_files_train(name, tmp_path, monkeypatch, capsys):
    """Each example run file trains a few steps, and tells of held-out rows."""
    settings = {
        "digits": ["steps=3"],
        "docstrings": ["steps=2", "batch_size=4", "microbatch_size=2", "data.limit=40", "schedule.warmup_steps=1"],
    }
    small = {"docstrings": ["model.layers=1", "model.width=48", "data.max_bytes=64", "validate={}"], "digits": []}
    monkeypatch.chdir(tmp_path)
    changes = [part for setting in settings[name] + small[name] for part in ("--set", setting)]
    assert 0 == main(["fit", str(EXAMPLES / f"{name}.toml"), *changes])
    assert "held out    loss" in capsys.readouterr().out


def test_the_demo_has_about_a_million_parameters(capsys):
    """examples/docstrings.toml describes a language model of 0.8 to 1.3 million parameters."""
    settings = [part for setting in ("data.limit=100",) for part in ("--set", setting)]
    assert 0 == main(["fit", str(EXAMPLES / "docstrings.toml"), "--dry-run", *settings])
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("model ")]
    assert 800_000 <= int(line.split()[2].replace(",", "")) <= 1_300_000


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.toml")), ids=lambda path: path.name)
def test_run_files_name_their_command(path):
    """Each run file can be read, and its first line says how to run it."""
    read(path, [Setting.parse("seed=1")])
    assert f"augend fit examples/{path.name}" in path.read_text(encoding="utf-8").splitlines()[0]
