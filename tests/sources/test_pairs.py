"""JSON lines of prompt and completion."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from augend.errors import ConfigError
from augend.sources import Bytes, pairs

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
        ("[]", "line 3: expected an object with 'prompt' and 'completion'; got list"),
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
