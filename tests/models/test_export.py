"""Export: what transformers and safetensors find in the directory, and what a failure leaves behind."""

from __future__ import annotations

import json
import math
import os
import socket
import stat
import tempfile
from contextlib import contextmanager
from pathlib import Path

import pytest
import safetensors
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import nn

from augend import models
from augend.errors import ContractError
from augend.models import MLP, Llama
from augend.models import _export as exporting

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
TINY = {"vocab_size": 11, "width": 16, "layers": 2, "heads": 2, "max_length": 32}


@pytest.fixture(autouse=True)
def no_network(monkeypatch) -> None:
    """Let every connection fail, so that what transformers loads is what the directory holds."""

    def refuse(*arguments):
        raise AssertionError("a connection was tried")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@contextmanager
def new_directory():
    """Give a path that is not there yet, once for each example."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder) / "exported"


def roughened(model, seed):
    """Give a model weights that make every part matter, norms included."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / math.sqrt(parameter.shape[-1]) + 0.1)
    return model.eval()


def loaded(directory, **options):
    """Load a directory with transformers, as its user would."""
    options = {"attn_implementation": "sdpa", **options}
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, local_files_only=True, **options)
    return model.eval()


def aligned(model):
    """Move each weight from the file's mapped memory, where it may lie at any multiple of 8 bytes, to its own.

    A BLAS adds in another order where memory is aligned otherwise.
    """
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    return model


def same(expected, actual):
    """Say whether two states have the same names, dtypes and bits."""
    return expected.keys() == actual.keys() and all(
        value.dtype == actual[name].dtype and torch.equal(value, actual[name]) for name, value in expected.items()
    )


@st.composite
def llamas(draw):
    """Draw a Llama's arguments: head groups, odd hidden sizes, other bases, tied or not."""
    kv_heads, groups = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    heads = kv_heads * groups
    return {
        "vocab_size": draw(st.integers(2, 40)),
        "width": heads * 2 * draw(st.integers(1, 12)),
        "layers": draw(st.integers(1, 3)),
        "heads": heads,
        "kv_heads": kv_heads,
        "hidden": draw(st.integers(1, 50)),
        "max_length": 48,
        "rope_theta": draw(st.sampled_from([10.0, 10_000.0, 123_456.7, 5e5])),
        "norm_eps": draw(st.sampled_from([1e-6, 1e-5, 0.01])),
        "tied": draw(st.booleans()),
    }


