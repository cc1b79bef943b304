"""ggml's own reader and writer of GGUF files, in a process of their own: python gguf_process.py read|write PATH.

``read`` prints as JSON what ggml finds in a file: architecture, and shape, type and bytes of each tensor; null if ggml
refuses it. ``write`` writes the file that standard input describes in the same words.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import sys
from ctypes import POINTER, Structure, c_bool, c_char_p, c_int, c_int64, c_size_t, c_void_p
from pathlib import Path
from typing import Any

F32 = 0
DIMENSIONS = 4
MEMORY_BYTES = 64 << 20


class Reading(Structure):
    """gguf_init_params."""

    _fields_ = (("only_shapes", c_bool), ("context", POINTER(c_void_p)))


class Memory(Structure):
    """ggml_init_params."""

    _fields_ = (("bytes", c_size_t), ("buffer", c_void_p), ("only_shapes", c_bool))


SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "ggml_init": (c_void_p, [Memory]),
    "ggml_new_tensor": (c_void_p, [c_void_p, c_int, c_int, POINTER(c_int64)]),
    "ggml_set_name": (c_void_p, [c_void_p, c_char_p]),
    "ggml_get_tensor": (c_void_p, [c_void_p, c_char_p]),
    "ggml_get_data": (c_void_p, [c_void_p]),
    "ggml_nbytes": (c_size_t, [c_void_p]),
    "gguf_init_empty": (c_void_p, []),
    "gguf_init_from_file": (c_void_p, [c_char_p, Reading]),
    "gguf_find_key": (c_int64, [c_void_p, c_char_p]),
    "gguf_get_val_str": (c_char_p, [c_void_p, c_int64]),
    "gguf_get_n_kv": (c_int64, [c_void_p]),
    "gguf_get_n_tensors": (c_int64, [c_void_p]),
    "gguf_get_tensor_name": (c_char_p, [c_void_p, c_int64]),
    "gguf_get_tensor_ne": (POINTER(c_int64), [c_void_p, c_int64]),
    "gguf_get_tensor_type": (c_int, [c_void_p, c_int64]),
    "gguf_set_val_str": (None, [c_void_p, c_char_p, c_char_p]),
    "gguf_add_tensor": (None, [c_void_p, c_void_p]),
    "gguf_write_to_file": (c_bool, [c_void_p, c_char_p, c_bool]),
}


def library() -> Any:
    """Load ggml and tell ctypes its signatures."""
    folder = Path(importlib.util.find_spec("libggml").submodule_search_locations[0]) / "lib64"
    ggml = ctypes.CDLL(str(folder / "libggml-base.so.0"))
    for name, (result, arguments) in SIGNATURES.items():
        function = getattr(ggml, name)
        function.restype, function.argtypes = result, arguments
    return ggml


def read(path: str) -> dict[str, Any] | None:
    """Return what ggml finds in a file."""
    ggml, context = library(), c_void_p()
    file = ggml.gguf_init_from_file(path.encode(), Reading(only_shapes=False, context=ctypes.pointer(context)))
    if file is None:
        return None
    key = ggml.gguf_find_key(file, b"general.architecture")
    found = {"keys": ggml.gguf_get_n_kv(file), "architecture": ggml.gguf_get_val_str(file, key).decode(), "tensors": {}}
    for place in range(ggml.gguf_get_n_tensors(file)):
        name = ggml.gguf_get_tensor_name(file, place)
        tensor = ggml.ggml_get_tensor(context, name)
        found["tensors"][name.decode()] = {
            "shape": ggml.gguf_get_tensor_ne(file, place)[:DIMENSIONS],
            "type": ggml.gguf_get_tensor_type(file, place),
            "bytes": ctypes.string_at(ggml.ggml_get_data(tensor), ggml.ggml_nbytes(tensor)).hex(),
        }
    return found


def write(path: str, described: dict[str, Any]) -> bool:
    """Let ggml write a file of F32 tensors; tells whether it did."""
    ggml = library()
    context = ggml.ggml_init(Memory(MEMORY_BYTES, None, only_shapes=False))
    file = ggml.gguf_init_empty()
    ggml.gguf_set_val_str(file, b"general.architecture", described["architecture"].encode())
    for name, one in described["tensors"].items():
        shape = (c_int64 * len(one["shape"]))(*one["shape"])
        tensor = ggml.ggml_new_tensor(context, F32, len(shape), shape)
        ggml.ggml_set_name(tensor, name.encode())
        ctypes.memmove(ggml.ggml_get_data(tensor), bytes.fromhex(one["bytes"]), ggml.ggml_nbytes(tensor))
        ggml.gguf_add_tensor(file, tensor)
    return ggml.gguf_write_to_file(file, path.encode(), False)


if __name__ == "__main__":
    command, place = sys.argv[1:]
    print(json.dumps(read(place) if command == "read" else write(place, json.load(sys.stdin))))  # noqa: T201  # for its parent
