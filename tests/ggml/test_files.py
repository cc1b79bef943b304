"""GGUF files: byte for byte as ggml's example writes them; what cannot be trusted is refused and changes nothing."""

from __future__ import annotations

import itertools
import os
import stat
import struct
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from by_hand import ARCHITECTURE, BF16, F16, F32, HOSTILE, aligned, one_tensor, pair, tensor_info, text, written
from hypothesis import given
from hypothesis import strategies as st

import gguf
from augend.errors import ContractError, GGUFError
from augend.ggml import Graph, Limits, load, load_into, save
from augend.gguf import _write

FULLY_CONNECTED = {"fc1.weight": (784, 500), "fc1.bias": (500,), "fc2.weight": (500, 10), "fc2.bias": (10,)}
CONVOLUTIONAL = {
    "conv1.kernel": (3, 3, 1, 8),
    "conv1.bias": (1, 1, 8),
    "conv2.kernel": (3, 3, 8, 16),
    "conv2.bias": (1, 1, 16),
    "dense.weight": (784, 10),
    "dense.bias": (10,),
}
SMALL = {"w": (4, 3), "b": (3, 4)}


def graph_of(shapes: dict[str, tuple[int, ...]], seed: int = 0) -> Graph:
    """Return a graph of parameters with random values."""
    graph = Graph()
    generator = torch.Generator().manual_seed(seed)
    for name, shape in shapes.items():
        node = graph.tensor(shape, parameter=True, name=name)
        graph.set_values(node, torch.randn(shape[::-1], generator=generator))
    return graph


def bits(graph: Graph) -> dict[str, bytes]:
    """Return the parameters of a graph as bytes."""
    return {name: tensor.numpy().tobytes() for name, tensor in graph.state_dict().items()}


def by_hand(graph: Graph, **options: object) -> bytes:
    """Return the file of a graph, written by nothing but this test."""
    infos, data, offset = [], [], 0
    alignment = options.get("alignment", 32)
    for name, node in graph.parameters().items():
        values = graph.values(node).numpy().tobytes()
        infos.append(tensor_info(name.encode(), node.shape[: node.rank], F32, offset))
        data.append(values)
        offset += len(aligned(values, alignment))
    return written(infos, data, **options)


# ------------------------------------------------------------------ good files


