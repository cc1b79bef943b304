"""Damaged files: each is loaded as what it says, or refused; none crashes or takes more memory than it has bytes."""

from __future__ import annotations

import random
import struct
import tracemalloc
from pathlib import Path

import pytest
import torch
from llamas import CONFIGURATION, bits, llama

from augend.errors import GGUFError
from augend.gguf import Model, load, save
from augend.models import Llama

KINDS = {"width": 32, "layers": 1, "hidden": 32, "vocab_size": 6, "tied": False}
# Numbers that wrap, that are too large to allocate, and that are just off.
NUMBERS = [0, 1, 2, 3, 31, 33, 63, 64, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**62, 2**63 - 1, 2**63, 2**64 - 32]


def damaged(whole: bytes, header: int, seed: int) -> bytes:
    """Return a file with one to three damages, most of them in its header."""
    draw = random.Random(seed)  # noqa: S311  damage, not a secret
    data = bytearray(whole)
    for _ in range(draw.choice([1, 1, 1, 2, 3])):
        place = draw.randrange(min(header, len(data)) or 1)
        match draw.randrange(7):
            case 0:
                data[place : place + 1] = bytes([data[place] ^ 1 << draw.randrange(8)]) if data else b""
            case 1:
                data[place : place + 1] = bytes([draw.randrange(256)])
            case 2:
                width, letter = draw.choice([(4, "I"), (8, "Q")])
                data[place : place + width] = struct.pack(f"<{letter}", draw.choice(NUMBERS) % 256**width)
            case 3:
                del data[draw.randrange(len(data) or 1) :]
            case 4:
                del data[place : place + draw.randrange(1, 64)]
            case 5:
                data[place:place] = draw.randbytes(draw.randrange(1, 64))
            case 6:
                other = draw.randrange(header)
                length = draw.randrange(1, 64)
                data[place : place + length] = data[other : other + length]
    return bytes(data)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Model]]:
    """Make one small model in F32 and one in blocks."""
    folder = tmp_path_factory.mktemp("good")
    configuration = CONFIGURATION | KINDS
    models = {}
    for kind in "f32", "q8_0":
        save(folder / kind, llama(**configuration).state_dict(), configuration=configuration, type=kind)
        models[kind] = load(folder / kind)
    return folder, models


def check(path: Path, original: Model) -> bool:
    """Load a damaged file; tells whether it could be loaded, which it may as what it says and as nothing else."""
    try:
        model = load(path)
    except GGUFError as error:
        if str(path) not in str(error):
            raise
        return False
    with torch.device("meta"):
        asked = Llama(**model.configuration)
    assert {name: tensor.shape for name, tensor in asked.state_dict().items()} == {
        name: tensor.shape for name, tensor in model.state.items()
    }
    same_types = shape_and_types(original) == shape_and_types(model)
    same_heads = all(original.configuration[name] == model.configuration[name] for name in ("heads", "kv_heads"))
    if same_types and same_heads and weights(original.header.path, original) == weights(path, original):
        assert bits(original.state) == bits(model.state)
    return True


def shape_and_types(model: Model) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return what a file says of its tensors, but for their places."""
    return {name: (info.type, info.shape) for name, info in model.header.tensors.items()}


def weights(path: Path, like: Model) -> bytes:
    """Return the end of a file where its tensors are if it is like another."""
    return path.read_bytes()[-weight_bytes(like) :]


def weight_bytes(model: Model) -> int:
    """Return how many bytes the tensors take at the end of a file."""
    return model.header.path.stat().st_size - min(info.offset for info in model.header.tensors.values())


def fuzz(good: tuple[Path, dict[str, Model]], path: Path, seeds: range) -> int:
    """Load damaged files, one for each seed; returns how many could be loaded."""
    folder, models = good
    loaded = 0
    tracemalloc.start()
    try:
        for seed in seeds:
            kind = ("f32", "q8_0")[seed % 2]
            whole = (folder / kind).read_bytes()
            path.write_bytes(damaged(whole, len(whole) - weight_bytes(models[kind]), seed))
            tracemalloc.reset_peak()
            before, _ = tracemalloc.get_traced_memory()
            loaded += check(path, models[kind])
            _, peak = tracemalloc.get_traced_memory()
            assert peak - before < 2**20, seed
    finally:
        tracemalloc.stop()
    return loaded


def test_damaged_files(good: tuple[Path, dict[str, Model]], tmp_path: Path) -> None:
    """Of some hundred damaged files, those that are not refused have the weights of the whole one."""
    assert 0 < fuzz(good, tmp_path / "damaged.gguf", range(400)) < 200


@pytest.mark.long
def test_ten_thousand_damaged_files(good: tuple[Path, dict[str, Model]], tmp_path: Path) -> None:
    """The same for ten thousand others."""
    assert 0 < fuzz(good, tmp_path / "damaged.gguf", range(1000, 11_000)) < 5000


def test_every_length(good: tuple[Path, dict[str, Model]], tmp_path: Path) -> None:
    """A file cut off anywhere in its header, or in its last tensors, is refused, and says where it ends."""
    folder, _ = good
    whole = (folder / "f32").read_bytes()
    path = tmp_path / "cut.gguf"
    for length in (*range(0, 2400, 3), *range(len(whole) - 400, len(whole), 4)):
        path.write_bytes(whole[:length])
        with pytest.raises(GGUFError, match=rf"cut.gguf .*the file ends at byte {length:,}"):
            load(path)
