"""What a GGUF file says of a Llama: its configuration, and where each of its parameters is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from torch import Tensor

from augend.errors import GGUFError
from augend.gguf._header import Header
from augend.gguf._metadata import Value

LLAMA: Final = "llama"
TOKENS: Final = "tokenizer.ggml.tokens"
_EMBEDDING: Final = "token_embd.weight"
_OUTPUT: Final = "output.weight"
_BLOCK: Final = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_DEFAULT_THETA: Final = 10_000.0
# Argument of Llama, key without "llama.", type that is written.
_SIZES: Final = {
    "layers": "block_count",
    "max_length": "context_length",
    "width": "embedding_length",
    "hidden": "feed_forward_length",
    "heads": "attention.head_count",
    "kv_heads": "attention.head_count_kv",
}
_THETA: Final = "rope.freq_base"
_EPS: Final = "attention.layer_norm_rms_epsilon"
# Keys that change nothing at these values, given the configuration; at any other, or without being here, they ask for
# another model than Llama.
_NEUTRAL: Final[Mapping[str, tuple[object, ...]]] = {
    "rope.scaling.type": ("none", "linear"),
    "rope.scaling.factor": (0.0, 1.0),
    "rope.scale_linear": (0.0, 1.0),
    "expert_count": (0,),
    "expert_used_count": (0,),
}
_HEAD_WIDTH: Final = ("rope.dimension_count", "attention.key_length", "attention.value_length")


def configuration_of(header: Header) -> dict[str, Any]:
    """Return the arguments of ``augend.models.Llama`` for a file, which then is a Llama to the last key and tensor.

    Raises:
        GGUFError: It is something else; names the key or the tensor.
    """
    if header.architecture != LLAMA:
        raise GGUFError(f"{header.path} is of architecture {header.architecture!r}; {LLAMA!r} can be read")
    if (parts := _optional(header, "split.count", 1)) != 1:
        raise GGUFError(f"{header.path} is one of {parts} parts of a model (split.count); merge them first: gguf-split")
    keys = {key.removeprefix(f"{LLAMA}."): key for key in header.metadata if key.startswith(f"{LLAMA}.")}
    found = {name: _whole(header, key) for name, key in _SIZES.items() if name != "kv_heads"}
    found["kv_heads"] = _whole(header, _SIZES["kv_heads"]) if _SIZES["kv_heads"] in keys else found["heads"]
    _check_sizes(header, found)
    for key, full in keys.items():
        _check_key(header, key, full, found)
    configuration = {
        "vocab_size": _vocab_size(header),
        **found,
        "rope_theta": _real(header, _THETA) if _THETA in keys else _DEFAULT_THETA,
        "norm_eps": _real(header, _EPS),
        "tied": _OUTPUT not in header.tensors,
    }
    if not 0 < configuration["rope_theta"] < float("inf") or not 0 <= configuration["norm_eps"] < float("inf"):
        raise GGUFError(
            f"{header.path}: {LLAMA}.{_THETA} must be positive and {LLAMA}.{_EPS} not negative, both finite; "
            f"got {configuration['rope_theta']} and {configuration['norm_eps']}"
        )
    _check_tensors(header, configuration)
    return configuration


def metadata_for(configuration: Mapping[str, Any]) -> dict[str, Value]:
    """Return what a file must say of a Llama for llama.cpp to build it."""
    head_width = configuration["width"] // configuration["heads"]
    return {
        "general.architecture": Value.of("string", LLAMA),
        "general.type": Value.of("string", "model"),
        **{f"{LLAMA}.{key}": Value.of("uint32", configuration[name]) for name, key in _SIZES.items()},
        f"{LLAMA}.vocab_size": Value.of("uint32", configuration["vocab_size"]),
        f"{LLAMA}.rope.dimension_count": Value.of("uint32", head_width),
        f"{LLAMA}.{_THETA}": Value.of("float32", configuration["rope_theta"]),
        f"{LLAMA}.{_EPS}": Value.of("float32", configuration["norm_eps"]),
        "tokenizer.ggml.model": Value.of("string", "no_vocab"),
    }


def tensor_names(configuration: Mapping[str, Any]) -> dict[str, str]:
    """Return the name in a file of each parameter of a Llama, in the order of its ``state_dict()``."""
    names = {"model.embed_tokens.weight": _EMBEDDING}
    for layer in range(configuration["layers"]):
        for ours, theirs in _BLOCK.items():
            names[f"model.layers.{layer}.{ours}.weight"] = f"blk.{layer}.{theirs}.weight"
    names["model.norm.weight"] = "output_norm.weight"
    if not configuration["tied"]:
        names["lm_head.weight"] = _OUTPUT
    return names


def shape_of(name: str, configuration: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the shape of a parameter of a Llama, named as it is there."""
    width, hidden, vocab = configuration["width"], configuration["hidden"], configuration["vocab_size"]
    groups = width // configuration["heads"] * configuration["kv_heads"]
    shapes = {
        "embed_tokens": (vocab, width),
        "lm_head": (vocab, width),
        "q_proj": (width, width),
        "k_proj": (groups, width),
        "v_proj": (groups, width),
        "o_proj": (width, width),
        "gate_proj": (hidden, width),
        "up_proj": (hidden, width),
        "down_proj": (width, hidden),
    }
    return shapes.get(name.split(".")[-2], (width,))


