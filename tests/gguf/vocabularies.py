"""Tokenizers for the tests, trained on the spot."""

from __future__ import annotations

import inspect
import json
import random
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


# Letters, marks, digits of several kinds, spaces, contractions, signs; all older than anybody's tables of Unicode.
ALPHABET = (
    " \t\n\r\u00a0\u3000\u2028''stmdrevlLLSTſ012³½①٣४aébcXÉДж日本かกำ\u0301\u200d\ufeff.,;:!?-_()[]{}+<=>"
    '^~|`$%&*#@/\\"“—€😀🏽ªºǅʰ\u0378\ue000'
)


def nonsense(count: int) -> list[str]:
    """Return short texts of letters that rarely stand together."""
    chance = random.Random(0)  # noqa: S311  no secret
    return ["".join(chance.choices(ALPHABET, k=chance.randint(1, 12))) for _ in range(count)]


@cache
def trained_across() -> str:
    """Return a tokenizer.json whose tokens show every cut: trained on texts that were not cut, lacking some merges."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=2000,
        special_tokens=[END, BEGIN, TURN, TURN_END],
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        max_token_length=6,
        show_progress=False,
    )
    pieces = ["12", "345", "1234", "'S", "'Re", "'LL", "'tis", " 'll", "!!", "--", "=>", "\n\n", " \n ", "½²"]
    tokenizer.train_from_iterator([*lines(), *nonsense(3000), *pieces * 100], trainer)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    content = json.loads(tokenizer.to_str())
    content["model"]["merges"] = [merge for place, merge in enumerate(content["model"]["merges"]) if place % 9]
    return json.dumps(content)


def of(**values: object) -> dict[str, Value]:
    """Return keys of ``tokenizer.ggml`` with values of the type that Python's has."""
    types = {str: "string", bool: "bool", int: "uint32"}
    return {f"tokenizer.ggml.{key}": Value.of(types[type(value)], value) for key, value in values.items()}