class TestTransformers:
    """What transformers makes of a Llama."""

    @settings(max_examples=20)
    @given(llamas(), st.integers(1, 48), st.integers(0, 99))
    def test_logits_are_equal(self, arguments, length, seed):
        """In float32 logits are bitwise equal once the weights lie in memory of their own.

        As loaded they lie in the mapped file, where a BLAS may add in another order: logits then differ by what
        float32 gets wrong anyway. To first order that is what this model is off from itself in float64; a factor of 64
        allows for errors that happened to cancel.
        """
        model = roughened(Llama(**arguments), seed)
        with new_directory() as directory:
            models.export(model, directory)
            theirs = loaded(directory)
        assert same(model.state_dict(), {name: theirs.state_dict()[name] for name in model.state_dict()})
        tokens = torch.randint(0, arguments["vocab_size"], (2, length), generator=torch.Generator().manual_seed(seed))
        with torch.no_grad():
            expected, as_loaded = model(tokens), theirs(tokens, use_cache=False).logits
            assert torch.equal(expected, aligned(theirs)(tokens, use_cache=False).logits)
            wide = model.double()(tokens)
        assert (as_loaded - expected).abs().max() <= 64 * (expected.double() - wide).abs().max()

    @settings(max_examples=6)
    @given(llamas(), st.sampled_from([torch.bfloat16, torch.float16]), st.integers(0, 99))
    def test_16_bit_weights_stay_16_bit(self, arguments, dtype, seed):
        """The file has the dtype and the bits, transformers loads them so, and widened they give equal logits.

        In 16 bits themselves logits differ: the norm of transformers rounds once more, before it multiplies by the
        weight.
        """
        model = roughened(Llama(**arguments), seed).to(dtype)
        with new_directory() as directory:
            models.export(model, directory)
            assert {dtype} == {value.dtype for value in load_file(directory / "model.safetensors").values()}
            narrow, wide = loaded(directory), loaded(directory, dtype=torch.float32)
        assert {dtype} == {parameter.dtype for parameter in narrow.parameters()}
        assert all(torch.equal(value, narrow.state_dict()[name]) for name, value in model.state_dict().items())
        tokens = torch.randint(0, arguments["vocab_size"], (2, 7), generator=torch.Generator().manual_seed(seed))
        with torch.no_grad():
            assert torch.equal(model.float()(tokens), aligned(wide)(tokens, use_cache=False).logits)

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("tied", [True, False])
    def test_configuration(self, tmp_path, tied, dtype):
        """Every number of the architecture arrives, under the classes that transformers asks for by name."""
        arguments = {"vocab_size": 31, "width": 24, "layers": 3, "heads": 6, "kv_heads": 2, "hidden": 37}
        model = Llama(**arguments, max_length=50, rope_theta=5e5, norm_eps=0.25, tied=tied).to(dtype)
        models.export(model, tmp_path / "new", end_of_text=7)
        theirs = loaded(tmp_path / "new")
        assert type(theirs) is transformers.LlamaForCausalLM
        config = theirs.config
        assert (31, 24, 37, 3) == (
            config.vocab_size,
            config.hidden_size,
            config.intermediate_size,
            config.num_hidden_layers,
        )
        assert (6, 2, 4) == (config.num_attention_heads, config.num_key_value_heads, config.head_dim)
        assert (50, 0.25) == (config.max_position_embeddings, config.rms_norm_eps)
        assert {"rope_type": "default", "rope_theta": 5e5} == config.rope_parameters
        assert (tied, dtype) == (config.tie_word_embeddings, config.dtype)
        assert (None, 7, None) == (config.bos_token_id, config.eos_token_id, config.pad_token_id)
        assert 7 == theirs.generation_config.eos_token_id
        assert tied == (theirs.lm_head.weight is theirs.model.embed_tokens.weight)

    def test_nothing_is_missing_and_nothing_is_left_over(self, tmp_path):
        """Transformers initialises no weight by itself, and ignores none of the file."""
        for tied in (True, False):
            models.export(Llama(**TINY, tied=tied), tmp_path / str(tied))
            _, report = transformers.LlamaForCausalLM.from_pretrained(
                tmp_path / str(tied), local_files_only=True, output_loading_info=True
            )
            assert [] == [name for names in report.values() for name in names]

    def test_generation_stops_at_the_same_token(self, tmp_path):
        """Greedy texts are equal, up to the end of text that was written."""
        model = roughened(Llama(**TINY), 0)
        new = model.generate([1, 2], 20)
        models.export(model, tmp_path / "new", end_of_text=new[5])
        theirs = loaded(tmp_path / "new")
        whole = theirs.generate(torch.tensor([[1, 2]]), max_new_tokens=20, do_sample=False, pad_token_id=0)[0].tolist()
        expected = [1, 2, *model.generate([1, 2], 20, stop=new[5]), new[5]]
        assert expected == whole

    def test_older_readers_find_the_base(self, tmp_path):
        """Where versions before 5 look for base and dtype there is the same as where version 5 does."""
        models.export(Llama(**TINY, rope_theta=77.0).bfloat16(), tmp_path / "new")
        config = json.loads((tmp_path / "new" / "config.json").read_text("utf-8"))
        assert 77.0 == config["rope_theta"] == config["rope_parameters"]["rope_theta"]
        assert "bfloat16" == config["dtype"] == config["torch_dtype"]

    def test_mixed_dtypes_are_declared_as_the_widest(self, tmp_path):
        """Norms in float32 lose nothing on the way."""
        model = roughened(Llama(**TINY), 0).bfloat16()
        model.model.norm.float().weight.data.fill_(1 + 2.0**-20)
        models.export(model, tmp_path / "new")
        theirs = loaded(tmp_path / "new")
        assert torch.float32 == theirs.dtype
        assert all(torch.equal(value.float(), theirs.state_dict()[name]) for name, value in model.state_dict().items())

    def test_weights_that_were_tied_by_hand(self, tmp_path):
        """An output that was made the embedding after construction is declared as tied."""
        model = roughened(Llama(**TINY, tied=False), 0)
        model.lm_head.weight = model.model.embed_tokens.weight
        models.export(model, tmp_path / "new")
        assert "lm_head.weight" not in load_file(tmp_path / "new" / "model.safetensors")
        theirs = loaded(tmp_path / "new")
        assert theirs.lm_head.weight is theirs.model.embed_tokens.weight
        assert torch.equal(model.model.embed_tokens.weight, theirs.lm_head.weight)


