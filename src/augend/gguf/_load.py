"""A model, and any other tensors, from a GGUF file."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, final

from torch import Tensor

from augend.gguf._header import Header, header_of, opened
from augend.gguf._llama import configuration_of, heads_of, tensor_names, unpermuted
from augend.gguf._tensors import check_types, read_tensor
from augend.gguf._tokenizer import Tokenizer, tokenizer_of


@final
@dataclass(frozen=True, eq=False)
class Model:
    """A language model as a GGUF file holds it.

    Args:
        configuration: The arguments of ``augend.models.Llama``.
        state: float32 tensors by name and in the order of its ``state_dict()``.
        header: What else the file says.

    Example:
        >>> model = augend.models.Llama(vocab_size=64, width=32, layers=1, heads=2)
        >>> configuration = dict(vocab_size=64, width=32, layers=1, heads=2, kv_heads=2, hidden=96, max_length=1024)
        >>> configuration |= dict(rope_theta=10_000.0, norm_eps=1e-5, tied=True)
        >>> header = augend.gguf.save("small.gguf", model.state_dict(), configuration=configuration)
        >>> loaded = augend.gguf.load("small.gguf")
        >>> augend.models.Llama(**loaded.configuration).load_state_dict(loaded.state)
        <All keys matched successfully>
    """

    configuration: dict[str, Any]
    state: dict[str, Tensor]
    header: Header

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        """The file's tokenizer, made when it is first asked for; None where the file has none.

        Raises:
            GGUFError: It is one that cannot be made; the message names the key. The weights can be used without it.
        """
        kind = self.header.metadata.get("tokenizer.ggml.model")
        if kind is None or kind.value in {"no_vocab", "none"}:
            return None
        return tokenizer_of(self.header.metadata)


def load(path: str | os.PathLike[str]) -> Model:
    """Read a Llama from a GGUF file, of whatever types its tensors are.

    All that the file says is checked before memory is spent: first against its size, then against what a Llama is.

    Args:
        path: Of the file.

    Returns:
        The model, ready for ``augend.models.Llama``.

    Raises:
        GGUFError: The package `gguf` is missing; the file cannot be read or trusted (see ``read_header``); or it is no
            Llama: another architecture, a key, tensor or shape that Llama does not have, one that is missing, rotary
            scaling, biases, experts, one part of several, a type that `gguf` cannot convert. Names what it was.

    Numerics:
        A quantised tensor is what ``gguf.quants.dequantize`` makes of it, to the bit; F16 and BF16 are widened, which
        is exact. Rows of the query and key projections are put back into the order of Hugging Face.
        Memory: the state, and a few megabytes beside it.
    """
    source = Path(path)
    with opened(source) as file:
        header = header_of(file, source)
        configuration = configuration_of(header)
        check_types(header)
        state: dict[str, Tensor] = {}
        for ours, theirs in tensor_names(configuration).items():
            tensor = read_tensor(file, header, header.tensors[theirs])
            heads = heads_of(ours, configuration)
            state[ours] = tensor if heads is None else unpermuted(tensor, heads)
    return Model(configuration, state, header)


def read(path: str | os.PathLike[str]) -> tuple[Header, dict[str, Tensor]]:
    """Read all tensors of a GGUF file of any architecture, as they are there.

    Args:
        path: Of the file.

    Returns:
        Its header, and its tensors in float32, in torch's shapes, by name, in the order of the file.

    Raises:
        GGUFError: The package `gguf` is missing, the file cannot be read or trusted (see ``read_header``), or a tensor
            is of a type that `gguf` cannot convert.

    Numerics:
        As of ``load``, but rows stay where the file has them.
    """
    source = Path(path)
    with opened(source) as file:
        header = header_of(file, source)
        check_types(header)
        return header, {name: read_tensor(file, header, info) for name, info in header.tensors.items()}
