"""Conversations in the words of a model, by the chat template of its file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Final, NoReturn, Protocol, final

from augend.errors import ConfigError, GGUFError

Messages = Sequence[Mapping[str, str]]

_ASSISTANT: Final = "assistant"
# What the expressions of a template may raise, beside jinja2's own errors.
_RAISED: Final = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


class _Render(Protocol):
    """A template that is ready."""

    def __call__(self, messages: Messages, *, introduced: bool) -> str:
        """Render messages, with or without the introduction of an answer after them."""


@final
class ChatTemplate:
    """A template in Jinja, run in a sandbox as ``transformers`` and llama.cpp run it.

    Args:
        source: The template.
        start: The text of the token before a text; empty where there is none.
        end: The text of the token after a text.
        begins: Whether a text begins with ``start``, where the template does not say so, too.
        special: The texts of all special tokens.
    """

    def __init__(self, source: str, *, start: str, end: str, begins: bool, special: frozenset[str]) -> None:
        self._source, self._start, self._begins, self._special = source, start, begins, special
        self._words = {"bos_token": start, "eos_token": end}

    def pieces(self, messages: Messages) -> list[tuple[str, bool]]:
        """Return pieces of text by turns, those before an answer and the answers, each with whether it is supervised.

        Raises:
            ConfigError: The messages do not fit.
            GGUFError: The template cannot be read, or the package `jinja2` is not installed.
        """
        _check(messages)
        render = self._renderer()
        pieces, done = [], ""
        for number, message in enumerate(messages, start=1):
            if message["role"] != _ASSISTANT:
                continue
            prompt = render(messages[: number - 1], introduced=True)
            whole = render(messages[:number], introduced=False)
            if not (prompt.startswith(done) and whole.startswith(prompt)):
                raise ConfigError(
                    f"message {number}: the chat template changes what was before an answer when it is given, so that "
                    "the answer cannot be told from the rest; make a row of each answer, or write prompts"
                )
            answer = self._answer(whole[len(prompt) :], message["content"].strip())
            pieces += [(prompt[len(done) :], False), (answer, True)]
            done = prompt + answer
        return pieces

    def _answer(self, turn: str, content: str) -> str:
        """Return a turn up to the special token that ends it; the whole turn where none does."""
        after = turn.find(content) + len(content) if content in turn else 0
        ends = [at + len(token) for token in self._special if (at := turn.find(token, after)) >= 0]
        return turn[: min(ends, default=len(turn))]

    def _renderer(self) -> _Render:
        """Compile the template. It is told no date: a run must not depend on the day."""
        try:
            jinja2, sandbox = import_module("jinja2"), import_module("jinja2.sandbox")
        except ImportError as error:
            remedy = "pip install 'augend[gguf]'"
            raise GGUFError(f"chat templates need the package jinja2, which is not installed: {remedy}") from error
        environment = sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.globals["raise_exception"] = _refuse
        try:
            template = environment.from_string(self._source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise GGUFError(f"tokenizer.chat_template is no template that can be read: {error}") from error

        def render(messages: Messages, *, introduced: bool) -> str:
            try:
                text: str = template.render(messages=messages, add_generation_prompt=introduced, **self._words)
            except (jinja2.TemplateError, *_RAISED) as error:  # a template runs what it says
                raise ConfigError(f"the chat template does not take the messages: {error}") from error
            return text if not self._begins or text.startswith(self._start) else self._start + text

        return render


def _refuse(message: str) -> NoReturn:
    """Raise what a template has to say against the messages."""
    raise ValueError(message)


def _check(messages: Messages) -> None:
    """Refuse what is no conversation with an answer."""
    for number, message in enumerate(messages, start=1):
        fits = isinstance(message, Mapping) and all(isinstance(message.get(key), str) for key in ("role", "content"))
        if not fits:
            raise ConfigError(f"message {number} is {message!r:.80}; expected an object with texts role and content")
    if all(message["role"] != _ASSISTANT for message in messages):
        raise ConfigError(f"none of {len(messages)} messages is of the role {_ASSISTANT}; nothing would be learned")
