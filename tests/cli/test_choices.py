"""Adapters, frozen parts, 16 bits, packed rows, activations computed twice: what a run file asks for is what comes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from augend import inspect
from augend._cli import main
from augend._cli._adjust import adjust_model
from augend._cli._build import build_model, build_rows, build_training
from augend._cli._memory import Live, memory_of
from augend._cli._restore import restored
from augend._cli._sample import sample
from augend._config import Setting, read
from augend.models import Llama, lora_state

ADAPTER = ["adapter.rank=3", "adapter.alpha=6"]
EVERYTHING = [*ADAPTER, "adapter.dropout=0.2", "model.dtype=bfloat16", "model.freeze=['*lora_a*']", "data.pack=80"]


def parsed(settings) -> list[Setting]:
    """Read settings as the command line does."""
    return [Setting.parse(setting) for setting in settings]


def options(settings) -> list[str]:
    """Write settings as the command line takes them."""
    return [part for setting in settings for part in ("--set", setting)]


def steps_of(directory) -> list[dict]:
    """Read the steps of a run."""
    lines = map(json.loads, (Path(directory) / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return [line for line in lines if "loss" in line]


class TestAdapters:
    """``[adapter]``."""

    def test_they_alone_are_trained(self, folder, capsys):
        """The base of the last checkpoint has the bits it was built with, every adapter moved, and both are counted."""
        assert 0 == main(["fit", "llama.toml", *options(ADAPTER)])
        assert "model       llama, 9,376 parameters, 1,104 of them trained\n" in capsys.readouterr().out
        run = read(Path("llama.toml"), parsed(ADAPTER))
        built = build_model(run, build_rows(run).source)
        before, after = built.state_dict(), restored(Path("runs/llama-1")).model.state_dict()
        moved = {name for name, value in before.items() if not torch.equal(value, after[name])}
        assert lora_state(built).keys() == moved
        assert 2.0 == built.model.layers[0].self_attn.q_proj.scale

    def test_an_export_is_merged(self, folder, capsys):
        """It has the names of a model without adapters, and its logits but for the rounding of the merged weights."""
        assert 0 == main(["fit", "llama.toml", *options(ADAPTER), "--set", "optimizer.lr=0.1"])
        assert 0 == main(["export", "runs/llama-1", "--to", "safetensors"])
        assert 0 == main(["generate", "runs/llama-1", "--prompt", "def ", "--max-tokens", "1"])
        trained = restored(Path("runs/llama-1")).model
        plain = Llama(width=16, layers=1, heads=2, max_length=80)
        plain.load_state_dict(load_file("runs/llama-1/export/model.safetensors"))
        tokens = torch.arange(40)[None]
        expected, actual = trained(tokens), plain(tokens)
        assert (actual - expected).abs().max() <= 1e-5 * expected.abs().max()

    def test_layers_of_the_users_own(self, folder):
        """Targets are chosen by name in any model."""
        run = read(Path("linear.toml"), parsed(["adapter.rank=1", "adapter.targets=['1']"]))
        model = nn.Sequential(nn.Tanh(), nn.Linear(2, 2))
        adjust_model(run, model)
        assert ["1.lora_a.weight", "1.lora_b.weight"] == list(lora_state(model))


class TestFreezing:
    """``model.freeze``."""

    def test_what_is_named_stays(self, folder, capsys):
        """To the bit, by full names and by patterns."""
        freeze = ["model.freeze=['model.embed_tokens.weight', '*norm.weight']"]
        assert 0 == main(["fit", "llama.toml", *options(freeze)])
        assert "of them trained\n" in capsys.readouterr().out
        run = read(Path("llama.toml"))
        before = build_model(run, build_rows(run).source).state_dict()
        after = restored(Path("runs/llama-1")).model.state_dict()
        kept = {name for name, value in before.items() if torch.equal(value, after[name])}
        assert {name for name in before if "embed" in name or "norm.weight" in name} == kept


class TestSixteenBits:
    """``model.dtype``."""

    @pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
    def test_products_are_rounded_and_nothing_else(self, folder, dtype):
        """The loss is near that of float32 and another one; parameters and gradients stay in float32.

        A logit is a sum of 16 products of numbers that are rounded to 8 bits at least, after two sums of products in
        the layer: off by a few of 2^-8 of its size, which is below 1, and so is the loss.
        """
        losses = []
        for settings in ([], [f"model.dtype={dtype}"]):
            run = read(Path("llama.toml"), parsed(settings))
            rows = build_rows(run)
            model = build_model(run, rows.source)
            training = build_training(run, rows, model, strict_bits=False)
            microbatch = next(iter(next(iter(training.data))))
            tally = rows.source.loss(model, microbatch)
            tally.total.sum().backward()
            assert {torch.float32} == {each.dtype for p in model.parameters() for each in (p, p.grad)}
            losses.append(tally.mean().item())
        assert 0 < abs(losses[0] - losses[1]) < 0.05

    def test_metrics_are_computed_alike(self, folder):
        """The model sees 16 bits in the accuracy, too."""
        run = read(Path("llama.toml"), parsed(["model.dtype=bfloat16"]))
        rows = build_rows(run)
        model = build_model(run, rows.source)
        seen = []
        model.model.layers[0].self_attn.q_proj.register_forward_hook(lambda *made: seen.append(made[2].dtype))
        training = build_training(run, rows, model, strict_bits=False)
        rows.source.metrics["accuracy"](model, next(iter(next(iter(training.data)))))
        assert [torch.bfloat16] == seen


class TestPacking:
    """``data.pack``."""

    def test_a_run_comes_to_the_same_numbers(self, folder):
        """Steps have the same rows and counts, and losses and error bars that differ in the rounding of sums alone.

        A float32 loss of a token is a sum over 258 classes of what some dozens of roundings made of the same tokens:
        relative errors of some hundreds of 2^-24 at the first step; later ones also see an update.
        """
        for settings in ([], ["data.pack=80"]):
            assert 0 == main(["fit", "llama.toml", *options(settings)])
        plain, packed = (steps_of(f"runs/llama-{number}") for number in (1, 2))
        for key in ("count", "rows", "step", "update", "lr"):
            assert [line[key] for line in plain] == [line[key] for line in packed]
        assert abs(packed[0]["loss"] / plain[0]["loss"] - 1) <= 512 * 2.0**-24
        assert abs(packed[0]["loss_error"] / plain[0]["loss_error"] - 1) <= 2**16 * 2.0**-24

    def test_a_sample_is_of_one_document(self, folder):
        """The prompt that is shown ends with it, where nothing in it is a prompt."""
        Path("a.txt").write_text("abcdefg" * 40, encoding="utf-8")
        settings = ["data.source=text", "data.path=a.txt", "data.length=7", "data.pack=80"]
        text = Path("llama.toml").read_text(encoding="utf-8").replace("max_bytes = 64\nlimit = 40\n", "")
        Path("text.toml").write_text(text, encoding="utf-8")
        run = read(Path("text.toml"), parsed(settings))
        rows = build_rows(run)
        model = build_model(run, rows.source)
        training = build_training(run, rows, model, strict_bits=False)
        prompt, _ = sample(model, training.data, rows.source.tokenizer)
        assert "abcdefg" == prompt

    @pytest.mark.parametrize("own", [False, True])
    def test_other_models_are_given_the_documents(self, folder, own):
        """A model of the user's own that takes them is trained, and one that does not is refused."""
        signature = "tokens, documents" if own else "tokens"
        code = "import torch\nclass Own(torch.nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        code += "        self.table = torch.nn.Embedding(258, 258)\n"
        code += f"    def forward(self, {signature}):\n        return self.table(tokens)\n"
        Path(f"own_net_{own}.py").write_text(code, encoding="utf-8")
        text = (
            f'steps = 1\n[model]\nname = "own_net_{own}:Own"\n[data]\nsource = "docstrings"\nlimit = 20\npack = 600\n'
        )
        Path("own.toml").write_text(text, encoding="utf-8")
        assert (0 if own else 2) == main(["fit", "own.toml"])


