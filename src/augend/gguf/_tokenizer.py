"""The tokenizer that a GGUF file carries: byte pairs, merged as llama.cpp merges them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any, Final, final

from augend.errors import ConfigError, GGUFError
from augend.gguf._chat import ChatTemplate
from augend.gguf._metadata import Value
from augend.gguf._vocabulary import CONTROL, ORDINARY, UNKNOWN, USER_DEFINED
from augend.gguf._words import WORDS, Words

_SPECIAL: Final = frozenset({CONTROL, UNKNOWN})


@final
class Tokenizer:
    """Byte pairs of a file, with its special tokens and its chat template; satisfies `augend.sources.Tokenizer`.

    Made by `load`; `tokenizer_of` makes one of metadata.

    Args:
        tokenizer: A ``tokenizers.Tokenizer``.
        vocab_size: How many tokens there are.
        start_of_text: The token before a text; None where the file wants none.
        end_of_text: The token after a text.
        padding: The token that fills short rows.
        template: The file's chat template; None where it has none.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        vocab_size: int,
        start_of_text: int | None,
        end_of_text: int,
        padding: int,
        template: ChatTemplate | None,
    ) -> None:
        self._tokenizer, self._template = tokenizer, template
        self.vocab_size, self.padding = vocab_size, padding
        self.start_of_text, self.end_of_text = start_of_text, end_of_text

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, those llama.cpp finds with ``parse_special``, without a beginning or an end.

        What is written like a special token is that token. Half a surrogate pair becomes a question mark.
        """
        whole = text.encode(errors="replace").decode()
        tokens: list[int] = self._tokenizer.encode(whole, add_special_tokens=False).ids
        return tokens

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens; special ones are nothing, and what is no UTF-8 becomes U+FFFD."""
        text: str = self._tokenizer.decode(list(tokens), skip_special_tokens=True)
        return text

    def chat(self, messages: Sequence[Mapping[str, str]]) -> list[tuple[str, bool]]:
        """Return a conversation in the words of the file's chat template, cut where supervision begins and ends.

        What the assistant says is supervised, with the special token that ends it. All else is not: what others say,
        what introduces a turn, and what the template puts after its end. Templates are rendered without a date, so
        that a text does not depend on the day.

        Args:
            messages: Each ``{"role": ..., "content": ...}``, in the order they were said; the roles are those that
                the template knows, usually ``system``, ``user`` and ``assistant``.

        Returns:
            Pieces of text, each with whether it is supervised. Special tokens are written out, the first one of a
            text too: ``encode`` makes tokens of it.

        Raises:
            ConfigError: The file has no template, or the messages do not fit it: nobody answers, the template
                refuses them, or it does not keep what was before an answer as it was.
            GGUFError: The template cannot be read, or the package `jinja2` is not installed.
        """
        if self._template is None:
            raise ConfigError("the GGUF file has no chat template (tokenizer.chat_template); write prompts instead")
        return self._template.pieces(messages)


def tokenizer_of(metadata: Mapping[str, Value]) -> Tokenizer:
    """Return the tokenizer that a GGUF file's metadata describes.

    Byte-level byte pairs (``tokenizer.ggml.model`` is ``gpt2``) whose pre-tokenizer is known, which a file names by
    ``tokenizer.ggml.pre``. A text gets a beginning where ``tokenizer.ggml.add_bos_token`` says so, or where it says
    nothing and llama.cpp gives one to files with that pre-tokenizer.

    Args:
        metadata: Of a file; keys that do not begin with ``tokenizer.`` are left alone.

    Returns:
        The tokenizer.

    Raises:
        GGUFError: A key is missing, of another type or out of its range, which names the key, or the package
            `tokenizers` is not installed.
    """
    keys = _Keys(metadata)
    if (model := keys.text("tokenizer.ggml.model")) != "gpt2":
        raise GGUFError(f"tokenizer.ggml.model is {model!r}; only 'gpt2', byte-level byte pairs, can be read")
    if (pre := keys.text("tokenizer.ggml.pre", "default")) not in WORDS:
        raise GGUFError(f"tokenizer.ggml.pre is {pre!r}, which is not known; known are {', '.join(sorted(WORDS))}")
    words, tokens = WORDS[pre], _tokens(keys)
    kinds = keys.numbers("tokenizer.ggml.token_type", len(tokens))
    end = keys.token("tokenizer.ggml.eos_token_id", len(tokens))
    if end is None:
        raise GGUFError("tokenizer.ggml.eos_token_id is missing; it must be the token that ends a text")
    padding = keys.token("tokenizer.ggml.padding_token_id", len(tokens))
    start = keys.token("tokenizer.ggml.bos_token_id", len(tokens))
    begins = keys.choice("tokenizer.ggml.add_bos_token", otherwise=words.begins)
    if begins and start is None:
        raise GGUFError("tokenizer.ggml.bos_token_id is missing; it must be the token that texts begin with")
    source = keys.text("tokenizer.chat_template", "")
    template = ChatTemplate(
        source,
        start="" if start is None else tokens[start],
        end=tokens[end],
        begins=begins,
        special=frozenset(token for token, kind in zip(tokens, kinds, strict=True) if kind in _SPECIAL),
    )
    return Tokenizer(
        _built(tokens, kinds, keys.texts("tokenizer.ggml.merges"), words),
        vocab_size=len(tokens),
        start_of_text=start if begins else None,
        end_of_text=end,
        padding=end if padding is None else padding,
        template=template if source else None,
    )


