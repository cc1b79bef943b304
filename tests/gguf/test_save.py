"""Llamas to GGUF files: what llama.cpp's converter would write, in any type, whole or not at all."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from llamas import CONFIGURATION, bits, in_llama_cpp, llama

import gguf
from augend.errors import ContractError, GGUFError
from augend.gguf import Value, _write, load, metadata_of, read, read_header, save, write

WIDE = {"width": 256, "hidden": 512, "vocab_size": 10}  # every type's blocks divide these rows
FILE_TYPES = {
    "f32": "ALL_F32",
    "f16": "MOSTLY_F16",
    "bf16": "MOSTLY_BF16",
    "q8_0": "MOSTLY_Q8_0",
    "q5_1": "MOSTLY_Q5_1",
    "q5_0": "MOSTLY_Q5_0",
    "q4_1": "MOSTLY_Q4_1",
    "q4_0": "MOSTLY_Q4_0",
    "mxfp4": "MOSTLY_MXFP4_MOE",
    "tq2_0": "MOSTLY_TQ2_0",
    "tq1_0": "MOSTLY_TQ1_0",
}


@given(seed=st.integers(0, 2**16), tied=st.booleans(), kv_heads=st.sampled_from([1, 2, 4]), data=st.data())
def test_float32_comes_back_to_the_bit(
    seed: int, tied: bool, kv_heads: int, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """What is saved as f32 is loaded with all its bits, nan and inf too, and under the same configuration."""
    path = tmp_path_factory.getbasetemp() / "any.gguf"
    changes = {"tied": tied, "kv_heads": kv_heads}
    state = llama(seed, **changes).state_dict()
    name = data.draw(st.sampled_from(list(state)))
    raw = data.draw(st.binary(min_size=4 * state[name].numel(), max_size=4 * state[name].numel()))
    state[name] = torch.from_numpy(np.frombuffer(raw, np.float32).copy()).reshape(state[name].shape)
    save(path, state, configuration=CONFIGURATION | changes)
    loaded = load(path)
    assert CONFIGURATION | changes == loaded.configuration
    assert bits(state) == bits(loaded.state)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", FILE_TYPES)
def test_types_are_those_of_the_package(kind: str, tied: bool, tmp_path: Path) -> None:
    """Matrices have the bytes that gguf's own functions make of them in llama.cpp's order; norms are F32."""
    configuration = CONFIGURATION | WIDE | {"tied": tied}
    state = llama(**configuration).state_dict()
    header = save(tmp_path / "any.gguf", state, configuration=configuration, type=kind)
    output = "token_embd.weight" if tied else "output.weight"
    reader = gguf.GGUFReader(tmp_path / "any.gguf")
    found = {one.name: one for one in reader.tensors}
    assert found.keys() == header.tensors.keys()
    for name, ours, heads in [
        ("token_embd.weight", "model.embed_tokens.weight", None),
        ("blk.1.attn_q.weight", "model.layers.1.self_attn.q_proj.weight", 4),
        ("blk.1.attn_k.weight", "model.layers.1.self_attn.k_proj.weight", 2),
        ("blk.0.attn_v.weight", "model.layers.0.self_attn.v_proj.weight", None),
        ("blk.0.ffn_down.weight", "model.layers.0.mlp.down_proj.weight", None),
        ("blk.0.ffn_norm.weight", "model.layers.0.post_attention_layernorm.weight", None),
    ]:
        values = state[ours].numpy() if heads is None else in_llama_cpp(state[ours].numpy(), heads)
        stored = "f32" if values.ndim == 1 else kind
        if name == output and kind not in {"f32", "f16", "bf16"}:
            stored = "q8_0"
        quantisation = gguf.GGMLQuantizationType[stored.upper()]
        assert quantisation == found[name].tensor_type
        with np.errstate(all="ignore"):
            expected = gguf.quants.quantize(np.ascontiguousarray(values), quantisation)
        assert expected.tobytes() == found[name].data.tobytes(), name
    assert gguf.LlamaFileType[FILE_TYPES[kind]] == header.metadata["general.file_type"].value
    assert (kind in {"f32", "f16", "bf16"}) == ("general.quantization_version" not in header.metadata)


@pytest.mark.parametrize(("kind", "u"), [("f16", 2.0**-11), ("bf16", 2.0**-8), ("q8_0", None)])
def test_rounding_is_bounded(kind: str, u: float | None, tmp_path: Path) -> None:
    """f16 and bf16 are off by u of a value; q8_0 by half a 127th of its block's largest, and by its scale's u."""
    configuration = CONFIGURATION | WIDE
    state = llama(**configuration).state_dict()
    save(tmp_path / "any.gguf", state, configuration=configuration, type=kind)
    for name, loaded in load(tmp_path / "any.gguf").state.items():
        if loaded.dim() == 1:
            assert torch.equal(state[name], loaded)
            continue
        blocks, ours = loaded.reshape(-1, 32), state[name].reshape(-1, 32)
        largest = ours.abs().amax(1, keepdim=True)
        # Below 2⁻¹⁴, float16 has steps of 2⁻²⁴.
        bound = largest * (0.5 / 127 + 2.0**-11) + 2.0**-24 if u is None else ours.abs() * u + 2.0**-25
        assert bool(((blocks - ours).abs() <= bound).all()), name


def test_rows_that_blocks_do_not_divide_are_f16(tmp_path: Path) -> None:
    """The header that save returns says which matrices are not of the type that was asked for."""
    configuration = CONFIGURATION | {"hidden": 65}
    header = save(tmp_path / "any.gguf", llama(**configuration).state_dict(), configuration=configuration, type="q4_0")
    types = {name: info.type for name, info in header.tensors.items() if name.startswith("blk.0.")}
    assert {
        "blk.0.attn_norm.weight": "F32",
        "blk.0.attn_q.weight": "Q4_0",
        "blk.0.attn_k.weight": "Q4_0",
        "blk.0.attn_v.weight": "Q4_0",
        "blk.0.attn_output.weight": "Q4_0",
        "blk.0.ffn_norm.weight": "F32",
        "blk.0.ffn_gate.weight": "Q4_0",
        "blk.0.ffn_up.weight": "Q4_0",
        "blk.0.ffn_down.weight": "F16",
    } == types


def test_metadata_is_carried_over_unchanged(tmp_path: Path) -> None:
    """Every key, its type, its bits and its place stay; only what says how tensors are stored changes."""
    first = save(tmp_path / "first.gguf", llama().state_dict(), configuration=CONFIGURATION)
    metadata = {
        "general.alignment": Value.of("uint32", 64),
        "custom.nan": Value("float32", b"\1\0\x80\x7f"),
        **first.metadata,
        "tokenizer.ggml.tokens": Value.of("array[string]", ["a", "", "é", *map(str, range(21))]),
        "tokenizer.chat_template": Value.of("string", "{{ messages }}"),
        "empty": Value.of("array[int32]", []),
    }
    _, tensors = read(tmp_path / "first.gguf")
    write(tmp_path / "rich.gguf", metadata, tensors)
    model = load(tmp_path / "rich.gguf")
    for like in model, model.header:
        header = save(tmp_path / "again.gguf", model.state, like=like, type="q8_0")
        expected = dict(model.header.metadata) | {
            "general.file_type": Value.of("uint32", 7),
            "general.quantization_version": Value.of("uint32", 2),
        }
        assert list(expected.items()) == list(header.metadata.items())
        assert 64 == header.alignment
    save(tmp_path / "again.gguf", model.state, like=model)
    assert (tmp_path / "rich.gguf").read_bytes() == (tmp_path / "again.gguf").read_bytes()


def test_a_new_file_says_what_llama_cpp_needs(tmp_path: Path) -> None:
    """Without a file to be like, the keys are those of llama.cpp's converter, with its types."""
    header = save(tmp_path / "new.gguf", llama().state_dict(), configuration=CONFIGURATION | {"dropout": 0.1})
    assert {
        "general.architecture": Value.of("string", "llama"),
        "general.type": Value.of("string", "model"),
        "llama.block_count": Value.of("uint32", 2),
        "llama.context_length": Value.of("uint32", 16),
        "llama.embedding_length": Value.of("uint32", 32),
        "llama.feed_forward_length": Value.of("uint32", 64),
        "llama.attention.head_count": Value.of("uint32", 4),
        "llama.attention.head_count_kv": Value.of("uint32", 2),
        "llama.vocab_size": Value.of("uint32", 24),
        "llama.rope.dimension_count": Value.of("uint32", 8),
        "llama.rope.freq_base": Value.of("float32", 5000.0),
        "llama.attention.layer_norm_rms_epsilon": Value.of("float32", 2.0**-17),
        "tokenizer.ggml.model": Value.of("string", "no_vocab"),
        "general.file_type": Value.of("uint32", 0),
    } == header.metadata


