"""Documents that share rows, so that little is computed for padding."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from augend import Accuracy, Tally
from augend.data import Microbatch
from augend.errors import ConfigError
from augend.losses import cross_entropy, mean
from augend.sources._source import Source, next_token_loss
from augend.sources._tokens import UNSUPERVISED

_PADDING = -1


def packed(source: Source, length: int) -> Source:
    """Return a source of tokens whose micro-batches are laid out in rows that documents share.

    The rows of the source stay what they are: documents, each with its own number in the tally, its own weight in the
    error bar, and its own place in batches, splits and checkpoints. Only a micro-batch is laid out otherwise: its
    documents are put, the longest first, into the first of its rows that has room for them (Johnson 1973, first fit
    decreasing), and the model is called as ``model(tokens, documents=documents)``, which must keep documents apart as
    `augend.models.Llama` does.

    Args:
        source: What `docstrings`, `pairs` or `text` returned.
        length: Most tokens of a row that documents share; no document may be longer.

    Returns:
        The source with a loss, metrics and collation of its own. A micro-batch has ``tokens``, ``labels`` (-100 also at
        the first token of each document) and ``documents`` (its number in the micro-batch, -1 in padding), all
        ``[rows, length]`` int64 for as many and as long rows as it takes, and ``places``, ``[documents, longest]``
        int64: where in those, read row by row, the tokens of each document are, -1 behind its end.

    Raises:
        ConfigError: The length is no length, or the source's loss is not that of next tokens; when a micro-batch is
            collated, a document is longer than a row.

    Numerics:
        Given the same losses of tokens, loss, accuracy and their error bars have the same bits as without packing.
        The losses of tokens are those of a document alone, but for the rounding of sums in the model.

    Example:
        >>> source = augend.sources.packed(augend.sources.docstrings(limit=8), 512)
        >>> data = augend.Batches(source.rows, batch_size=8, microbatch_size=8, collate_fn=source.collate)
        >>> microbatch = next(iter(next(iter(data))))
        >>> len(microbatch["places"]), len(microbatch["tokens"]) < 8
        (8, True)
    """
    if length < 2:  # noqa: PLR2004  one token predicts nothing
        raise ConfigError(f"rows to pack into must have at least 2 tokens; got {length}")
    if source.tokenizer is None or source.loss is not next_token_loss:
        raise ConfigError(
            "only rows of tokens with the loss of the next token can be packed, as those of docstrings, pairs and text"
        )
    return replace(
        source,
        loss=packed_loss,
        metrics={"accuracy": packed_accuracy},
        collate=functools.partial(_collated, length, source.tokenizer.padding),
    )


def packed_loss(model: nn.Module, microbatch: Microbatch) -> Tally:
    """Return the cross entropy of each document's supervised tokens, in nats."""
    logits = model(microbatch["tokens"], documents=microbatch["documents"])  # [rows, length, vocabulary]
    following = _following(microbatch["labels"])  # [rows, length]
    losses = cross_entropy(logits.flatten(0, 1), following.flatten()).total  # [rows · length]
    return _by_document(losses, following, microbatch["places"])


def packed_accuracy(model: nn.Module, microbatch: Microbatch) -> Accuracy:
    """Return how many of the supervised tokens were the most likely ones."""
    logits = model(microbatch["tokens"], documents=microbatch["documents"])  # [rows, length, vocabulary]
    following = _following(microbatch["labels"])
    largest, predicted = logits.max(dim=-1)  # [rows, length] both
    hits = (predicted == following).double().masked_fill(largest.isnan(), torch.nan)
    accuracy = Accuracy()
    accuracy.update_tally(_by_document(hits.flatten(), following, microbatch["places"]), microbatch)
    return accuracy


def _following(labels: Tensor) -> Tensor:
    """Return what each position is to predict."""
    return torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], UNSUPERVISED)], dim=1)


def _by_document(values: Tensor, following: Tensor, places: Tensor) -> Tally:
    """Add up values ``[rows · length]`` of the tokens that predict, a document after the other.

    They are laid out as rows of documents are without packing, so that they are added in the same order.
    """
    counted = (following.flatten() != UNSUPERVISED)[places.clamp(min=0)] & (places != _PADDING)  # [documents, longest]
    return mean(values[places.clamp(min=0)], item_weights=counted)


def _collated(length: int, padding: int, rows: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Lay the documents of a micro-batch out in rows."""
    sizes = [len(row["tokens"]) for row in rows]
    if max(sizes) > length:
        raise ConfigError(f"a row of the data has {max(sizes)} tokens, and is to be packed into {length}; raise that")
    bins = _bins(sizes, length)
    longest = max(sum(sizes[document] for document in one) for one in bins)
    shape = len(bins), longest
    tokens = torch.full(shape, padding)
    labels, documents = torch.full(shape, UNSUPERVISED), torch.full(shape, _PADDING)
    places = torch.full((len(rows), max(sizes)), _PADDING)
    for index, one in enumerate(bins):
        start = 0
        for document in one:
            end = start + sizes[document]
            tokens[index, start:end] = rows[document]["tokens"]
            labels[index, start + 1 : end] = rows[document]["labels"][1:]
            documents[index, start:end] = document
            places[document, : sizes[document]] = index * longest + torch.arange(start, end)
            start = end
    return {"tokens": tokens, "labels": labels, "documents": documents, "places": places}


def _bins(sizes: Sequence[int], length: int) -> list[list[int]]:
    """Return which documents share a row: by first fit decreasing, then each row and all of them in their order."""
    bins: list[list[int]] = []
    room: list[int] = []
    for document in sorted(range(len(sizes)), key=lambda each: -sizes[each]):
        size = sizes[document]
        found = next((index for index, free in enumerate(room) if free >= size), len(bins))
        if found == len(bins):
            bins.append([])
            room.append(length)
        bins[found].append(document)
        room[found] -= size
    return sorted(sorted(one) for one in bins)
