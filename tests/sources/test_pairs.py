"""JSON lines of prompt and completion."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from augend.errors import ConfigError
from augend.sources import Bytes, ChatTokenizer, pairs

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """Give the path of a file to write."""
    return tmp_path_factory.mktemp("pairs") / "pairs.jsonl"


@given(st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=5), st.booleans(), st.sampled_from(["\n", "\n\n", "\r\n"]))
def test_rows(path, written, escaped, newline):
    """Each line is prompt, completion and end; the prompt is not supervised; empty lines and other keys are skipped."""
    lines = [json.dumps({"q": q, "a": a, "id": 7}, ensure_ascii=escaped) for q, a in written]
    path.write_bytes(newline.join([*lines, ""]).encode())
    rows = list(pairs(path, prompt="q", completion="a").rows)
    assert len(written) == len(rows)
    for (q, a), row in zip(written, rows, strict=True):
        assert [*q.encode(), *a.encode(), Bytes.end_of_text] == row["tokens"].tolist()
        assert [-100] * len(q.encode()) + [*a.encode(), Bytes.end_of_text] == row["labels"].tolist()


def test_longest(path):
    """Rows are cut on the right to `max_tokens`, if that is given."""
    path.write_text('{"prompt": "ab", "completion": "cd"}\n{"prompt": "ab", "completion": "c"}\n')
    rows = list(pairs(path, max_tokens=4).rows)
    assert [[97, 98, 99, 100], [97, 98, 99, Bytes.end_of_text]] == [row["tokens"].tolist() for row in rows]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 3: not JSON at column 2"),
        ("[" * 200_000, "line 3: JSON that cannot be read: .*recursion"),
        ('{"prompt": "a", "completion": "b", "id": ' + "7" * 5000 + "}", "line 3: JSON that cannot be read: .*digits"),
        ("[]", "line 3: expected an object with 'prompt' and 'completion', or with 'messages'; got list"),
        ('{"prompt": "a"}', "line 3: expected a text under 'completion'; got only 'prompt'"),
        ("{}", "line 3: expected a text under 'prompt'; got only nothing"),
        ('{"prompt": 1, "completion": "b"}', "line 3: expected a text under 'prompt'; got int"),
        ('{"prompt": "a", "completion": null}', "line 3: expected a text under 'completion'; got NoneType"),
        ('{"prompt": "abcdef", "completion": "b"}', "line 3: no room for a completion, the prompt has 6 tokens"),
    ],
)
def test_every_error_names_its_line(path, line, message):
    """Empty lines count as lines; a key that is missing, of another type, or a prompt too long."""
    path.write_text('{"prompt": "a", "completion": "b"}\n\n' + line)
    with pytest.raises(ConfigError, match=message) as caught:
        pairs(path, max_tokens=6)
    assert str(path) in str(caught.value)


class Talking:
    """Letters of ASCII, a token before and one after a text, and a word for each role."""

    vocab_size, start_of_text, end_of_text, padding = 130, 128, 129, 129

    def encode(self, text):
        return list(text.encode())

    def decode(self, tokens):
        return bytes(token for token in tokens if token < self.start_of_text).decode()

    def chat(self, messages):
        if any(message["role"] == "nobody" for message in messages):
            raise ConfigError("there is nobody")
        return [(each["content"], each["role"] == "assistant") for each in messages]


def test_a_tokenizer_that_is_given(path):
    """An object that satisfies the protocol is taken as it is; a row begins with its start of text."""
    path.write_text('{"prompt": "ab", "completion": "c"}\n')
    source = pairs(path, tokenizer=Talking())
    assert [128, 97, 98, 99, 129] == source.rows[0]["tokens"].tolist()
    assert [-100, -100, -100, 99, 129] == source.rows[0]["labels"].tolist()
    assert isinstance(source.tokenizer, Talking)
    with pytest.raises(ConfigError, match="the prompt has 3 tokens"):
        pairs(path, tokenizer=Talking(), max_tokens=3)


@given(st.lists(st.tuples(st.sampled_from(["user", "assistant"]), st.text("abc", max_size=3)), max_size=6))
def test_conversations(path, said):
    """All that the assistant says is supervised, and nothing else; the words are those of the tokenizer."""
    said = [*said, ("assistant", "a")]
    messages = [{"role": role, "content": content} for role, content in said]
    path.write_text(json.dumps({"id": 1, "talk": messages}))
    row = pairs(path, messages="talk", tokenizer=Talking()).rows[0]
    assert [ord(letter) for _, content in said for letter in content] == row["tokens"].tolist()
    expected = [ord(letter) if role == "assistant" else -100 for role, content in said for letter in content]
    assert expected == row["labels"].tolist()


def test_conversations_are_cut(path):
    """On the right, like other rows, but not before the first answer begins."""
    messages = [{"role": role, "content": role[0] * 2} for role in ("user", "assistant", "user", "assistant")]
    path.write_text(json.dumps({"messages": messages}))
    labels = [-100, -100, 97, 97, -100, -100, 97, 97]
    for length in range(3, 9):
        assert labels[:length] == pairs(path, tokenizer=Talking(), max_tokens=length).rows[0]["labels"].tolist()
    with pytest.raises(ConfigError, match="no room for a completion, the prompt has 2 tokens and max_tokens is 2"):
        pairs(path, tokenizer=Talking(), max_tokens=2)


@pytest.mark.parametrize(
    ("messages", "tokenizer", "message"),
    [
        ([], None, "line 1: the tokenizer has no chat template for messages; .*GGUF"),
        ("hello", Talking(), "line 1: expected a list of messages; got str"),
        ([{"role": "nobody", "content": "a"}], Talking(), "line 1: there is nobody"),
    ],
)
def test_conversations_that_do_not_fit_are_refused(path, messages, tokenizer, message):
    """Without a chat template, without a list, or with messages that the tokenizer does not take."""
    path.write_text(json.dumps({"messages": messages}))
    with pytest.raises(ConfigError, match=message):
        pairs(path, tokenizer=tokenizer)


def test_only_some_tokenizers_talk():
    """The protocol tells them apart."""
    assert isinstance(Talking(), ChatTokenizer)
    assert not isinstance(Bytes(), ChatTokenizer)


def test_what_does_not_fit_is_refused(path):
    """An empty file, a missing one, another coding, and a number out of range."""
    path.write_text("\n")
    with pytest.raises(ConfigError, match="no lines"):
        pairs(path)
    path.write_bytes(b'{"prompt": "a", "completion": "b"}\n\xff')
    with pytest.raises(ConfigError, match="line 2, is not UTF-8"):
        pairs(path)
    with pytest.raises(ConfigError, match=r"pairs file no\.jsonl does not exist"):
        pairs("no.jsonl")
    with pytest.raises(ConfigError, match="max_tokens.*1"):
        pairs(path, max_tokens=1)
