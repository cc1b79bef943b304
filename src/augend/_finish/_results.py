"""What a finish returns: plain numbers, equal on all ranks, and mappings of gradients."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import final

from torch import Tensor

from augend._accumulate import AccumulatorState
from augend.errors import StateError
from augend.metrics import Estimate


@final
@dataclass(frozen=True, slots=True)
class Finished:
    """One batch, finished.

    Args:
        count: Items (or weight) of the first term in the batch.
        microbatches: How many were made, those that counted nothing included.
        norm: 2-norm of the mean gradient before clipping.
        scale: What clipping multiplied the mean gradient by, at most 1.
        skipped: True if a policy dropped the batch: no gradient was written and no step taken.
        update: Steps really taken so far, this one included; a schedule's clock.
        losses: For every term its value and standard error over the rows of the batch.
        offers: How often the batch was offered: 1, or 2 where exact sums needed other grids.
    """

    count: int | float
    microbatches: int
    norm: float
    scale: float
    skipped: bool
    update: int
    losses: Mapping[str, Estimate]
    offers: int = 1

    @property
    def loss(self) -> Estimate:
        """The estimate of the only term.

        Raises:
            StateError: There are several terms; take one from ``losses``.
        """
        if len(self.losses) != 1:
            raise StateError(f"there are several loss terms; take one of losses[...]: {', '.join(self.losses)}")
        return next(iter(self.losses.values()))

    def to_plain(self) -> dict[str, object]:
        """Return the record as plain numbers, strings and dictionaries; inf and nan as strings, as JSON has none."""
        losses = {
            term: {"value": _write(one.value), "error": _write(one.error), "count": one.count}
            for term, one in self.losses.items()
        }
        return {
            "count": self.count,
            "microbatches": self.microbatches,
            "norm": _write(self.norm),
            "scale": _write(self.scale),
            "skipped": self.skipped,
            "update": self.update,
            "losses": losses,
            "offers": self.offers,
        }

    @staticmethod
    def from_plain(plain: object, terms: tuple[str, ...]) -> Finished:
        """Read what ``to_plain`` returned, of a batch with these terms.

        Raises:
            StateError: A field is missing, unknown or of another type.
        """
        try:
            fields = dict(plain)  # type: ignore[call-overload]  # anything that is no mapping is a TypeError below
            losses = {
                term: Estimate(_read(one["value"]), _read(one["error"]), _read_count(one["count"]))
                for term, one in fields.pop("losses").items()
            }
            numbers = {"norm": _read(fields["norm"]), "scale": _read(fields["scale"])}
            done = Finished(**{**fields, **numbers, "count": _read_count(fields["count"])}, losses=losses)
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise StateError(f"the saved record of the last finish is not one: {error}") from error
        if tuple(losses) != terms:
            raise StateError(f"the last finish must have the losses {list(terms)}; got {list(losses)}")
        if type(done.skipped) is not bool:
            raise StateError(f"the last finish's skipped must be true or false; got {done.skipped!r}")
        for name, least in (("microbatches", 0), ("update", 0), ("offers", 1)):
            value = getattr(done, name)
            if type(value) is not int or value < least:
                raise StateError(f"the last finish's {name} must be a whole number of at least {least}; got {value!r}")
        return done


def _write(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)


def _read(value: object) -> float:
    if isinstance(value, float) or (isinstance(value, str) and value in ("nan", "inf", "-inf")):
        return float(value)
    raise ValueError(f"{value!r} is no float")


def _read_count(value: object) -> int | float:
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf:
        return value
    raise ValueError(f"{value!r} is no count")


@final
@dataclass(frozen=True, slots=True)
class Sums:
    """Gradients of ``loss_scale`` times the loss sums, undivided, in the work dtype.

    Args:
        gradients: Name to sum, for parameters that had a gradient; with several terms, term to such a mapping.
        state: The counters that belong to them.
    """

    gradients: Mapping[str, Tensor] | Mapping[str, Mapping[str, Tensor]]
    state: AccumulatorState


@final
@dataclass(frozen=True, slots=True)
class Means:
    """Mean gradients in the work dtype: unscaled, divided by the count, not clipped.

    Args:
        gradients: Name to mean, for parameters that had a gradient; empty if a policy dropped the batch.
        state: The counters of the batch.
        skipped: True if a policy dropped the batch.
    """

    gradients: Mapping[str, Tensor]
    state: AccumulatorState
    skipped: bool = field(default=False)
