"""GGUF files against ggml itself: the same bytes are written, and each reads what the other wrote."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from augend.ggml import Graph, load_into, save

pytestmark = pytest.mark.usefixtures("ggml")  # which skips where there is none
PROCESS = Path(__file__).with_name("gguf_process.py")
NETWORKS = {
    "mnist-fc": {"fc1.weight": (784, 500), "fc1.bias": (500,), "fc2.weight": (500, 10), "fc2.bias": (10,)},
    "mnist-cnn": {
        "conv1.kernel": (3, 3, 1, 8),
        "conv1.bias": (1, 1, 8),
        "conv2.kernel": (3, 3, 8, 16),
        "conv2.bias": (1, 1, 16),
        "dense.weight": (784, 10),
        "dense.bias": (10,),
    },
    "ones": {"column": (5, 1), "row": (1, 5), "one": (1, 1, 1, 1), "naïve": (1, 2, 1, 3)},
}


def graph_of(shapes: dict[str, tuple[int, ...]], seed: int) -> Graph:
    """Return a graph of parameters with random values."""
    graph, generator = Graph(), torch.Generator().manual_seed(seed)
    for name, shape in shapes.items():
        graph.set_values(graph.tensor(shape, parameter=True, name=name), torch.randn(shape[::-1], generator=generator))
    return graph


def described(graph: Graph) -> dict[str, Any]:
    """Return the parameters of a graph as ``gguf_process.py`` describes tensors."""
    values = graph.state_dict()
    return {
        name: {"shape": list(node.shape), "type": 0, "bytes": values[name].numpy().tobytes().hex()}
        for name, node in graph.parameters().items()
    }


def peer(command: str, path: Path, text: str = "") -> Any:
    """Let ggml read or write a file, in a process of its own."""
    done = subprocess.run(
        [sys.executable, str(PROCESS), command, str(path)],
        input=text,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert 0 == done.returncode, done.stderr[-500:]
    return json.loads(done.stdout)


@pytest.mark.parametrize("architecture", NETWORKS)
def test_ggml_reads_what_augend_saves(architecture: str, tmp_path: Path) -> None:
    """One key and all tensors: names, four dimensions, type F32, and every bit of the weights."""
    graph = graph_of(NETWORKS[architecture], seed=0)
    save(tmp_path / "saved.gguf", graph, architecture=architecture)
    expected = {"keys": 1, "architecture": architecture, "tensors": described(graph)}
    assert expected == peer("read", tmp_path / "saved.gguf")


@pytest.mark.parametrize("architecture", NETWORKS)
def test_ggml_writes_the_same_file(architecture: str, tmp_path: Path) -> None:
    """ggml's own writer makes the same file of the same weights, byte for byte, and a graph takes it."""
    graph, other = graph_of(NETWORKS[architecture], seed=0), graph_of(NETWORKS[architecture], seed=1)
    save(tmp_path / "augend.gguf", graph, architecture=architecture)
    what = json.dumps({"architecture": architecture, "tensors": described(graph)})
    assert peer("write", tmp_path / "ggml.gguf", what) is True
    assert (tmp_path / "ggml.gguf").read_bytes() == (tmp_path / "augend.gguf").read_bytes()
    load_into(tmp_path / "ggml.gguf", other, architecture=architecture)
    assert described(graph) == described(other)


def test_ggml_refuses_what_is_cut_off_too(tmp_path: Path) -> None:
    """The reading of a damaged file is ggml's: it returns nothing, and does not abort."""
    save(tmp_path / "saved.gguf", graph_of(NETWORKS["ones"], seed=0), architecture="ones")
    (tmp_path / "cut.gguf").write_bytes((tmp_path / "saved.gguf").read_bytes()[:-100])
    assert peer("read", tmp_path / "cut.gguf") is None
