"""LoRA adapters, trained by augend and used by llama.cpp itself."""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from small_llama import loss, rows, saved, trained_llama
from torch import Tensor

import augend
from augend.gguf import _adapter, read_header, save_adapter
from augend.models import Llama, lora, lora_state, merge_lora

ALPHA = 8.0
AGREE = 1e-4  # of logits up to 6, computed in float32 on both sides with sums in other orders: 3e-6 was measured


@cache
def adapted() -> Llama:
    """Train adapters on all layers of a trained Llama, fast enough to change what it says."""
    model = copy.deepcopy(trained_llama())
    torch.manual_seed(1)
    lora(model, rank=4, alpha=ALPHA)
    data = augend.Batches(rows(), batch_size=4, microbatch_size=4, seed=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2)
    augend.fit(model, data, loss=loss, optimizer=optimizer, steps=8, max_norm=1.0)
    return model.eval()


def ours(model: Llama) -> Tensor:
    """Return the logits of a model for the rows that are compared."""
    with torch.no_grad():
        return model(rows()[:2])


def theirs(llama, base: str, **options) -> Tensor:
    """Return llama.cpp's logits for them."""
    return torch.from_numpy(np.stack(llama("logits", path=base, rows=rows()[:2].tolist(), **options)["logits"]))


def off(expected: Tensor, actual: Tensor) -> float:
    """Return the largest difference of a logit."""
    return float((actual - expected).abs().max())


def files(folder: Path) -> tuple[str, str]:
    """Save the base and the adapters."""
    base = saved(trained_llama(), folder / "base.gguf")
    save_adapter(folder / "adapter.gguf", lora_state(adapted()), like=read_header(base), alpha=ALPHA)
    return base, str(folder / "adapter.gguf")


def test_llama_cpp_agrees_with_the_unmerged_model(llama, tmp_path):
    """Its logits are those of the model with adapters, which are far from those of the base; at half strength, too."""
    base, adapter = files(tmp_path)
    assert off(ours(trained_llama()), ours(adapted())) > 100 * AGREE
    assert off(ours(adapted()), theirs(llama, base, adapter=adapter)) < AGREE
    weaker = copy.deepcopy(adapted())
    with torch.no_grad():
        for name, tensor in lora_state(weaker).items():
            tensor.mul_(0.5 if "lora_b" in name else 1.0)
    assert off(ours(weaker), theirs(llama, base, adapter=adapter, scale=0.5)) < AGREE


def test_rows_in_the_wrong_order_would_load(llama, tmp_path, monkeypatch):
    """Without the order of llama.cpp's queries and keys the file is taken, and the logits are others: it is needed."""
    monkeypatch.setattr(_adapter, "permuted", lambda rows, heads: rows)
    base, adapter = files(tmp_path)
    assert off(ours(adapted()), theirs(llama, base, adapter=adapter)) > 10 * AGREE


def test_the_merged_model_agrees(llama, tmp_path):
    """A file of the merged weights gives the logits of the model with adapters."""
    merged = copy.deepcopy(adapted())
    merge_lora(merged)
    assert off(ours(adapted()), theirs(llama, saved(merged, tmp_path / "merged.gguf"))) < AGREE


@pytest.mark.parametrize("kind", ["f16", "q8_0"])
def test_the_base_may_be_of_any_type(llama, tmp_path, kind):
    """An adapter is for a model, not for one file of it; the base's type alone decides how near the logits are."""
    base, adapter = files(tmp_path)
    rounded = saved(trained_llama(), tmp_path / "rounded.gguf", type=kind)
    base_off = off(theirs(llama, base), theirs(llama, rounded))
    assert off(theirs(llama, base, adapter=adapter), theirs(llama, rounded, adapter=adapter)) < 3 * base_off + AGREE
