"""A LoRA adapter as a GGUF file that llama.cpp puts beside a model."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any, Final

from torch import Tensor

from augend.errors import ContractError
from augend.gguf._header import ARCHITECTURE, Header
from augend.gguf._llama import LLAMA, configuration_of, heads_of, permuted, shape_of, tensor_names
from augend.gguf._load import Model
from augend.gguf._metadata import Value
from augend.gguf._write import check_tensor, write

_PARTS: Final = ("lora_a", "lora_b")


def save_adapter(
    path: str | os.PathLike[str],
    state: Mapping[str, Tensor],
    *,
    like: Model | Header,
    alpha: float | None = None,
) -> Header:
    """Write a Llama's LoRA adapters to a GGUF file that llama.cpp uses with the model's own, whole or not at all.

    llama.cpp takes it as ``--lora PATH``; it needs the model's file beside it, of whatever type.

    Args:
        path: Of the file.
        state: What ``augend.models.lora_state`` returned: ``NAME.lora_a.weight`` ``[rank, inputs]`` and
            ``NAME.lora_b.weight`` ``[outputs, rank]`` of each layer, all of one rank, of any floating dtype.
        like: What `load`, `read_header` or `save` gave for the file of the model that the adapters are for.
        alpha: That of ``augend.models.lora``; None: the rank, as there.

    Returns:
        The header of the file, read back before the file got its name.

    Raises:
        ContractError: The state is not that of adapters for such a Llama, or alpha is not positive and finite.
        GGUFError: The package `gguf` is missing, the model is no Llama, or the file cannot be written.

    Numerics:
        Tensors have the bits of a float32 state, and alpha is rounded to float32. Rows of what is added to queries and
        keys are in llama.cpp's order, as those of the model's file are: in another order a file would load, too.

    Example:
        >>> sizes = dict(vocab_size=64, width=32, layers=1, heads=2, kv_heads=2, hidden=96, max_length=128)
        >>> sizes |= dict(rope_theta=10_000.0, norm_eps=1e-5, tied=True)
        >>> model = augend.models.Llama(**sizes)
        >>> base = augend.gguf.save("base.gguf", model.state_dict(), configuration=sizes)
        >>> augend.models.lora(model, rank=4, targets=["q_proj"])
        >>> adapter = augend.gguf.save_adapter("adapter.gguf", augend.models.lora_state(model), like=base)
        >>> list(adapter.tensors)
        ['blk.0.attn_q.weight.lora_a', 'blk.0.attn_q.weight.lora_b']
    """
    sizes = configuration_of(like.header if isinstance(like, Model) else like)
    rank = _rank(state, sizes)
    strength = float(rank if alpha is None else alpha)
    if not 0 < strength < math.inf:
        raise ContractError(f"alpha must be positive and finite; got {strength}")
    tensors: dict[str, Tensor] = {}
    for ours, theirs in tensor_names(sizes).items():
        name, heads = ours.removesuffix(".weight"), heads_of(ours, sizes)
        if f"{name}.lora_a.weight" in state:
            raised = state[f"{name}.lora_b.weight"].detach()  # [outputs, rank]
            tensors[f"{theirs}.lora_a"] = state[f"{name}.lora_a.weight"].detach()
            tensors[f"{theirs}.lora_b"] = raised if heads is None else permuted(raised, heads)
    metadata = {
        ARCHITECTURE: Value.of("string", LLAMA),
        "general.type": Value.of("string", "adapter"),
        "adapter.type": Value.of("string", "lora"),
        "adapter.lora.alpha": Value.of("float32", strength),
    }
    return write(path, metadata, tensors)


def _rank(state: Mapping[str, Tensor], sizes: Mapping[str, Any]) -> int:
    """Return the rank of adapters, after a look at all of them.

    Raises:
        ContractError: There are none, one is of no matrix of such a Llama, or they do not fit it or each other.
    """
    if not state:
        raise ContractError("the state has no adapters; expected what augend.models.lora_state returns")
    names = {name.removesuffix(".weight") for name in tensor_names(sizes)}
    layers = {key.removesuffix(".weight").rpartition(".")[0]: None for key in state}  # in their order
    wanted = {f"{layer}.{part}.weight" for layer in layers for part in _PARTS}
    if wrong := sorted(wanted ^ set(state)):
        what = "is missing" if wrong[0] in wanted else "is no part of an adapter"
        raise ContractError(f"{wrong[0]!r} {what} in the state; expected what augend.models.lora_state returns")
    first = state[f"{next(iter(layers))}.lora_a.weight"]
    rank = first.shape[0] if first.dim() else 0
    for layer in layers:
        shape = shape_of(f"{layer}.weight", sizes)
        if layer not in names or len(shape) < 2 or layer.endswith("embed_tokens"):  # noqa: PLR2004  a matrix
            raise ContractError(f"{layer!r} is no linear layer of such a Llama; save adapters with their own model")
        for part, expected in zip(_PARTS, ((rank, shape[1]), (shape[0], rank)), strict=True):
            tensor = state[f"{layer}.{part}.weight"]
            check_tensor(f"{layer}.{part}.weight", tensor)
            if tuple(tensor.shape) != expected:
                got = f"{list(tensor.shape)}; its Llama and rank {rank} ask for {list(expected)}"
                raise ContractError(f"{layer}.{part}.weight has the shape {got}")
    return rank
