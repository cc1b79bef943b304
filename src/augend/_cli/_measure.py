"""Measure a trained model, and tell a person about it."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from torch import nn

from augend import Perplexity, Tally, evaluate
from augend._cli._build import batches
from augend._cli._console import Output
from augend._cli._restore import restored
from augend.data import Microbatch

_OF_TOKENS: Final = ("docstrings", "pairs", "text")  # their loss is a negative log-likelihood, in nats


def measure(path: Path) -> None:
    """Print loss and metrics of a checkpoint's model over the held-out rows, or over all rows where none are held out.

    Raises:
        ConfigError: There is no run, or its config cannot be used.
        CheckpointError: It has no good checkpoint.
        ContractError: The checkpoint is not of the model that the config describes.
    """
    console = Output()
    found = restored(path)
    source = found.rows.source
    held_out = found.rows.held_out
    rows = batches(found.run, source, found.rows.train if held_out is None else held_out)
    which = "none are held out, so all rows it was trained on" if held_out is None else "the held-out rows"
    console.say(f"checkpoint  {found.checkpoint.path}")
    console.say(f"updates     {found.checkpoint.updates:,}")
    console.say(f"data        {found.run.data.source}, {rows.rows_per_epoch:,} rows: {which}")
    label = "all rows" if held_out is None else "held out"
    perplexity = Perplexity()

    def kept(model: nn.Module, microbatch: Microbatch) -> Tally:  # a metric of its own would be one more forward
        tally = source.loss(model, microbatch)
        perplexity.update(tally)
        return tally

    of_tokens = found.run.data.source in _OF_TOKENS
    loss = kept if of_tokens else source.loss
    estimates = evaluate(found.model, rows, loss=loss, metrics=source.metrics)
    if of_tokens:
        estimates["perplexity"] = perplexity.compute()
    for name, estimate in estimates.items():
        console.say(f"{label:<12}{name} {estimate}")
