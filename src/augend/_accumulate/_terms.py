"""The named loss terms: one is the common case, and then nobody has to name it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from fractions import Fraction
from numbers import Rational, Real
from typing import TypeVar, cast, final

from torch import Tensor

from augend._tally import Tally
from augend.errors import TallyError

V = TypeVar("V")
Gradients = Mapping[str, Tensor]
Count = float | Fraction


@final
class Terms:
    """Sorts what a caller gives into one value for each term, in the terms' order."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names
        self.several = len(names) > 1

    def tallies(self, given: Tally | Mapping[str, Tally]) -> dict[str, Tally]:
        """Return every term's tally.

        Raises:
            TallyError: A term is missing or unknown, or a value is no tally.
        """
        by_term = self._named(given, "a tally") if isinstance(given, Mapping) else self._only(given)
        for term, tally in by_term.items():
            if not isinstance(tally, Tally):
                raise TallyError(f"term {term!r} must be a Tally(total, count); got {type(tally).__name__}")
        return by_term

    def gradients(self, given: Gradients | Mapping[str, Gradients]) -> dict[str, Gradients]:
        """Return every term's gradients.

        Raises:
            TallyError: A term is missing or unknown.
        """
        if not self.several:
            return self._only(cast("Gradients", given))
        return self._named(cast("Mapping[str, Gradients]", given), "gradients")

    def counts(self, given: Count | Mapping[str, Count]) -> dict[str, Fraction]:
        """Return every term's count, exactly.

        Raises:
            TallyError: A term is missing or unknown, or a count is negative, not finite, or no number.
        """
        by_term = self._named(given, "a count") if isinstance(given, Mapping) else self._only(given)
        return {term: _exact(term, count) for term, count in by_term.items()}

    def _only(self, given: V) -> dict[str, V]:
        if self.several:
            raise TallyError(f"there are several terms; name each of them: {{{', '.join(map(repr, self.names))}}}")
        return {self.names[0]: given}

    def _named(self, given: Mapping[str, V], what: str) -> dict[str, V]:
        if given.keys() != set(self.names):
            expected, got = ", ".join(map(repr, self.names)), ", ".join(map(repr, given))
            raise TallyError(f"every call needs {what} for every term ({expected}); got {got or 'none'}")
        return {term: given[term] for term in self.names}


def _exact(term: str, count: Count) -> Fraction:
    if isinstance(count, bool) or not isinstance(count, Real):
        raise TallyError(f"the count of term {term!r} must be a number; got {count!r}")
    if not (count >= 0 and math.isfinite(count)):
        raise TallyError(f"the count of term {term!r} must be finite and not negative; got {count}")
    exact = Fraction(count) if isinstance(count, Rational) else Fraction(float(count))
    return Fraction(round(exact * 2**40), 2**40)
