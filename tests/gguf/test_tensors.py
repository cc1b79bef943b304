"""Tensors of every type: what the package gguf makes of them, to the bit, some rows at a time."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from by_hand import F32, one_tensor

import gguf
from augend.errors import ContractError, GGUFError
from augend.gguf import Value, _tensors, read, write

TYPES = {kind.name: kind for kind in gguf.GGMLQuantizationType}
UNREADABLE = {"I8", "I16", "I32", "I64", "F64", "Q8_1", "Q8_K", "Q1_0"}
ARCHITECTURE = {"general.architecture": Value.of("string", "any")}


def random_bytes(kind: Any, rows: int, blocks: int) -> np.ndarray[Any, Any]:
    """Return rows of a type, of random bits: infinite and nan scales too."""
    size = gguf.GGML_QUANT_SIZES[kind][1]
    return np.random.default_rng(0).integers(0, 256, (rows, blocks * size), dtype=np.uint8)


@pytest.mark.parametrize("at_once", [2**19, 600])
@pytest.mark.parametrize("name", sorted(TYPES.keys() - UNREADABLE))
def test_every_type_is_dequantised(name: str, at_once: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the bits and however many rows are converted at once, numbers are those of the package."""
    monkeypatch.setattr(_tensors, "_AT_ONCE", at_once)
    kind = TYPES[name]
    data = random_bytes(kind, rows=35, blocks=3)
    width = 3 * gguf.GGML_QUANT_SIZES[kind][0]
    path = tmp_path / "any.gguf"
    path.write_bytes(one_tensor(kind.value, data.tobytes(), (width, 7, 5)))
    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(data.copy(), kind)
    header, tensors = read(path)
    assert name == header.tensors["w"].type
    assert (5, 7, width) == tuple(tensors["w"].shape)
    actual = tensors["w"].numpy()
    nan = np.isnan(expected.reshape(actual.shape))
    assert np.array_equal(nan, np.isnan(actual))
    assert np.where(nan, 0, expected.reshape(actual.shape)).tobytes() == np.where(nan, 0, actual).tobytes()


@pytest.mark.parametrize("name", sorted(UNREADABLE))
def test_other_types_are_refused_by_name(name: str, tmp_path: Path) -> None:
    """A type without a conversion is an error that names the tensor, and no tensor is read."""
    kind = TYPES[name]
    path = tmp_path / "any.gguf"
    width = gguf.GGML_QUANT_SIZES[kind][0]
    path.write_bytes(one_tensor(kind.value, random_bytes(kind, 1, 1).tobytes(), (width,)))
    with pytest.raises(GGUFError, match=f"any.gguf: tensor 'w' is of type {name}, which"):
        read(path)


def test_tensors_that_shrink_or_fail_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that is cut off after its header was read, or fails, is an error and no wrong number."""
    path = tmp_path / "any.gguf"
    path.write_bytes(one_tensor(F32, bytes(4000), (1000,)))

    def cut(rows: torch.Tensor, _: int) -> tuple[torch.Tensor, ...]:
        os.truncate(path, 200)
        return (rows,)

    def failing(*_: object) -> None:
        raise OSError(5, "Input/output error")

    for split, words in (failing, "Input/output error"), (cut, "cannot be read whole; the file was cut off meanwhile"):
        with monkeypatch.context() as patched:
            patched.setattr(_tensors.torch, "split", split)
            with pytest.raises(GGUFError, match=f"any.gguf: tensor 'w' .*{words}"):
                read(path)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_tensors_of_any_dtype_are_written_as_float32(dtype: torch.dtype, tmp_path: Path) -> None:
    """A view, in any dtype, is written as the numbers that it shows."""
    values = torch.randn(6, 4).to(dtype).t()
    header = write(tmp_path / "any.gguf", ARCHITECTURE, {"a": values, "b": torch.nn.Parameter(values[1:, ::2])})
    _, tensors = read(tmp_path / "any.gguf")
    assert ["F32", "F32"] == [info.type for info in header.tensors.values()]
    assert torch.equal(values.float(), tensors["a"])
    assert torch.equal(values[1:, ::2].float(), tensors["b"])


@pytest.mark.parametrize(
    ("name", "tensor", "words"),
    [
        ("w" * 64, torch.ones(1), "1 to 63 bytes"),
        ("é" * 32, torch.ones(1), "1 to 63 bytes"),
        ("", torch.ones(1), "1 to 63 bytes"),
        ("a\0b", torch.ones(1), "none 0"),
        ("w", torch.ones(()), r"the shape \[\]; expected 1 to 4"),
        ("w", torch.ones(0, 3), r"the shape \[0, 3\]; expected 1 to 4"),
        ("w", torch.ones(1, 1, 1, 1, 1), "expected 1 to 4"),
        ("w", torch.ones(3, dtype=torch.int32), "w has dtype torch.int32"),
        ("w", torch.ones(3, device="meta"), "w is on the meta device"),
        ("w", torch.ones(3).to_sparse(), "w is a torch.sparse_coo Tensor"),
    ],
)
def test_what_no_file_can_hold_is_refused(name: str, tensor: torch.Tensor, words: str, tmp_path: Path) -> None:
    """Names, shapes and kinds that ggml does not have are errors before a file is made."""
    with pytest.raises(ContractError, match=words):
        write(tmp_path / "any.gguf", ARCHITECTURE, {name: tensor})
    assert [] == list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({}, "must say in general.architecture"),
        ({"general.architecture": Value.of("uint32", 1)}, "must say in general.architecture"),
        ({"general.architecture": Value.of("string", "")}, "must say in general.architecture"),
        (ARCHITECTURE | {"": Value.of("uint32", 1)}, "1 to 65,535 bytes"),
        (ARCHITECTURE | {"k" * 65536: Value.of("uint32", 1)}, "1 to 65,535 bytes"),
        (ARCHITECTURE | {"general.alignment": Value.of("uint64", 32)}, "power of two"),
        (ARCHITECTURE | {"general.alignment": Value.of("uint32", 24)}, "power of two"),
        (ARCHITECTURE | {"general.alignment": Value.of("uint32", 0)}, "power of two"),
    ],
)
def test_metadata_that_no_reader_takes_is_refused(metadata: dict[str, Value], words: str, tmp_path: Path) -> None:
    """What would make a file unreadable is refused when it is written."""
    with pytest.raises(ContractError, match=words):
        write(tmp_path / "any.gguf", metadata, {})
    assert [] == list(tmp_path.iterdir())


@pytest.mark.parametrize("alignment", [1, 8, 256])
def test_alignment_is_kept(alignment: int, tmp_path: Path) -> None:
    """Tensors begin where the metadata's own alignment puts them, and the package's reader finds them there."""
    metadata = ARCHITECTURE | {"general.alignment": Value.of("uint32", alignment)}
    tensors = {"a": torch.randn(3), "b": torch.randn(5, 2), "c": torch.randn(1)}
    header = write(tmp_path / "any.gguf", metadata, tensors)
    assert all(info.offset % alignment == 0 for info in header.tensors.values())
    reader = gguf.GGUFReader(tmp_path / "any.gguf")
    assert {one.name: one.data.tobytes() for one in reader.tensors} == {
        name: tensor.numpy().tobytes() for name, tensor in tensors.items()
    }
    assert math.prod([5, 2]) == reader.tensors[1].n_elements
