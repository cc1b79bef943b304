"""What a run trained as files of llama.cpp: the whole model, or its adapters alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from augend import gguf, models, sources
from augend._cli._base import base_header, base_path
from augend._cli._restore import Restored
from augend._config import refuse
from augend.errors import ConfigError


def write_model(source: Restored, target: Path, kind: str) -> str:
    """Write a run's Llama, its adapters added, with the metadata and the tokenizer of its base or of its source.

    Args:
        source: The run; its model is changed where it has adapters.
        target: Of the file.
        kind: How matrices are stored.

    Returns:
        How many tensors are of which type.

    Raises:
        ConfigError: The model is no Llama, or the tokenizer none that can be written.
        ContractError: llama.cpp has no such tokenizer, or the type cannot hold the weights.
        GGUFError: The file cannot be written.
    """
    model = _llama(source)
    base = base_path(source.run)
    if source.run.adapter is not None:
        models.merge_lora(model)
    options: dict[str, Any] = {"configuration": model.configuration}
    if base is not None:
        options = {"like": base_header(source.run, base)}
    header = gguf.save(target, model.state_dict(), tokenizer=_described(source), type=kind, **options)
    return _counted(header)


def write_adapter(source: Restored, target: Path) -> str:
    """Write the adapters that a run trained beside the model of a GGUF file.

    Returns:
        How many tensors are of which type.

    Raises:
        ConfigError: The run has no adapters, or they are beside no GGUF file.
        GGUFError: The file cannot be written.
    """
    run, model = source.run, _llama(source)
    if run.adapter is None:
        raise ConfigError("--to gguf-adapter: the run has no [adapter]; write all of its model with --to gguf")
    base = base_path(run)
    if base is None:
        remedy = "its adapters are beside no GGUF file, and of use to no other model; write --to gguf"
        raise refuse("model.name", run.model.name, remedy)
    state = models.lora_state(model)
    return _counted(gguf.save_adapter(target, state, like=base_header(run, base), alpha=run.adapter.alpha))


def _llama(source: Restored) -> models.Llama:
    if not isinstance(source.model, models.Llama):
        kind = type(source.model).__name__
        remedy = f"made a {kind}, and a GGUF file is written of an augend.models.Llama alone; write --to safetensors"
        raise refuse("model.name", source.run.model.name, remedy)
    return source.model


def _described(source: Restored) -> Mapping[str, gguf.Value] | None:
    """Return what the file must say of the run's tokenizer; None where its base says it, or there is none."""
    tokenizer = source.rows.source.tokenizer
    if isinstance(tokenizer, sources.Bytes):
        return gguf.metadata_of(None, end_of_text=tokenizer.end_of_text, padding=tokenizer.padding)
    if isinstance(tokenizer, sources.TokenizerFile):
        return gguf.metadata_of(tokenizer.description, end_of_text=tokenizer.end_of_text, padding=tokenizer.padding)
    if tokenizer is None or (isinstance(tokenizer, gguf.Tokenizer) and base_path(source.run) is not None):
        return None
    kind = type(tokenizer).__name__
    remedy = f"its tokenizer is a {kind}, which a GGUF file cannot carry; write --to safetensors"
    raise refuse("data.source", source.run.data.source, remedy)


def _counted(header: gguf.Header) -> str:
    counts = Counter(tensor.type for tensor in header.tensors.values())
    return ", ".join(f"{count} {kind}" for kind, count in counts.most_common())
