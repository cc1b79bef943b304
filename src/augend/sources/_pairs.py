"""Prompts and completions, or conversations, from a file of JSON lines."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import accumulate, groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from augend.errors import ConfigError
from augend.sources._files import text_of
from augend.sources._source import Source, of_tokens
from augend.sources._tokenizer import ChatTokenizer, Tokenizer, tokenizer_of
from augend.sources._tokens import TokenRows


def pairs(
    path: str | Path,
    *,
    prompt: str = "prompt",
    completion: str = "completion",
    messages: str = "messages",
    tokenizer: str | Path | Tokenizer | None = None,
    end_of_text: str | None = None,
    max_tokens: int | None = None,
) -> Source:
    """Return prompts and completions, one JSON object a line; what is to be said, and its end, alone is supervised.

    A row is the prompt's tokens, the completion's, and the end of text. A line may have a conversation instead; its row
    is in the words of the tokenizer's chat template, up to the end of the last answer, and all answers are supervised.
    Rows begin with the tokenizer's start of text, where it has one. Empty lines are skipped.

    Args:
        path: A UTF-8 file whose lines are objects with two texts, such as ``{"prompt": "2+2=", "completion": "4"}``, or
            with a list of messages, each ``{"role": "user", "content": "2+2?"}``; the role ``assistant`` answers.
        prompt: The key of the prompt.
        completion: The key of the completion.
        messages: The key of the list of messages.
        tokenizer: A ``tokenizer.json`` of the package `tokenizers`, or a `Tokenizer`; None for `Bytes`. For messages a
            `ChatTokenizer`, such as that of a GGUF file.
        end_of_text: The token of a ``tokenizer.json`` which ends a text; None for the usual one.
        max_tokens: Longer rows are cut on the right, and then have no end of text; None keeps them.

    Returns:
        Rows ``{"tokens": [length] int64, "labels": [length] int64}``, -100 on what is not supervised;
        `augend.losses.causal_lm`; accuracy of the next token; the tokenizer.

    Raises:
        ConfigError: The file cannot be used, a line is not such an object, what comes before the first answer leaves no
            room for it, or the tokenizer has no chat template for messages; names file and line.
    """
    encoder = tokenizer_of(tokenizer, end_of_text)
    if max_tokens is not None and max_tokens < 2:  # noqa: PLR2004  one token predicts nothing
        raise ConfigError(f"max_tokens must be at least 2, a token and the next; got {max_tokens}")
    rows = TokenRows(_rows(path, (prompt, completion, messages), encoder, max_tokens), encoder.vocab_size)
    if not len(rows):
        raise ConfigError(f"pairs file {path} has no lines; write one JSON object a line")
    return of_tokens(rows, encoder)


def _rows(
    path: str | Path, keys: tuple[str, str, str], tokenizer: Tokenizer, max_tokens: int | None
) -> Iterator[tuple[list[int], list[int]]]:
    """Yield the tokens of each line, and where supervision begins and ends by turns."""
    for number, line in enumerate(text_of(path, "pairs file").split("\n"), start=1):
        if not line.strip():
            continue
        where = f"pairs file {path}, line {number}"
        content = _object(line, keys, where)
        if keys[2] in content:
            parts = _conversation(content[keys[2]], tokenizer, where)
        else:
            before, after = (tokenizer.encode(each) for each in _texts(content, keys[:2], where))
            start = [] if tokenizer.start_of_text is None else [tokenizer.start_of_text]
            parts = [[*start, *before], [*after, tokenizer.end_of_text]]
        turns = list(accumulate(map(len, parts)))
        if max_tokens is not None and turns[0] >= max_tokens:
            got = f"{turns[0]} tokens and max_tokens is {max_tokens}"
            raise ConfigError(
                f"{where}: no room for a completion, the prompt has {got}; raise it or shorten the prompt"
            )
        yield [token for part in parts for token in part][:max_tokens], turns[:-1]


def _object(line: str, keys: tuple[str, str, str], where: str) -> Mapping[str, Any]:
    """Return what a line holds."""
    try:
        content = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{where}: not JSON at column {error.colno}: {error.msg}; write one object a line") from error
    except (RecursionError, ValueError) as error:  # too deep, or an integer too long
        raise ConfigError(f"{where}: JSON that cannot be read: {error}; write one object of texts a line") from error
    if not isinstance(content, dict):
        wanted = f"an object with {keys[0]!r} and {keys[1]!r}, or with {keys[2]!r}"
        raise ConfigError(f"{where}: expected {wanted}; got {type(content).__name__}")
    return content


def _conversation(messages: Any, tokenizer: Tokenizer, where: str) -> list[list[int]]:
    """Return the tokens of a conversation, by turns of those that are not supervised and those that are."""
    if not isinstance(tokenizer, ChatTokenizer):
        remedy = "take the tokenizer of a GGUF file that has one, or write prompts and completions"
        raise ConfigError(f"{where}: the tokenizer has no chat template for messages; {remedy}")
    if not isinstance(messages, list):
        raise ConfigError(f"{where}: expected a list of messages; got {type(messages).__name__}")
    try:
        pieces = tokenizer.chat(messages)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
    return [
        [token for text, _ in group for token in tokenizer.encode(text)]
        for _, group in groupby([("", False), *pieces], key=itemgetter(1))
    ]


def _texts(content: Mapping[str, Any], keys: tuple[str, str], where: str) -> list[str]:
    """Return prompt and completion of a line."""
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
