"""A small Llama, trained by augend on Python's source, and its files."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from vocabularies import lines, trained

import augend
from augend.gguf import metadata_of, save
from augend.models import Llama
from augend.sources import TokenizerFile

LENGTH = 256  # of a context of llama.cpp's training; a row has one token more
CONFIGURATION: dict[str, Any] = {
    "vocab_size": 600,
    "width": 64,
    "layers": 2,
    "heads": 4,
    "kv_heads": 2,
    "hidden": 96,
    "max_length": 512,
    "rope_theta": 10_000.0,
    "norm_eps": 1e-5,
    "tied": True,
}


@cache
def rows() -> Tensor:
    """Return real text in rows of 257 tokens, int64."""
    import tokenizers  # noqa: PLC0415  as augend imports it: where a tokenizer is asked for

    tokenizer = TokenizerFile(tokenizers.Tokenizer.from_str(trained()), end_of_text=0)
    tokens = torch.tensor(tokenizer.encode("\n".join(lines())))  # [tokens]
    return tokens[: len(tokens) // (LENGTH + 1) * (LENGTH + 1)].view(-1, LENGTH + 1)


def loss(model: torch.nn.Module, microbatch: Any) -> augend.Tally:
    """Return the cross entropy of each row, in nats."""
    return augend.losses.causal_lm(model(microbatch[0]), microbatch[0])


@cache
def trained_llama(*, tied: bool = True) -> Llama:
    """Return a Llama after a few steps, which is enough to be sure of some tokens."""
    torch.manual_seed(0)
    model = Llama(**CONFIGURATION | {"tied": tied})
    data = augend.Batches(rows(), batch_size=4, microbatch_size=4, seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    augend.fit(model, data, loss=loss, optimizer=optimizer, steps=30, max_norm=1.0)
    return model.eval()


def saved(model: Llama, path: Path, **options: Any) -> str:
    """Save a Llama with its tokenizer."""
    configuration = CONFIGURATION | {"tied": model.lm_head is None}
    tokenizer = metadata_of(trained(), end_of_text=0)
    save(path, model.state_dict(), configuration=configuration, tokenizer=tokenizer, **options)
    return str(path)
