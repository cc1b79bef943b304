"""What does an accurate norm cost against torch's, and how much more accurate is it?

Prints one line of JSON: milliseconds and relative errors on ten million float32 elements, each 0.7, in forty tensors.
The exact norm of equal elements is known: |x|·√n.
"""

from __future__ import annotations

import json
import math
import platform
import statistics
import time
from collections.abc import Callable

import torch

import augend
from augend._numerics import norm

TENSORS = 40
ELEMENTS = 250_000
ROUNDS = 9


def milliseconds(call: Callable[[], object]) -> float:
    """Return the median time of a call."""
    times = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return round(1000 * statistics.median(times), 3)


def main() -> None:
    """Measure and print."""
    gradients = [torch.full((ELEMENTS,), 0.7) for _ in range(TENSORS)]
    exact = float(gradients[0][0]) * math.sqrt(TENSORS * ELEMENTS)
    theirs = float(torch.nn.utils.get_total_norm(gradients))
    result = {
        "question": "accurate norm against torch.nn.utils.get_total_norm",
        "elements": TENSORS * ELEMENTS,
        "augend_ms": milliseconds(lambda: norm(gradients)),
        "torch_ms": milliseconds(lambda: torch.nn.utils.get_total_norm(gradients)),
        "augend_relative_error": abs(norm(gradients) - exact) / exact,
        "torch_relative_error": abs(theirs - exact) / exact,
        "threads": torch.get_num_threads(),
        "augend": augend.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}",
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
