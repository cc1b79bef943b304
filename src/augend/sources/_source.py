"""What a source returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

from torch import nn

from augend import Accuracy, Mean, Perplexity, Tally
from augend.data import Microbatch, pad
from augend.losses import causal_lm
from augend.sources._tokenizer import Tokenizer

Loss = Callable[[nn.Module, Microbatch], Tally]
Metric = Callable[[nn.Module, Microbatch], Tally | Mean | Accuracy | Perplexity]


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Source:
    """Rows, and what fits them.

    Attributes:
        rows: What `augend.Batches` takes: a mapping of tensors, or a dataset with ``len`` and ``[]``.
        loss: For `augend.fit`: ``loss(model, microbatch)`` returns a tally.
        metrics: For `augend.fit`: each ``metric(model, microbatch)`` returns a tally or a metric.
        collate: For ``Batches(collate_fn=...)``; None where torch's own does.
        tokenizer: For rows of tokens: what made them, for a sample's way back to text. None for other rows.

    Example:
        >>> numbers = {"x": torch.arange(8.0)[:, None]}
        >>> def loss(model, microbatch):
        ...     return augend.losses.mse(model(microbatch["x"]), 2 * microbatch["x"])
        >>> source = augend.sources.Source(rows=numbers, loss=loss)
        >>> data = augend.Batches(source.rows, batch_size=4, microbatch_size=2, collate_fn=source.collate)
    """

    rows: Any
    loss: Loss
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    collate: Callable[[Sequence[Any]], Any] | None = None
    tokenizer: Tokenizer | None = None


def of_tokens(rows: object, tokenizer: Tokenizer) -> Source:
    """Return a source of rows ``{"tokens": [length] int64, "labels": [length] int64}`` for a causal language model."""
    return Source(
        rows=rows,
        loss=next_token_loss,
        metrics={"accuracy": next_token_accuracy},
        collate=pad(tokens=tokenizer.padding, labels=-100),
        tokenizer=tokenizer,
    )


def next_token_loss(model: nn.Module, microbatch: Microbatch) -> Tally:
    """Return the cross entropy of each row's supervised tokens, in nats; its exponential is the perplexity."""
    return causal_lm(model(microbatch["tokens"]), microbatch["labels"])


def next_token_accuracy(model: nn.Module, microbatch: Microbatch) -> Accuracy:
    """Return how many of the supervised tokens were the most likely ones."""
    accuracy = Accuracy()
    logits = model(microbatch["tokens"])  # [rows, length, vocabulary]
    accuracy.update(logits[:, :-1], microbatch["labels"][:, 1:], microbatch=microbatch)
    return accuracy
