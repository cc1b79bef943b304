"""From a run directory, or one checkpoint in it, back to the run, its rows and its trained model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final, final

from torch import nn

from augend import Checkpoint, Inspection, inspect
from augend._cli._build import Rows, build_model, build_rows, use_threads
from augend._cli._directory import config_around
from augend._config import RunFile, read
from augend.errors import CheckpointError

_TRIES: Final = 5


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Restored:
    """A trained model, and what it was trained as and on.

    Args:
        run: The resolved run file.
        rows: The run's rows, split as in training.
        model: The model with the checkpoint's weights and buffers, in the train/eval mode it was built in.
        checkpoint: Where they came from.
    """

    run: RunFile
    rows: Rows
    model: nn.Module
    checkpoint: Inspection


def restored(directory: Path) -> Restored:
    """Build a run's rows and model, and load the model's part of its newest good checkpoint.

    No lock is taken and nothing is written: it may be called while the run goes on.

    Args:
        directory: A run directory, its directory of checkpoints, or one checkpoint of it.

    Raises:
        ConfigError: There is no run, or its config cannot be used.
        CheckpointError: It has no good checkpoint.
        ContractError: The checkpoint is not of the model that the config describes.
    """
    run = read(config_around(directory))
    use_threads(run)
    rows = build_rows(run)
    model = build_model(run, rows.source)
    return Restored(run=run, rows=rows, model=model, checkpoint=loaded(directory, model))


def loaded(directory: Path, model: nn.Module) -> Inspection:
    """Load the newest good checkpoint; one that the run itself removed in the meantime gives way to its successor."""
    for _ in range(_TRIES):
        found = inspect(directory)
        try:
            Checkpoint(found.path.parent, model=model).load(found.path, only=("model",))
        except CheckpointError:
            if found.path.exists():
                raise
        else:
            return found
    raise CheckpointError(f"{directory}: checkpoints come and go faster than one can be read; raise checkpoint.keep")
