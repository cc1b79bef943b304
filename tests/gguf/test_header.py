"""Headers: all that a file says of itself, and nothing that is not there."""

from __future__ import annotations

import os
import stat
import struct
import sys
import threading
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from by_hand import ARCHITECTURE, F32, HOSTILE, one_tensor, pair, tensor_info, text, written

import gguf
from augend.errors import GGUFError
from augend.gguf import TensorInfo, Value, _header, load, read, read_header


def test_a_header_is_what_the_package_reads(tmp_path: Path) -> None:
    """Keys, types, values, shapes and places are those that the package's own reader finds in its writer's file."""
    path = tmp_path / "mixed.gguf"
    writer = gguf.GGUFWriter(path, "mine")
    writer.add_uint32("a.uint32", 7)
    writer.add_float32("a.float32", 0.1)
    writer.add_string("a.string", "né")
    writer.add_array("a.strings", ["x", "", "é"])
    writer.add_array("a.ints", [3, -1])
    writer.add_bool("a.bool", val=True)
    writer.add_tensor("half", np.ones((3, 5), np.float16))
    writer.add_tensor("blocks", np.zeros((2, 3, 34), np.uint8), raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    reader, header = gguf.GGUFReader(path), read_header(path)
    assert ("mine", 3, 32, path) == (header.architecture, header.version, header.alignment, header.path)
    expected = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    assert expected == {name: value.value for name, value in header.metadata.items()}
    assert ["string", "uint32", "float32", "string", "array[string]", "array[int32]", "bool"] == [
        value.type for value in header.metadata.values()
    ]
    assert {
        one.name: TensorInfo(
            one.name, tuple(one.shape.tolist()[::-1]), one.tensor_type.name, one.data_offset, one.n_bytes
        )
        for one in reader.tensors
    } == header.tensors
    assert 3 * 5 + 2 * 3 * 32 == header.parameters


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_refused(name: str, tmp_path: Path) -> None:
    """What a file announces and does not have is an error that names it, by each reader, before memory is spent."""
    data, words = HOSTILE[name]
    path = tmp_path / "hostile.gguf"
    path.write_bytes(data)
    tracemalloc.start()
    try:
        for reader in read, load:
            with pytest.raises(GGUFError, match=f"hostile.gguf.*{words}|architecture 'small'"):
                reader(path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2**20


def test_more_than_a_header_may_have_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values and bytes of metadata are bounded together, too, and a list of texts while it is read."""
    path = tmp_path / "many.gguf"
    numbers = pair(b"k", 9, struct.pack("<IQ", 0, 9) + bytes(9))
    words = pair(b"w", 9, struct.pack("<IQ", 8, 9) + 9 * text(b"word"))
    path.write_bytes(written([], [], (ARCHITECTURE, numbers, words)))
    assert 3 == len(read_header(path).metadata)
    with monkeypatch.context() as patched:
        patched.setattr(_header, "_VALUES", 18)
        with pytest.raises(GGUFError, match="more than 18 values or .* bytes at key 'w'"):
            read_header(path)
    with monkeypatch.context() as patched:
        patched.setattr(_header, "_METADATA_BYTES", 107)
        with pytest.raises(GGUFError, match="the value of key 'w' has more than 107 bytes"):
            read_header(path)
    with monkeypatch.context() as patched:
        patched.setattr(_header, "_METADATA_BYTES", 60)
        with pytest.raises(GGUFError, match="values or 60 bytes at key 'k'"):
            read_header(path)


def test_padding_after_the_last_tensor_may_be_missing(tmp_path: Path) -> None:
    """Some writers end a file with its last number."""
    path = tmp_path / "short.gguf"
    path.write_bytes(written([tensor_info(b"w", (3,), F32, 0)], [bytes(12)])[:-20])
    assert 3 == read_header(path).parameters
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(GGUFError, match="tensor 'w' needs 12 bytes"):
        read_header(path)


def test_what_is_no_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory and a pipe are named, and not waited for; so is a file that fails while it is read."""
    os.mkfifo(tmp_path / "pipe")
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)
    for name in "pipe", "missing", ".":
        with pytest.raises(GGUFError, match="is no file; expected a GGUF file"):
            read_header(tmp_path / name)
    path = tmp_path / "good.gguf"
    path.write_bytes(one_tensor(F32, bytes(4), (1,)))

    def failing(*_: object) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fstat", failing)
        with pytest.raises(GGUFError, match="good.gguf cannot be read: .*Input/output error"):
            read_header(path)


def test_a_header_needs_no_more_than_the_file(tmp_path: Path) -> None:
    """A list of a million numbers costs its bytes until somebody asks for its value."""
    path = tmp_path / "long.gguf"
    path.write_bytes(written([], [], (ARCHITECTURE, pair(b"k", 9, struct.pack("<IQ", 0, 2**20) + bytes(2**20)))))
    tracemalloc.start()
    header = read_header(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 4 * 2**20
    assert 2**20 == len(header.metadata["k"].value)


def test_values_are_immutable(tmp_path: Path) -> None:
    """A header is what the file said; nobody changes it by mistake."""
    path = tmp_path / "good.gguf"
    path.write_bytes(one_tensor(F32, bytes(4), (1,)))
    header = read_header(path)
    with pytest.raises(TypeError):
        header.metadata["k"] = Value.of("bool", value=True)
    with pytest.raises(TypeError):
        del header.tensors["w"]


def test_the_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the package gguf, what to install is said."""
    path = tmp_path / "good.gguf"
    path.write_bytes(one_tensor(F32, bytes(4), (1,)))
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(GGUFError, match=r"not installed: pip install 'augend\[gguf\]'"):
        read_header(path)


def test_readers_do_not_disturb_each_other(tmp_path: Path) -> None:
    """Threads may read one file at once: nothing is shared."""
    path = tmp_path / "good.gguf"
    path.write_bytes(one_tensor(F32, np.arange(4096, dtype=np.float32).tobytes(), (4096,)))
    found: list[bytes] = []
    threads = [
        threading.Thread(target=lambda: found.extend(read(path)[1]["w"].numpy().tobytes() for _ in range(20)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {path.read_bytes()[-16384:]} == set(found)
    assert 80 == len(found)
