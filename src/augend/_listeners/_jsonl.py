"""One JSON object a line: what a run measured, for programs."""

from __future__ import annotations

import json
import math
import resource
import sys
from pathlib import Path
from typing import Any, Final

import torch

from augend import Estimate
from augend._fit import Event, Listener, Step, Validation

_RESIDENT_UNIT_BYTES: Final = 1 if sys.platform == "darwin" else 1024  # what ru_maxrss counts in (getrusage(2))


def json_lines(path: Path) -> Listener:
    """Return a listener that appends to ``path`` one line a step and one a validation, each on disk before the next.

    A step's line has ``step, epoch, loss, loss_error, count, rows, norm, scale, skipped, update, lr, seconds, world,
    restarts, memory_bytes``, and ``losses`` where there are several terms. A validation's line has ``step, epoch,
    seconds`` and ``validation``, an object with ``value, error, count`` for each name. JSON has no nan and no inf:
    both are written as null, which is "undefined", never 0. ``memory_bytes`` is the accelerator's peak where one was
    used, else the peak of the process.

    Args:
        path: The file; its directory must exist.
    """

    def write(event: Event) -> None:
        if isinstance(event, Step):
            line = _of_step(event)
        elif isinstance(event, Validation):
            line = _of_validation(event)
        else:
            return
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, allow_nan=False) + "\n")

    return write


def _of_step(step: Step) -> dict[str, Any]:
    line: dict[str, Any] = {
        "step": step.step,
        "epoch": step.epoch,
        "loss": _number(step.loss.value),
        "loss_error": _number(step.loss.error),
        "count": step.count,
        "rows": step.rows,
        "norm": _number(step.norm),
        "scale": _number(step.scale),
        "skipped": step.skipped,
        "update": step.update,
        "lr": step.lr,
        "seconds": step.seconds,
        "world": 1,
        "restarts": 0,
        "memory_bytes": _peak_memory_bytes(),
    }
    if len(step.losses) > 1:
        line["losses"] = {name: _estimate(estimate) for name, estimate in step.losses.items()}
    return line


def _of_validation(validation: Validation) -> dict[str, Any]:
    return {
        "step": validation.step,
        "epoch": validation.epoch,
        "seconds": validation.seconds,
        "validation": {name: _estimate(estimate) for name, estimate in validation.estimates.items()},
    }


def _estimate(estimate: Estimate) -> dict[str, float | None]:
    return {
        "value": _number(estimate.value),
        "error": _number(estimate.error),
        "count": _number(estimate.count),
    }


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _peak_memory_bytes() -> int:
    accelerator = torch.accelerator.max_memory_allocated() if torch.accelerator.is_available() else 0
    return accelerator or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _RESIDENT_UNIT_BYTES
