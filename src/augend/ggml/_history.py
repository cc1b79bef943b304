"""What a fit leaves behind: one record for each epoch, and why it ended."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from numbers import Real
from typing import Any, Final, final

from augend import Estimate
from augend.errors import ContractError
from augend.ggml._given import mapping, whole_number
from augend.ggml._result import Result

_ESTIMATES: Final = ("loss", "accuracy", "validation_loss", "validation_accuracy")


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Epoch:
    """One epoch of a fit.

    Args:
        number: From 1.
        loss: Of the training part, each physical batch before its update.
        accuracy: The same; NaN without a cross entropy.
        validation_loss: Of the rows that are held out, after the epoch; of count 0 where there are none.
        validation_accuracy: The same.
        iteration: Updates made so far.
        seconds: Wall time.
    """

    number: int
    loss: Estimate
    accuracy: Estimate
    validation_loss: Estimate
    validation_accuracy: Estimate
    iteration: int
    seconds: float

    @staticmethod
    def of(number: int, train: Result, validation: Result, iteration: int, seconds: float) -> Epoch:
        """Make the record of an epoch from the results of its two parts."""
        return Epoch(
            number=number,
            loss=train.loss(),
            accuracy=train.accuracy(),
            validation_loss=validation.loss(),
            validation_accuracy=validation.accuracy(),
            iteration=iteration,
            seconds=seconds,
        )

    @property
    def watched(self) -> float:
        """The loss that early stopping watches: of the rows that are held out, or of the training part without any."""
        return self.validation_loss.value if self.validation_loss.count else self.loss.value

    def to_plain(self) -> dict[str, Any]:
        """Return numbers that can be saved."""
        return asdict(self)

    @staticmethod
    def from_plain(plain: object) -> Epoch:
        """Return the record that ``to_plain`` was called on.

        Raises:
            ContractError: It is none.
        """
        saved = mapping("a saved epoch", plain, [field.name for field in fields(Epoch)])
        if not isinstance(saved["seconds"], Real):
            raise ContractError(f"the seconds of a saved epoch must be a number; got {saved['seconds']!r:.80}")
        return Epoch(
            number=whole_number("the number of a saved epoch", saved["number"], 1),
            iteration=whole_number("the updates of a saved epoch", saved["iteration"], 0),
            seconds=float(saved["seconds"]),
            **{name: _estimate(saved[name]) for name in _ESTIMATES},
        )


def _estimate(plain: object) -> Estimate:
    numbers = mapping("a saved estimate", plain, [field.name for field in fields(Estimate)])
    if not all(isinstance(one, Real) for one in numbers.values()):
        raise ContractError(f"a saved estimate is made of numbers; got {dict(numbers)!r:.200}")
    return Estimate(**numbers)


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class History:
    """All epochs of a fit, and why it ended.

    Args:
        epochs: In order; those of before a resume, too.
        stopped: Why it ended, for people.
    """

    epochs: tuple[Epoch, ...]
    stopped: str

    @property
    def best(self) -> Epoch | None:
        """The epoch with the smallest watched loss, of equal ones the first; None where no loss is a number."""
        watched = [one for one in self.epochs if not math.isnan(one.watched)]
        return min(watched, key=lambda one: one.watched, default=None)

    def __str__(self) -> str:
        """Return two lines for people: how far it went and why no further, and the last losses."""
        lines = [f"{len(self.epochs)} epochs: {self.stopped}"]
        if self.epochs:
            last = self.epochs[-1]
            held_out = f", validation loss {last.validation_loss}" if last.validation_loss.count else ""
            lines.append(f"training loss {last.loss}{held_out}")
        return "\n".join(lines)
