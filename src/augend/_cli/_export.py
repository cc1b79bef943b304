"""``augend export``: a trained model for other programs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from augend._cli._failures import Reported
from augend._cli._options import SavedPath, Traceback
from augend.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from augend._cli._restore import Restored

_FORMATS: Final = {"safetensors": "export", "gguf": "model.gguf", "gguf-adapter": "adapter.gguf"}
_TYPES: Final = ("f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "mxfp4", "tq2_0", "tq1_0")


def export(
    path: SavedPath,
    *,
    to: Annotated[
        str,
        typer.Option("--to", metavar="FORMAT", help=f"The format: {', '.join(_FORMATS)}.", show_default=False),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            help=f"What to write, and not there yet; {', '.join(_FORMATS.values())} in the run directory if not given.",
        ),
    ] = None,
    kind: Annotated[
        str | None,
        typer.Option(
            "--type", metavar="TYPE", help=f"How gguf stores matrices: {', '.join(_TYPES)}; f32 if not given."
        ),
    ] = None,
    show_traceback: Traceback = False,
) -> None:
    """Write the model of a run's newest good checkpoint, or of the checkpoint given, for other programs.

    safetensors: a directory whose model.safetensors has every tensor under its name; with a Llama comes a config.json,
    so that AutoModelForCausalLM.from_pretrained of transformers loads the directory. gguf: a Llama as a file that
    llama.cpp loads, with the tokenizer and all else that the GGUF file said which the run began with. gguf-adapter: the
    adapters alone, for llama.cpp's --lora beside that file. In the other two, adapters are added to the weights.
    """
    with Reported(show_traceback=show_traceback):
        _check_options(to, kind)

        from augend._cli._console import Output
        from augend._cli._directory import config_around
        from augend._cli._restore import restored
        from augend._cli._written import write_adapter, write_model

        target = config_around(path).parent / _FORMATS[to] if out is None else out
        _check_new(target, to)
        source = restored(path)
        tensors = ""
        if to == "gguf":
            tensors = write_model(source, target, kind or _TYPES[0])
        elif to == "gguf-adapter":
            tensors = write_adapter(source, target)
        else:
            _write_safetensors(source, target)
        console = Output()
        console.say(f"checkpoint  {source.checkpoint.path}")
        console.say(f"export      {target}")
        if tensors:
            console.say(f"tensors     {tensors}")


def _write_safetensors(source: Restored, target: Path) -> None:
    from augend import models

    model, tokenizer = source.model, source.rows.source.tokenizer
    if source.run.adapter is not None:
        models.merge_lora(model)
    end = tokenizer.end_of_text if tokenizer is not None and isinstance(model, models.Llama) else None
    try:
        models.export(model, target, end_of_text=end)
    except OSError as error:
        reason = error.strerror or str(error)
        raise CheckpointError(f"{target}: cannot be written: {reason}; name another place with --out") from error


def _check_options(to: str, kind: str | None) -> None:
    if to not in _FORMATS:
        raise ConfigError(f"--to {to}: no format of this version; write --to {' or '.join(_FORMATS)}")
    if kind is not None and to != "gguf":
        raise ConfigError(f"--type {kind}: is for --to gguf; leave it out")
    if kind is not None and kind not in _TYPES:
        raise ConfigError(f"--type {kind}: no type that can be written; types are {', '.join(_TYPES)}")


def _check_new(target: Path, to: str) -> None:
    """Refuse what would be refused after the model was loaded, before that; and a file that would be replaced."""
    if to != "safetensors":
        if target.exists() or target.is_symlink():
            raise ConfigError(f"{target}: there already; name a new file with --out")
        return
    empty = target.is_dir() and not target.is_symlink() and not any(target.iterdir())
    if not empty and (target.exists() or target.is_symlink()):
        raise ConfigError(f"{target}: there already, and no empty directory; name a new one with --out")
    if empty and target.samefile(Path.cwd()):
        raise ConfigError(f"{target}: the current directory, which cannot be replaced; name a new one in it with --out")