class TestTogether:
    """All of it in one run."""

    def test_resume_is_bitwise(self, folder):
        """Also where activations are computed twice from then on: the same weights as without an interruption."""
        assert 0 == main(["fit", "llama.toml", *options([*EVERYTHING, "steps=4", "schedule.name=constant"])])
        assert 0 == main(["fit", "llama.toml", *options([*EVERYTHING, "steps=2", "schedule.name=constant"])])
        assert 0 == main(["resume", "runs/llama-2", *options(["steps=4", "model.checkpoint_activations=true"])])
        whole, parts = (inspect(f"runs/llama-{number}") for number in (1, 2))
        assert whole.digest == parts.digest
        assert [line["loss"] for line in steps_of("runs/llama-1")] == [
            line["loss"] for line in steps_of("runs/llama-2")
        ]

    @pytest.mark.long
    def test_exact_steps_are_the_same_on_shards(self, folder):
        """Two ranks that share the model, and compute activations twice, come to the weights of one that does not."""
        exactly = [*EVERYTHING, "accumulator.dtype=exact"]
        assert 0 == main(["fit", "llama.toml", *options(exactly)])
        assert 0 == main(
            ["fit", "llama.toml", *options([*exactly, "model.checkpoint_activations=true"]), "--ranks", "2"]
        )
        alone, shared = (inspect(f"runs/llama-{number}") for number in (1, 2))
        assert alone.digest == shared.digest

    def test_what_the_run_was_begun_with_stays(self, folder, capsys):
        """Another value is refused by its key."""
        assert 0 == main(["fit", "llama.toml", *options([*EVERYTHING, "steps=1"])])
        for setting in ("adapter.rank=4", "model.dtype=float16", "data.pack=79", "model.freeze=['*a']"):
            capsys.readouterr()
            assert 2 == main(["resume", "runs/llama-1", *options([setting])])
            assert f"{setting.partition('=')[0]} = " in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("settings", "parts"),
        [
            (["adapter.rank=2", "adapter.targets=['q_prj']"], ["adapter.targets = ('q_prj',)", "did you mean q_proj"]),
            (["model.freeze=['nrm']"], ["model.freeze = ['nrm']", "fits no parameter", "such as model.embed_tokens"]),
            (["model.freeze=['*']"], ["model.freeze = ['*']", "nothing is left to be trained"]),
            (["data.pack=81"], ["data.pack = 81", "model.max_length = 80 is less"]),
            (["data.pack=60"], ["data.pack = 60", "tokens; raise it, or set data.max_bytes = 60"]),
        ],
    )
    def test_mistakes(self, folder, capsys, settings, parts):
        """Each is one line with the key and the remedy, before anything is written."""
        assert 2 == main(["fit", "llama.toml", *options(settings)])
        message = capsys.readouterr().err
        assert [] == [part for part in parts if part not in message]
        assert 1 == message.count("\n")
        assert not Path("runs").exists()

    def test_rows_without_tokens_are_not_packed(self, folder, capsys):
        """The line names the source."""
        assert 2 == main(["fit", "linear.toml", *options(["data.pack=80"])])
        assert "data.pack = 80: only rows of tokens" in capsys.readouterr().err