class TestSafetensors:
    """What the file holds."""

    @settings(max_examples=15)
    @given(llamas(), st.sampled_from(DTYPES), st.integers(0, 99))
    def test_a_llama_comes_back_whole(self, arguments, dtype, seed):
        """Names, dtypes and bits of ``state_dict()``, and a Llama that loads them says the same."""
        model = roughened(Llama(**arguments), seed).to(dtype)
        with new_directory() as directory:
            models.export(model, directory)
            assert ["config.json", "model.safetensors"] == sorted(path.name for path in directory.iterdir())
            state = load_file(directory / "model.safetensors")
        assert same(model.state_dict(), state)
        twin = Llama(**arguments).to(dtype)
        twin.load_state_dict(state)
        tokens = torch.arange(2)[None]
        assert torch.equal(model(tokens), twin.eval()(tokens))

    def test_any_module(self, tmp_path):
        """Parameters and persistent buffers of any dtype and stride, and no configuration."""
        model = nn.Sequential(MLP([3, 4, 2]), nn.BatchNorm1d(2))
        model.register_buffer("mask", torch.tensor([True, False]))
        model.register_buffer("across", torch.arange(6).reshape(2, 3).t())
        model.register_buffer("passing", torch.zeros(1), persistent=False)
        model.register_buffer("single", torch.tensor(3.5))
        models.export(model, str(tmp_path / "new"))
        assert ["model.safetensors"] == [path.name for path in (tmp_path / "new").iterdir()]
        state = load_file(tmp_path / "new" / "model.safetensors")
        assert same(model.state_dict(), state)
        with safetensors.safe_open(tmp_path / "new" / "model.safetensors", framework="pt") as file:
            assert {"format": "pt"} == file.metadata()

    def test_tied_tensors_are_there_once_and_views_each(self, tmp_path):
        """One parameter with two names has the first; two tensors in one memory are two."""
        model = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3)})
        model["b"].weight = model["a"].weight
        model.register_buffer("whole", torch.arange(4.0))
        model.register_buffer("part", model.whole[:2])
        models.export(model, tmp_path / "new")
        state = load_file(tmp_path / "new" / "model.safetensors")
        assert {"a.weight", "a.bias", "b.bias", "whole", "part"} == state.keys()
        assert torch.equal(torch.arange(2.0), state["part"])

    def test_nothing_changes_in_the_model(self, tmp_path):
        """Exporting reads: same bits, same objects, same mode, same gradients."""
        model = roughened(Llama(**TINY), 0).train()
        model(torch.tensor([[1, 2]])).sum().backward()
        before = {name: (value, value.clone(), value.grad.clone()) for name, value in model.named_parameters()}
        models.export(model, tmp_path / "new")
        assert model.training
        for name, parameter in model.named_parameters():
            value, bits, grad = before[name]
            assert value is parameter
            assert torch.equal(bits, parameter)
            assert torch.equal(grad, parameter.grad)


class WithState(nn.Module):
    """A module with state that is no tensor."""

    def get_extra_state(self):
        return {"count": 3}

    def set_extra_state(self, state):
        raise NotImplementedError


class TestRefusals:
    """What is refused leaves nothing behind."""

    @pytest.mark.parametrize(
        ("model", "message"),
        [
            (WithState(), "_extra_state is a dict"),
            (Llama(**TINY).to("meta"), "model.embed_tokens.weight is on the meta device"),
            (nn.ParameterList([torch.eye(2).to_sparse()]), r"0 is a torch.sparse_coo"),
            (nn.ParameterList([torch.zeros(2, dtype=torch.complex128)]), "0 has dtype torch.complex128"),
        ],
    )
    def test_tensors_that_no_file_can_hold(self, tmp_path, model, message):
        """State without numbers in memory is named."""
        with pytest.raises(ContractError, match=message):
            models.export(model, tmp_path / "new")
        assert [] == list(tmp_path.iterdir())

    @pytest.mark.parametrize("end_of_text", [-1, 11])
    def test_an_end_that_is_no_token(self, tmp_path, end_of_text):
        """The message has the vocabulary's bounds and the number."""
        with pytest.raises(ContractError, match=f"from 0 to 10; got {end_of_text}"):
            models.export(Llama(**TINY), tmp_path / "new", end_of_text=end_of_text)
        assert [] == list(tmp_path.iterdir())

    def test_an_end_of_something_else_than_a_llama(self, tmp_path):
        """There is no place to write it."""
        with pytest.raises(ContractError, match="Llama alone; got 3 for MLP"):
            models.export(MLP([2, 2]), tmp_path / "new", end_of_text=3)

    def test_a_directory_in_use(self, tmp_path):
        """What is there stays as it is, also a file, and a link to an empty directory."""
        full, file, link = tmp_path / "full", tmp_path / "file", tmp_path / "link"
        (tmp_path / "empty").mkdir()
        full.mkdir()
        for path in (full / "notes.txt", file):
            path.write_text("mine", "utf-8")
        link.symlink_to(tmp_path / "empty")
        for target, message in {
            full: "something already, such as notes.txt",
            file: "no directory",
            link: "no directory",
        }.items():
            with pytest.raises(ContractError, match=message):
                models.export(MLP([2, 2]), target)
        assert ["empty", "file", "full", "link"] == sorted(path.name for path in tmp_path.iterdir())
        assert "mine" == (full / "notes.txt").read_text("utf-8") == file.read_text("utf-8")
        assert [] == list((tmp_path / "empty").iterdir())

    def test_the_current_directory(self, tmp_path, monkeypatch):
        """A rename would leave the shell in a directory that is gone."""
        monkeypatch.chdir(tmp_path)
        for target in (".", tmp_path):
            with pytest.raises(ContractError, match="current directory"):
                models.export(MLP([2, 2]), target)


