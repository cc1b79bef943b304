"""Prompts and completions from a file of JSON lines."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from augend.errors import ConfigError
from augend.sources._files import text_of
from augend.sources._source import Source, of_tokens
from augend.sources._tokenizer import Tokenizer, tokenizer_of
from augend.sources._tokens import TokenRows


def pairs(
    path: str | Path,
    *,
    prompt: str = "prompt",
    completion: str = "completion",
    tokenizer: str | Path | None = None,
    end_of_text: str | None = None,
    max_tokens: int | None = None,
) -> Source:
    """Return prompts and completions, one JSON object a line; completion and end of text alone are supervised.

    A row is the prompt's tokens, the completion's, and the end of text. Empty lines are skipped.

    Args:
        path: A UTF-8 file whose lines are objects with two texts, such as ``{"prompt": "2+2=", "completion": "4"}``.
        prompt: The key of the prompt.
        completion: The key of the completion.
        tokenizer: A ``tokenizer.json`` of the package `tokenizers`; None for `Bytes`.
        end_of_text: The token of that file which ends a text; None for the usual one.
        max_tokens: Longer rows are cut on the right, and then have no end of text; None keeps them.

    Returns:
        Rows ``{"tokens": [length] int64, "labels": [length] int64}``, -100 on the prompt; `augend.losses.causal_lm`;
        accuracy of the next token; the tokenizer.

    Raises:
        ConfigError: The file cannot be used, a line is not such an object, or a prompt leaves no room for its
            completion; names file and line.
    """
    encoder = tokenizer_of(tokenizer, end_of_text)
    if max_tokens is not None and max_tokens < 2:  # noqa: PLR2004  one token predicts nothing
        raise ConfigError(f"max_tokens must be at least 2, a token and the next; got {max_tokens}")
    rows = TokenRows(_rows(path, (prompt, completion), encoder, max_tokens), encoder.vocab_size)
    if not len(rows):
        raise ConfigError(f"pairs file {path} has no lines; write one JSON object a line")
    return of_tokens(rows, encoder)


def _rows(
    path: str | Path, keys: tuple[str, str], tokenizer: Tokenizer, max_tokens: int | None
) -> Iterator[tuple[list[int], int]]:
    """Yield the tokens of each line, and how many belong to the prompt."""
    for number, line in enumerate(text_of(path, "pairs file").split("\n"), start=1):
        if not line.strip():
            continue
        where = f"pairs file {path}, line {number}"
        before, after = (tokenizer.encode(each) for each in _texts(line, keys, where))
        if max_tokens is not None and len(before) >= max_tokens:
            got = f"{len(before)} tokens and max_tokens is {max_tokens}"
            raise ConfigError(
                f"{where}: no room for a completion, the prompt has {got}; raise it or shorten the prompt"
            )
        yield [*before, *after, tokenizer.end_of_text][:max_tokens], len(before)


def _texts(line: str, keys: tuple[str, str], where: str) -> list[str]:
    """Return prompt and completion of a line."""
    try:
        content = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{where}: not JSON at column {error.colno}: {error.msg}; write one object a line") from error
    except (RecursionError, ValueError) as error:  # too deep, or an integer too long
        raise ConfigError(f"{where}: JSON that cannot be read: {error}; write one object of texts a line") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{where}: expected an object with {keys[0]!r} and {keys[1]!r}; got {type(content).__name__}")
    texts = []
    for key in keys:
        if not isinstance(content.get(key), str):
            got = (
                f"{type(content[key]).__name__}"
                if key in content
                else f"only {', '.join(map(repr, content)) or 'nothing'}"
            )
            raise ConfigError(f"{where}: expected a text under {key!r}; got {got}")
        texts.append(content[key])
    return texts
