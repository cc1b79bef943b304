"""``augend export``: a trained model as a directory for other programs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer

from augend._cli._failures import Reported
from augend._cli._options import SavedPath, Traceback
from augend.errors import CheckpointError, ConfigError

_FORMATS: Final = ("safetensors",)


def export(
    path: SavedPath,
    *,
    to: Annotated[str, typer.Option("--to", metavar="FORMAT", help="The format: safetensors.", show_default=False)],
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="New directory to write; export in the run directory if not given."),
    ] = None,
    show_traceback: Traceback = False,
) -> None:
    """Write the model of a run's newest good checkpoint, or of the checkpoint given, into a new directory.

    Its model.safetensors has every tensor under its name; with a Llama comes a config.json, so that
    AutoModelForCausalLM.from_pretrained of transformers loads the directory. Adapters are added to the weights.
    """
    with Reported(show_traceback=show_traceback):
        if to not in _FORMATS:
            raise ConfigError(f"--to {to}: no format of this version; write --to {' or '.join(_FORMATS)}")

        from augend import models
        from augend._cli._console import Output
        from augend._cli._directory import config_around
        from augend._cli._restore import restored

        target = config_around(path).parent / "export" if out is None else out
        _check_new(target)
        source = restored(path)
        model, tokenizer = source.model, source.rows.source.tokenizer
        if source.run.adapter is not None:
            models.merge_lora(model)
        end = tokenizer.end_of_text if tokenizer is not None and isinstance(model, models.Llama) else None
        try:
            models.export(model, target, end_of_text=end)
        except OSError as error:
            reason = error.strerror or str(error)
            raise CheckpointError(f"{target}: cannot be written: {reason}; name another place with --out") from error
        console = Output()
        console.say(f"checkpoint  {source.checkpoint.path}")
        console.say(f"export      {target}")


def _check_new(target: Path) -> None:
    """Refuse what would be refused after the model was loaded, before that."""
    empty = target.is_dir() and not target.is_symlink() and not any(target.iterdir())
    if not empty and (target.exists() or target.is_symlink()):
        raise ConfigError(f"{target}: there already, and no empty directory; name a new one with --out")
    if empty and target.samefile(Path.cwd()):
        raise ConfigError(f"{target}: the current directory, which cannot be replaced; name a new one in it with --out")
