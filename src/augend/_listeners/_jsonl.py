"""One JSON object a line: what a run measured, for programs."""

from __future__ import annotations

import json
import math
import resource
import sys
from pathlib import Path
from typing import Any, Final, final

import torch

from augend import Estimate
from augend._fit import Begin, Event, History, Listener, Step, Validation
from augend._listeners._cut import cut_back

_RESIDENT_UNIT_BYTES: Final = 1 if sys.platform == "darwin" else 1024  # what ru_maxrss counts in (getrusage(2))


def json_lines(path: Path) -> Listener:
    """Return a listener that appends to ``path`` one line a step and one a validation, each there before the next.

    A step's line has ``step, epoch, loss, loss_error, count, rows, norm, scale, skipped, update, offers, lr, seconds,
    world, restarts, memory_bytes``, ``losses`` where there are several terms, and ``digests`` (16 hexadecimal digits
    for each trained parameter, in the model's order) where they were asked for. A validation's line has ``step, epoch,
    seconds`` and ``validation``, an object with ``value, error, count`` for each name. JSON has no nan and no inf:
    both are written as null, which is "undefined", never 0. ``world`` is the number of ranks, and ``memory_bytes`` the
    accelerator's peak where one was used, else the peak of the process; of several ranks, that of the first one.

    Where training goes on from a checkpoint, the file is first cut back to what the checkpoint knows: every step and
    validation of its history has one line, and no other has any. Lines that were lost with the machine are written
    again, with a ``memory_bytes`` of null; lines of steps that are to be done again, and one that was torn, are moved
    to ``metrics.lost-1.jsonl`` (or ``-2``, ...; the name is that of the file). An interruption of this loses no line.

    Args:
        path: The file; its directory must exist.
    """
    return _JsonLines(path)


@final
class _JsonLines:
    """The listener, which knows how often the run was restarted."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._restarts = 0
        self._world = 1

    def __call__(self, event: Event) -> None:
        if isinstance(event, Begin):
            self._restarts, self._world = event.restarts, event.world
            if event.history is not None:
                cut_back(self._path, _lines_of(event.history, event), first_step=_first_step(event))
        elif isinstance(event, Step):
            self._append(_of_step(event, self._restarts, self._world, _peak_memory_bytes()))
        elif isinstance(event, Validation):
            self._append(_of_validation(event))

    def _append(self, line: dict[str, Any]) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, allow_nan=False) + "\n")


def _first_step(begin: Begin) -> int:
    """Return the first step that the history is about; what was before it, in a run without a checkpoint, stays."""
    if begin.history is not None and begin.history.steps:
        return begin.history.steps[0].step
    return 0 if begin.position is None else begin.position.step


def _lines_of(history: History, begin: Begin) -> list[dict[str, Any]]:
    """Return a line for every step and validation, in the order in which they were told."""
    validations = {validation.step: validation for validation in history.validations}
    lines = []
    for step in history.steps:
        lines.append(_of_step(step, begin.restarts, begin.world, None))
        if step.step in validations:
            lines.append(_of_validation(validations[step.step]))
    return lines


def _of_step(step: Step, restarts: int, world: int, memory_bytes: int | None) -> dict[str, Any]:
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
        "offers": step.offers,
        "lr": _number(step.lr),
        "seconds": step.seconds,
        "world": world,
        "restarts": restarts,
        "memory_bytes": memory_bytes,
    }
    if len(step.losses) > 1:
        line["losses"] = {name: _estimate(estimate) for name, estimate in step.losses.items()}
    if step.digests:
        line["digests"] = dict(step.digests)
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
