"""Tensors from and to the bytes that a GGUF file has of them, some rows at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, BinaryIO, Final

import numpy as np
import torch
from torch import Tensor

from augend.errors import GGUFError
from augend.gguf._header import Header, TensorInfo
from augend.gguf._package import package

# How many numbers are converted at once: what a conversion needs beside the tensor stays at a few megabytes.
_AT_ONCE: Final = 2**19
_DTYPES: Final = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def check_types(header: Header) -> None:
    """Check that every tensor of a file is of a type that can be converted, before memory is spent on any.

    Raises:
        GGUFError: One is not; names it.
    """
    known: set[str] = set()
    for info in header.tensors.values():
        if info.type in known or info.type in _DTYPES:
            continue
        gguf = package()
        kind = gguf.GGMLQuantizationType[info.type]
        block = np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8)
        try:
            _dequantised(gguf, block, info.type)
        except NotImplementedError as error:
            raise GGUFError(
                f"{header.path}: tensor {info.name!r} is of type {info.type}, which the package gguf cannot convert "
                "to float32"
            ) from error
        known.add(info.type)


def read_tensor(file: BinaryIO, header: Header, info: TensorInfo) -> Tensor:
    """Read a tensor of a file whose header and types were checked, in float32.

    Raises:
        GGUFError: It cannot be read.
    """
    tensor = torch.empty(info.shape, dtype=torch.float32)
    rows = tensor.view(-1, info.shape[-1])
    row_bytes = info.bytes // rows.shape[0]
    try:
        file.seek(info.offset)
        for part in torch.split(rows, _rows_at_once(info.shape[-1])):
            data = np.empty((part.shape[0], row_bytes), np.uint8)
            if file.readinto(data.data) != data.nbytes:  # type: ignore[attr-defined]  # of every binary file
                raise GGUFError(
                    f"{header.path}: tensor {info.name!r} cannot be read whole; the file was cut off meanwhile"
                )
            part.copy_(_widened(data, info.type))
    except OSError as error:
        raise GGUFError(f"{header.path}: tensor {info.name!r} cannot be read: {error}") from error
    return tensor


def bytes_of(shape: tuple[int, ...], type: str) -> int:  # noqa: A002  as TensorInfo calls it
    """Return how many bytes a tensor takes in a file."""
    gguf = package()
    elements, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[type]]
    return int(math.prod(shape) // elements * size)


def block_of(type: str) -> int:  # noqa: A002  as TensorInfo calls it
    """Return how many elements of a row are stored together."""
    gguf = package()
    return int(gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[type]][0])


def encoded(tensor: Tensor, type: str) -> Iterator[memoryview]:  # noqa: A002  as TensorInfo calls it
    """Give the bytes of a tensor, some rows at a time.

    Args:
        tensor: Of any shape and floating dtype, on any device.
        type: As ggml calls it.
    """
    rows = tensor.detach().reshape(-1, tensor.shape[-1])
    for part in torch.split(rows, _rows_at_once(tensor.shape[-1])):
        yield _narrowed(part.to("cpu", torch.float32).contiguous(), type).data


def _rows_at_once(width: int) -> int:
    return max(1, _AT_ONCE // width)


def _widened(data: np.ndarray[Any, np.dtype[np.uint8]], type: str) -> Tensor:  # noqa: A002  as TensorInfo calls it
    """Return rows of bytes as numbers; of float32, float16 and bfloat16 those that they are."""
    if type in _DTYPES:
        return torch.from_numpy(data).view(_DTYPES[type])
    return torch.from_numpy(_dequantised(package(), data, type))


def _dequantised(gguf: Any, data: np.ndarray[Any, Any], type: str) -> np.ndarray[Any, Any]:  # noqa: A002  as ggml calls it
    with np.errstate(all="ignore"):  # a scale may be inf or nan; so is then what it scales
        values: np.ndarray[Any, Any] = gguf.quants.dequantize(data, gguf.GGMLQuantizationType[type])
    return values


def _narrowed(part: Tensor, type: str) -> np.ndarray[Any, np.dtype[np.uint8]]:  # noqa: A002  as ggml calls it
    """Return rows of float32 as bytes."""
    if type in _DTYPES:
        return part.to(_DTYPES[type]).view(torch.uint8).numpy()
    gguf = package()
    with np.errstate(all="ignore"):  # a block of zeros divides by zero, and is zeros
        values: np.ndarray[Any, np.dtype[np.uint8]] = gguf.quants.quantize(
            part.numpy(), gguf.GGMLQuantizationType[type]
        )
    return values