class TestMemory:
    """What ``--dry-run`` says of memory."""

    def test_tensors_are_counted_while_they_are_there(self):
        """Each memory once, views not at all."""
        with Live() as live:
            first = torch.zeros(1000)
            view = first.view(10, 100)
            second = first + 1
            assert (8000, 8000) == (live.now, live.most)
            del first, second
            assert (4000, 8000) == (live.now, live.most)
            del view
            assert (0, 8000) == (live.now, live.most)

    def test_a_backward_is_counted(self):
        """Outputs that are kept for the backward, and gradients."""
        weight = torch.zeros(10, 10, requires_grad=True)
        x = torch.ones(50, 10)
        with Live() as live:
            total = (x @ weight).exp().sum()
            assert 2000 + 4 == live.now
            total.backward()
        assert 400 + 4 == live.now

    def test_a_dry_run_says_what_training_takes(self, folder, capsys):
        """Parameters trained and all, rows, steps, and memory; nothing is written."""
        assert 0 == main(["fit", "llama.toml", "--dry-run", *options(ADAPTER)])
        output = capsys.readouterr().out
        assert "model       llama, 9,376 parameters, 1,104 of them trained\n" in output
        assert "training    3 steps of 8 rows" in output
        assert "in tensors: model 37.5 kB, optimizer 8.9 kB, sums and a micro-batch " in output.splitlines()[-1]
        assert not Path("runs").exists()

    def test_activations_computed_twice_take_less(self, folder):
        """Of a model of many layers; the model and the optimizer's state are what they are without."""
        found = []
        for again in ("false", "true"):
            run = read(Path("llama.toml"), parsed(["model.layers=24", f"model.checkpoint_activations={again}"]))
            rows = build_rows(run)
            training = build_training(run, rows, build_model(run, rows.source), strict_bits=False)
            found.append(memory_of(run, rows, training).split(": ")[1].split(", "))
        assert found[0][:2] == found[1][:2]
        plain, checkpointed = (
            float(size) * {"kB": 1, "MB": 1000}[unit] for size, unit in (each[2].split()[-2:] for each in found)
        )
        assert checkpointed < plain / 2
