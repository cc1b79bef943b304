"""A model as a directory that others read: safetensors, and for a Llama the configuration that transformers wants."""

from __future__ import annotations

import json
import os
import shutil
from functools import reduce
from pathlib import Path
from secrets import token_hex
from typing import Final

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from augend.errors import ContractError
from augend.models._llama import Llama
from augend.models._lora import Adapted

_WEIGHTS: Final = "model.safetensors"
_CONFIG: Final = "config.json"


def export(model: nn.Module, directory: str | Path, *, end_of_text: int | None = None) -> None:
    """Write a model into a new directory, for programs that know nothing of augend.

    ``model.safetensors`` has all parameters and persistent buffers under the names and in the dtypes of
    ``state_dict()``; a tensor with several names, such as tied weights, is there once, under its first name. For a
    `Llama` there is a ``config.json`` too, with which ``AutoModelForCausalLM.from_pretrained`` of `transformers` loads
    the directory.

    The directory is there whole or not at all: it is written beside, as a hidden ``.partial``, made durable, and
    renamed. A process that is killed may leave that one behind.

    Collective: no; one process writes, which has all of every tensor.

    Args:
        model: Any module; its tensors may be on any device.
        directory: Where to: one that is not there yet, or is empty. Missing parents are made.
        end_of_text: The token at which a Llama's text ends (``eos_token_id``); None where nobody knows it.

    Raises:
        ContractError: The directory holds something, is none or is the current one; the model has what no such file
            can hold (memory that is not there, a distributed tensor, state that is no tensor, an unusual dtype) or no
            other program would use (adapters: `merge_lora` comes first); ``end_of_text`` is no token of this model.
        OSError: It cannot be written.

    Numerics:
        The file has every tensor's own bits. What `transformers` 5.24 computes from it in float32, on a CPU, with
        ``attn_implementation="sdpa"`` and ``use_cache=False``, is what the Llama computes, bit for bit, but for two
        things: its rotary frequencies take a division more and differ by at most γ(5), u = 2⁻²⁴ (two powers within
        1 ulp, one division); and where it maps the file into memory, weights are aligned to 8 bytes only, where a BLAS
        may add in another order. In 16 bits its norms round once more.

    Example:
        >>> from pathlib import Path
        >>> augend.models.export(augend.models.Llama(width=32, layers=1, heads=2), "exported")
        >>> sorted(path.name for path in Path("exported").iterdir())
        ['config.json', 'model.safetensors']
    """
    target = Path(directory)
    _check_new(target)
    _check_plain(model)
    tensors = _tensors(model)
    config = _config(model, end_of_text)
    _make_parents(target.parent)
    partial = target.with_name(f".{target.name}.{token_hex(8)}.partial")
    partial.mkdir()
    try:
        _save(tensors, partial / _WEIGHTS)
        if config is not None:
            (partial / _CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        for path in (*partial.iterdir(), partial):
            _sync(path)
        partial.rename(target)  # refused by the system if somebody filled it in the meantime
    finally:
        shutil.rmtree(partial, ignore_errors=True)  # not there any more where all went well
    _sync(target.parent)


def _check_new(directory: Path) -> None:
    """Refuse a directory that is not new.

    Raises:
        ContractError: It holds something, is no directory, or the current one.
    """
    if directory.is_symlink() or (directory.exists() and not directory.is_dir()):
        raise ContractError(f"{directory} is no directory; name a new one")
    if directory.is_dir() and directory.samefile(Path.cwd()):
        raise ContractError(f"{directory} is the current directory, which cannot be replaced; name a new one in it")
    if directory.is_dir() and (first := next(directory.iterdir(), None)) is not None:
        raise ContractError(f"{directory} holds something already, such as {first.name}; name a new directory")


def _check_plain(model: nn.Module) -> None:
    """Refuse adapters, which other programs would pass over in silence.

    Raises:
        ContractError: A layer has one.
    """
    name = next((name for name, module in model.named_modules() if isinstance(module, Adapted)), None)
    if name is not None:
        raise ContractError(f"{name} has an adapter, which is no part of the file's model; call merge_lora() first")


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return every tensor of a state once, in memory of its own, as ``save_file`` asks for."""
    tensors: dict[str, Tensor] = {}
    known: set[int] = set()
    storages: set[int] = set()
    for name, value in model.state_dict(keep_vars=True).items():
        if not isinstance(value, Tensor):
            kind = type(value).__name__
            raise ContractError(f"{name} is a {kind}, and a safetensors file holds tensors alone; leave it out")
        if id(value) in known:
            continue
        known.add(id(value))
        tensor = value.detach()
        if type(tensor) is not Tensor or tensor.is_meta or tensor.layout is not torch.strided:
            kind = "on the meta device" if tensor.is_meta else f"a {tensor.layout} {type(tensor).__name__}"
            raise ContractError(f"{name} is {kind}; export needs an ordinary dense tensor in memory: make it one first")
        tensor = tensor.cpu().contiguous()
        storage = tensor.untyped_storage().data_ptr()
        tensors[name] = tensor.clone() if storage in storages else tensor  # views of one memory are two tensors
        storages.add(storage)
    return tensors


def _save(tensors: dict[str, Tensor], path: Path) -> None:
    """Write tensors with the errors and the permissions of any other file."""
    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(f"{path} cannot be written: {error}") from error
    except KeyError as error:
        dtype = error.args[0]
        name = next((name for name, tensor in tensors.items() if tensor.dtype == dtype), "a tensor")
        raise ContractError(
            f"{name} has dtype {dtype}, which no safetensors file can hold; convert it first"
        ) from error
    path.chmod(path.parent.stat().st_mode & 0o666)  # safetensors lets the owner alone read it


def _config(model: nn.Module, end_of_text: int | None) -> dict[str, object] | None:
    """Return what `transformers` must know of a Llama; of another module it knows nothing."""
    if not isinstance(model, Llama):
        if end_of_text is not None:
            raise ContractError(
                f"end_of_text is written for a Llama alone; got {end_of_text} for {type(model).__name__}"
            )
        return None
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    vocab_size, width = shapes["model.embed_tokens.weight"]
    if end_of_text is not None and not 0 <= end_of_text < vocab_size:
        raise ContractError(f"end_of_text must be a token, from 0 to {vocab_size - 1}; got {end_of_text}")
    decoder = model.model
    dtype = reduce(torch.promote_types, (parameter.dtype for parameter in model.parameters()))
    name = str(dtype).removeprefix("torch.")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab_size,
        "hidden_size": width,
        "intermediate_size": shapes["model.layers.0.mlp.up_proj.weight"][0],
        "num_hidden_layers": len(decoder.layers),
        "num_attention_heads": shapes["model.layers.0.self_attn.q_proj.weight"][0] // decoder.head_width,
        "num_key_value_heads": shapes["model.layers.0.self_attn.k_proj.weight"][0] // decoder.head_width,
        "head_dim": decoder.head_width,
        "max_position_embeddings": model.max_length,
        "rms_norm_eps": decoder.norm.eps,
        # Version 4 reads rope_theta, and would take 10,000 in silence where it finds rope_parameters alone.
        "rope_theta": decoder.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": decoder.rope_theta},
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": model.lm_head is None or model.lm_head.weight is decoder.embed_tokens.weight,
        # Absent ones would be taken for 1 and 2, which are letters to many a tokenizer.
        "bos_token_id": None,
        "eos_token_id": end_of_text,
        "pad_token_id": None,
        "dtype": name,
        "torch_dtype": name,  # how version 4 calls it
    }


def _make_parents(directory: Path) -> None:
    """Make a directory and what it lies in, each durable before anything is put into it."""
    if directory.is_dir():
        return
    _make_parents(directory.parent)
    directory.mkdir(exist_ok=True)
    _sync(directory.parent)


def _sync(path: Path) -> None:
    """Wait until a file, or the names in a directory, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
