"""augend: training on PyTorch whose result does not depend on how the work was cut.

The front door. Names are found on first use (PEP 562), so that ``import augend`` and ``augend --help`` do not wait
for torch; ``__init__.pyi`` tells type checkers the same names.
"""

from __future__ import annotations

from importlib import import_module
from typing import Final

__version__ = "0.1.0"

__all__ = [
    "Accumulator",
    "Accuracy",
    "Batches",
    "Checkpoint",
    "Comparison",
    "Estimate",
    "Finished",
    "History",
    "Inspection",
    "Mean",
    "Perplexity",
    "Position",
    "Tally",
    "compare",
    "data",
    "errors",
    "evaluate",
    "fit",
    "ggml",
    "gguf",
    "inspect",
    "losses",
    "metrics",
    "models",
    "optim",
    "schedules",
    "sources",
    "split",
    "testing",
    "verify",
]

# Where each name lives; the names of __all__ that are not here are modules of the package.
_HOMES: Final = {
    "Accumulator": "augend._accumulator",
    "Accuracy": "augend.metrics",
    "Batches": "augend.data",
    "Checkpoint": "augend._checkpoint",
    "Comparison": "augend._checkpoint",
    "Estimate": "augend.metrics",
    "Finished": "augend._finish",
    "History": "augend._fit",
    "Inspection": "augend._checkpoint",
    "Mean": "augend.metrics",
    "Perplexity": "augend.metrics",
    "Position": "augend._checkpoint",
    "Tally": "augend._tally",
    "compare": "augend._checkpoint",
    "evaluate": "augend._fit",
    "fit": "augend._fit",
    "inspect": "augend._checkpoint",
    "split": "augend.data",
    "verify": "augend._checkpoint",
}


def __getattr__(name: str) -> object:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    if name in __all__:
        return import_module(f"augend.{name}")
    raise AttributeError(f"module 'augend' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
