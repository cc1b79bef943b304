"""A Llama trained by augend, saved, and run and trained by llama.cpp itself."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_llama import loss, rows, saved, trained_llama
from torch import Tensor
from torch.nn import functional

import augend
from augend.gguf import read

# What the type of a file may change, measured on these models and doubled or more: the mean loss in nats, one logit
# (the largest is 8), and the share of positions whose most likely token is another one. llama.cpp also rounds what it
# multiplies matrices with, to 11 bits (f16), 8 bits (bf16), or 8 bits and a scale for 32 numbers (q8_0).
TOLERANCES = {
    "f32": (1e-4, 2e-3, 0.0),
    "f16": (1e-3, 2e-2, 0.005),
    "bf16": (2e-3, 0.2, 0.03),
    "q8_0": (2e-3, 0.2, 0.03),
}


def logits_of(model: torch.nn.Module, tokens: Tensor) -> Tensor:
    """Return the logits of a model in float64."""
    with torch.no_grad():
        return model(tokens).double()  # [rows, length, vocabulary]


def loss_of(logits: Tensor, tokens: Tensor) -> float:
    """Return the mean loss of all next tokens."""
    return float(functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()))


@pytest.mark.parametrize("type_", TOLERANCES)
@pytest.mark.parametrize("tied", [True, False])
def test_llama_cpp_agrees(llama, tmp_path: Path, type_: str, tied: bool) -> None:
    """Parameters, mean loss, every logit, and the most likely token at every place, within the type's tolerances."""
    model, tokens = trained_llama(tied=tied), rows()[:4]
    found = llama("logits", path=saved(model, tmp_path / "model.gguf", type=type_), rows=tokens.tolist())
    expected, theirs = logits_of(model, tokens), torch.from_numpy(np.stack(found["logits"])).double()
    of_loss, of_logits, of_places = TOLERANCES[type_]
    assert sum(each.numel() for each in model.parameters()) == found["parameters"]
    assert loss_of(theirs, tokens) == pytest.approx(loss_of(expected, tokens), abs=of_loss, rel=0)
    assert float((theirs - expected).abs().max()) < of_logits
    assert float((theirs.argmax(-1) != expected.argmax(-1)).double().mean()) <= of_places


def test_a_model_comes_back(llama, tmp_path: Path) -> None:
    """What llama.cpp saves of a model that it moved by less than a rounding has all its tensors, bit for bit."""
    path, out = saved(trained_llama(), tmp_path / "model.gguf"), str(tmp_path / "theirs.gguf")
    asked = rows()[:2].numpy().astype(np.int32)
    llama("optimise", path=path, rows=asked, trained=1, rate=1e-30, epochs=1, out=out)
    (_, ours), (_, theirs) = read(path), read(out)
    assert ours.keys() == theirs.keys()
    assert [] == [name for name in ours if not torch.equal(ours[name], theirs[name])]


def estimates_of(model: torch.nn.Module, tokens: Tensor) -> Any:
    """Return the mean loss of rows, with its error bar."""
    return augend.evaluate(model, augend.Batches(tokens, batch_size=4, microbatch_size=2), loss=loss)["loss"]


def test_losses_and_error_bars_are_those_of_llama_opt_epoch(llama, tmp_path: Path) -> None:
    """At a rate of 1e-12, which moves nothing, both parts have the same loss and the same error bar.

    Its batches are rows here, so that its error bar, over batches, is one over rows, too. Either may be off by what
    the losses of rows are: each a float32, summed in another order.
    """
    model, tokens = trained_llama(), rows()[100:112]
    path, asked = saved(model, tmp_path / "model.gguf"), tokens.numpy().astype(np.int32)
    found = llama("optimise", path=path, rows=asked, trained=8, rate=1e-12, epochs=1, out=None)
    for part, theirs in zip((tokens[:8], tokens[8:]), found["losses"][0], strict=True):
        estimate = estimates_of(model, part)
        assert theirs == pytest.approx([estimate.value, estimate.error], abs=16 * 2.0**-24 * estimate.value, rel=0)


def test_gradients_that_are_never_cleared(llama, tmp_path: Path) -> None:
    """At a real rate llama.cpp learns nothing of the rows it trains on that its error bar shows; augend does.

    Same model, rows, order, AdamW and rate; llama.cpp steps with the sum of all gradients since it began.
    """
    model, tokens, rate = copy.deepcopy(trained_llama()), rows()[100:112], 1e-3
    path, asked = saved(model, tmp_path / "model.gguf"), tokens.numpy().astype(np.int32)
    losses = llama("optimise", path=path, rows=asked, trained=8, rate=rate, epochs=4, out=None)["losses"]
    data = augend.Batches(tokens[:8], batch_size=1, microbatch_size=1, shuffle=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)
    before = estimates_of(model, tokens[:8])
    augend.fit(model, data, loss=loss, optimizer=optimizer, epochs=4)
    after = estimates_of(model, tokens[:8])
    (theirs, error), _ = losses[-1]
    assert before.value - error < theirs
    assert after.value < before.value - 3 * before.error
