"""The example that is ggml's: it reads the same files, prints the same lines and writes the same kind of file."""

from __future__ import annotations

import gzip
import importlib.util
import re
import struct
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from augend.ggml import load

EXAMPLE = Path(__file__).parents[2] / "examples" / "mnist_ggml.py"
LINE = (
    r"(train|val): +\[█{8}\] data=(\d{7})/\2 loss=\d\.\d{5}±\d\.\d{5} acc=\d+\.\d\d±\d+\.\d\d% "
    r"t=00:00:\d\d ETA=00:00:00"
)


@pytest.fixture
def example() -> ModuleType:
    """The example as a module."""
    spec = importlib.util.spec_from_file_location("mnist_ggml_example", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write_images(folder: Path, part: str, rows: int) -> None:
    """Write files as those of Fashion-MNIST, whose images have a bright row for their class, in noise."""
    random = np.random.default_rng(rows)
    classes = random.integers(0, 10, rows, dtype=np.uint8)
    images = random.integers(0, 100, (rows, 28, 28), dtype=np.uint8)
    images[np.arange(rows), 2 * classes] = 255
    heads = {"images-idx3": struct.pack(">4i", 2051, rows, 28, 28), "labels-idx1": struct.pack(">2i", 2049, rows)}
    for kind, data in (("images-idx3", images), ("labels-idx1", classes)):
        (folder / f"{part}-{kind}-ubyte.gz").write_bytes(gzip.compress(heads[kind] + data.tobytes(), 1))


def test_it_learns_from_the_files_and_saves_what_ggml_reads(
    example: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A few updates on images that are easy to tell: nearly all are right, and the file has the example's tensors."""
    write_images(tmp_path, "train", 1100)
    write_images(tmp_path, "t10k", 600)
    accuracy = example.main(tmp_path, 8, tmp_path / "fc.gguf")
    assert 600 == accuracy.count
    assert 0.95 < accuracy.value
    printed = capsys.readouterr()
    assert f"Fashion-MNIST from {tmp_path}" == printed.out.splitlines()[0]
    assert re.fullmatch(
        r"test_loss=\d\.\d{6}\+-\d\.\d{6}\ntest_acc=\d+\.\d\d\+-\d\.\d\d%", printed.out.split("\n", 1)[1].strip()
    )
    lines = [line for line in re.split(r"\s*[\r\n]+", printed.err) if line.startswith(("train", "val"))]
    assert 16 == len(lines)
    assert [] == [line for line in lines if not re.fullmatch(LINE, line.strip())]
    assert printed.err.index("fit: epoch 0001/0008:") < printed.err.index("train: [")
    weights = load(tmp_path / "fc.gguf")
    assert "mnist-fc" == weights.architecture
    assert {"fc1.weight": [500, 784], "fc1.bias": [500], "fc2.weight": [10, 500], "fc2.bias": [10]} == {
        name: list(tensor.shape) for name, tensor in weights.tensors.items()
    }


def test_without_the_files_it_reads_digits_and_says_so(
    example: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """1,437 digits are trained and validated on and 360 tested, though neither number fills its batches."""
    missing = tmp_path / "none"
    assert 360 == example.main(missing, 1, tmp_path / "digits.gguf").count
    printed = capsys.readouterr()
    assert f"scikit-learn's digits, since {missing} is no directory" == printed.out.splitlines()[0]
    assert "data=0000437/0000437" in printed.err
    assert [500, 64] == list(load(tmp_path / "digits.gguf").tensors["fc1.weight"].shape)
