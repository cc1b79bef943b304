"""Adapters to GGUF files: llama.cpp's layout, and its order of rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from llamas import CONFIGURATION, in_llama_cpp, llama

import gguf
from augend.errors import ContractError, GGUFError
from augend.gguf import Header, Value, load, read, read_header, save, save_adapter, write
from augend.models import lora, lora_state

NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def adapters(folder: Path, *, rank: int = 3, tied: bool = True, **options) -> tuple[Header, dict[str, torch.Tensor]]:
    """Save a base, and return its header with adapters that are not zero."""
    model = llama(0, tied=tied)
    base = save(folder / "base.gguf", model.state_dict(), configuration=CONFIGURATION | {"tied": tied})
    lora(model, rank=rank, **options)
    state = lora_state(model)
    for tensor in state.values():
        tensor.normal_()
    return base, state


def test_the_layout_is_llama_cpps(tmp_path):
    """Every tensor has its name, its bits and its place, a and b of a pair beside each other; as the package reads it.

    Rows of b are reordered as those of the base are, by the converter's own function, and only for queries and keys.
    """
    base, state = adapters(tmp_path)
    header = save_adapter(tmp_path / "adapter.gguf", state, like=base, alpha=6.0)
    expected = {}
    for layer in range(2):
        for ours, theirs in NAMES.items():
            a, b = (state[f"model.layers.{layer}.{ours}.lora_{part}.weight"].numpy() for part in "ab")
            heads = {"attn_q": 4, "attn_k": 2}.get(theirs)
            expected[f"blk.{layer}.{theirs}.weight.lora_a"] = a
            expected[f"blk.{layer}.{theirs}.weight.lora_b"] = b if heads is None else in_llama_cpp(b, heads)
    reader = gguf.GGUFReader(tmp_path / "adapter.gguf")
    assert list(expected) == [one.name for one in reader.tensors] == list(header.tensors)
    for one in reader.tensors:
        assert gguf.GGMLQuantizationType.F32 == one.tensor_type
        assert np.array_equal(expected[one.name], one.data)
    fields = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    assert fields == {
        "general.architecture": "llama",
        "general.type": "adapter",
        "adapter.type": "lora",
        "adapter.lora.alpha": 6.0,
    }


def test_what_it_adds_is_what_merging_adds(tmp_path):
    """alpha / rank · b · a, added to the base's matrix in the file's order, is the merged model's, in float64."""
    base, state = adapters(tmp_path)
    save_adapter(tmp_path / "adapter.gguf", state, like=load(tmp_path / "base.gguf"), alpha=6.0)
    _, theirs = read(tmp_path / "adapter.gguf")
    merged = load(tmp_path / "base.gguf").state
    for name, value in merged.items():
        a, b = (state.get(f"{name.removesuffix('.weight')}.lora_{part}.weight") for part in "ab")
        if a is not None:
            value.copy_(value.double() + 2.0 * (b.double() @ a.double()))
    save(tmp_path / "merged.gguf", merged, like=base)
    _, before = read(tmp_path / "base.gguf")
    _, after = read(tmp_path / "merged.gguf")
    for name, value in before.items():
        a, b = (theirs.get(f"{name}.lora_{part}") for part in "ab")
        added = torch.zeros(()) if a is None else 2.0 * (b.double() @ a.double())
        sizes = value.abs() + (0 if a is None else 2.0 * (b.abs() @ a.abs()))
        # once rounded to float32, and in float64 a sum of three products and one more term
        assert ((after[name] - (value + added)).abs() <= 2.0**-24 * (1 + 2.0**-20) * sizes).all()


def test_alpha_is_the_rank_where_it_is_not_given(tmp_path):
    """As in `lora`."""
    base, state = adapters(tmp_path, rank=2, targets=["v_proj"])
    header = save_adapter(tmp_path / "adapter.gguf", state, like=base)
    assert 2.0 == header.metadata["adapter.lora.alpha"].value
    assert header.metadata.keys() == read_header(tmp_path / "adapter.gguf").metadata.keys()


def test_the_output_may_have_one(tmp_path):
    """Of a model whose output is not its embedding."""
    base, state = adapters(tmp_path, tied=False, targets=["lm_head"])
    header = save_adapter(tmp_path / "adapter.gguf", state, like=base)
    assert ["output.weight.lora_a", "output.weight.lora_b"] == list(header.tensors)


def without(state, name):
    """Return a state without one tensor."""
    return {key: value for key, value in state.items() if key != name}


Q = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: {}, "no adapters"),
        (lambda state: without(state, f"{Q}.lora_a.weight"), "q_proj.lora_a.weight' is missing"),
        (lambda state: without(state, f"{Q}.lora_b.weight"), "q_proj.lora_b.weight' is missing"),
        (
            lambda state: state | {f"{Q}.weight": torch.ones(2, 2)},
            "'model.layers.0.self_attn.lora_a.weight' is missing",
        ),
        (
            lambda state: state | {f"{Q}.lora_b.weight": torch.ones(32, 2)},
            r"\[32, 2\]; its Llama and rank 3 .*\[32, 3\]",
        ),
        (
            lambda state: state | {f"{Q}.lora_a.weight": torch.ones(())},
            r"lora_a.weight has the shape \[\]; .* \[0, 32\]",
        ),
        (
            lambda state: {k.replace("layers.1", "layers.7"): v for k, v in state.items()},
            r"layers\.7.* no linear layer",
        ),
        (lambda state: {k.replace("v_proj", "norm"): v for k, v in state.items()}, "norm' is no linear layer"),
        (
            lambda state: {
                f"model.embed_tokens.lora_{p}.weight": torch.ones(s) for p, s in (("a", (3, 32)), ("b", (24, 3)))
            },
            "'model.embed_tokens' is no linear layer",
        ),
        (lambda state: state | {f"{Q}.lora_b.weight": torch.ones(32, 3).int()}, "int32; expected floating"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path, change, message):
    """By the tensor's name, before there is a file."""
    base, state = adapters(tmp_path)
    with pytest.raises(ContractError, match=message):
        save_adapter(tmp_path / "adapter.gguf", change(state), like=base)
    assert not (tmp_path / "adapter.gguf").exists()


@pytest.mark.parametrize("alpha", [0.0, -1.0, float("inf"), float("nan")])
def test_alpha_is_positive(tmp_path, alpha):
    """And finite."""
    base, state = adapters(tmp_path)
    with pytest.raises(ContractError, match="alpha must be positive and finite"):
        save_adapter(tmp_path / "adapter.gguf", state, like=base, alpha=alpha)


def test_a_base_that_is_no_llama_is_refused(tmp_path):
    """As `load` refuses it."""
    _, state = adapters(tmp_path)
    other = write(tmp_path / "other.gguf", {"general.architecture": Value.of("string", "mine")}, {"x": torch.ones(2)})
    with pytest.raises(GGUFError, match="architecture 'mine'"):
        save_adapter(tmp_path / "adapter.gguf", state, like=other)
