"""The format of GGUF files, written by hand, and files that no reader may trust."""

from __future__ import annotations

import struct

F32, F16, BF16 = 0, 1, 30


def text(value: bytes) -> bytes:
    """Return a string as GGUF has it: its length before it."""
    return struct.pack("<Q", len(value)) + value


def pair(key: bytes, kind: int, value: bytes) -> bytes:
    """Return a key, the type of its value, and its value."""
    return text(key) + struct.pack("<I", kind) + value


ARCHITECTURE = pair(b"general.architecture", 8, text(b"small"))


def tensor_info(name: bytes, shape: tuple[int, ...], kind: int, offset: int) -> bytes:
    """Return what is said of a tensor."""
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def aligned(data: bytes, alignment: int = 32) -> bytes:
    """Return data with zeros after it, up to a multiple of the alignment."""
    return data + bytes(-len(data) % alignment)


def written(  # the parts of a file, one by one
    infos: list[bytes], data: list[bytes], pairs: tuple[bytes, ...] = (ARCHITECTURE,), alignment: int = 32
) -> bytes:
    """Return a file of these parts."""
    header = b"GGUF" + struct.pack("<IQQ", 3, len(infos), len(pairs)) + b"".join(pairs) + b"".join(infos)
    return aligned(header, alignment) + b"".join(aligned(one, alignment) for one in data)


def one_tensor(kind: int, values: bytes, shape: tuple[int, ...], pairs: tuple[bytes, ...] = (ARCHITECTURE,)) -> bytes:
    """Return a file of one tensor."""
    return written([tensor_info(b"w", shape, kind, 0)], [values], pairs)


