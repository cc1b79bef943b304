"""Conversations by a file's chat template."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vocabularies import BEGIN, CHAT, END, TURN, TURN_END, of, trained

from augend.errors import ConfigError, GGUFError
from augend.gguf import Value, metadata_of, tokenizer_of

ASKED, ANSWERED = {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}
SAID = st.text(st.characters(codec="ascii", exclude_categories=["Cc"]), max_size=8)


def talking(template, **changes):
    """Return a tokenizer with a template."""
    metadata = metadata_of(trained(), end_of_text=0) | of(**changes)
    return tokenizer_of(metadata | {"tokenizer.chat_template": Value.of("string", template)})


def test_a_conversation_in_pieces():
    """The answers and the tokens that end them are supervised; what the template writes after the last is left out."""
    expected = [
        (f"{TURN}user\n2+2?{TURN_END}\n{TURN}assistant\n", False),
        (f"4{TURN_END}", True),
        (f"\n{TURN}user\n2+2?{TURN_END}\n{TURN}assistant\n", False),
        (f"4{TURN_END}", True),
    ]
    assert expected == talking(CHAT).chat([ASKED, ANSWERED, ASKED, ANSWERED])
    assert expected[:2] == talking(CHAT).chat([ASKED, ANSWERED, ASKED])


@given(st.lists(st.tuples(st.sampled_from(["system", "user", "assistant"]), SAID), max_size=5), SAID)
def test_pieces_are_the_rendered_text(turns, last):
    """Together the pieces are what the template writes, up to the end of the last answer; the answers are in order."""
    turns = [*turns, ("assistant", last)]
    pieces = talking(CHAT).chat([{"role": role, "content": content} for role, content in turns])
    whole = "".join(f"{TURN}{role}\n{content.strip(' ')}{TURN_END}\n" for role, content in turns)
    assert whole.removesuffix("\n") == "".join(text for text, _ in pieces)
    answers = [f"{content.strip(' ')}{TURN_END}" for role, content in turns if role == "assistant"]
    assert answers == [text for text, supervised in pieces if supervised]


def test_an_answer_that_speaks_of_the_end():
    """A special token inside an answer does not end it."""
    answer = f"say {TURN_END} now"
    assert f"{answer}{TURN_END}" == talking(CHAT).chat([{"role": "assistant", "content": answer}])[1][0]


def test_a_template_without_an_end():
    """The whole turn is supervised, and a template may change what was said."""
    template = "{% for message in messages %}{{ message.role[0] }}:{{ message.content | upper }}\n{% endfor %}"
    said = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "yes"}]
    assert [("u:X\n", False), ("a:YES\n", True)] == talking(template).chat(said)


@pytest.mark.parametrize(
    ("begins", "written", "expected"), [(True, True, 1), (True, False, 1), (False, True, 1), (False, False, 0)]
)
def test_a_text_begins_once(begins, written, expected):
    """The beginning that a file asks for is there once, whether the template writes it or not."""
    template = ("{{ bos_token }}" if written else "") + CHAT
    tokenizer = talking(template, bos_token_id=1, add_bos_token=begins)
    pieces = tokenizer.chat([ASKED, ANSWERED, ASKED, ANSWERED])
    tokens = [token for text, _ in pieces for token in tokenizer.encode(text)]
    assert [1] * expected == tokens[:expected]
    assert expected == tokens.count(1)


def test_what_a_template_is_told():
    """The special tokens by name, and no date, so that the text does not depend on the day."""
    template = "{{ bos_token }}{% if strftime_now is defined %}now{% endif %}{{ eos_token }}" + CHAT
    (before, _), _ = talking(template, bos_token_id=1).chat([ASKED, ANSWERED])
    assert before.startswith(f"{BEGIN}{END}{TURN}")


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "none of 0 messages is of the role assistant"),
        ([ASKED], "none of 1 messages"),
        ([ASKED, "4"], "message 2 is '4'; expected an object"),
        ([{"role": "user"}], "message 1 is .*; expected an object"),
        ([{"role": "user", "content": ["a"]}], "message 1 is"),
    ],
)
def test_what_is_no_conversation_is_refused(messages, message):
    """Messages are objects with a role and a content, and one of them answers."""
    with pytest.raises(ConfigError, match=message):
        talking(CHAT).chat(messages)


@pytest.mark.parametrize(
    ("template", "error", "message"),
    [
        ("{{ raise_exception('only users') }}", ConfigError, "does not take the messages: only users"),
        ("{{ messages.append(1) }}", ConfigError, "does not take the messages: access to attribute 'append'"),
        (
            "{{ messages.__class__.__mro__ }}",
            ConfigError,
            "does not take the messages: access to attribute '__class__'",
        ),
        ("{{ 1 / 0 }}", ConfigError, "does not take the messages: division by zero"),
        ("{% for", GGUFError, r"tokenizer\.chat_template is no template that can be read"),
        ("{{ messages | length }}", ConfigError, "message 2: the chat template changes what was before an answer"),
    ],
)
def test_what_a_template_does_not_do(template, error, message):
    """It may refuse the messages, and may neither break out of its sandbox nor change what was said before."""
    with pytest.raises(error, match=message):
        talking(template).chat([ASKED, ANSWERED])


def test_without_the_package(monkeypatch):
    """It is named, with the remedy."""
    tokenizer = talking(CHAT)
    monkeypatch.setitem(__import__("sys").modules, "jinja2", None)
    with pytest.raises(GGUFError, match=r"jinja2, which is not installed: pip install 'augend\[gguf\]'"):
        tokenizer.chat([ANSWERED])
