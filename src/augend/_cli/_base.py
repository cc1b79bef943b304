"""The model in a GGUF file that a run trains on from: its sizes, its weights and its tokenizer."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch

from augend import gguf, models, sources
from augend._cli._call import refused
from augend._cli._names import Function, bound
from augend._config import RunFile, did_you_mean, refuse
from augend.errors import ConfigError, ContractError, GGUFError

_PREFIX: Final = "gguf:"
_OPEN: Final = ("checkpoint_activations", "dropout", "max_length")


def base_path(run: RunFile) -> Path | None:
    """Return the file that ``model.name = "gguf:PATH"`` names; None where the model is another.

    Raises:
        ConfigError: It names no path.
    """
    name = run.model.name
    if not name.startswith(_PREFIX):
        return None
    if not name.removeprefix(_PREFIX):
        raise refuse("model.name", name, "expected the path of a GGUF file, such as gguf:models/small.gguf")
    return Path(name.removeprefix(_PREFIX))


def base_header(run: RunFile, path: Path) -> gguf.Header:
    """Return what a base file says beside its weights.

    Raises:
        ConfigError: It cannot be read or trusted.
    """
    try:
        return gguf.read_header(path)
    except GGUFError as error:
        raise _unusable(run, error) from error


def base_model(run: RunFile, path: Path, source: sources.Source) -> models.Llama:
    """Return the Llama of a base file, with its weights.

    Raises:
        ConfigError: The file is no Llama that can be read, it has fewer tokens than the source, or a key of the run
            file is for the file to say.
    """
    for name, value in run.model.arguments.items():
        if name not in _OPEN:
            remedy = f"the GGUF file says what the model is; leave it out; {did_you_mean(name, _OPEN)}"
            raise refuse(f"model.{name}", value, remedy)
    try:
        base = gguf.load(path)
    except GGUFError as error:
        raise _unusable(run, error) from error
    tokens, needed = base.configuration["vocab_size"], 0 if source.tokenizer is None else source.tokenizer.vocab_size
    if tokens < needed:
        remedy = f"the file's model has {tokens:,} tokens, and the source {needed:,}; leave out data.tokenizer"
        raise refuse("model.name", run.model.name, remedy)
    arguments: dict[str, Any] = {**base.configuration, **bound("model", models.Llama, run.model.arguments)}
    try:
        with torch.device("meta"):  # nothing is drawn that would be overwritten
            model = models.Llama(**arguments)
    except ContractError as error:
        raise refused("model.name", run.model.name, run.model.arguments, error, table="model") from error
    # Copies lie where torch puts them: of other places a BLAS may make other bits, and those shall be the run's own.
    state = {name: base.state.pop(name).clone() for name in list(base.state)}
    model.load_state_dict(state, assign=True)
    return model


def base_tokenizer(run: RunFile, source: Function) -> Mapping[str, sources.Tokenizer]:
    """Return the tokenizer of a base file as an argument of a source that takes one, where the run file names none.

    Raises:
        ConfigError: The file has none that can be used.
    """
    path = base_path(run)
    takes_one = "tokenizer" in inspect.signature(source).parameters and "tokenizer" not in run.data.arguments
    if path is None or not takes_one:
        return {}
    header = base_header(run, path)
    kind = header.metadata.get("tokenizer.ggml.model")
    if kind is None or kind.value in {"no_vocab", "none"}:
        raise refuse("model.name", run.model.name, "the file has no tokenizer; name one with data.tokenizer")
    try:
        return {"tokenizer": gguf.tokenizer_of(header.metadata)}
    except GGUFError as error:
        remedy = f"its tokenizer cannot be used: {error}; name another with data.tokenizer"
        raise refuse("model.name", run.model.name, remedy) from error


def _unusable(run: RunFile, error: GGUFError) -> ConfigError:
    return refuse("model.name", run.model.name, str(error))