def heads_of(name: str, configuration: Mapping[str, Any]) -> int | None:
    """Return the number of heads whose rows llama.cpp has in another order; None for a parameter without such."""
    heads = {"q_proj": configuration["heads"], "k_proj": configuration["kv_heads"]}
    return heads.get(name.split(".")[-2])


def permuted(rows: Tensor, heads: int) -> Tensor:
    """Reorder the rows of each head as llama.cpp has them: it turns neighbours where Hugging Face turns halves.

    Args:
        rows: ``[heads · head_width, ...]``.
        heads: Of queries or of keys.
    """
    halves = rows.reshape(heads, 2, -1, *rows.shape[1:])  # [heads, half, head_width / 2, ...]
    return halves.transpose(1, 2).reshape(rows.shape)


def unpermuted(rows: Tensor, heads: int) -> Tensor:
    """Undo ``permuted``."""
    pairs = rows.reshape(heads, -1, 2, *rows.shape[1:])  # [heads, head_width / 2, half, ...]
    return pairs.transpose(1, 2).reshape(rows.shape)


def output_of(configuration: Mapping[str, Any]) -> str:
    """Return the name in a file of what gives the logits: the embedding, where the two are tied."""
    return _EMBEDDING if configuration["tied"] else _OUTPUT


def _optional(header: Header, key: str, default: object) -> object:
    return header.metadata[key].value if key in header.metadata else default


def _value(header: Header, key: str) -> object:
    """Return the value of a key of the architecture that must be there."""
    full = f"{LLAMA}.{key}"
    if full not in header.metadata:
        raise GGUFError(f"{header.path} has no key {full}, which a Llama needs")
    return header.metadata[full].value


def _whole(header: Header, key: str) -> int:
    value = _value(header, key)
    if type(value) is not int or value < 1:
        raise GGUFError(f"{header.path}: {LLAMA}.{key} must be a whole number, at least 1; got {_short(value)}")
    return value


def _real(header: Header, key: str) -> float:
    value = _value(header, key)
    if type(value) is not float:
        raise GGUFError(f"{header.path}: {LLAMA}.{key} must be a floating-point number; got {_short(value)}")
    return value


def _vocab_size(header: Header) -> int:
    """Return the number of tokens, which the embedding knows."""
    if _EMBEDDING not in header.tensors:
        raise GGUFError(f"{header.path} has no tensor {_EMBEDDING!r}, which a Llama needs")
    size = header.tensors[_EMBEDDING].shape[0]
    tokens = _optional(header, TOKENS, None)
    if isinstance(tokens, list) and len(tokens) != size:
        raise GGUFError(f"{header.path}: {TOKENS} has {len(tokens):,} tokens, and tensor {_EMBEDDING!r} {size:,}")
    return size


def _check_sizes(header: Header, found: Mapping[str, int]) -> None:
    """Refuse sizes that do not go together."""
    width, heads, groups = found["width"], found["heads"], found["kv_heads"]
    if width % (2 * heads) or heads % groups:
        raise GGUFError(
            f"{header.path}: {LLAMA}.embedding_length must be an even multiple of attention.head_count, and that one "
            f"a multiple of attention.head_count_kv; got {width}, {heads} and {groups}"
        )


def _check_key(header: Header, key: str, full: str, found: Mapping[str, int]) -> None:
    """Refuse a key of the architecture that asks for what Llama has not."""
    if key in {*_SIZES.values(), _THETA, _EPS}:
        return
    value = header.metadata[full].value
    if key == "vocab_size":
        expected: tuple[object, ...] = (_vocab_size(header),)
    elif key in _HEAD_WIDTH:
        expected = (found["width"] // found["heads"],)
    elif key in _NEUTRAL:
        expected = _NEUTRAL[key]
    else:
        raise GGUFError(f"{header.path} has the key {full} ({_short(value)}), which asks for what Llama does not have")
    if value not in expected:
        raise GGUFError(
            f"{header.path}: {full} is {_short(value)}; only {' or '.join(map(repr, expected))} can be read here"
        )


def _check_tensors(header: Header, configuration: Mapping[str, Any]) -> None:
    """Refuse a tensor too many, one too few, and one of another shape."""
    if configuration["layers"] > len(header.tensors):  # before names are made of what is the file's own word
        raise GGUFError(
            f"{header.path}: {LLAMA}.block_count is {configuration['layers']:,}, more than the tensors that it has"
        )
    names = tensor_names(configuration)
    known = set(names.values())
    if unknown := next((name for name in header.tensors if name not in known), None):
        raise GGUFError(f"{header.path} has the tensor {unknown!r}, which Llama does not have")
    for ours, theirs in names.items():
        if theirs not in header.tensors:
            raise GGUFError(f"{header.path} has no tensor {theirs!r}, which a Llama needs")
        shape, wanted = header.tensors[theirs].shape, shape_of(ours, configuration)
        if shape != wanted:
            raise GGUFError(
                f"{header.path}: tensor {theirs!r} has the shape {list(shape)}; its sizes ask for {list(wanted)}"
            )


def _short(value: object) -> str:
    return repr(value)[:80]
