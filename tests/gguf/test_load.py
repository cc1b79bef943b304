"""Llamas from GGUF files: as the file has them, or refused by the name of what is not a Llama's."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from llamas import CONFIGURATION, bits, in_llama_cpp, llama

import gguf
from augend.errors import GGUFError
from augend.gguf import Header, Value, load, read, read_header, save, write
from augend.models import Llama

NAMES = {  # of llama.cpp's gguf-py, tensor_mapping.py
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def converted(path: Path, model: Llama, configuration: dict[str, Any]) -> None:
    """Write a model as llama.cpp's converter does, with the writer of the package gguf."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(configuration["max_length"])
    writer.add_embedding_length(configuration["width"])
    writer.add_block_count(configuration["layers"])
    writer.add_feed_forward_length(configuration["hidden"])
    writer.add_head_count(configuration["heads"])
    writer.add_head_count_kv(configuration["kv_heads"])
    writer.add_rope_freq_base(configuration["rope_theta"])
    writer.add_layer_norm_rms_eps(configuration["norm_eps"])
    writer.add_vocab_size(configuration["vocab_size"])
    writer.add_rope_dimension_count(configuration["width"] // configuration["heads"])
    names = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    for layer in range(configuration["layers"]):
        names |= {f"model.layers.{layer}.{ours}": f"blk.{layer}.{theirs}" for theirs, ours in NAMES.items()}
    for name, tensor in model.state_dict().items():
        values = tensor.numpy()
        if name.endswith("q_proj.weight"):
            values = in_llama_cpp(values, configuration["heads"], configuration["heads"])
        if name.endswith("k_proj.weight"):
            values = in_llama_cpp(values, configuration["heads"], configuration["kv_heads"])
        writer.add_tensor(f"{names[name.removesuffix('.weight')]}.weight", np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


SIZES = st.fixed_dictionaries(
    {
        "kv_heads": st.integers(1, 3),
        "queries": st.integers(1, 3),
        "half": st.integers(1, 4),
        "layers": st.integers(1, 3),
        "hidden": st.integers(1, 40),
        "vocab_size": st.integers(2, 40),
        "tied": st.booleans(),
        "rope_theta": st.floats(1, 2**20, width=32),
        "norm_eps": st.floats(0, 1, width=32),
        "max_length": st.integers(1, 2**20),
    }
)


@given(sizes=SIZES)
def test_a_converted_model_is_the_model(sizes: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> None:
    """Whatever its sizes, a Llama that llama.cpp's converter wrote comes back to the bit, and has the same logits."""
    path = tmp_path_factory.getbasetemp() / "converted.gguf"
    heads = sizes["kv_heads"] * sizes.pop("queries")
    configuration = CONFIGURATION | {**sizes, "heads": heads, "width": heads * 2 * sizes["half"]}
    del configuration["half"]
    model = llama(**configuration)
    converted(path, model, configuration)
    loaded = load(path)
    assert configuration == loaded.configuration
    assert list(model.state_dict()) == list(loaded.state)
    assert bits(model.state_dict()) == bits(loaded.state)
    other = Llama(**loaded.configuration)
    other.load_state_dict(loaded.state)
    tokens = torch.arange(min(configuration["max_length"], configuration["vocab_size"], 6))[None]
    assert torch.equal(model(tokens), other(tokens))


def test_what_a_file_need_not_say(tmp_path: Path) -> None:
    """Without its keys: as many key heads as query heads, a base of 10,000, and the embedding's vocabulary."""
    model = llama(kv_heads=4)
    header = save(tmp_path / "whole.gguf", model.state_dict(), configuration=CONFIGURATION | {"kv_heads": 4})
    dropped = {
        "llama.attention.head_count_kv",
        "llama.rope.freq_base",
        "llama.vocab_size",
        "llama.rope.dimension_count",
        "general.file_type",
    }
    _, tensors = read(tmp_path / "whole.gguf")
    write(tmp_path / "less.gguf", {k: v for k, v in header.metadata.items() if k not in dropped}, tensors)
    loaded = load(tmp_path / "less.gguf")
    assert CONFIGURATION | {"kv_heads": 4, "rope_theta": 10_000.0} == loaded.configuration
    assert bits(model.state_dict()) == bits(loaded.state)


def test_neutral_keys_are_taken(tmp_path: Path) -> None:
    """Keys that say that there is no scaling, no expert and one part only change nothing."""
    header = save(tmp_path / "whole.gguf", llama().state_dict(), configuration=CONFIGURATION)
    _, tensors = read(tmp_path / "whole.gguf")
    neutral = {
        "split.count": Value.of("uint16", 1),
        "llama.rope.scaling.type": Value.of("string", "none"),
        "llama.rope.scaling.factor": Value.of("float32", 1.0),
        "llama.expert_count": Value.of("uint32", 0),
        "llama.attention.key_length": Value.of("uint32", 8),
        "general.author": Value.of("string", "somebody"),
    }
    write(tmp_path / "more.gguf", {**header.metadata, **neutral}, tensors)
    assert bits(llama().state_dict()) == bits(load(tmp_path / "more.gguf").state)


Metadata = dict[str, Value]
Tensors = dict[str, torch.Tensor]


def key(name: str, kind: str, value: object) -> Callable[[Metadata, Tensors], None]:
    """Return what sets a key."""
    return lambda metadata, _: metadata.update({name: Value.of(kind, value)})


def without_key(name: str) -> Callable[[Metadata, Tensors], None]:
    """Return what takes a key away."""
    return lambda metadata, _: metadata.pop(name)


def tensor(name: str, *shape: int) -> Callable[[Metadata, Tensors], None]:
    """Return what sets a tensor."""
    return lambda _, tensors: tensors.update({name: torch.ones(shape)})


def without_tensor(name: str) -> Callable[[Metadata, Tensors], None]:
    """Return what takes a tensor away."""
    return lambda _, tensors: tensors.pop(name)


REFUSED: list[tuple[Callable[[Metadata, Tensors], None], str]] = [
    (key("general.architecture", "string", "qwen2"), "architecture 'qwen2'; 'llama' can be read"),
    (key("tokenizer.ggml.tokens", "array[string]", ["a"]), "tokenizer.ggml.tokens has 1 tokens, and .* 24"),
    (key("split.count", "uint16", 2), "one of 2 parts"),
    (without_key("llama.block_count"), "has no key llama.block_count"),
    (without_key("llama.attention.layer_norm_rms_epsilon"), "has no key llama.attention.layer_norm_rms_epsilon"),
    (key("llama.block_count", "uint32", 0), "llama.block_count must be a whole number, at least 1; got 0"),
    (key("llama.block_count", "float32", 2.0), "llama.block_count must be a whole number, at least 1; got 2.0"),
    (key("llama.block_count", "bool", True), "llama.block_count must be a whole number, at least 1; got True"),
    (key("llama.block_count", "uint32", 2**32 - 1), "llama.block_count is 4,294,967,295, more than the tensors"),
    (key("llama.attention.head_count_kv", "array[uint32]", [2, 2]), r"head_count_kv must be .* got \[2, 2\]"),
    (key("llama.attention.head_count", "uint32", 5), "even multiple of attention.head_count"),
    (key("llama.attention.head_count_kv", "uint32", 3), "multiple of attention.head_count_kv; got 32, 4 and 3"),
    (key("llama.attention.head_count", "uint32", 8), "llama.rope.dimension_count is 8; only 4 can be read"),
    (key("llama.attention.head_count_kv", "uint32", 1), r"'blk.0.attn_k.weight' has the shape \[16, 32\].*\[8, 32\]"),
    (key("llama.feed_forward_length", "uint32", 65), r"'blk.0.ffn_gate.weight' has the shape \[64, 32\].*\[65, 32\]"),
    (key("llama.vocab_size", "uint32", 25), "llama.vocab_size is 25; only 24"),
    (key("llama.rope.freq_base", "uint32", 5), "llama.rope.freq_base must be a floating-point number; got 5"),
    (key("llama.rope.freq_base", "float32", 0.0), "must be positive.*got 0.0"),
    (key("llama.rope.freq_base", "float32", float("inf")), "must be positive.*got inf"),
    (key("llama.rope.freq_base", "float32", float("nan")), "must be positive.*got nan"),
    (key("llama.attention.layer_norm_rms_epsilon", "float32", -1.0), "not negative.*-1.0"),
    (key("llama.rope.scaling.type", "string", "yarn"), "llama.rope.scaling.type is 'yarn'; only 'none' or 'linear'"),
    (key("llama.rope.scaling.factor", "float32", 8.0), "llama.rope.scaling.factor is 8.0"),
    (key("llama.rope.scale_linear", "float32", 2.0), "llama.rope.scale_linear is 2.0"),
    (key("llama.rope.dimension_count", "uint32", 4), "llama.rope.dimension_count is 4; only 8"),
    (key("llama.attention.value_length", "uint32", 16), "llama.attention.value_length is 16; only 8"),
    (key("llama.expert_count", "uint32", 8), "llama.expert_count is 8"),
    (key("llama.attention.sliding_window", "uint32", 8), r"the key llama.attention.sliding_window \(8\)"),
    (tensor("rope_freqs.weight", 4), "has the tensor 'rope_freqs.weight', which Llama does not have"),
    (tensor("blk.0.attn_q.bias", 32), "has the tensor 'blk.0.attn_q.bias'"),
    (tensor("blk.2.attn_q.weight", 32, 32), "has the tensor 'blk.2.attn_q.weight'"),
    (tensor("output_norm.weight", 31), r"'output_norm.weight' has the shape \[31\].*\[32\]"),
    (tensor("output.weight", 24, 31), r"'output.weight' has the shape \[24, 31\]"),
    (without_tensor("token_embd.weight"), "has no tensor 'token_embd.weight'"),
    (without_tensor("blk.1.ffn_up.weight"), "has no tensor 'blk.1.ffn_up.weight'"),
]


@pytest.mark.parametrize(("change", "words"), REFUSED)
def test_what_is_no_llama_is_refused(change: Callable[..., None], words: str, tmp_path: Path) -> None:
    """Another architecture, key, tensor, shape or value is named; nothing is loaded by halves."""
    header = save(tmp_path / "whole.gguf", llama().state_dict(), configuration=CONFIGURATION)
    metadata, (_, tensors) = dict(header.metadata), read(tmp_path / "whole.gguf")
    change(metadata, tensors)
    write(tmp_path / "changed.gguf", metadata, tensors)
    with pytest.raises(GGUFError, match=f"changed.gguf.*{words}"):
        load(tmp_path / "changed.gguf")


MEMORY = """
import sys
from pathlib import Path
from augend.gguf import load
def kilobytes(name):
    return int(Path("/proc/self/status").read_text().partition(name + ":")[2].split()[0])
load(sys.argv[1])
before = kilobytes("VmRSS")
state = load(sys.argv[2]).state
print(1024 * (kilobytes("VmHWM") - before), sum(4 * tensor.numel() for tensor in state.values()))
"""


def test_loading_needs_the_state_and_little_more(tmp_path: Path) -> None:
    """The memory of a process grows by the state, by one tensor whose rows are reordered, and a few megabytes."""
    changes = {"vocab_size": 8192, "width": 512, "heads": 8, "kv_heads": 8, "hidden": 1536, "layers": 2}
    save(tmp_path / "small.gguf", llama().state_dict(), configuration=CONFIGURATION, type="q8_0")
    save(tmp_path / "large.gguf", llama(**changes).state_dict(), configuration=CONFIGURATION | changes, type="q8_0")
    paths = [tmp_path / "small.gguf", tmp_path / "large.gguf"]
    done = subprocess.run([sys.executable, "-c", MEMORY, *paths], capture_output=True, text=True, check=True)
    grown, size = map(int, done.stdout.split())
    assert size <= grown < size + 512 * 512 * 4 + 12 * 2**20


def test_a_header_is_enough_to_know(tmp_path: Path) -> None:
    """The header that a loaded model carries is the one that read_header gives."""
    header = save(tmp_path / "whole.gguf", llama().state_dict(), configuration=CONFIGURATION)
    assert header == read_header(tmp_path / "whole.gguf")
    assert isinstance(load(tmp_path / "whole.gguf").header, Header)
    assert header == load(tmp_path / "whole.gguf").header


def test_weights_can_be_had_without_the_tokenizer(tmp_path: Path) -> None:
    """A tokenizer that cannot be made is refused by the key's name when it is asked for, not before."""
    header = save(tmp_path / "whole.gguf", llama().state_dict(), configuration=CONFIGURATION)
    _, tensors = read(tmp_path / "whole.gguf")
    other = {**header.metadata, "tokenizer.ggml.model": Value.of("string", "llama")}
    write(tmp_path / "other.gguf", other, tensors)
    model = load(tmp_path / "other.gguf")
    assert bits(llama().state_dict()) == bits(model.state)
    with pytest.raises(GGUFError, match="tokenizer.ggml.model is 'llama'"):
        _ = model.tokenizer
    del other["tokenizer.ggml.model"]
    write(tmp_path / "other.gguf", other, tensors)
    assert load(tmp_path / "other.gguf").tokenizer is None
