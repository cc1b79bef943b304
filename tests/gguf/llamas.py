"""Small Llamas, their GGUF files, and the order of llama.cpp's rows, as its converter writes it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from augend.models import Llama

CONFIGURATION: dict[str, Any] = {
    "vocab_size": 24,
    "width": 32,
    "layers": 2,
    "heads": 4,
    "kv_heads": 2,
    "hidden": 64,
    "max_length": 16,
    "rope_theta": 5000.0,
    "norm_eps": 2.0**-17,
    "tied": True,
}


def llama(seed: int = 0, **changes: Any) -> Llama:
    """Return a Llama with random weights, its norms too."""
    torch.manual_seed(seed)
    model = Llama(**CONFIGURATION | changes)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    return model


def in_llama_cpp(weights: np.ndarray[Any, Any], heads: int, kv_heads: int | None = None) -> np.ndarray[Any, Any]:
    """LlamaModel.permute of llama.cpp's convert_hf_to_gguf.py."""
    if kv_heads is not None and heads != kv_heads:
        heads = kv_heads
    return (
        weights.reshape(heads, 2, weights.shape[0] // heads // 2, *weights.shape[1:])
        .swapaxes(1, 2)
        .reshape(weights.shape)
    )


def bits(state: dict[str, Tensor]) -> dict[str, bytes]:
    """Return tensors as their shapes and bytes."""
    return {name: (tuple(tensor.shape), tensor.numpy().tobytes()) for name, tensor in state.items()}
