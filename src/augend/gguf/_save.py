"""A model into a GGUF file that llama.cpp loads."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from augend.errors import ContractError
from augend.gguf._header import Header
from augend.gguf._llama import (
    TOKENS,
    configuration_of,
    heads_of,
    metadata_for,
    output_of,
    permuted,
    shape_of,
    tensor_names,
)
from augend.gguf._load import Model
from augend.gguf._metadata import Value
from augend.gguf._tensors import block_of
from augend.gguf._write import Part, check_tensor, write_parts

# What llama.cpp calls a file most of whose tensors are of a type: llama_ftype in its llama.h.
_FILE_TYPES: Final = {
    "f32": 0,
    "f16": 1,
    "q4_0": 2,
    "q4_1": 3,
    "q8_0": 7,
    "q5_0": 8,
    "q5_1": 9,
    "bf16": 32,
    "tq1_0": 36,
    "tq2_0": 37,
    "mxfp4": 38,
}
_WHOLE: Final = ("f32", "f16", "bf16")
_OUTPUT_TYPE: Final = "q8_0"
_QUANTISATION_VERSION: Final = 2
_MAXIMUM: Final = torch.finfo(torch.float16).max
_TOKEN_TYPES: Final = "tokenizer.ggml.token_type"  # noqa: S105  a key, not a secret
_UNUSED: Final = 5  # LLAMA_TOKEN_TYPE_UNUSED
_ARGUMENTS: Final = ("vocab_size", "width", "layers", "heads", "kv_heads", "hidden", "max_length")
_OTHERS: Final = ("rope_theta", "norm_eps", "tied")


def save(
    path: str | os.PathLike[str],
    state: Mapping[str, Tensor],
    *,
    like: Model | Header | None = None,
    configuration: Mapping[str, Any] | None = None,
    tokenizer: Mapping[str, Value] | None = None,
    type: str = "f32",  # noqa: A002  as ggml calls it
) -> Header:
    """Write a Llama to a GGUF file that llama.cpp loads: whole, or not at all.

    The file gets its name when all of it is on disk; until then what had that name is untouched.

    Args:
        path: Of the file.
        state: The ``state_dict()`` of an ``augend.models.Llama``, of any floating dtype, on any device.
        like: What `load` or `read_header` gave for the model that this one was made of. All its metadata is carried
            over unchanged, the tokenizer and the chat template too, but for what says how tensors are stored.
        configuration: Without ``like``: the arguments of ``augend.models.Llama``.
        tokenizer: What the file says of one, such as `metadata_of` gives; it replaces that of ``like``. Where the model
            has more tokens, the file fills up with unused ones. None: that of ``like``, or none.
        type: How matrices are stored: ``f32``, ``f16``, ``bf16``, ``q8_0``, ``q5_1``, ``q5_0``, ``q4_1``, ``q4_0``,
            ``mxfp4``, ``tq2_0`` or ``tq1_0``. Norms stay F32. Matrices whose rows the type's blocks do not divide are
            F16. Below 8 bits, the matrix that gives the logits is Q8_0, as llama.cpp has it.

    Returns:
        The header of the file, read back before the file got its name; it tells the type of each tensor.

    Raises:
        ContractError: There is no such type; not exactly one of ``like`` and ``configuration`` was given; the state
            does not fit it; or it has numbers that the type cannot hold.
        GGUFError: The package `gguf` is missing, or the file cannot be written.

    Numerics:
        ``f32`` has the bits of a float32 state, and `load` gives them back. Other types are rounded from float32: f16
        and bf16 to the nearest, the others as ``gguf.quants.quantize`` does.
    """
    if type not in _FILE_TYPES:
        raise ContractError(f"type {type!r} cannot be written; types are {', '.join(_FILE_TYPES)}")
    if like is not None and configuration is None:
        header = like.header if isinstance(like, Model) else like
        sizes: Mapping[str, Any] = configuration_of(header)
        metadata = dict(header.metadata)
    elif like is None and configuration is not None:
        sizes = _checked(configuration)
        metadata = metadata_for(sizes)
    else:
        raise ContractError("save needs one of like= and configuration=, to know what to write beside the tensors")
    if tokenizer is not None:
        metadata = {key: value for key, value in metadata.items() if not key.startswith("tokenizer.")}
        metadata |= _filled(tokenizer, sizes["vocab_size"])
    metadata["general.file_type"] = Value.of("uint32", _FILE_TYPES[type])
    if type not in _WHOLE:
        metadata["general.quantization_version"] = Value.of("uint32", _QUANTISATION_VERSION)
    return write_parts(Path(path), metadata, _parts(state, sizes, type))


def _checked(configuration: Mapping[str, Any]) -> Mapping[str, Any]:
    """Refuse a configuration that leaves something open."""
    if missing := [name for name in (*_ARGUMENTS, *_OTHERS) if configuration.get(name) is None]:
        raise ContractError(
            f"configuration must say {', '.join(missing)}, as the arguments of augend.models.Llama are called"
        )
    width, heads, groups = configuration["width"], configuration["heads"], configuration["kv_heads"]
    if width % (2 * heads) or heads % groups:
        raise ContractError(
            f"width must be an even multiple of heads, and heads one of kv_heads; got {width}, {heads} and {groups}"
        )
    return configuration


def _filled(tokenizer: Mapping[str, Value], vocab_size: int) -> dict[str, Value]:
    """Return the metadata of a tokenizer with as many tokens as the model has, without which llama.cpp loads none."""
    tokens, kinds = (tokenizer[key].value if key in tokenizer else None for key in (TOKENS, _TOKEN_TYPES))
    if not isinstance(tokens, list) or not isinstance(kinds, list):
        raise ContractError(f"tokenizer must have {TOKENS} and {_TOKEN_TYPES}, as augend.gguf.metadata_of gives them")
    if len(tokens) > vocab_size:
        raise ContractError(f"the tokenizer has {len(tokens):,} tokens, and the model {vocab_size:,}")
    more = range(len(tokens), vocab_size)
    return {
        **tokenizer,
        TOKENS: Value.of("array[string]", [*tokens, *(f"[PAD{token}]" for token in more)]),
        _TOKEN_TYPES: Value.of("array[int32]", [*kinds, *(_UNUSED for _ in more)]),
    }


def _parts(state: Mapping[str, Tensor], sizes: Mapping[str, Any], type: str) -> list[Part]:  # noqa: A002  as ggml calls it
    """Return what is to be written, after a look at all of it."""
    names = tensor_names(sizes)
    if wrong := sorted(set(names) ^ set(state)):
        what = "is missing in the state" if wrong[0] in names else "of the state is no parameter of such a Llama"
        raise ContractError(f"{wrong[0]!r} {what}; expected the state_dict() of augend.models.Llama")
    parts = []
    for ours, theirs in names.items():
        tensor = state[ours]
        check_tensor(ours, tensor)
        if tuple(tensor.shape) != (wanted := shape_of(ours, sizes)):
            raise ContractError(f"{ours} has the shape {list(tensor.shape)}; its Llama asks for {list(wanted)}")
        stored = _stored(tensor, type, is_output=theirs == output_of(sizes))
        _check_values(ours, tensor, stored)
        parts.append(Part(theirs, wanted, stored.upper(), partial(_ordered, tensor, heads_of(ours, sizes))))
    return parts


def _stored(tensor: Tensor, type: str, *, is_output: bool) -> str:  # noqa: A002  as ggml calls it
    """Return the type as which a tensor is stored in a file of a type."""
    if tensor.dim() == 1:
        return "f32"
    if is_output and type not in {*_WHOLE, _OUTPUT_TYPE}:
        type = _OUTPUT_TYPE  # noqa: A001  as ggml calls it
    return "f16" if tensor.shape[-1] % block_of(type.upper()) else type


def _check_values(name: str, tensor: Tensor, stored: str) -> None:
    """Refuse values that would become something else: blocks of quantised numbers have a scale in 16 bits."""
    if stored == "f32":
        return
    largest = float(tensor.detach().abs().max())
    if not largest <= (torch.finfo(torch.bfloat16).max if stored == "bf16" else _MAXIMUM):
        raise ContractError(
            f"{name} has a value of magnitude {largest}, which {stored} cannot hold; write it as f32, or mend it"
        )


def _ordered(tensor: Tensor, heads: int | None) -> Tensor:
    """Return a tensor with its rows as llama.cpp has them."""
    return tensor.detach() if heads is None else permuted(tensor.detach(), heads)
