"""From a GGUF file to a run that trains on from it, and back to GGUF files."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
import torch
from vocabularies import CHAT, END, trained

import augend
from augend import gguf, models
from augend._cli import main
from augend._cli._build import build_model, build_rows
from augend._cli._restore import restored
from augend._config import Setting, read

SIZES = {
    "vocab_size": 600,
    "width": 32,
    "layers": 2,
    "heads": 4,
    "kv_heads": 2,
    "hidden": 64,
    "max_length": 64,
    "rope_theta": 5000.0,
    "norm_eps": 2.0**-17,
    "tied": True,
}
RUN = """
steps = 3
batch_size = 4
microbatch_size = 2
[model]
name = "gguf:base.gguf"
[data]
source = "pairs"
path = "pairs.jsonl"
validation = 0.25
[optimizer]
lr = 1e-2
"""

TEXT = {"data.source=text": ("--set", "data.tokenizer=large.json", "--set", "data.length=8")}


def base(path: Path, *, described: bool = True) -> Path:
    """Write the file of a small Llama with random weights and a tokenizer that begins texts, or without one."""
    torch.manual_seed(1)
    content = json.loads(trained())
    identity = {token["content"]: token["id"] for token in content["added_tokens"]}
    tokenizer = gguf.metadata_of(trained(), end_of_text=identity[END])
    tokenizer["tokenizer.ggml.add_bos_token"] = gguf.Value.of("bool", value=True)
    tokenizer["tokenizer.chat_template"] = gguf.Value.of("string", CHAT)
    state = models.Llama(**SIZES).state_dict()
    gguf.save(path, state, configuration=SIZES, tokenizer=tokenizer if described else None)
    return path


@pytest.fixture
def place(folder) -> Path:
    """Work beside a base file, pairs and a run file that names both."""
    base(Path("base.gguf"))
    chat = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
    rows = [{"prompt": f"{each}+{each}=", "completion": f"{2 * each}"} for each in range(11)] + [{"messages": chat}]
    Path("pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    Path("run.toml").write_text(RUN, encoding="utf-8")
    return folder


@pytest.fixture
def tuned(place, capsys) -> Path:
    """Train the run, and give its directory."""
    assert 0 == main(["fit", "run.toml", "--run-dir", "tuned"])
    capsys.readouterr()
    return Path("tuned")


def said(capsys, *arguments: str) -> str:
    """Run a command that must end with 2, and one line and nothing else; return the line."""
    assert 2 == main(arguments)
    output, message = capsys.readouterr()
    assert "" == output
    assert message.startswith("augend: ")
    assert 1 == message.count("\n")
    return message


def test_a_run_begins_with_the_weights_and_the_tokenizer_of_the_file(place):
    """Before the first step, the model has the file's bits, and rows are in the tokens of the file, its first too."""
    run = read(Path("run.toml"))
    rows = build_rows(run)
    loaded = gguf.load("base.gguf")
    state = build_model(run, rows.source).state_dict()
    assert list(loaded.state) == list(state)
    assert all(torch.equal(loaded.state[name], tensor) for name, tensor in state.items())
    tokenizer = loaded.tokenizer
    expected = [tokenizer.start_of_text, *tokenizer.encode("3+3="), *tokenizer.encode("6"), tokenizer.end_of_text]
    assert expected == rows.source.rows[3]["tokens"].tolist()
    said = "<|endoftext|><|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n", "4<|im_end|>"
    assert [token for text in said for token in tokenizer.encode(text)] == rows.source.rows[11]["tokens"].tolist()


@pytest.mark.parametrize("source", ["docstrings", "text"])
def test_every_source_of_text_takes_the_tokenizer(place, source):
    """What the file's tokenizer makes of a text is what those sources have, from its first token to its end."""
    Path("code").mkdir()
    Path("code/one.py").write_text('def one():\n    "One."\n', encoding="utf-8")
    data = {"docstrings": {"folder": "code"}, "text": {"path": "code/one.py"}}[source]
    settings = [f"data.{name}={value}" for name, value in data.items()]
    settings += [f"data.source={source}", "data.validation=0"]
    Path("run.toml").write_text(RUN.replace('path = "pairs.jsonl"', ""), encoding="utf-8")
    rows = build_rows(read(Path("run.toml"), [Setting.parse(each) for each in settings])).source
    text = {"docstrings": 'def one():\n    """One.', "text": 'def one():\n    "One."\n'}[source]
    tokens = rows.rows[0]["tokens"].tolist()
    assert (rows.tokenizer.start_of_text, rows.tokenizer.end_of_text) == (tokens[0], tokens[-1])
    assert text == rows.tokenizer.decode(tokens)
    assert len(tokens) < len(text)


