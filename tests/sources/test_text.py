"""Files cut to rows."""

from __future__ import annotations

import json
import math
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from augend.errors import ConfigError
from augend.sources import Bytes, text

END = Bytes.end_of_text


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Give a folder for files."""
    return tmp_path_factory.mktemp("text")


def tokens_of(source):
    """Return the tokens of all rows, after checking that all are supervised."""
    rows = list(source.rows)
    assert len(rows) == len(source.rows)
    assert all(torch.equal(row["tokens"], row["labels"]) and torch.int64 == row["labels"].dtype for row in rows)
    return [row["tokens"].tolist() for row in rows]


def cut(tokens, length):
    """Cut tokens to rows, without a last row of one token."""
    return [tokens[i : i + length] for i in range(0, len(tokens) - 1, length)]


WORDS = {"<|endoftext|>": 0, "ein": 1, "zwei": 2, "drei": 3, "?": 4, "stop": 70_000}


@pytest.fixture(scope="module")
def tokenizer(folder):
    """Give a tokenizer file of whole words, with a token beyond 16 bits."""
    model = {"type": "WordLevel", "vocab": WORDS, "unk_token": "?"}
    special = {"id": 0, "content": "<|endoftext|>", "special": True}
    special |= dict.fromkeys(["single_word", "lstrip", "rstrip", "normalized"], False)
    whole = {"version": "1.0", "added_tokens": [special], "pre_tokenizer": {"type": "Whitespace"}, "model": model}
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(whole))
    return path


@given(st.lists(st.binary(max_size=30), min_size=1, max_size=3), st.integers(2, 9))
def test_bytes(folder, contents, length):
    """Rows are the bytes of each file and its end, in order; rows of several files never mix."""
    files = [folder / f"{number}.txt" for number in range(len(contents))]
    for file, content in zip(files, contents, strict=True):
        file.write_bytes(content)
    expected = [row for content in contents for row in cut([*content, END], length)]
    if not expected:
        with pytest.raises(ConfigError, match=r"no text in .*0\.txt"):
            text(files, length=length)
        return
    source = text([str(file) for file in files], length=length)
    assert expected == tokens_of(source)
    assert expected == tokens_of(pickle.loads(pickle.dumps(source)))  # noqa: S301  our own, as for a worker


def test_one_path(folder):
    """A single file needs no list, and 256 tokens are a row."""
    (folder / "one.txt").write_bytes(bytes(600))
    assert [256, 256, 89] == [len(row) for row in tokens_of(text(folder / "one.txt"))]
    assert tokens_of(text(folder / "one.txt")) == tokens_of(text(str(folder / "one.txt")))


def test_a_file_that_shrinks_is_found(folder):
    """A row that is no longer there is an error, not a shorter row."""
    path = folder / "shrinking.txt"
    path.write_bytes(b"x" * 100)
    rows = text(path, length=10).rows
    path.write_bytes(b"x" * 15)
    assert 10 == len(rows[0]["tokens"])
    with pytest.raises(ConfigError, match=r"shrinking\.txt had 100 bytes and now has 15"):
        rows[1]
    for index in (-1, 10):
        with pytest.raises(IndexError, match=f"row {index} of 10"):
            rows[index]


@given(st.lists(st.lists(st.sampled_from(["ein", "zwei", "drei", "vier", "stop"]), max_size=9), min_size=1, max_size=3))
def test_a_tokenizer_file(folder, tokenizer, contents):
    """Each file is encoded as a whole and ends with the file's end of text; ids beyond 16 bits are kept."""
    files = [folder / f"{number}.words" for number in range(len(contents))]
    for file, content in zip(files, contents, strict=True):
        file.write_text(" ".join(content))
    expected = [row for content in contents for row in cut([*(WORDS.get(w, 4) for w in content), 0], 4)]
    if not expected:
        with pytest.raises(ConfigError, match="no text"):
            text(files, length=4, tokenizer=tokenizer)
        return
    source = text(files, length=4, tokenizer=tokenizer)
    assert expected == tokens_of(source)
    assert (70_001, 0, 0) == (source.tokenizer.vocab_size, source.tokenizer.end_of_text, source.tokenizer.padding)
    assert "ein drei" == source.tokenizer.decode([1, 3, 0])


class Begun:
    """Letters of ASCII, with a token before and one after a text."""

    vocab_size, start_of_text, end_of_text, padding = 130, 128, 129, 129

    def encode(self, text):
        return list(text.encode())


def test_a_tokenizer_that_is_given(folder):
    """An object that satisfies the protocol is taken as it is; each file begins with its start of text."""
    for name in "ab":
        (folder / f"{name}.begun").write_text(name * 3)
    source = text([folder / "a.begun", folder / "b.begun"], length=3, tokenizer=Begun())
    assert [[128, 97, 97], [97, 129], [128, 98, 98], [98, 129]] == tokens_of(source)
    assert isinstance(source.tokenizer, Begun)
    assert [[97, 97, 97]] == tokens_of(text(folder / "a.begun", length=3, tokenizer=Bytes()))