HUGE = struct.pack("<Q", 2**63 - 1)
COUNTS = b"GGUF" + struct.pack("<I", 3)
HOSTILE = {
    "nothing": (b"", "the file ends at byte 0"),
    "magic": (b"GGML" + bytes(60), "begins with b'GGML'"),
    "version 1": (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1 in this machine's byte order"),
    "big endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "version 50331648 in this machine's byte order"),
    "tensors": (COUNTS + HUGE + struct.pack("<Q", 0), "at most 1,048,576 are read"),
    "keys": (COUNTS + struct.pack("<Q", 0) + HUGE, "the file ends"),
    "long key": (COUNTS + struct.pack("<QQ", 0, 1) + HUGE, "at most 65,535 are a name"),
    "long text": (written([], [], (pair(b"k", 8, HUGE),)), "the file ends"),
    "long list": (written([], [], (pair(b"k", 9, struct.pack("<I", 0) + HUGE),)), "at most 8,388,608 are read"),
    "long words": (written([], [], (pair(b"k", 9, struct.pack("<IQ", 8, 2**23)),)), "needs 67,108,864 bytes"),
    "many values": (
        written([], [], (pair(b"k", 9, struct.pack("<IQ", 0, 2**23 + 1)),)),
        "8,388,609 elements; at most 8,388,608 are read",
    ),
    "lists of lists": (written([], [], (pair(b"k", 9, struct.pack("<IQ", 9, 1)),)), "a list of lists"),
    "unknown value": (written([], [], (pair(b"k", 13, bytes(8)),)), "type 13, which does not exist"),
    "alignment 0": (written([], [], (pair(b"general.alignment", 4, bytes(4)),)), "must be a power of two"),
    "alignment 3": (written([], [], (pair(b"general.alignment", 4, b"\3\0\0\0"),)), "must be a power of two"),
    "alignment of 8 bytes": (
        written([], [], (pair(b"general.alignment", 10, b"\x20" + bytes(7)),)),
        "is of type uint64",
    ),
    "alignment 2^31": (
        one_tensor(F32, bytes(4), (1,), (ARCHITECTURE, pair(b"general.alignment", 4, struct.pack("<I", 2**31)))),
        "the file ends",
    ),
    "long name": (written([tensor_info(b"w" * 64, (1,), F32, 0)], [bytes(4)]), "has 64 bytes; at most 63"),
    "rank 5": (written([tensor_info(b"w", (1,) * 5, F32, 0)], [bytes(4)]), "5 dimensions; 1 to 4"),
    "rank 0": (written([tensor_info(b"w", (), F32, 0)], [bytes(4)]), "0 dimensions; 1 to 4"),
    "rank 2^32": (written([text(b"w") + b"\xff" * 4], []), "4,294,967,295 dimensions"),
    "size 0": (one_tensor(F32, b"", (4, 0)), r"the shape \[4, 0\]"),
    "size 2^64": (one_tensor(F32, bytes(4), (2**32, 2**32)), "needs 73,786,976,294,838,206,464 bytes"),
    "size 2^124": (one_tensor(F32, bytes(4), (2**31,) * 4), "needs"),
    "no whole block": (one_tensor(2, bytes(18), (33,)), "rows of 33; Q4_0 has blocks of 32"),
    "whole numbers": (one_tensor(26, bytes(4), (1,)), "type I32, which"),
    "unknown type": (one_tensor(10**6, bytes(4), (1,)), "type 1000000, which"),
    "outside": (written([tensor_info(b"w", (1,), F32, 2**20)], [bytes(4)]), "at byte 1,048,576 of the data"),
    "before": (written([tensor_info(b"w", (1,), F32, 2**64 - 32)], [bytes(4)]), "its place is byte 0"),
    "gap": (
        written([tensor_info(b"w", (1,), F32, 0), tensor_info(b"b", (1,), F32, 64)], [bytes(4), b"", bytes(64)]),
        "tensor 'b' is said to be at byte 64 of the data; its place is byte 32",
    ),
    "over each other": (
        written([tensor_info(b"w", (1,), F32, 0), tensor_info(b"b", (1,), F32, 0)], [bytes(4), bytes(4)]),
        "tensor 'b' is said to be at byte 0 of the data; its place is byte 32",
    ),
    "more": (one_tensor(F32, bytes(4), (1,)) + b"more", "4 bytes follow where its tensors end"),
    "a byte lost in the padding": (
        one_tensor(F32, b"\1" * 4, (1,)).replace(bytes(8) + b"\1\1\1\1", bytes(7) + b"\1\1\1\1"),
        "the padding before tensor 'w' is not zeros",
    ),
    "padding between tensors": (
        written(
            [tensor_info(b"w", (1,), F32, 0), tensor_info(b"b", (1,), F32, 32)],
            [bytes(4) + b"\1" + bytes(27), bytes(4)],
        ),
        "the padding before tensor 'b' is not zeros",
    ),
    "padding at the end": (one_tensor(F32, bytes(31) + b"\1", (1,)), "the padding at the end is not zeros"),
    "tensor twice": (
        written([tensor_info(b"w", (1,), F32, 0), tensor_info(b"w", (1,), F32, 32)], [bytes(4), bytes(4)]),
        "'w' is there twice",
    ),
    "key twice": (written([], [], (ARCHITECTURE, ARCHITECTURE)), "'general.architecture' is there twice"),
    "name no UTF-8": (written([tensor_info(b"\xff", (1,), F32, 0)], [bytes(4)]), "is no UTF-8"),
    "key no UTF-8": (written([], [], (pair(b"\xff", 4, bytes(4)),)), "is no UTF-8"),
    "architecture no UTF-8": (written([], [], (pair(b"general.architecture", 8, text(b"\xff")),)), "is no UTF-8"),
    "a word no UTF-8": (
        written([], [], (pair(b"k", 9, struct.pack("<IQ", 8, 1) + text(b"\xff")), ARCHITECTURE)),
        "key 'k'.*is no UTF-8",
    ),
    "no architecture": (written([], [], ()), "does not say in general.architecture"),
    "architecture 5": (written([], [], (pair(b"general.architecture", 4, b"\5\0\0\0"),)), "does not say"),
    "architectures": (
        written([], [], (pair(b"general.architecture", 9, struct.pack("<IQ", 8, 1) + text(b"a")),)),
        "does not say",
    ),
}
