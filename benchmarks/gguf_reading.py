"""How long does it take to read a language model from a GGUF file: augend.gguf.load against transformers?

python benchmarks/gguf_reading.py [FILE] [--rounds 3]

FILE is a Llama in GGUF; by default SmolLM2 where the long tests have put it. Both read it by turns in one process,
after their imports, on one thread; of transformers only what from_pretrained does for the configuration and for the
tensors is timed. Prints one line of JSON: medians, their ratio, and whether the weights are the same bits.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

import augend
from augend.gguf import load

SMOLLM2 = Path(__file__).parent.parent / ".venv" / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"


def by_transformers(path: Path) -> dict[str, Tensor]:
    """Return the tensors as transformers reads them."""
    config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    tensors: dict[str, Tensor] = load_gguf_checkpoint(path, return_tensors=True, model_to_load=model)["tensors"]
    return tensors


def by_augend(path: Path) -> dict[str, Tensor]:
    """Return the tensors as augend reads them."""
    return load(path).state


def timed(read: Callable[[Path], dict[str, Tensor]], path: Path) -> tuple[float, dict[str, Tensor]]:
    """Read once; return the seconds and what was read."""
    start = time.perf_counter()
    tensors = read(path)
    return time.perf_counter() - start, tensors


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", nargs="?", type=Path, default=SMOLLM2)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    result: dict[str, object] = {"question": "reading a GGUF file, augend.gguf.load against transformers"}
    if not arguments.file.is_file():
        print(json.dumps({**result, "not_measured": f"{arguments.file.name} is not there; name a file"}))
        return
    warnings.simplefilter("ignore")  # transformers' own
    torch.set_num_threads(1)
    ours, theirs, same = [], [], True
    for _ in range(arguments.rounds):
        seconds, mine = timed(by_augend, arguments.file)
        ours.append(seconds)
        seconds, other = timed(by_transformers, arguments.file)
        theirs.append(seconds)
        same = same and all(torch.equal(other[name], tensor) for name, tensor in mine.items())
    result |= {
        "file": arguments.file.name,
        "augend_seconds": round(statistics.median(ours), 2),
        "transformers_seconds": round(statistics.median(theirs), 2),
        "ratio": round(statistics.median(one / other for one, other in zip(ours, theirs, strict=True)), 3),
        "same_bits": same,
        "rounds": arguments.rounds,
        "augend": augend.__version__,
        "transformers": importlib.metadata.version("transformers"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}",
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
