"""Tokenizers for the tests, trained on the spot."""

from __future__ import annotations

import inspect
import json
import textwrap
from functools import cache

import tokenizers

from augend.gguf import Value

END, BEGIN, TURN, TURN_END = "<|endoftext|>", "<|begin|>", "<|im_start|>", "<|im_end|>"
CHAT = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content | trim }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def lines() -> list[str]:
    """Return real text and code: more than a thousand lines of Python's own textwrap, inspect and json."""
    whole = "".join(inspect.getsource(module) for module in (textwrap, inspect, json))
    return whole.splitlines()


@cache
def trained(size: int = 600) -> str:
    """Return the tokenizer.json of byte-level byte pairs with four special tokens, trained on those lines."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[END, BEGIN, TURN, TURN_END],
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(lines(), trainer)
    return tokenizer.to_str()


def of(**values: object) -> dict[str, Value]:
    """Return keys of ``tokenizer.ggml`` with values of the type that Python's has."""
    types = {str: "string", bool: "bool", int: "uint32"}
    return {f"tokenizer.ggml.{key}": Value.of(types[type(value)], value) for key, value in values.items()}