@given(
    shapes=st.dictionaries(
        st.text(st.characters(exclude_characters=".\0", codec="utf-8"), min_size=1, max_size=15),
        st.lists(st.integers(1, 4), min_size=1, max_size=4).map(tuple),
        min_size=1,
        max_size=4,
    ),
    data=st.data(),
)
def test_what_is_saved_comes_back_to_the_bit(
    shapes: dict[str, tuple[int, ...]], data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Names in any script, every shape of one to four dimensions, and all bit patterns, inf and nan too."""
    path = tmp_path_factory.getbasetemp() / "any.gguf"
    graph, other = graph_of(shapes), graph_of(shapes, seed=1)
    for node in graph.parameters().values():
        size = 4 * graph.values(node).numel()
        values = np.frombuffer(data.draw(st.binary(min_size=size, max_size=size)), np.float32)
        graph.set_values(node, torch.from_numpy(values.copy()))
    save(path, graph, architecture="any")
    load_into(path, other, architecture="any")
    assert bits(graph) == bits(other)
    assert list(shapes) == list(load(path).tensors)


@pytest.mark.parametrize(
    ("architecture", "shapes"), [("mnist-fc", FULLY_CONNECTED), ("mnist-cnn", CONVOLUTIONAL)], ids=["fc", "cnn"]
)
def test_the_files_of_the_mnist_example(architecture: str, shapes: dict[str, tuple[int, ...]], tmp_path: Path) -> None:
    """One key and the example's F32 tensors, in its names and shapes, as the format's own reader sees them."""
    graph = graph_of(shapes)
    save(tmp_path / "mnist.gguf", graph, architecture=architecture)
    reader = gguf.GGUFReader(tmp_path / "mnist.gguf")
    assert architecture == reader.get_field("general.architecture").contents()
    assert ["general.architecture"] == [key for key in reader.fields if not key.startswith("GGUF.")]
    assert shapes == {one.name: tuple(one.shape.tolist()) for one in reader.tensors}
    assert {"F32"} == {one.tensor_type.name for one in reader.tensors}
    assert bits(graph) == {one.name: one.data.tobytes() for one in reader.tensors}
    weights = load(tmp_path / "mnist.gguf")
    assert architecture == weights.architecture
    assert {name: shape[::-1] for name, shape in shapes.items()} == {
        name: tuple(tensor.shape) for name, tensor in weights.tensors.items()
    }


def test_a_file_has_the_bytes_that_the_format_says(tmp_path: Path) -> None:
    """The whole file is what a dozen lines of struct.pack make of the format's description, padding too."""
    graph = graph_of(SMALL | {"odd": (3,)})
    save(tmp_path / "small.gguf", graph, architecture="small")
    assert by_hand(graph) == (tmp_path / "small.gguf").read_bytes()


def test_dimensions_of_one_at_the_end_are_not_written(tmp_path: Path) -> None:
    """ggml counts dimensions up to the last that is not 1; a graph that declares more of them takes the file too."""
    graph = graph_of({"column": (5, 1), "row": (1, 5), "one": (1, 1)})
    save(tmp_path / "ones.gguf", graph, architecture="small")
    assert {"column": [5], "row": [5, 1], "one": [1]} == {
        name: list(tensor.shape) for name, tensor in load(tmp_path / "ones.gguf").tensors.items()
    }
    for shapes in (
        {"column": (5,), "row": (1, 5), "one": (1,)},
        {"column": (5, 1, 1), "row": (1, 5, 1), "one": (1,) * 4},
    ):
        other = graph_of(shapes, seed=1)
        load_into(tmp_path / "ones.gguf", other)
        assert bits(graph) == bits(other)


@pytest.mark.parametrize(
    ("kind", "dtype"), [(F32, torch.float32), (F16, torch.float16), (BF16, torch.bfloat16)], ids=["F32", "F16", "BF16"]
)
def test_narrow_tensors_are_widened_exactly(kind: int, dtype: torch.dtype, tmp_path: Path) -> None:
    """F16 and BF16 come as the float32 numbers that they are."""
    values = torch.tensor([[1 / 3, -0.0, 65504.0], [2.0**-20, torch.inf, -7.0]]).to(dtype)
    raw = values.view(torch.uint8).numpy().tobytes()
    path = tmp_path / "narrow.gguf"
    path.write_bytes(one_tensor(kind, raw, (3, 2)))
    loaded = load(path).tensors["w"]
    assert torch.float32 == loaded.dtype
    assert torch.equal(values.float(), loaded)


@pytest.mark.parametrize("alignment", [1, 8, 64])
def test_the_alignment_is_the_one_that_the_file_says(alignment: int, tmp_path: Path) -> None:
    """Tensors begin at multiples of general.alignment, which may stand before or after other keys."""
    graph, other = graph_of({"a": (3,), "b": (5,)}), graph_of({"a": (3,), "b": (5,)}, seed=1)
    key = pair(b"general.alignment", 4, struct.pack("<I", alignment))
    for pairs in itertools.permutations([ARCHITECTURE, key]):
        (tmp_path / "aligned.gguf").write_bytes(by_hand(graph, pairs=pairs, alignment=alignment))
        load_into(tmp_path / "aligned.gguf", other)
        assert bits(graph) == bits(other)


def test_other_metadata_is_passed_over(tmp_path: Path) -> None:
    """Values of every type, and lists of them, may stand in the file."""
    kinds = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
    pairs = [pair(f"one.{kind}".encode(), kind, struct.pack(f"<{code}", 1)) for kind, code in kinds.items()]
    pairs += [
        pair(f"list.{kind}".encode(), 9, struct.pack(f"<IQ3{code}", kind, 3, 1, 0, 1)) for kind, code in kinds.items()
    ]
    pairs += [
        pair(b"words", 9, struct.pack("<IQ", 8, 2) + text(b"a") + text(b"")),
        pair(b"empty", 9, struct.pack("<IQ", 8, 0)),
        ARCHITECTURE,
    ]
    graph, other = graph_of(SMALL), graph_of(SMALL, seed=1)
    (tmp_path / "more.gguf").write_bytes(by_hand(graph, pairs=tuple(pairs)))
    load_into(tmp_path / "more.gguf", other, architecture="small")
    assert bits(graph) == bits(other)


# ------------------------------------------------------------------ damaged and hostile files


def refused(path: Path, data: bytes, words: str = "") -> None:
    """Assert that a file is refused, by load and by load_into, with its name, and that the graph stays as it was."""
    path.write_bytes(data)
    graph = graph_of(SMALL, seed=1)
    before = bits(graph)
    with pytest.raises(GGUFError, match=f"{path.name}.*{words}"):
        load(path)
    with pytest.raises(GGUFError, match=f"{path.name}.*{words}"):
        load_into(path, graph)
    assert before == bits(graph)


def test_a_file_cut_off_anywhere_is_refused(tmp_path: Path) -> None:
    """Every length short of the last weight is an error that says where the file ends; padding may be missing."""
    graph = graph_of({"w": (4, 3), "b": (3,)})
    whole = by_hand(graph)
    end = len(whole) - len(aligned(b"-" * 12)) + 12
    for length in range(end):
        refused(tmp_path / "cut.gguf", whole[:length], f"the file ends at byte {length}")
    other = graph_of({"w": (4, 3), "b": (3,)}, seed=1)
    for length in range(end, len(whole) + 1):
        (tmp_path / "cut.gguf").write_bytes(whole[:length])
        load_into(tmp_path / "cut.gguf", other)
        assert bits(graph) == bits(other)


def test_no_flipped_bit_of_the_header_gives_wrong_weights(tmp_path: Path) -> None:
    """Whatever bit of the header is wrong, a graph gets exactly the weights that were saved, or none."""
    graph = graph_of(SMALL)
    whole = by_hand(graph)
    path, harmless = tmp_path / "flipped.gguf", []
    header = whole.index(b"b\x02\0\0\0") + 1 + 4 + 16 + 4 + 8  # to the end of the offset of tensor b
    for place, bit in itertools.product(range(header), range(8)):
        flipped = bytearray(whole)
        flipped[place] ^= 1 << bit
        path.write_bytes(flipped)
        other = graph_of(SMALL, seed=1)
        before = bits(other)
        try:
            load_into(path, other, architecture="small")
        except GGUFError:
            assert before == bits(other)
        else:
            harmless.append((place, bit))
            assert bits(graph) == bits(other)
    assert [(4, 0)] == harmless  # version 2 instead of 3, which has the same layout


@given(tail=st.binary(max_size=200), start=st.integers(0, 160))
def test_noise_is_refused(tail: bytes, start: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Any bytes after any part of a good file give an error of augend's, never another, or what load can vouch for."""
    path = tmp_path_factory.getbasetemp() / "noise.gguf"
    path.write_bytes(by_hand(graph_of(SMALL))[:start] + tail)
    try:
        weights = load(path)
    except GGUFError:
        return
    assert all(torch.float32 == tensor.dtype for tensor in weights.tensors.values())


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_refused(name: str, tmp_path: Path) -> None:
    """What a file announces and does not have, or a graph cannot take, is an error before memory is spent."""
    data, words = HOSTILE[name]
    tracemalloc.start()
    try:
        refused(tmp_path / "hostile.gguf", data, words)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4 * 2**20


def test_a_file_that_shrinks_while_it_is_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is missing when it is read is an error too, though the file was long enough when it was measured."""
    path = tmp_path / "shrinking.gguf"
    path.write_bytes(by_hand(graph_of(SMALL))[:20])
    monkeypatch.setattr(os, "fstat", lambda _: os.stat_result([0o100644, 0, 0, 1, 0, 0, 10**6, 0, 0, 0]))
    with pytest.raises(GGUFError, match="could not be read whole at byte 16; the file was cut off meanwhile"):
        load(path)


def test_what_is_no_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing file, a directory and one that cannot be opened are errors that name them."""
    for path in tmp_path / "missing.gguf", tmp_path:
        with pytest.raises(GGUFError, match=f"{path} is no file"):
            load(path)
    path = tmp_path / "locked.gguf"
    path.write_bytes(by_hand(graph_of(SMALL)))

    def denied(self: Path, *_: object) -> None:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "open", denied)
    with pytest.raises(GGUFError, match="locked.gguf cannot be read: .*Permission denied"):
        load(path)


# ------------------------------------------------------------------ files that do not fit


@pytest.mark.parametrize(
    ("shapes", "words"),
    [
        ({"w": (4, 3)}, "tensor 'b' is no parameter of the graph"),
        (SMALL | {"c": (1,)}, "parameter 'c' is missing in the file"),
        ({"w": (4, 3), "B": (3, 4)}, "parameter 'B' is missing in the file; tensor 'b' is no parameter of the graph"),
        ({"w": (4, 3), "b": (4, 3)}, r"tensor 'b' has the shape \[3, 4, 1, 1\], and the parameter \[4, 3, 1, 1\]"),
        ({"w": (4, 3), "b": (12,)}, r"tensor 'b' has the shape \[3, 4, 1, 1\], and the parameter \[12, 1, 1, 1\]"),
    ],
)
def test_a_file_of_another_graph_is_refused(shapes: dict[str, tuple[int, ...]], words: str, tmp_path: Path) -> None:
    """All names and shapes are compared before the first value changes, also where the first tensor would have fit."""
    save(tmp_path / "small.gguf", graph_of(SMALL), architecture="small")
    other = graph_of(shapes, seed=1)
    before = bits(other)
    with pytest.raises(GGUFError, match=f"small.gguf does not fit the graph: .*{words}"):
        load_into(tmp_path / "small.gguf", other)
    assert before == bits(other)


def test_the_architecture_can_be_demanded(tmp_path: Path) -> None:
    """A file that says it is something else is refused, by both names."""
    save(tmp_path / "small.gguf", graph_of(SMALL), architecture="mnist-cnn")
    other = graph_of(SMALL, seed=1)
    before = bits(other)
    with pytest.raises(GGUFError, match="small.gguf is of architecture 'mnist-cnn'; expected 'mnist-fc'"):
        load_into(tmp_path / "small.gguf", other, architecture="mnist-fc")
    assert before == bits(other)


def test_loading_keeps_the_parameters_of_a_module(tmp_path: Path) -> None:
    """A module made of the graph before sees the loaded weights: its parameters are the same objects."""
    graph = Graph()
    x = graph.tensor((4, 2), name="x")
    w = graph.tensor((4, 3), parameter=True, name="w")
    module = graph.module(x, graph.mul_mat(w, x))
    saved = graph_of({"w": (4, 3)}, seed=1)
    save(tmp_path / "w.gguf", saved, architecture="small")
    load_into(tmp_path / "w.gguf", graph)
    assert torch.equal(saved.state_dict()["w"], module.state_dict()["w"])


# ------------------------------------------------------------------ saving


@pytest.mark.parametrize("architecture", ["", "a\0b"])
def test_an_architecture_is_a_word(architecture: str, tmp_path: Path) -> None:
    """An empty architecture, or one with a NUL, which ggml would cut, is refused, and no file is written."""
    with pytest.raises(ContractError, match="architecture must be a word"):
        save(tmp_path / "none.gguf", graph_of(SMALL), architecture=architecture)
    assert [] == list(tmp_path.iterdir())


def test_a_graph_that_no_file_can_hold_is_refused(tmp_path: Path) -> None:
    """A graph without parameters, and a name longer than ggml's 63 bytes, are refused, and no file is written."""
    long = Graph(limits=Limits(name_bytes=100, kept_name_bytes=100))
    long.tensor(1, parameter=True, name="é" * 32)
    for graph, words in ((Graph(), "no parameter"), (long, "more than 63 bytes")):
        with pytest.raises(ContractError, match=words):
            save(tmp_path / "none.gguf", graph, architecture="small")
        with pytest.raises(ContractError, match=words):
            load_into(tmp_path / "none.gguf", graph)
    assert [] == list(tmp_path.iterdir())


@pytest.mark.parametrize("fails", ["open", "write", "fsync", "replace"])
def test_a_failed_save_leaves_what_was_there(fails: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever call fails, the old file is whole and nothing else is left; the error names the file."""
    path = tmp_path / "small.gguf"
    save(path, graph_of(SMALL), architecture="small")
    before = path.read_bytes()

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    owner, name = {
        "open": (os, "open"),
        "write": (_write, "_fill"),
        "fsync": (os, "fsync"),
        "replace": (Path, "replace"),
    }[fails]
    with monkeypatch.context() as patched:
        patched.setattr(owner, name, full)
        with pytest.raises(GGUFError, match="small.gguf cannot be written: .*No space left"):
            save(path, graph_of(SMALL, seed=1), architecture="small")
    assert [path] == list(tmp_path.iterdir())
    assert before == path.read_bytes()


def test_a_file_gets_its_name_when_it_is_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is synced, then renamed, then the directory is synced; only then does save return."""
    path, calls = tmp_path / "small.gguf", []
    fsync, replace = os.fsync, Path.replace

    def noted_fsync(handle: int) -> None:
        calls.append(("fsync", "directory" if stat.S_ISDIR(os.fstat(handle).st_mode) else "file", path.exists()))
        fsync(handle)

    def noted_replace(self: Path, target: Path) -> Path:
        calls.append(("replace", target.name, path.exists()))
        return replace(self, target)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(Path, "replace", noted_replace)
    save(path, graph_of(SMALL), architecture="small")
    assert [("fsync", "file", False), ("replace", "small.gguf", False), ("fsync", "directory", True)] == calls


def test_a_directory_that_is_not_there_is_named(tmp_path: Path) -> None:
    """Nothing is made up: a missing directory is an error."""
    with pytest.raises(GGUFError, match="missing/small.gguf cannot be written: .*No such file"):
        save(tmp_path / "missing" / "small.gguf", graph_of(SMALL), architecture="small")


def test_the_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the package gguf, saving and loading say what to install."""
    (tmp_path / "small.gguf").write_bytes(by_hand(graph_of(SMALL)))
    monkeypatch.setitem(sys.modules, "gguf", None)
    for call in (
        lambda: save(tmp_path / "small.gguf", graph_of(SMALL), architecture="small"),
        lambda: load(tmp_path / "small.gguf"),
        lambda: load_into(tmp_path / "small.gguf", graph_of(SMALL)),
    ):
        with pytest.raises(GGUFError, match=r"not installed: pip install 'augend\[gguf\]'"):
            call()
