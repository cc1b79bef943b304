"""augend export: from a run to a directory that transformers loads, or a line that says what stands in the way."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

from augend._cli import main
from augend._cli._restore import restored


@pytest.fixture
def spoken(folder, capsys) -> Path:
    """Train the language model of the run file on a few functions, and give its directory."""
    Path("code").mkdir()
    functions = "".join(f'def f{number}():\n    "Return {number}."\n' for number in range(20))
    Path("code/functions.py").write_text(functions, "utf-8")
    assert 0 == main(["fit", "llama.toml", "--set", "data.folder=code", "--run-dir", "spoken"])
    capsys.readouterr()
    return Path("spoken")


def said(capsys, code: int, *arguments: str) -> str:
    """Run a command that must fail with one line and nothing else; return the line."""
    assert code == main(arguments)
    output, message = capsys.readouterr()
    assert "" == output
    assert message.startswith("augend: ")
    assert 1 == message.count("\n")
    return message


def test_a_language_model(spoken, capsys):
    """Transformers loads what the run trained, with equal logits and the run's own end of text.

    ``use_cache=False`` keeps the memory layout of attention, and weights move out of the file's mapping, where a BLAS
    may add in another order.
    """
    assert 0 == main(["export", str(spoken), "--to", "safetensors"])
    checkpoint = spoken / "checkpoints" / "00000001-step-3"
    assert (f"checkpoint  {checkpoint}\nexport      {spoken / 'export'}\n", "") == capsys.readouterr()
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        spoken / "export", local_files_only=True, attn_implementation="sdpa"
    ).eval()
    for parameter in theirs.parameters():
        parameter.data = parameter.data.clone()
    tokens = torch.arange(70)[None]
    with torch.no_grad():
        assert torch.equal(restored(spoken).model.eval()(tokens), theirs(tokens, use_cache=False).logits)
    assert 256 == theirs.config.eos_token_id


def test_any_model(saved, capsys):
    """The newest checkpoint, or the one asked for, of a model that is no Llama: its tensors alone."""
    oldest = saved / "checkpoints" / "00000001-step-0"
    for place, out, weight in [(saved, "a/new", 3.0), (oldest, "old", 1.0)]:
        assert 0 == main(["export", str(place), "--to", "safetensors", "--out", out])
        assert f"export      {out}\n" in capsys.readouterr().out
        assert ["model.safetensors"] == [path.name for path in Path(out).iterdir()]
        assert torch.equal(torch.full((1, 2), weight), load_file(Path(out) / "model.safetensors")["weight"])


def test_a_checkpoint_is_left_alone(saved):
    """Without --out, the model of one checkpoint goes into its run's directory, not into the checkpoint."""
    checkpoint = saved / "checkpoints" / "00000002-step-0"
    before = sorted(checkpoint.rglob("*"))
    assert 0 == main(["export", str(checkpoint), "--to", "safetensors"])
    assert before == sorted(checkpoint.rglob("*"))
    assert torch.equal(torch.full((1, 2), 2.0), load_file(saved / "export" / "model.safetensors")["weight"])


def test_wrong_usage(saved, capsys, monkeypatch):
    """Everything that is wrong on the command line ends with 2, before the model is loaded, and says what to do."""
    monkeypatch.setattr("augend._cli._restore.restored", None)
    full, link = Path("full"), Path("link")
    full.mkdir()
    (full / "notes").write_text("mine", "utf-8")
    link.symlink_to("elsewhere")
    run, form = str(saved), ("--to", "safetensors")
    assert "--to onnx: no format of this version; write --to safetensors or gguf" in said(
        capsys, 2, "export", run, "--to", "onnx"
    )
    assert "'--to'" in said(capsys, 2, "export", run)
    assert "nowhere: no such directory" in said(capsys, 2, "export", "nowhere", *form)
    assert "full: not the directory of a run" in said(capsys, 2, "export", "full", *form)
    for out in ("full", "full/notes", "link"):
        assert f"{out}: there already, and no empty directory" in said(capsys, 2, "export", run, *form, "--out", out)
    (saved / "export").mkdir()
    (saved / "export" / "notes").write_text("mine", "utf-8")
    assert f"{saved / 'export'}: there already" in said(capsys, 2, "export", run, *form)
    Path("empty").mkdir()
    monkeypatch.chdir("empty")
    assert ".: the current directory" in said(capsys, 2, "export", f"../{run}", *form, "--out", ".")
    assert "mine" == Path("../full/notes").read_text("utf-8")


def test_an_empty_directory_is_filled(saved):
    """An empty directory that is there already is as good as a new one."""
    Path("empty").mkdir()
    assert 0 == main(["export", str(saved), "--to", "safetensors", "--out", "empty"])
    assert ["model.safetensors"] == [path.name for path in Path("empty").iterdir()]


def test_failures(saved, capsys):
    """A run without a good checkpoint, and a place that cannot be written, end with 1 and one line."""
    Path("file").write_text("", "utf-8")
    line = said(capsys, 1, "export", str(saved), "--to", "safetensors", "--out", "file/new")
    assert re.match(
        "augend: failed: file/new: cannot be written: (Not a directory|File exists); name another place with --out\n",
        line,
    )
    for path in (saved / "checkpoints").glob("*/manifest.json"):
        path.write_text("{}", "utf-8")
    assert "manifest" in said(capsys, 1, "export", str(saved), "--to", "safetensors")
    assert not (saved / "export").exists()
