"""Pairs of signature and docstring."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

import pytest
import torch

from augend.errors import ConfigError
from augend.sources import Bytes, docstrings

SOURCE = '''
def plain(a, b=1, *rest, c: int, **more) -> dict[str, int]:
    """Say one thing.

        Indented.
    """

async def later():
    "Wait."
    def within(): "Nested."

class Thing:
    def method(self):
        """Do it."""
        if True:
            for x in y:
                with z:
                    try:
                        pass
                    except E:
                        def deep(): "Deep."
                    else:
                        def other(): "Other."
                    finally:
                        def last(): "Last."
        match x:
            case 1:
                def matched(): "Matched."
    def bare(self): pass
    def empty(self): ""
'''
PAIRS = [
    (
        "def plain(a, b=1, *rest, c: int, **more) -> dict[str, int]:",
        "Say one thing.\n\nIndented.",
    ),
    ("async def later():", "Wait."),
    ("def within():", "Nested."),
    ("def method(self):", "Do it."),
    ("def deep():", "Deep."),
    ("def other():", "Other."),
    ("def last():", "Last."),
    ("def matched():", "Matched."),
]


def pairs_of(source):
    """Return (signature, docstring) of every row, after checking tokens against labels."""
    pairs = []
    for index in range(len(source.rows)):
        tokens, labels = source.rows[index]["tokens"], source.rows[index]["labels"]
        prompt = int((labels == -100).sum())
        assert torch.int64 == tokens.dtype == labels.dtype
        assert torch.equal(tokens[prompt:], labels[prompt:])
        assert Bytes.end_of_text == tokens[-1]
        before, after = bytes(tokens[:prompt].tolist()).decode(), bytes(tokens[prompt:-1].tolist()).decode()
        assert before.endswith('\n    """')
        pairs.append((before.removesuffix('\n    """'), after))
    return pairs


@pytest.fixture
def folder(tmp_path):
    """Give a folder of Python files, some of which are left out."""
    (tmp_path / "z").mkdir()
    (tmp_path / "z" / "first.py").write_text(SOURCE)
    (tmp_path / "z.py").write_text('def z(): "Last: z.py comes after what is in z."')
    (tmp_path / "a.py").write_text('def a(): "A."\ndef a(): "A."\ndef a(): "Another."')
    (tmp_path / "notes.txt").write_text("not Python")
    for name in ("test", "tests", "site-packages", "idle_test", "dist-packages", "__pycache__"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "left_out.py").write_text("def no(): 'No.'")
    return tmp_path


def test_every_documented_function_in_the_order_of_paths_and_lines(folder):
    """Signature and cleaned docstring of each, nested ones too, each pair once; only the docstring is supervised."""
    last = ("def z():", "Last: z.py comes after what is in z.")
    assert [("def a():", "A."), ("def a():", "Another."), *PAIRS, last] == pairs_of(docstrings(folder))


def test_the_file_system_has_no_say(folder, monkeypatch):
    """Rows have the same order however the file system lists its files."""
    expected = pairs_of(docstrings(folder))
    walk = os.walk
    monkeypatch.setattr(os, "walk", lambda root: ((a, b, c[::-1]) for a, b, c in walk(root)))
    assert expected == pairs_of(docstrings(str(folder)))


def test_long_pairs_are_left_out_whole(folder):
    """A pair of exactly `max_bytes` tokens stays, one more is left out; nothing is cut."""
    rows = docstrings(folder).rows
    lengths = sorted(len(rows[index]["tokens"]) for index in range(len(rows)))
    assert lengths[:-1] == sorted(
        len(row["tokens"]) for row in list(docstrings(folder, max_bytes=lengths[-1] - 1).rows)
    )
    assert lengths == sorted(len(row["tokens"]) for row in list(docstrings(folder, max_bytes=lengths[-1]).rows))