def test_a_run_trains_and_goes_on(tuned, capsys, monkeypatch):
    """fit trains from the file, and resume goes on to the bits of a run that went through, where the file moved too."""
    assert 0 == main(["fit", "run.toml", "--run-dir", "whole", "--set", "steps=5"])
    Path("base.gguf").rename("moved.gguf")
    moved = ["--set", "model.name=gguf:moved.gguf"]
    capsys.readouterr()
    assert "base.gguf" in said(capsys, "resume", str(tuned), "--set", "steps=5")
    assert "base.gguf" in said(capsys, "evaluate", str(tuned))
    assert 0 == main(["resume", str(tuned), "--set", "steps=5", *moved])
    Path("whole/config.toml").write_text(Path("tuned/config.toml").read_text("utf-8"), encoding="utf-8")
    weights = [restored(Path(directory)).model.state_dict() for directory in ("whole", "tuned")]
    assert all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())
    assert not torch.equal(weights[0]["model.norm.weight"], gguf.load("moved.gguf").state["model.norm.weight"])


def test_what_the_file_leaves_open_may_be_said(place):
    """Dropout, the length and what is kept for the backward are the run file's."""
    settings = ("model.dropout=0.5", "model.max_length=32", "model.checkpoint_activations=true")
    run = read(Path("run.toml"), [Setting.parse(each) for each in settings])
    model = build_model(run, build_rows(run).source)
    assert 32 == model.max_length
    tokens = torch.arange(20)[None]
    assert not torch.equal(model(tokens), model(tokens))
    assert torch.equal(model.eval()(tokens), model(tokens))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("model.width=64", "model.width = 64: the GGUF file says what the model is; leave it out"),
        ("model.drop_out=0.1", "did you mean dropout"),
        ("model.dropout=2", "model.dropout = 2: dropout must be at least 0"),
        ("model.dropout=much", "model.dropout = 'much'"),
        ("model.name=gguf:", "expected the path of a GGUF file"),
        ("model.name=gguf:none.gguf", "none.gguf"),
        ("model.name=gguf:run.toml", "run.toml"),
        ("model.name=gguf:mute.gguf", "the file has no tokenizer; name one with data.tokenizer"),
        ("model.name=gguf:strange.gguf", "its tokenizer cannot be used: tokenizer.ggml.pre is 'strange'"),
        ("model.name=gguf:other.gguf", "other.gguf is of architecture 'mamba'"),
        ("data.source=text", "the file's model has 600 tokens, and the source 700; leave out data.tokenizer"),
    ],
)
def test_what_cannot_be_used(place, capsys, change, message):
    """Each thing that cannot be done ends with 2 and one line that names it, before anything is written."""
    loaded = gguf.load("base.gguf")
    described = dict(loaded.header.metadata)
    base(Path("mute.gguf"), described=False)
    strange = {key: value for key, value in described.items() if key.startswith("tokenizer.")}
    strange["tokenizer.ggml.pre"] = gguf.Value.of("string", "strange")
    gguf.save("strange.gguf", loaded.state, configuration=SIZES, tokenizer=strange)
    gguf.write("other.gguf", described | {"general.architecture": gguf.Value.of("string", "mamba")}, {})
    Path("large.json").write_text(trained(700), encoding="utf-8")
    assert message in said(capsys, "fit", "run.toml", "--set", change, *TEXT.get(change, ()))
    assert not Path("runs").exists()


@pytest.mark.parametrize("kind", ["f32", "q8_0"])
def test_a_model_is_given_back(tuned, capsys, kind):
    """What was trained, as any type: the file has all that its base said, and the weights but for their rounding."""
    assert 0 == main(["export", str(tuned), "--to", "gguf", *(() if kind == "f32" else ("--type", kind))])
    output = capsys.readouterr().out
    assert (
        f"export      {tuned / 'model.gguf'}\ntensors     15 {kind.upper()}, 5 F32\n".replace("15 F32, 5", "20")
        in output
    )
    back, began = gguf.load(tuned / "model.gguf"), gguf.read_header("base.gguf")
    trained_on = restored(tuned).model.state_dict()
    apart = {name: float((back.state[name] - tensor).abs().max()) for name, tensor in trained_on.items()}
    widest = max(float(tensor.abs().max()) for name, tensor in trained_on.items() if tensor.dim() == 2)
    # Q8_0: half a step of the largest magnitude / 127, and that step rounded to 11 bits.
    assert max(apart.values()) <= (0.0 if kind == "f32" else widest / 127 * (0.5 + 127 * 2.0**-11))
    changed = {"general.file_type", "general.quantization_version"}
    assert [(key, value.value) for key, value in began.metadata.items() if key not in changed] == [
        (key, value.value) for key, value in back.header.metadata.items() if key not in changed
    ]
    for to in ("gguf", "safetensors"):
        assert 0 == main(["export", str(tuned), "--to", to, "--out", f"another-{to}"])
    capsys.readouterr()
    assert "another-gguf: there already" in said(capsys, "export", str(tuned), "--to", "gguf", "--out", "another-gguf")
    assert "run has no [adapter]" in said(capsys, "export", str(tuned), "--to", "gguf-adapter")