@final
class _Keys:
    """Metadata, whose values are of the type that is asked for, or refused."""

    def __init__(self, metadata: Mapping[str, Value]) -> None:
        self._metadata = metadata

    def text(self, key: str, otherwise: str | None = None) -> str:
        value = self._value(key, "string")
        if not isinstance(value, str):
            if otherwise is None:
                raise GGUFError(f"{key} is missing; it must be a text")
            return otherwise
        return value

    def choice(self, key: str, *, otherwise: bool) -> bool:
        value = self._value(key, "bool")
        return otherwise if value is None else bool(value)

    def token(self, key: str, size: int) -> int | None:
        """Return a token; none for one that is not there, as llama.cpp does."""
        value = self._value(key, "uint32")
        return value if isinstance(value, int) and value < size else None

    def texts(self, key: str) -> list[str]:
        return self._values(key, "array[string]")

    def numbers(self, key: str, size: int) -> list[int]:
        """Return a number for each token, all of ordinary ones where the key is missing."""
        if key not in self._metadata:
            return [ORDINARY] * size
        values: list[int] = self._values(key, "array[int32]")
        if len(values) != size:
            raise GGUFError(f"{key} has {len(values):,} numbers; expected one for each of {size:,} tokens")
        return values

    def _values(self, key: str, kind: str) -> list[Any]:
        value = self._value(key, kind)
        if not isinstance(value, list):
            raise GGUFError(f"{key} is missing; it must be of type {kind}")
        return value

    def _value(self, key: str, kind: str) -> object:
        """Return a value, None where there is none."""
        found = self._metadata.get(key)
        if found is None:
            return None
        if found.type != kind:
            raise GGUFError(f"{key} is of type {found.type}; expected {kind}")
        try:
            return found.value
        except UnicodeDecodeError as error:
            raise GGUFError(f"{key} is not UTF-8: {error.reason}") from error


def _tokens(keys: _Keys) -> list[str]:
    """Return the tokens; one without letters is named by its place, as llama.cpp does."""
    key = "tokenizer.ggml.tokens"
    tokens = [token or f"[EMPTY_{place}]" for place, token in enumerate(keys.texts(key))]
    if len(set(tokens)) != len(tokens):
        twice, _ = Counter(tokens).most_common(1)[0]
        raise GGUFError(f"{key} has {twice!r} more than once; each token must be another one")
    return tokens


def _built(tokens: Sequence[str], kinds: Sequence[int], merges: Sequence[str], words: Words) -> Any:
    """Build a tokenizer of the package `tokenizers`."""
    try:
        package = import_module("tokenizers")
    except ImportError as error:
        remedy = "pip install 'augend[gguf]'"
        raise GGUFError(f"a tokenizer needs the package tokenizers, which is not installed: {remedy}") from error
    vocabulary = {token: place for place, token in enumerate(tokens)}
    pairs = [_merge(merge, vocabulary) for merge in merges]
    tokenizer = package.Tokenizer(package.models.BPE(vocabulary, pairs, ignore_merges=words.whole))
    cuts = [package.pre_tokenizers.Split(package.Regex(each), "isolated") for each in words.expressions]
    letters = package.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = package.pre_tokenizers.Sequence([*cuts, letters])
    tokenizer.decoder = package.decoders.ByteLevel()
    tokenizer.add_tokens(
        [
            package.AddedToken(token, special=kind in _SPECIAL, normalized=False)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind in _SPECIAL or kind == USER_DEFINED
        ]
    )
    return tokenizer


def _merge(merge: str, vocabulary: Mapping[str, int]) -> tuple[str, str]:
    """Return the two tokens that are merged."""
    first, _, second = merge.partition(" ")
    if not {first, second, first + second} <= vocabulary.keys():
        raise GGUFError(f"tokenizer.ggml.merges has {merge!r}, which does not make a token of two others")
    return first, second
