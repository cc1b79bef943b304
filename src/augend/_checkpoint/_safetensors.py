"""The bytes of a safetensors file, piece by piece: the state of a large model is never in memory once more.

``safetensors.torch.save`` makes two further copies of everything, most of the time without letting Python's other
threads run, and puts its metadata in another order each time. The format is a length, a JSON header, and the tensors.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Final

import torch
from torch import Tensor

NAMES: Final = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
OFFSETS: Final = "DCP_SHARDING_INFO"  # torch's key for where in the whole tensors these begin
_SMALL_BYTES: Final = 1 << 16
_PIECE_BYTES: Final = 1 << 20
_ALIGNMENT_BYTES: Final = 8


def pieces(tensors: Mapping[str, Tensor], offsets: Mapping[str, list[int]]) -> Iterator[bytearray | memoryview]:
    """Yield the bytes of a file: small tensors together, large ones as they lie in memory.

    Args:
        tensors: Contiguous, on the CPU.
        offsets: Where each begins in the whole tensor that it is a part of, by name.
    """
    order = sorted(tensors, key=lambda name: (-tensors[name].itemsize, name))  # so every one is aligned
    gathered = bytearray(_header(tensors, order, offsets))
    for name in order:
        data = tensors[name].reshape(-1).view(torch.uint8).numpy().data
        if len(data) < _SMALL_BYTES and len(gathered) < _PIECE_BYTES:
            gathered += data
        else:
            yield gathered
            yield data
            gathered = bytearray()
    yield gathered


def _header(tensors: Mapping[str, Tensor], order: list[str], offsets: Mapping[str, list[int]]) -> bytes:
    places = {name: {"saved_offsets": list(offsets[name])} for name in order}
    entries: dict[str, object] = {
        "__metadata__": {OFFSETS: json.dumps(places), "DCP_VERSION": "1.0", "format": "pt"},
    }
    end = 0
    for name in order:
        tensor = tensors[name]
        begin, end = end, end + tensor.nbytes
        entries[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT_BYTES)
    return len(text).to_bytes(8, "little") + text