def test_adapters_are_given_back_alone_and_merged(place, capsys):
    """Adapters beside the file are those of the model; merged, they are in the weights of a model without any."""
    settings = [part for key in ("rank=3", "alpha=6") for part in ("--set", f"adapter.{key}")]
    assert 0 == main(["fit", "run.toml", "--run-dir", "tuned", *settings])
    for to in ("gguf", "gguf-adapter"):
        assert 0 == main(["export", "tuned", "--to", to])
    assert "export      tuned/adapter.gguf\ntensors     28 F32\n" in capsys.readouterr().out
    header, adapters = gguf.read("tuned/adapter.gguf")
    assert 6.0 == header.metadata["adapter.lora.alpha"].value
    model = restored(Path("tuned")).model
    expected = models.lora_state(model)["model.layers.1.mlp.up_proj.lora_b.weight"]
    assert torch.equal(expected, adapters["blk.1.ffn_up.weight.lora_b"])
    assert expected.abs().max() > 0
    models.merge_lora(model)
    merged = gguf.load("tuned/model.gguf").state
    assert all(torch.equal(tensor, merged[name]) for name, tensor in model.state_dict().items())
    assert "there already" in said(capsys, "export", "tuned", "--to", "gguf-adapter")


def test_models_without_a_file_are_given_too(folder, capsys):
    """A Llama trained from scratch: with bytes, with a tokenizer of its own, and with adapters that are only merged."""
    Path("tokenizer.json").write_text(trained(), encoding="utf-8")
    for name, settings in {"own": ["data.tokenizer=tokenizer.json"], "bytes": ["adapter.rank=2"]}.items():
        changes = [part for setting in settings for part in ("--set", setting)]
        assert 0 == main(["fit", "llama.toml", *changes, "--run-dir", name])
        assert 0 == main(["export", name, "--to", "gguf", "--out", f"{name}.gguf"])
        loaded, run = gguf.load(f"{name}.gguf"), restored(Path(name))
        tokenizer = run.rows.source.tokenizer
        assert tokenizer.encode("def né(): 12") == loaded.tokenizer.encode("def né(): 12")
        assert (tokenizer.end_of_text, tokenizer.padding) == (loaded.tokenizer.end_of_text, loaded.tokenizer.padding)
        assert run.model.configuration | {"norm_eps": loaded.configuration["norm_eps"]} == loaded.configuration
    capsys.readouterr()
    message = said(capsys, "export", "bytes", "--to", "gguf-adapter")
    assert "model.name = 'llama': its adapters are beside no GGUF file" in message


def test_what_cannot_be_given(tuned, saved, capsys, monkeypatch):
    """No Llama, no such type, a type for another format, a tokenizer that no file carries: 2 and one line."""
    assert "made a Linear, and a GGUF file" in said(capsys, "export", str(saved), "--to", "gguf")
    assert "--type q8_0: is for --to gguf" in said(
        capsys, "export", str(tuned), "--to", "safetensors", "--type", "q8_0"
    )
    message = said(capsys, "export", str(tuned), "--to", "gguf", "--type", "q9")
    with pytest.raises(ValueError, match="types are ") as refusal:
        gguf.save("none.gguf", {}, configuration=SIZES, type="q9")
    assert set(re.findall(r"\w+", str(refusal.value))) <= set(re.findall(r"\w+", f"{message} cannot"))
    monkeypatch.setattr("augend._cli._base.gguf.tokenizer_of", lambda _: Spoken(gguf.load("base.gguf").tokenizer))
    message = said(capsys, "export", str(tuned), "--to", "gguf")
    assert "data.source = 'pairs': its tokenizer is a Spoken, which a GGUF file cannot carry" in message
    assert not list(tuned.glob("*.gguf"))


@pytest.mark.parametrize("pack", [(), ("--set", "data.pack=64")])
def test_evaluate_tells_of_the_perplexity(place, capsys, pack):
    """It is the exponential of the loss, with its error over the rows, also of rows that share a row of the model."""
    assert 0 == main(["fit", "run.toml", "--run-dir", "tuned", *pack])
    capsys.readouterr()
    assert 0 == main(["evaluate", "tuned"])
    run = restored(Path("tuned"))
    rows = augend.Batches(run.rows.held_out, batch_size=3, microbatch_size=1, collate_fn=run.rows.source.collate)
    loss = augend.evaluate(run.model, rows, loss=run.rows.source.loss)["loss"]
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "perplexity" in line)
    value, error = (float(number) for number in line.removeprefix("held out    perplexity ").split(" ± "))
    value_of_loss = math.exp(loss.value)
    assert (value, error) == pytest.approx((value_of_loss, value_of_loss * loss.error), rel=0.1)  # two or three digits


class Spoken:
    """A tokenizer of the user's own."""

    def __init__(self, inner):
        self.inner = inner

    def __getattr__(self, name):
        return getattr(self.inner, name)