def test_the_description_of_a_tokenizer_file(folder, tokenizer):
    """It makes the same tokenizer again."""
    (folder / "five.words").write_text("ein zwei drei")
    first = text(folder / "five.words", tokenizer=tokenizer)
    (folder / "again.json").write_text(first.tokenizer.description)
    again = text(folder / "five.words", tokenizer=folder / "again.json")
    assert tokens_of(first) == tokens_of(again)
    assert first.tokenizer.description == again.tokenizer.description


def test_truncation_and_padding_of_a_tokenizer_file_are_off(folder, tokenizer):
    """What a file was saved with neither cuts the text nor fills it up: rows are cut and padded here."""
    whole = json.loads(tokenizer.read_text())
    sides = {"direction": "Right", "stride": 0, "strategy": "LongestFirst", "max_length": 2}
    fills = {"strategy": {"Fixed": 9}, "direction": "Right", "pad_to_multiple_of": None}
    whole |= {"truncation": sides, "padding": fills | {"pad_id": 3, "pad_type_id": 0, "pad_token": "drei"}}
    saved = folder / "saved.json"
    saved.write_text(json.dumps(whole))
    (folder / "five.words").write_text("ein zwei ein zwei ein")
    assert [[1, 2, 1, 2, 1, 0]] == tokens_of(text(folder / "five.words", tokenizer=saved))


def test_another_end_of_text(folder, tokenizer):
    """The token that ends a text is the caller's choice."""
    (folder / "a.words").write_text("ein zwei")
    assert [[1, 2, 3]] == tokens_of(text(folder / "a.words", tokenizer=tokenizer, end_of_text="drei"))


class TestLoss:
    """What comes with the rows."""

    def test_padding_counts_nothing(self, folder):
        """The loss of a padded micro-batch scores the tokens after the first of each row, and only those."""
        (folder / "padded.txt").write_bytes(b"abcdef")
        source = text(folder / "padded.txt", length=4)
        microbatch = source.collate([source.rows[0], source.rows[1]])
        assert [[97, 98, 99, 100], [101, 102, END, Bytes.padding]] == microbatch["tokens"].tolist()
        assert [[97, 98, 99, 100], [101, 102, END, -100]] == microbatch["labels"].tolist()
        tally = source.loss(lambda tokens: torch.zeros(*tokens.shape, 258), microbatch)
        assert [3, 2] == tally.count.tolist()
        assert torch.allclose(tally.total, tally.count * math.log(258.0), rtol=8 * 2.0**-24, atol=0.0)  # 8 roundings

    def test_accuracy(self, folder):
        """The metric compares each prediction with the token that follows."""
        (folder / "next.txt").write_bytes(bytes([0, 1, 2, 3, 4, 9]))
        source = text(folder / "next.txt", length=6)
        microbatch = Offered(source.collate([source.rows[0]]))
        after = torch.nn.functional.one_hot
        metric = source.metrics["accuracy"](lambda tokens: after(tokens + 1, 258).float(), microbatch)
        assert 4 / 5 == metric.compute().value  # 0 1 2 3 4 are followed by 1 2 3 4 9


class Offered(dict):
    """A micro-batch by hand."""

    real_rows, epoch, step, offer = 1, 0, 0, 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"path": "no.txt"}, r"text file no\.txt does not exist"),
        ({"path": "."}, r"text file \. is a folder"),
        ({"path": []}, "no text in no files"),
        ({"path": "no.txt", "length": 1}, "length.*1"),
    ],
)
def test_what_does_not_fit_is_refused(arguments, message):
    """Paths and numbers are named."""
    with pytest.raises(ConfigError, match=message):
        text(**arguments)


def test_tokenizer_files_that_do_not_fit_are_refused(folder, tokenizer, monkeypatch):
    """What is wrong with a tokenizer file is said before any text is read."""
    file = folder / "some.txt"
    file.write_text("ein")
    bad = folder / "bad.json"
    for content, message in (
        ("{", "bad.json is not JSON"),
        ("[" * 200_000, "bad.json is JSON that cannot be read"),
        ("7" * 5000, "bad.json is JSON that cannot be read"),
        ("[]", "no model with a vocab"),
        ('{"model": {}}', "no model"),
    ):
        bad.write_text(content)
        with pytest.raises(ConfigError, match=message):
            text(file, tokenizer=bad)
    with pytest.raises(ConfigError, match="tokenizer no.json does not exist"):
        text(file, tokenizer="no.json")
    with pytest.raises(ConfigError, match="no token fin; .*end_of_text="):
        text(file, tokenizer=tokenizer, end_of_text="fin")
    with pytest.raises(ConfigError, match="end_of_text 'fin' is of a tokenizer file"):
        text(file, end_of_text="fin")
    file.write_bytes(b"ein\nzwei \xff")
    with pytest.raises(ConfigError, match=r"some\.txt, line 2, is not UTF-8"):
        text(file, tokenizer=tokenizer)
    monkeypatch.setitem(__import__("sys").modules, "tokenizers", None)
    with pytest.raises(ConfigError, match=r"pip install 'augend\[text\]'"):
        text(file, tokenizer=tokenizer)


def test_a_file_that_cannot_be_read(tokenizer, monkeypatch):
    """The system's reason is passed on."""

    def refuse(_path):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("pathlib.Path.read_bytes", refuse)
    with pytest.raises(ConfigError, match=r"tokenizer\.json cannot be read: Permission denied"):
        text(tokenizer, tokenizer=tokenizer)
