"""ggml's MNIST example: 784-500-10 with ReLU, cross entropy and AdamW, printed and saved as ggml does.

python examples/mnist_ggml.py [DIRECTORY] [--epochs 30] [--save mnist-fc-f32.gguf]

DIRECTORY has the files of Fashion-MNIST (Debian: dataset-fashion-mnist); without it, digits of scikit-learn are read.
"""

from __future__ import annotations

import argparse
import gzip
import sys
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import Tensor

from augend import Estimate
from augend.ggml import Dataset, Fit, Graph, Loss, Node, Optimizer, Result, Training, epoch, fit, save

DEBIAN = Path("/usr/share/datasets/fashion-mnist")
CLASSES, HIDDEN, PHYSICAL, LOGICAL, SHARD = 10, 500, 500, 1000, 10


def images_and_classes(path: Path, part: str) -> tuple[Tensor, Tensor]:
    """Read images ``[rows, 784]``, each pixel from 0 to 1, and classes ``[rows]``."""
    pixels, classes = (
        torch.frombuffer(bytearray(gzip.decompress((path / f"{part}-{kind}-ubyte.gz").read_bytes())), dtype=torch.uint8)
        for kind in ("images-idx3", "labels-idx1")
    )
    return pixels[16:].reshape(-1, 28 * 28) / 255, classes[8:]


def datasets(path: Path) -> list[Dataset]:
    """Return what is trained on and what is tested on, and say which data it is."""
    if path.is_dir():
        print(f"Fashion-MNIST from {path}")
        parts = [images_and_classes(path, part) for part in ("train", "t10k")]
    else:
        print(f"scikit-learn's digits, since {path} is no directory")
        pixels, classes = map(torch.tensor, load_digits(return_X_y=True))
        parts = [(pixels[:1437] / 16, classes[:1437]), (pixels[1437:] / 16, classes[1437:])]
    return [Dataset(x, torch.nn.functional.one_hot(y.long(), CLASSES), shard=SHARD) for x, y in parts]


def layer(graph: Graph, x: Node, size: int, name: str) -> Node:
    """Add a matrix and a bias, all drawn as in ggml's example."""
    weight = graph.tensor((x.shape[0], size), parameter=True, name=f"{name}.weight")
    bias = graph.tensor(size, parameter=True, name=f"{name}.bias")
    for node in (weight, bias):
        graph.set_values(node, 0.01 * torch.randn(node.torch_shape))
    return graph.add(graph.mul_mat(weight, x), bias)


def main(path: Path, epochs: int, file: Path) -> Estimate:
    """Train, save, and return the accuracy on images that were never seen."""
    torch.manual_seed(0)
    train, test = datasets(path)
    graph = Graph()
    images = graph.tensor((train.width, PHYSICAL), name="images")
    logits = layer(graph, graph.relu(layer(graph, images, HIDDEN, "fc1")), CLASSES, "fc2")
    training = Training(inputs=images, outputs=logits, loss=Loss.CROSS_ENTROPY)
    fit(graph, training, train, Fit(epochs=epochs, logical_batch=LOGICAL, validation_split=0.05), progress=sys.stderr)
    save(file, graph, architecture="mnist-fc")
    result = Result()
    epoch(Optimizer(graph, training), test, split=0, evaluate=result)
    loss, accuracy = result.loss(), result.accuracy()
    print(f"test_loss={loss.value:.6f}+-{loss.error:.6f}")
    print(f"test_acc={100 * accuracy.value:.2f}+-{100 * accuracy.error:.2f}%")
    return accuracy


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", nargs="?", type=Path, default=DEBIAN)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--save", type=Path, default=Path("mnist-fc-f32.gguf"))
    arguments = parser.parse_args()
    main(arguments.directory, arguments.epochs, arguments.save)
