"""What a finish is asked for: clipping, the weights of the terms, and what to do with nothing and with nan."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, TypedDict, final

from augend.errors import ContractError

Empty = Literal["raise", "skip", "one", "zero"]
NonFinite = Literal["raise", "skip", "allow"]
_EMPTY: Final = ("raise", "skip", "one", "zero")
_NONFINITE: Final = ("raise", "skip", "allow")


class FinishOptions(TypedDict, total=False):
    """The keyword arguments of ``Accumulator.finish``, which ``Accumulator.step`` takes too."""

    max_norm: float | None
    eps: float
    term_weights: Mapping[str, float] | None
    empty: Empty
    nonfinite: NonFinite


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """``FinishOptions`` with their defaults, checked.

    Raises:
        ContractError: A value is out of its domain.
    """

    max_norm: float | None = None
    eps: float = 0.0
    term_weights: Mapping[str, float] | None = field(default=None)
    empty: Empty = "raise"
    nonfinite: NonFinite = "raise"

    def __post_init__(self) -> None:
        if self.max_norm is not None and not self.max_norm >= 0:
            raise ContractError(f"max_norm must be a number of at least 0, or None; got {self.max_norm!r}")
        if not 0 <= self.eps < math.inf:
            raise ContractError(f"eps must be a finite number of at least 0; got {self.eps!r}")
        _check_word("empty", self.empty, _EMPTY)
        _check_word("nonfinite", self.nonfinite, _NONFINITE)

    def to_plain(self) -> dict[str, object]:
        """Return what all ranks must ask for alike."""
        weights = None if self.term_weights is None else sorted(dict(self.term_weights).items())
        return {
            "max_norm": self.max_norm,
            "eps": self.eps,
            "term_weights": weights,
            "empty": self.empty,
            "nonfinite": self.nonfinite,
        }

    def scale(self, norm: float) -> float:
        """Return ``min(1, max_norm / (norm + eps))`` in float64; 1 for a norm of 0, nan for nan."""
        if self.max_norm is None or norm == 0:
            return 1.0
        return math.nan if math.isnan(norm) else min(1.0, self.max_norm / (norm + self.eps))

    def weights(self, terms: tuple[str, ...]) -> dict[str, float]:
        """Return one finite weight for every term, 1.0 where none was given.

        Raises:
            ContractError: A weight is of no term, or not finite.
        """
        given = dict(self.term_weights or {})
        if unknown := given.keys() - set(terms):
            raise ContractError(f"term_weights names {min(unknown)!r}, which is no term of {', '.join(terms)}")
        for term, weight in given.items():
            if not math.isfinite(weight):
                raise ContractError(f"the weight of term {term!r} must be finite; got {weight}")
        return {term: float(given.get(term, 1.0)) for term in terms}


def _check_word(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ContractError(f"{name} must be one of {', '.join(map(repr, allowed))}; got {value!r}")