def test_limit(folder):
    """The first so many."""
    assert pairs_of(docstrings(folder))[:3] == pairs_of(docstrings(folder, limit=3))


def test_the_standard_library():
    """Without a folder it is the running Python's own library, tests and packages left out."""
    expected = docstrings(sysconfig.get_path("stdlib"), limit=40)
    assert pairs_of(expected) == pairs_of(docstrings(limit=40))
    assert 40 == len(expected.rows)


def test_a_text_without_utf8(tmp_path):
    """A file in another coding is read as its first line says; half a surrogate pair becomes a question mark."""
    (tmp_path / "a.py").write_bytes("# -*- coding: latin-1 -*-\ndef f(): 'Ä \\ud800'\n".encode("latin-1"))
    assert [("def f():", "Ä ?")] == pairs_of(docstrings(tmp_path))


def test_escapes_do_not_warn(tmp_path):
    """Warnings about somebody else's code are not shown."""
    (tmp_path / "a.py").write_text("def f(): '\\d'\n")
    assert [("def f():", "\\d")] == pairs_of(docstrings(tmp_path))


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"x = 1\nprint 'two'\n", r"bad\.py, line 2, is not Python"), (b"x\0", r"bad\.py, line 1, is not Python")],
)
def test_what_is_not_python_is_refused(folder, content, message):
    """The error names file and line."""
    (folder / "bad.py").write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        docstrings(folder)


def test_what_does_not_fit_is_refused(tmp_path):
    """Numbers out of range, a folder that is not there, and one without docstrings."""
    for arguments, message in (
        ({"max_bytes": 0}, "max_bytes.*0"),
        ({"limit": 0}, "limit.*0"),
        ({"folder": tmp_path / "no"}, "no does not exist"),
        ({"folder": tmp_path}, "no function with a docstring of at most 512 bytes"),
    ):
        with pytest.raises(ConfigError, match=message):
            docstrings(**arguments)


def test_rows_are_a_map_style_dataset(folder):
    """Rows end with IndexError, so they can be listed, and Path or text names the folder."""
    rows = docstrings(Path(folder)).rows
    assert len(rows) == len(list(rows))
    with pytest.raises(IndexError, match="row -1"):
        rows[-1]


def test_another_tokenizer(folder):
    """Its tokens, one before each text where it wants one; a pair is still measured in bytes, and once more in them."""

    class Halves:
        vocab_size, start_of_text, end_of_text, padding = 600, 599, 598, 598

        def encode(self, text):
            return [max(text.encode()[at : at + 2]) for at in range(0, len(text.encode()), 2)]

    halves, plain = docstrings(folder, tokenizer=Halves()), docstrings(folder)
    assert len(plain.rows) == len(halves.rows)
    assert halves.tokenizer.end_of_text == halves.collate([halves.rows[0], halves.rows[3]])["tokens"][0, -1]
    row = halves.rows[0]
    prompt = Halves().encode('def a():\n    """')
    assert [599, *prompt, *Halves().encode("A."), 598] == row["tokens"].tolist()
    assert [-100] * (1 + len(prompt)) == row["labels"][: 1 + len(prompt)].tolist()
    sizes = [len(row["tokens"]) for row in (plain.rows[index] for index in range(len(plain.rows)))]
    assert sum(size < max(sizes) for size in sizes) == len(
        docstrings(folder, tokenizer=Halves(), max_bytes=max(sizes) - 1).rows
    )
    with pytest.raises(ConfigError, match="end_of_text"):
        docstrings(folder, end_of_text="<eos>")


def test_tokens_are_bounded_as_bytes_are(folder):
    """A tokenizer that makes more tokens than there are bytes makes no longer rows."""

    class Double(Bytes):
        def encode(self, text):
            return [byte for byte in text.encode() for _ in range(2)]

    assert all(len(row["tokens"]) <= 60 for row in docstrings(folder, tokenizer=Double(), max_bytes=60).rows)
