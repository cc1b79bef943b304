"""A manifest has one text, to the byte, with its own checksum inside; every other text is none."""

from __future__ import annotations

import dataclasses
import hashlib
import json

import pytest
import torch
from forge import sealed
from hypothesis import given
from hypothesis import strategies as st

from augend._checkpoint._manifest import FileRecord, Manifest, PartRecord, TensorRecord, from_bytes, record_of, to_bytes
from augend._checkpoint._tree import DTYPES
from augend.errors import CheckpointError, ContractError

SMALL = Manifest(
    epoch=0,
    step=3,
    rows_done=4,
    microbatch=2,
    count=7,
    updates=3,
    world=1,
    created="2030-01-02T03:04:05+00:00",
    augend="0.1.0",
    torch="2.13.0",
    parts={"model": PartRecord("module", {"w": TensorRecord("float32", [2, 3])}, ["w"])},
    files={"state.json": record_of(b"{}")},
)
TEXT = """\
{
 "augend": "0.1.0",
 "checksum": "CHECKSUM",
 "count": 7,
 "created": "2030-01-02T03:04:05+00:00",
 "epoch": 0,
 "files": {
  "state.json": {
   "bytes": 2,
   "sha256": "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"
  }
 },
 "format": "augend checkpoint",
 "microbatch": 2,
 "parts": {
  "model": {
   "kind": "module",
   "parameters": [
    "w"
   ],
   "tensors": {
    "w": {
     "dtype": "float32",
     "shape": [
      2,
      3
     ]
    }
   }
  }
 },
 "rows_done": 4,
 "step": 3,
 "torch": "2.13.0",
 "updates": 3,
 "version": 1,
 "world": 1
}
"""

whole = st.integers(0, 2**63 - 1)
identifiers = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,6}", fullmatch=True)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
sums = st.binary(max_size=3).map(lambda content: hashlib.sha256(content).hexdigest())
records = st.builds(FileRecord, bytes=whole, sha256=sums)
stems = st.from_regex(r"[A-Za-z0-9_-]{1,6}", fullmatch=True)
paths = st.one_of(st.just("state.json"), st.builds(lambda part, stem: f"{part}/{stem}.safetensors", identifiers, stems))
tensors = st.builds(TensorRecord, dtype=st.sampled_from([*DTYPES]), shape=st.lists(whole, max_size=3))
parts = st.builds(
    PartRecord,
    kind=texts,
    tensors=st.dictionaries(texts, tensors, max_size=3),
    parameters=st.lists(texts, max_size=3),
)
manifests = st.builds(
    Manifest,
    **dict.fromkeys(("epoch", "step", "rows_done", "microbatch", "updates"), whole),
    count=st.one_of(whole, st.floats(0, allow_infinity=False)),
    world=st.integers(1, 2**63 - 1),
    **dict.fromkeys(("created", "augend", "torch"), texts),
    parts=st.dictionaries(identifiers, parts, max_size=3),
    files=st.dictionaries(paths, records, max_size=3),
)


def test_this_is_the_text() -> None:
    """Sorted keys, one space a level, a line end; the checksum is the SHA-256 of the text with an empty one."""
    checksum = hashlib.sha256(TEXT.replace("CHECKSUM", "").encode()).hexdigest()
    assert TEXT.replace("CHECKSUM", checksum) == to_bytes(SMALL).decode()
    assert SMALL == from_bytes(to_bytes(SMALL))
    assert to_bytes(SMALL) == sealed(json.loads(TEXT))


@given(manifests)
def test_every_manifest_comes_back_and_has_one_text(manifest: Manifest) -> None:
    """Written, read, written again: the same bytes, whatever order its dictionaries had."""
    text = to_bytes(manifest)
    back = from_bytes(text)
    assert manifest == back
    assert type(manifest.count) is type(back.count)
    assert text == to_bytes(back)
    turned = dataclasses.replace(
        manifest, parts=dict(reversed(manifest.parts.items())), files=dict(reversed(manifest.files.items()))
    )
    assert text == to_bytes(turned)


@given(st.data())
def test_no_other_text_is_read(data: st.DataObject) -> None:
    """A byte changed, left out, put in or cut off anywhere: CheckpointError."""
    text = to_bytes(SMALL)
    place = data.draw(st.integers(0, len(text) - 1))
    byte = data.draw(st.binary(min_size=1, max_size=1).filter(lambda one: one != text[place : place + 1]))
    for other in (
        text[:place] + byte + text[place + 1 :],
        text[:place] + text[place + 1 :],
        text[:place] + byte + text[place:],
        text[:place],
    ):
        if other != text:
            with pytest.raises(CheckpointError, match=r"manifest\.json"):
                from_bytes(other)


@given(st.binary(max_size=100))
def test_bytes_are_no_manifest(content: bytes) -> None:
    """Whatever they are."""
    with pytest.raises(CheckpointError, match=r"manifest\.json"):
        from_bytes(content)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32", "utf-8-sig"])
def test_another_encoding_is_another_text(encoding: str) -> None:
    """JSON readers that guess an encoding would take it."""
    with pytest.raises(CheckpointError, match=r"manifest\.json"):
        from_bytes(to_bytes(SMALL).decode().encode(encoding))


def test_a_key_of_a_later_augend_is_ignored() -> None:
    """The version tells whether a reader understands; a key more does not make it another version."""
    plain = json.loads(to_bytes(SMALL))
    assert SMALL == from_bytes(sealed({**plain, "zone": "later"}))
    with pytest.raises(ContractError, match="version 2, and this augend reads version 1: .*'0.1.0'"):
        from_bytes(sealed({**plain, "version": 2}))


def test_a_record_is_size_and_sha256() -> None:
    """By the known hash of nothing."""
    nothing = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    assert FileRecord(0, nothing) == record_of(b"")
    assert TensorRecord("bfloat16", [2, 0]) == TensorRecord.of(torch.ones(2, 0, dtype=torch.bfloat16))
    assert TensorRecord("bool", []) == TensorRecord.of(torch.tensor(data=True))
