"""From text to tokens and back: bytes, a file of the `tokenizers` package, or whatever else does it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Final, Protocol, final, runtime_checkable

from augend.errors import ConfigError
from augend.sources._files import content_of

_USUAL_ENDS: Final = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")


class Tokenizer(Protocol):
    """What a source needs of a tokenizer."""

    @property
    def vocab_size(self) -> int:
        """How many tokens there are: all are below it."""

    @property
    def start_of_text(self) -> int | None:
        """The token before the first of a text; None where a text begins with its own first token."""

    @property
    def end_of_text(self) -> int:
        """The token after the last of a text; what `Llama.generate` stops at."""

    @property
    def padding(self) -> int:
        """The token that fills short rows; never supervised."""

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, without a beginning or an end."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens."""


@runtime_checkable
class ChatTokenizer(Tokenizer, Protocol):
    """A tokenizer that also has words for a conversation, such as `augend.gguf.Tokenizer`."""

    def chat(self, messages: Sequence[Mapping[str, str]]) -> Sequence[tuple[str, bool]]:
        """Return a conversation as pieces of text, each with whether it is supervised.

        Raises:
            ConfigError: The messages do not fit.
        """


@final
class Bytes:
    """The 256 bytes of UTF-8 as tokens 0 to 255, then 256 for the end of a text and 257 for padding.

    Example:
        >>> tokenizer = augend.sources.Bytes()
        >>> tokenizer.encode("né")
        [110, 195, 169]
        >>> tokenizer.decode([110, 195, 169, tokenizer.end_of_text])
        'né'
    """

    vocab_size: Final = 258
    start_of_text: Final = None
    end_of_text: Final = 256
    padding: Final = 257

    def encode(self, text: str) -> list[int]:
        """Return the bytes of a text, without an end. Half a surrogate pair becomes a question mark."""
        return list(text.encode(errors="replace"))

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of bytes; the two special tokens are nothing, and what is no UTF-8 becomes U+FFFD."""
        return bytes(token for token in tokens if token < self.end_of_text).decode(errors="replace")


@final
class TokenizerFile:
    """A tokenizer of the `tokenizers` package, without the truncation and padding that it may have been saved with.

    Args:
        tokenizer: A ``tokenizers.Tokenizer``.
        end_of_text: The token that ends a text.

    Example:
        >>> from tokenizers import Tokenizer, models
        >>> words = Tokenizer(models.WordLevel({"one": 0, "<eos>": 1}, unk_token="<eos>"))
        >>> augend.sources.TokenizerFile(words, end_of_text=1).encode("one")
        [0]
    """

    start_of_text: Final = None

    def __init__(self, tokenizer: Any, end_of_text: int) -> None:
        tokenizer.no_truncation()  # it would lose text in silence
        tokenizer.no_padding()  # it would be supervised
        self._tokenizer = tokenizer
        self.vocab_size: int = 1 + max(tokenizer.get_vocab().values())
        self.end_of_text = self.padding = end_of_text

    @property
    def description(self) -> str:
        """The text of a ``tokenizer.json`` that makes this one again."""
        description: str = self._tokenizer.to_str()
        return description

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, without special ones."""
        tokens: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return tokens

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens; special ones are nothing."""
        text: str = self._tokenizer.decode(list(tokens), skip_special_tokens=True)
        return text


def tokenizer_of(source: str | Path | Tokenizer | None, end_of_text: str | None) -> Tokenizer:
    """Return the tokenizer of a file, the one given, or bytes without either.

    Args:
        source: A ``tokenizer.json``, a tokenizer, or None for bytes.
        end_of_text: The token that ends a text; None for the first of the usual ones that the file has.

    Raises:
        ConfigError: `tokenizers` is not installed, the file cannot be used, or it has no such token.
    """
    if not isinstance(source, str | Path):
        if end_of_text is not None:
            raise ConfigError(
                f"end_of_text {end_of_text!r} is of a tokenizer file; name one with tokenizer=, or drop it"
            )
        return Bytes() if source is None else source
    return _read(source, end_of_text)


def _read(path: str | Path, end_of_text: str | None) -> TokenizerFile:
    """Read a tokenizer.json."""
    description = content_of(path, "tokenizer").decode(errors="replace")
    _check(path, description)
    try:
        tokenizer = import_module("tokenizers").Tokenizer.from_str(description)
    except ImportError as error:
        remedy = "pip install 'augend[text]'"
        raise ConfigError(f"a tokenizer file needs the package tokenizers, which is not installed: {remedy}") from error
    asked = _USUAL_ENDS if end_of_text is None else (end_of_text,)
    found = [identity for identity in map(tokenizer.token_to_id, asked) if identity is not None]
    if not found:
        remedy = "name the token that ends a text with end_of_text="
        raise ConfigError(f"tokenizer {path} has no token {' or '.join(asked)}; {remedy}")
    return TokenizerFile(tokenizer, found[0])


def _check(path: str | Path, description: str) -> None:
    """Refuse what is no tokenizer file, since `tokenizers` raises the bare root of all exceptions."""
    try:
        content = json.loads(description)
    except json.JSONDecodeError as error:
        raise ConfigError(f"tokenizer {path} is not JSON: {error}; expected a tokenizer.json") from error
    except (RecursionError, ValueError) as error:  # too deep, or an integer too long
        raise ConfigError(
            f"tokenizer {path} is JSON that cannot be read: {error}; expected a tokenizer.json"
        ) from error
    model = content.get("model") if isinstance(content, dict) else None
    if not isinstance(model, dict) or "vocab" not in model:
        raise ConfigError(f"tokenizer {path} has no model with a vocab; expected a tokenizer.json of `tokenizers`")
