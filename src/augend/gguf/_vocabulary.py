"""What a GGUF file says of a tokenizer that was not made of one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from augend.errors import ContractError
from augend.gguf._metadata import Value
from augend.gguf._words import CONTRACTIONS, DIGITS, GPT2, WORDS

# Types of tokens in llama.cpp.
ORDINARY: Final = 1
UNKNOWN: Final = 2
CONTROL: Final = 3
USER_DEFINED: Final = 4
_UNUSED: Final = 5

_BYTES: Final = 256
_PRINTED: Final = (*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1))
_ANY_CASE: Final = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"


def metadata_of(description: str | None, *, end_of_text: int, padding: int | None = None) -> dict[str, Value]:
    """Return what a GGUF file must say of a tokenizer, so that llama.cpp makes the same tokens of a text.

    Args:
        description: A ``tokenizer.json`` with byte-level byte pairs, such as `augend.sources.TokenizerFile` has; None
            for bytes as tokens 0 to 255, as `augend.sources.Bytes` makes them.
        end_of_text: The token that ends a text.
        padding: The token that fills short rows; None: the same.

    Returns:
        Values by key, all of which begin with ``tokenizer.``. The file will ask for no token before a text, since the
        tokenizers of `augend.sources` put none there.

    Raises:
        ContractError: llama.cpp has no such tokenizer: it normalises, is no byte-level byte pairs, or cuts text in
            another way than those that a file can name.

    Example:
        >>> metadata = augend.gguf.metadata_of(None, end_of_text=256, padding=257)
        >>> len(metadata["tokenizer.ggml.tokens"].value)
        258
    """
    filling = end_of_text if padding is None else padding
    if description is None:
        tokens, kinds = _letters(), [ORDINARY] * _BYTES
        for identity in range(_BYTES, 1 + max(end_of_text, filling)):
            tokens.append("<|endoftext|>" if identity == end_of_text else f"<|{identity}|>")
            kinds.append(CONTROL)
        merges: list[str] = []
        pre = "qwen2"  # without merges the cut does not matter; with gpt-2, llama.cpp takes spaces out of what it says
    else:
        tokens, kinds, merges, pre = _described(json.loads(description))
    for name, token in (("end_of_text", end_of_text), ("padding", filling)):
        if not 0 <= token < len(tokens):
            raise ContractError(f"{name} is {token}; the tokenizer has tokens 0 to {len(tokens) - 1}")
    return {
        "tokenizer.ggml.model": Value.of("string", "gpt2"),
        "tokenizer.ggml.pre": Value.of("string", pre),
        "tokenizer.ggml.tokens": Value.of("array[string]", tokens),
        "tokenizer.ggml.token_type": Value.of("array[int32]", kinds),
        "tokenizer.ggml.merges": Value.of("array[string]", merges),
        "tokenizer.ggml.bos_token_id": Value.of("uint32", end_of_text),
        "tokenizer.ggml.eos_token_id": Value.of("uint32", end_of_text),
        "tokenizer.ggml.padding_token_id": Value.of("uint32", filling),
        "tokenizer.ggml.add_bos_token": Value.of("bool", value=False),
    }


def _letters() -> list[str]:
    """Return the letter that stands for each byte (Radford et al., "GPT-2", 2019): itself where it can be printed."""
    others = iter(range(_BYTES, 2 * _BYTES))
    return [chr(byte if byte in _PRINTED else next(others)) for byte in range(_BYTES)]


def _described(content: Mapping[str, Any]) -> tuple[list[str], list[int], list[str], str]:
    """Return tokens, their types, merges and the name of the pre-tokenizer."""
    model = content["model"]
    if model.get("type", "BPE") != "BPE" or model.get("byte_fallback"):
        raise ContractError("llama.cpp takes byte-level byte pairs (BPE without byte_fallback); the tokenizer is not")
    if content.get("normalizer") is not None:
        raise ContractError("llama.cpp normalises no text before byte pairs; the tokenizer has a normalizer")
    if model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        raise ContractError("llama.cpp knows no prefix or suffix of subwords; the tokenizer has one")
    texts = {identity: token for token, identity in model["vocab"].items()}
    kinds = dict.fromkeys(texts, ORDINARY)
    for added in content.get("added_tokens") or ():
        if added["single_word"] or added["lstrip"] or added["rstrip"]:
            raise ContractError(f"llama.cpp finds the token {added['content']!r} everywhere; the tokenizer does not")
        texts[added["id"]] = added["content"]
        kinds[added["id"]] = CONTROL if added["special"] else USER_DEFINED
    size = 1 + max(texts)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    tokens = [texts.get(identity, f"[UNUSED_{identity}]") for identity in range(size)]
    pre = _name_of(content.get("pre_tokenizer"), whole=bool(model.get("ignore_merges")))
    return tokens, [kinds.get(identity, _UNUSED) for identity in range(size)], merges, pre


def _name_of(pre: Mapping[str, Any] | None, *, whole: bool) -> str:
    """Return the name that llama.cpp has for a way to cut text."""
    steps = [] if pre is None else pre.get("pretokenizers", [pre])
    *cuts, letters = steps or [{}]
    is_byte_level = letters.get("type") == "ByteLevel" and not letters["add_prefix_space"]
    expressions = [_expression(step) for step in cuts]
    if is_byte_level and letters.get("use_regex", True):
        expressions.append(GPT2)
    found = [name for name, words in WORDS.items() if (*expressions,) == words.expressions and whole is words.whole]
    if not is_byte_level or not found:
        raise ContractError(
            "llama.cpp has no name for the tokenizer's way to cut text into words (pre_tokenizer); "
            "ByteLevel(add_prefix_space=False) alone is 'gpt-2', after Digits(individual_digits=True) it is 'smollm'"
        )
    return found[0]


def _expression(step: Mapping[str, Any]) -> str | None:
    """Return the expression of a step; None for one that has none."""
    match step:
        case {"type": "Digits", "individual_digits": True}:
            return DIGITS
        case {"type": "Split", "pattern": {"Regex": str(expression)}, "behavior": "Isolated", "invert": False}:
            return expression.replace(_ANY_CASE, CONTRACTIONS)
    return None
