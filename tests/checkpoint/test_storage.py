"""Tensors go to safetensors files and back, every bit, through our file system alone."""

from __future__ import annotations

import json
import math
import tempfile
from pathlib import Path

import pytest
import torch
from disk import Counting, Faulty, Short, Unsynced, open_handles
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

import reference
from augend._checkpoint._chunks import chunk_of
from augend._checkpoint._files import Files, LocalFiles
from augend._checkpoint._manifest import FileRecord, record_of
from augend._checkpoint._storage import read_part, shard_name, write_part
from augend._checkpoint._tree import DTYPES

FEW = [torch.float32, torch.bfloat16, torch.int64, torch.bool]
FILE = shard_name(0)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Draw contiguous tensors of every dtype, with any bits, of 0 to 3 dims."""
    dtype = draw(st.sampled_from([*DTYPES.values()]))
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    size = math.prod(shape) * dtype.itemsize
    content = draw(st.binary(min_size=size, max_size=size))
    if dtype == torch.bool:
        content = bytes(byte % 2 for byte in content)
    tensor = torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(content), dtype=dtype).reshape(shape) if content else tensor


names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8).filter("__metadata__".__ne__)


def write(files: Files, directory: Path, tensors: dict[str, torch.Tensor]) -> dict[str, FileRecord]:
    """Write whole tensors into a new directory, as one process alone does."""
    files.make_directory(directory)
    return {FILE: write_part(files, directory / FILE, {name: chunk_of(one) for name, one in tensors.items()})}


def zeros(parts: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return tensors like them with nothing in them."""
    return {name: torch.zeros_like(tensor) for name, tensor in parts.items()}


@given(st.dictionaries(names, tensors(), min_size=1, max_size=5))
def test_every_tensor_comes_back_to_the_bit(parts: dict[str, torch.Tensor]) -> None:
    """Any dtype, shape and name: the planner and reader of torch give it back, and so does safetensors alone."""
    with tempfile.TemporaryDirectory() as place:
        directory = Path(place) / "part"
        records = write(Unsynced(), directory, parts)
        assert [FILE] == [path.name for path in directory.iterdir()]
        assert {FILE: record_of((directory / FILE).read_bytes())} == records
        back = zeros(parts)
        read_part(directory, back)
        assert reference.digest(parts) == reference.digest(back)
        alone = load_file(directory / FILE)
        assert reference.digest(parts) == reference.digest({name: alone[name] for name in parts})


def test_some_tensors_can_be_read_without_the_others(tmp_path: Path) -> None:
    """Only what is asked for is read."""
    parts = {"a": torch.arange(3.0), "b": torch.arange(4)}
    write(LocalFiles(), tmp_path / "part", parts)
    back = {"b": torch.zeros(4, dtype=torch.int64)}
    read_part(tmp_path / "part", back)
    assert torch.equal(parts["b"], back["b"])


def test_a_disk_that_takes_little_at_once_gets_all(tmp_path: Path) -> None:
    """Size and hash are of what lies there, and the tensors are whole."""
    parts = {"a": torch.arange(300.0), "b": torch.arange(4)}
    records = write(Short(7), tmp_path / "part", parts)
    assert {FILE: record_of((tmp_path / "part" / FILE).read_bytes())} == records
    back = zeros(parts)
    read_part(tmp_path / "part", back)
    assert reference.digest(parts) == reference.digest(back)


def test_everything_goes_through_the_given_file_system(tmp_path: Path) -> None:
    """One directory, one file, synced once, closed once: torch writes nothing by itself."""
    files = Counting()
    write(files, tmp_path / "part", {"a": torch.ones(2)})
    expected = {"make_directory": 1, "create": 1, "fsync": 1, "close": 1}
    assert expected == {kind: count for kind, count in files.calls.items() if kind != "write"}
    assert files.calls["write"] >= 1


def test_nothing_is_written_over(tmp_path: Path) -> None:
    """The file must be new."""
    (tmp_path / FILE).touch()
    with pytest.raises(FileExistsError):
        write_part(LocalFiles(), tmp_path / FILE, {"a": chunk_of(torch.ones(2))})


@pytest.mark.parametrize("kind", ["make_directory", "create", "write", "fsync", "close"])
def test_a_fault_is_an_oserror_and_leaves_no_handle(tmp_path: Path, kind: str) -> None:
    """Whatever call fails, and whatever torch makes of it on the way."""
    handles = open_handles()
    with pytest.raises(OSError, match="No space left"):
        write(Faulty(kind, 0), tmp_path / "part", {"a": torch.ones(2)})
    assert handles == open_handles()


def test_equal_tensors_are_equal_bytes(tmp_path: Path) -> None:
    """Whatever the order in which they come: the file, and so its hash, is a function of the tensors alone."""
    tensors = {name: torch.ones(3, dtype=dtype) for name, dtype in zip("abcd", FEW, strict=True)}
    first = write(LocalFiles(), tmp_path / "one", tensors)
    second = write(LocalFiles(), tmp_path / "two", dict(reversed(tensors.items())))
    assert first == second
    assert (tmp_path / "one" / FILE).read_bytes() == (tmp_path / "two" / FILE).read_bytes()


@given(st.lists(st.sampled_from([0, 1, 3, 1000, 150_000, 300_000, 900_000]), min_size=1, max_size=7), st.randoms())
@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_pieces_are_the_file_that_safetensors_reads(tmp_path_factory, sizes: list[int], random) -> None:
    """Small tensors gathered, large ones as they lie: safetensors reads them back, aligned, in few large writes."""
    tensors = {str(index): torch.arange(size).to(random.choice(FEW)) for index, size in enumerate(sizes)}
    directory = tmp_path_factory.mktemp("pieces") / "part"
    files = Counting()
    (record,) = write(files, directory, tensors).values()
    read = load_file(directory / FILE)
    assert tensors.keys() == read.keys()
    assert all(tensors[name].dtype == read[name].dtype and torch.equal(tensors[name], read[name]) for name in read)
    assert (directory / FILE).stat().st_size == record.bytes
    content = (directory / FILE).read_bytes()
    begin = 8 + int.from_bytes(content[:8], "little")
    for name, entry in json.loads(content[8:begin]).items():
        if name != "__metadata__":
            assert 0 == (begin + entry["data_offsets"][0]) % tensors[name].itemsize
    assert files.calls["write"] <= 2 + 2 * record.bytes // 2**16
