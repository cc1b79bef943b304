"""What fit has told so far, in this process and in those that it goes on from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Final, final

import numpy as np
import torch
from torch import Tensor

from augend._fit._history import End, Event, History, Listener, Step, Validation
from augend._fit._records import line_of, plain_of, step_of, validation_of
from augend.errors import StateError
from augend.metrics import Ranks

_VERSION: Final = 1
_KEYS: Final = ("steps", "validations", "version")


@final
class Told:
    """Hands each event on to every listener, and keeps steps and validations, ready to be saved.

    A step is encoded once, when it is told, so that a save in a long run costs one copy of bytes.

    Args:
        listeners: Who is told, by the first rank.
        ranks: Who trains together.
    """

    def __init__(self, listeners: Iterable[Listener], ranks: Ranks) -> None:
        self.ranks = ranks
        self.steps: list[Step] = []
        self.validations: list[Validation] = []
        self._lines = bytearray()
        self._plain: list[dict[str, object]] = []
        self._listeners = tuple(listeners) if ranks.rank == 0 else ()

    def __call__(self, event: Event) -> None:
        if isinstance(event, Step):
            self.steps.append(event)
            self._lines += line_of(event)
        elif isinstance(event, Validation):
            self.validations.append(event)
            self._plain.append(plain_of(event))
        for listener in self._listeners:
            listener(event)

    def history(self, stopped: str) -> History:
        """Return all of it."""
        return History(steps=tuple(self.steps), validations=tuple(self.validations), stopped=stopped)

    def end(self, stopped: str) -> History:
        """Tell that training is over, and return all of it."""
        history = self.history(stopped)
        self(End(history=history))
        return history

    def state_dict(self) -> dict[str, object]:
        """Return a copy: ``"steps"``, a line of JSON each, as uint8 ``[bytes]``; ``"validations"``, plain values."""
        steps = torch.from_numpy(np.frombuffer(self._lines, dtype=np.uint8).copy())  # [bytes]
        return {"version": _VERSION, "steps": steps, "validations": list(self._plain)}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Replace all of it by a saved state; listeners hear nothing of it.

        Raises:
            StateError: As ``prepare_load``.
        """
        self.prepare_load(state)()

    def prepare_load(self, state: Mapping[str, object]) -> Callable[[], None]:
        """Check every field of a saved state, and return what swaps it in; until then nothing is changed.

        Raises:
            StateError: A field is missing, unknown, of another type or out of its domain or order; names line and
                field.
        """
        lines, plain = _checked(state)
        steps = [step_of(line, number) for number, line in enumerate(lines.splitlines(), start=1)]
        validations = [validation_of(one, number) for number, one in enumerate(plain, start=1)]
        _check_order(steps, validations)

        def swap() -> None:
            self.steps, self.validations = steps, validations
            self._lines = bytearray(lines)
            self._plain = [plain_of(validation) for validation in validations]

        return swap


def _checked(state: object) -> tuple[bytes, Sequence[object]]:
    if not isinstance(state, Mapping) or sorted(state) != list(_KEYS):
        got = sorted(map(str, state)) if isinstance(state, Mapping) else type(state).__name__
        raise StateError(f"the state of a history must have exactly the fields {', '.join(_KEYS)}; got {got}")
    version, steps, validations = state["version"], state["steps"], state["validations"]
    if version != _VERSION or isinstance(version, bool):
        raise StateError(f"version of the history must be {_VERSION}; got {version!r}: written by another augend")
    if not isinstance(steps, Tensor) or steps.dtype != torch.uint8 or steps.dim() != 1:
        got = f"{steps.dtype} of {list(steps.shape)}" if isinstance(steps, Tensor) else type(steps).__name__
        raise StateError(f"steps of the history must be a uint8 tensor [bytes]; got {got}")
    if not isinstance(validations, list):
        raise StateError(f"validations of the history must be a list; got {type(validations).__name__}")
    lines = steps.cpu().numpy().tobytes()
    if lines and not lines.endswith(b"\n"):
        raise StateError("the last line of the history's steps is torn")
    return lines, validations


def _check_order(steps: Sequence[Step], validations: Sequence[Validation]) -> None:
    for number, (before, after) in enumerate(pairwise(steps), start=2):
        where = f"line {number} of the history's steps"
        if after.step != before.step + 1:
            raise StateError(f"{where}: step must be {before.step + 1}, one more than before; got {after.step}")
        if after.epoch < before.epoch:
            raise StateError(f"{where}: epoch must be at least {before.epoch}, as before; got {after.epoch}")
        if after.update not in {before.update, before.update + 1}:
            raise StateError(f"{where}: update must be {before.update} or one more; got {after.update}")
    known = {step.step: step.epoch for step in steps}
    latest = -1
    for number, validation in enumerate(validations, start=1):
        where = f"validation {number} of the history"
        if validation.step not in known or validation.step <= latest:
            raise StateError(f"{where}: step must be one of the history's, after {latest}; got {validation.step}")
        if validation.epoch != known[validation.step]:
            raise StateError(f"{where}: epoch must be its step's, {known[validation.step]}; got {validation.epoch}")
        latest = validation.step