def test_a_tokenizer_is_written_with_as_many_tokens_as_the_model(tmp_path: Path) -> None:
    """It takes the place of the one before; tokens that the model has more are unused, as with llama.cpp."""
    configuration = CONFIGURATION | {"vocab_size": 260}
    state = llama(**configuration).state_dict()
    tokenizer = metadata_of(None, end_of_text=256, padding=257)
    without = save(tmp_path / "without.gguf", state, configuration=configuration)
    assert load(tmp_path / "without.gguf").tokenizer is None
    for options in {"configuration": configuration}, {"like": without}:
        header = save(tmp_path / "with.gguf", state, tokenizer=tokenizer, **options)
        assert {
            **tokenizer,
            "tokenizer.ggml.tokens": Value.of(
                "array[string]", [*tokenizer["tokenizer.ggml.tokens"].value, "[PAD258]", "[PAD259]"]
            ),
            "tokenizer.ggml.token_type": Value.of(
                "array[int32]", [*tokenizer["tokenizer.ggml.token_type"].value, 5, 5]
            ),
        } == {key: value for key, value in header.metadata.items() if key.startswith("tokenizer.")}
        found = load(tmp_path / "with.gguf").tokenizer
        assert (260, 256, 257) == (found.vocab_size, found.end_of_text, found.padding)
        assert "né".encode() == bytes(found.encode("né"))


