"""augend generate: the completion and nothing else, or a line that says what stands in the way."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from augend import models, sources
from augend._cli import main
from augend._cli._generate import completion
from augend._cli._restore import restored
from augend.errors import ConfigError


@pytest.fixture
def spoken(folder, capsys) -> Path:
    """Train the language model of the run file on a few functions, and give its directory."""
    Path("code").mkdir()
    functions = "".join(f'def f{number}():\n    "Return {number}."\n' for number in range(20))
    Path("code/functions.py").write_text(functions, "utf-8")
    assert 0 == main(["fit", "llama.toml", "--set", "data.folder=code", "--run-dir", "spoken"])
    capsys.readouterr()
    return Path("spoken")


def said(capsys, *arguments: str) -> str:
    """Run a command that must end with 2, and one line and nothing else; return the line."""
    assert 2 == main(["generate", *arguments])
    output, message = capsys.readouterr()
    assert "" == output
    assert message.startswith("augend: ")
    assert 1 == message.count("\n")
    return message


def test_the_completion_is_printed(spoken, capsys):
    """What the model itself says, up to N tokens, as text; nothing else is printed, written or changed."""
    before = sorted(spoken.rglob("*"))
    model, tokenizer = restored(spoken).model, sources.Bytes()
    expected = tokenizer.decode(model.generate(tokenizer.encode("def né"), 9, stop=tokenizer.end_of_text))
    for place in (spoken, spoken / "checkpoints" / "00000001-step-3"):
        assert 0 == main(["generate", str(place), "--prompt", "def né", "--max-tokens", "9"])
        assert (f"{expected}\n", "") == capsys.readouterr()
    assert before == sorted(spoken.rglob("*"))


def test_tokens_are_drawn(spoken, capsys):
    """With a temperature it is what the model draws by the seed, the same again, and another text with another seed."""
    model, tokenizer = restored(spoken).model, sources.Bytes()
    texts = []
    for seed in (5, 5, 6):
        options = ["--temperature", "0.9", "--top-p", "0.8", "--seed", str(seed)]
        assert 0 == main(["generate", str(spoken), "--prompt", "def f", "--max-tokens", "20", *options])
        drawn = model.generate(list(b"def f"), 20, stop=256, temperature=0.9, top_p=0.8, seed=seed)
        texts.append(capsys.readouterr().out)
        assert f"{tokenizer.decode(drawn)}\n" == texts[-1]
    assert texts[0] == texts[1] != texts[2]


def test_a_text_begins_as_in_training(spoken, monkeypatch):
    """Where rows have a token before their text, the prompt has it too, and it counts."""
    source = restored(spoken)
    seen = []
    monkeypatch.setattr(sources.Bytes, "start_of_text", 257)
    monkeypatch.setattr(models.Llama, "generate", lambda model, prompt, *_, **__: seen.append(prompt) or [])
    assert "" == completion(source, "de", 50, {})
    assert [[257, *b"de"]] == seen
    with pytest.raises(ConfigError, match="80 tokens"):
        completion(source, "d" * 79, 1, {})


def test_the_text_stops_where_the_model_is_full(spoken, capsys):
    """By default it is long, but never longer than the model's 80 tokens with the prompt."""
    assert 0 == main(["generate", str(spoken), "--prompt", "d" * 75])
    model, tokenizer = restored(spoken).model, sources.Bytes()
    assert tokenizer.decode(model.generate([100] * 75, 5, stop=256)) + "\n" == capsys.readouterr().out


def test_the_text_stops_at_its_end(spoken, monkeypatch):
    """The end of text is a stop, and is not printed; text is what the tokenizer makes of it, tabs too."""
    source = restored(spoken)
    replies = [*b"a\tb", 256, *b"never"]

    def forward(self, tokens):
        length = tokens.shape[1]
        return torch.nn.functional.one_hot(torch.tensor([[replies[length - 2]] * length]), 258).float()

    monkeypatch.setattr(models.Llama, "forward", forward)
    assert "a\tb" == completion(source, "de", 50, {})
    assert "a\t" == completion(source, "de", 2, {})


def test_tabs_arrive(spoken, capsys, monkeypatch):
    """The text is printed as it is: rich would turn tabs into spaces and read markup."""
    monkeypatch.setattr(models.Llama, "generate", lambda *_, **__: list(b"[b]\tx :smile:"))
    assert 0 == main(["generate", str(spoken), "--prompt", "d"])
    assert "[b]\tx :smile:\n" == capsys.readouterr().out


def test_wrong_usage(spoken, saved, capsys):
    """What is wrong with the command line, or cannot be asked of this run, ends with 2 and says what to do."""
    run = str(spoken)
    assert "--prompt: empty" in said(capsys, run, "--prompt", "")
    for length in (80, 90):
        line = said(capsys, run, "--prompt", "d" * length)
        assert f"--prompt: {length} tokens, and prompt and completion together may have 80" in line
        assert "shorten it to 79 tokens" in line
    assert "'--prompt'" in said(capsys, run)
    assert "'--max-tokens'" in said(capsys, run, "--prompt", "d", "--max-tokens", "0")
    for wrong in ("0", "1.5", "nan"):
        assert f"--top-p {float(wrong)}: expected a probability" in said(capsys, run, "--prompt", "d", "--top-p", wrong)
    assert "--temperature inf: expected" in said(capsys, run, "--prompt", "d", "--temperature", "inf")
    for wrong in ("-1", "nan"):
        assert "'--temperature'" in said(capsys, run, "--prompt", "d", "--temperature", wrong)
    assert "nowhere: no such directory" in said(capsys, "nowhere", "--prompt", "d")
    assert "data.source = 'nets_of_the_cli:rows' has no tokenizer" in said(capsys, str(saved), "--prompt", "d")


def test_a_model_that_does_not_speak(folder, spoken):
    """A model of the user's own has no way to generate; the message has its name and kind."""
    source = restored(spoken)
    own = type(source)(run=source.run, rows=source.rows, model=torch.nn.Identity(), checkpoint=source.checkpoint)
    with pytest.raises(
        ConfigError, match=r"model.name = 'llama' made a Identity; generate needs an augend.models.Llama"
    ):
        completion(own, "def", 3, {})


def test_a_prompt_without_tokens(spoken, monkeypatch):
    """A tokenizer may make nothing of a text."""
    source = restored(spoken)
    monkeypatch.setattr(sources.Bytes, "encode", lambda tokenizer, text: [])
    with pytest.raises(ConfigError, match="no token"):
        completion(source, "\u200b", 3, {})


def test_a_run_without_checkpoints_fails(spoken, capsys):
    """There is nothing to generate with: exit 1, one line that names the place."""
    for path in (spoken / "checkpoints").glob("*/manifest.json"):
        path.write_text("{}", "utf-8")
    assert 1 == main(["generate", str(spoken), "--prompt", "d"])
    output, message = capsys.readouterr()
    assert "" == output
    assert 1 == message.count("\n")
    assert "00000001-step-3" in message


def test_nobody_reads(spoken, capsys, monkeypatch):
    """Where the reader has gone the command ends quietly with 141, as in ``augend generate ... | head -c 0``."""
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as pipe, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", pipe)
        assert 141 == main(["generate", str(spoken), "--prompt", "d"])
    assert ("", "") == capsys.readouterr()


@pytest.mark.parametrize("verb", ["export", "generate"])
def test_help_does_not_wait_for_torch(verb):
    """The help of a verb imports neither torch nor numpy: Python's own list of imports has none."""
    command = [sys.executable, "-X", "importtime", "-m", "augend", verb, "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "augend" in imported
    assert not {"torch", "numpy"} & imported
