"""Splitting rows into training and validation: exact, the same on every rank, never drawn again differently."""

from __future__ import annotations

import hashlib
import operator
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Any, Final, NamedTuple, Protocol, final

import numpy as np

from augend.data._check import whole_number
from augend.data._order import Indices, Permutation
from augend.data._rows import Source, adapt
from augend.errors import SplitError

SPLIT: Final = "augend.split/1"  # the name of this algorithm; another one gets another number


class _Chosen(Protocol):
    """Which rows of the whole a part holds."""

    def __len__(self) -> int: ...
    def at(self, indices: Indices) -> Indices:
        """Return row ids of the whole."""


class Recipe(NamedTuple):
    """All that a split follows from."""

    algorithm: str
    rows: int
    fraction: Fraction
    seed: int
    digest: str  # SHA-256 of the validation rows' ids: what was drawn, not only how


@final
@dataclass(frozen=True, slots=True)
class _Drawn:
    """The rows drawn for validation, ascending."""

    drawn: Indices

    def __len__(self) -> int:
        return len(self.drawn)

    def at(self, indices: Indices) -> Indices:
        return self.drawn[indices]


@final
@dataclass(frozen=True, slots=True)
class _Others:
    """The rows not drawn, ascending, found from those that were: before the j-th of them stand j + k rows, k drawn."""

    before: Indices  # [drawn] how many rows that were not drawn come before each drawn one
    rows: int

    def __len__(self) -> int:
        return self.rows - len(self.before)

    def at(self, indices: Indices) -> Indices:
        return indices + np.searchsorted(self.before, indices, side="right")


@final
class Part(Source):
    """One side of a split: a map-style dataset over the rows it was split from, in their order.

    Rows are fetched from there when they are asked for. `augend.Batches`, another `augend.split` and torch's own
    `DataLoader` take it as it is.
    """

    def __init__(self, whole: Source, chosen: _Chosen, recipe: Recipe, name: str) -> None:
        self._whole = whole
        self._chosen = chosen
        self._recipe = recipe
        self._name = name

    @property
    def state(self) -> dict[str, int | str]:
        """The recipe, in plain numbers and text.

        ``algorithm`` (its name and version), ``rows`` (of the whole), ``fraction`` (exact, such as "1/20"), ``seed``,
        ``part`` ("train" or "validation"), ``digest`` (SHA-256 of the validation rows' ids, as little-endian int64)
        and ``within`` (the split that the whole came from, or ""). `augend.Batches` keeps it in its own state and
        refuses to go on with another split.
        """
        recipe = self._recipe
        return {
            "algorithm": recipe.algorithm,
            "rows": recipe.rows,
            "fraction": str(recipe.fraction),
            "seed": recipe.seed,
            "part": self._name,
            "digest": recipe.digest,
            "within": self._whole.split,
        }

    @property
    def given(self) -> object:
        """What the whole fetches from."""
        return self._whole.given

    @property
    def split(self) -> str:
        """The state as one line."""
        return " ".join(f"{key}={value}" for key, value in self.state.items())

    @property
    def draws(self) -> bool:
        """As the whole."""
        return self._whole.draws

    def __len__(self) -> int:
        return len(self._chosen)

    def row(self, index: int) -> object:
        """Return one row."""
        return self._whole.row(int(self._chosen.at(np.array([index]))[0]))

    def listed(self, indices: Indices) -> list[object]:
        """Return rows as a list."""
        return self._whole.listed(self._chosen.at(indices))

    def collated(self, indices: Indices) -> object:
        """Return rows as one collated value."""
        return self._whole.collated(self._chosen.at(indices))

    def __getitem__(self, index: int) -> Any:
        """Return one row; from the end if the index is negative.

        Raises:
            IndexError: There is no such row.
        """
        return self.row(range(len(self))[operator.index(index)])

    def __getitems__(self, indices: list[int]) -> list[object]:
        """Return rows as a list, gathered in one call."""
        return self.listed(np.asarray(indices, dtype=np.int64))


def split(rows: object, *, fraction: float | str | Fraction | Decimal, seed: int = 0) -> tuple[Part, Part]:
    """Split rows into training and validation.

    Validation gets ``round(N * fraction)`` rows, computed exactly, drawn by a keyed permutation of integers alone:
    the same on every rank, machine and version, whatever was drawn elsewhere. Both parts keep the order of the rows.
    Eight bytes are kept for each validation row; rows are neither read nor copied.

    Args:
        rows: Anything `augend.Batches` takes, also one part of another split.
        fraction: Which part is held out, between 0 and 1; 0.05 means the decimal, hence exactly 1/20.
        seed: Any integer.

    Returns:
        Training and validation; the ``state`` of each is its recipe.

    Raises:
        SplitError: The fraction is not between 0 and 1, or one of the parts would be empty.

    Example:
        >>> train, validation = augend.split(torch.arange(100), fraction="1/20")
        >>> len(train), len(validation)
        (95, 5)
    """
    whole = adapt(rows)
    exact = _exact(fraction)
    seed = whole_number("seed", seed, remedy="any integer will do, for example seed=0")
    held_out = round(len(whole) * exact)
    if not 0 < held_out < len(whole):
        raise SplitError(
            f"fraction {exact} of {len(whole)} rows is {held_out} for validation and {len(whole) - held_out} for "
            "training; both need at least one row: change fraction or bring more rows"
        )
    drawing = Permutation(len(whole), name=SPLIT, seed=seed, epoch=0)
    drawn = np.sort(drawing.at(np.arange(held_out, dtype=np.int64)))  # [held_out]
    digest = hashlib.sha256(drawn.astype("<i8").tobytes()).hexdigest()
    recipe = Recipe(algorithm=SPLIT, rows=len(whole), fraction=exact, seed=seed, digest=digest)
    others = _Others(drawn - np.arange(held_out, dtype=np.int64), len(whole))
    return Part(whole, others, recipe, "train"), Part(whole, _Drawn(drawn), recipe, "validation")


def _exact(fraction: object) -> Fraction:
    """Return the rational number that was written."""
    remedy = 'write it as 0.05, "1/20", Fraction(1, 20) or Decimal("0.05")'
    if isinstance(fraction, bool) or not isinstance(fraction, (int, float, str, Fraction, Decimal)):
        raise SplitError(f"fraction must be a number between 0 and 1; got {fraction!r}; {remedy}")
    try:
        exact = Fraction(str(fraction))
    except (ValueError, ZeroDivisionError) as error:
        raise SplitError(f"fraction must be a number between 0 and 1; got {fraction!r}; {remedy}") from error
    if not 0 < exact < 1:
        raise SplitError(f"fraction must be between 0 and 1, both excluded; got {fraction!r}; {remedy}")
    return exact