@pytest.mark.parametrize(
    ("tokenizer", "words"),
    [
        (metadata_of(None, end_of_text=256), "the tokenizer has 257 tokens, and the model 24"),
        ({}, "tokenizer must have tokenizer.ggml.tokens and tokenizer.ggml.token_type"),
    ],
)
def test_a_tokenizer_that_does_not_fit_is_refused(tokenizer: dict[str, Value], words: str, tmp_path: Path) -> None:
    """A model cannot have fewer tokens than its tokenizer."""
    with pytest.raises(ContractError, match=words):
        save(tmp_path / "any.gguf", llama().state_dict(), configuration=CONFIGURATION, tokenizer=tokenizer)
    assert [] == list(tmp_path.iterdir())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_states_of_any_dtype_are_saved(dtype: torch.dtype, tmp_path: Path) -> None:
    """The file has the float32 numbers of a state in another dtype, and of parameters that require gradients."""
    state = {name: torch.nn.Parameter(tensor.to(dtype)) for name, tensor in llama().state_dict().items()}
    save(tmp_path / "any.gguf", state, configuration=CONFIGURATION)
    expected = {name: tensor.detach().float() for name, tensor in state.items()}
    assert bits(expected) == bits(load(tmp_path / "any.gguf").state)


def broken(name: str, tensor: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """Return a state with another tensor, or without it."""
    state = dict(llama().state_dict())
    state.pop(name, None)
    return state if tensor is None else state | {name: tensor}


NORM = "model.norm.weight"
MATRIX = "model.layers.0.self_attn.q_proj.weight"
DAMAGED = torch.ones(32, 32).index_fill_(0, torch.tensor(3), 7e4)
REFUSED: list[tuple[dict[str, torch.Tensor], dict[str, Any], str]] = [
    (broken(NORM, None), {}, "'model.norm.weight' is missing in the state"),
    (broken("lm_head.weight", torch.ones(24, 32)), {}, "'lm_head.weight' of the state is no parameter"),
    (broken(NORM, torch.ones(31)), {}, r"model.norm.weight has the shape \[31\]; its Llama asks for \[32\]"),
    (broken(NORM, torch.ones(32, dtype=torch.int64)), {}, "model.norm.weight has dtype torch.int64"),
    (broken(NORM, torch.ones(32, device="meta")), {}, "model.norm.weight is on the meta device"),
    (broken(MATRIX, DAMAGED), {"type": "f16"}, "q_proj.weight has a value of magnitude 70000.0, which f16 cannot hold"),
    (broken(MATRIX, DAMAGED), {"type": "q8_0"}, "which q8_0 cannot hold"),
    (broken(MATRIX, DAMAGED * torch.inf), {"type": "bf16"}, "magnitude inf, which bf16 cannot hold"),
    (broken(MATRIX, DAMAGED * torch.nan), {"type": "q4_0"}, "magnitude nan, which q4_0 cannot hold"),
    (broken("", None), {"type": "q4_k"}, "type 'q4_k' cannot be written; types are f32, f16"),
    (broken("", None), {"configuration": None}, "one of like= and configuration="),
    (broken("", None), {"configuration": {"width": 32}}, "must say vocab_size, layers, heads"),
    (broken("", None), {"configuration": CONFIGURATION | {"rope_theta": 1e300}}, "float32 cannot be 1e"),
    (broken("", None), {"configuration": CONFIGURATION | {"heads": 3}}, "width must be an even multiple of heads"),
]


@pytest.mark.parametrize(("state", "options", "words"), REFUSED)
def test_what_does_not_fit_is_refused(
    state: dict[str, torch.Tensor], options: dict[str, Any], words: str, tmp_path: Path
) -> None:
    """A state, a type or a configuration that cannot be written is named, and no file is made."""
    with pytest.raises(ContractError, match=words):
        save(tmp_path / "any.gguf", state, **{"configuration": CONFIGURATION} | options)
    assert [] == list(tmp_path.iterdir())


def test_bfloat16_holds_what_float16_does_not(tmp_path: Path) -> None:
    """A value above 65,504 is written as bf16."""
    save(tmp_path / "any.gguf", broken(MATRIX, DAMAGED), configuration=CONFIGURATION, type="bf16")
    assert torch.equal(DAMAGED.bfloat16().float(), load(tmp_path / "any.gguf").state[MATRIX])


def test_both_sources_of_metadata_are_one_too_many(tmp_path: Path) -> None:
    """What a file is like and its configuration cannot both be given."""
    header = save(tmp_path / "first.gguf", llama().state_dict(), configuration=CONFIGURATION)
    with pytest.raises(ContractError, match="one of like= and configuration="):
        save(tmp_path / "other.gguf", llama().state_dict(), like=header, configuration=CONFIGURATION)


@pytest.mark.parametrize("fails", ["open", "write", "fsync", "replace"])
def test_a_failed_save_leaves_what_was_there(fails: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever call fails, the old file is whole and nothing else is left; the error names the file."""
    path = tmp_path / "model.gguf"
    save(path, llama().state_dict(), configuration=CONFIGURATION)
    before = path.read_bytes()

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    owner, name = {
        "open": (os, "open"),
        "write": (_write, "_fill"),
        "fsync": (os, "fsync"),
        "replace": (Path, "replace"),
    }[fails]
    with monkeypatch.context() as patched:
        patched.setattr(owner, name, full)
        with pytest.raises(GGUFError, match="model.gguf cannot be written: .*No space left"):
            save(path, llama(1).state_dict(), configuration=CONFIGURATION)
    assert [path] == list(tmp_path.iterdir())
    assert before == path.read_bytes()


def test_a_file_gets_its_name_when_it_is_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is synced, then renamed, then the directory is synced; only then does save return."""
    path, calls = tmp_path / "model.gguf", []
    fsync, replace = os.fsync, Path.replace

    def noted_fsync(handle: int) -> None:
        calls.append(("fsync", "directory" if stat.S_ISDIR(os.fstat(handle).st_mode) else "file", path.exists()))
        fsync(handle)

    def noted_replace(self: Path, target: Path) -> Path:
        calls.append(("replace", target.name, path.exists()))
        return replace(self, target)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(Path, "replace", noted_replace)
    header = save(path, llama().state_dict(), configuration=CONFIGURATION)
    assert [("fsync", "file", False), ("replace", "model.gguf", False), ("fsync", "directory", True)] == calls
    assert header == read_header(path)


def test_a_file_may_be_saved_over_the_one_it_is_like(tmp_path: Path) -> None:
    """A model can be given back under the name from which it came."""
    path = tmp_path / "model.gguf"
    save(path, llama().state_dict(), configuration=CONFIGURATION)
    model = load(path)
    save(path, llama(1).state_dict(), like=model, type="f32")
    assert bits(llama(1).state_dict()) == bits(load(path).state)