class TestFiles:
    """Whole or not at all."""

    def test_an_empty_directory_and_missing_parents(self, tmp_path):
        """Both are as good as a new directory."""
        (tmp_path / "empty").mkdir()
        for target in (tmp_path / "empty", tmp_path / "a" / "b" / "c"):
            models.export(MLP([2, 2]), target)
            assert ["model.safetensors"] == [path.name for path in target.iterdir()]
        assert ["a", "empty"] == sorted(path.name for path in tmp_path.iterdir())

    def test_others_may_read_what_the_umask_lets_them(self, tmp_path):
        """The files have the permissions of any new file, though safetensors makes its own private."""
        before = os.umask(0o027)
        try:
            models.export(Llama(**TINY), tmp_path / "new")
        finally:
            os.umask(before)
        assert {0o640} == {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "new").iterdir()}
        assert 0o750 == stat.S_IMODE((tmp_path / "new").stat().st_mode)

    def test_all_is_durable_before_the_name_is(self, tmp_path, monkeypatch):
        """Files, then their directory, then the rename, then its parent; new parents before what is put into them."""
        log = []
        sync, rename = exporting._sync, Path.rename
        monkeypatch.setattr(exporting, "_sync", lambda path: (log.append(("sync", path)), sync(path)))
        monkeypatch.setattr(Path, "rename", lambda path, to: (log.append(("rename", to)), rename(path, to)))
        models.export(Llama(**TINY), tmp_path / "parent" / "new")
        names = [(verb, ".partial" if path.suffix == ".partial" else path.name) for verb, path in log]
        assert ("sync", tmp_path.name) == names[0]
        assert {("sync", "config.json"), ("sync", "model.safetensors")} == set(names[1:3])
        assert [("sync", ".partial"), ("rename", "new"), ("sync", "parent")] == names[3:]

    @pytest.mark.parametrize("call", ["_save", "_sync"])
    def test_a_disk_that_fails_leaves_nothing(self, tmp_path, monkeypatch, call):
        """No directory, not even the one beside."""

        def fail(*arguments):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(exporting, call, fail)
        with pytest.raises(OSError, match="No space left"):
            models.export(Llama(**TINY), tmp_path / "new")
        assert [] == list(tmp_path.iterdir())

    def test_what_safetensors_cannot_write_is_an_os_error(self, tmp_path):
        """The library's own error says why, and is of the kind that callers catch."""
        with pytest.raises(OSError, match=r"gone.model.safetensors cannot be written: .*No such file"):
            exporting._save({"a": torch.zeros(2)}, tmp_path / "gone" / "model.safetensors")

    def test_a_directory_that_was_filled_meanwhile_is_not_replaced(self, tmp_path, monkeypatch):
        """Between the check and the rename somebody else may write: theirs stays."""
        (tmp_path / "new").mkdir()

        def fill(tensors, path):
            (tmp_path / "new" / "theirs").write_text("theirs", "utf-8")

        monkeypatch.setattr(exporting, "_save", fill)
        with pytest.raises(OSError, match="not empty"):
            models.export(MLP([2, 2]), tmp_path / "new")
        assert ["theirs"] == [path.name for path in (tmp_path / "new").iterdir()]
        assert ["new"] == [path.name for path in tmp_path.iterdir()]
