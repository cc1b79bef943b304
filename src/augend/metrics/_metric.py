"""Metric: what all metrics share, which is exact sums over batches that may be offered more than once."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Final, NamedTuple, Protocol, Self

from torch import Tensor

from augend._numerics import Moments
from augend._tally import Tally
from augend.errors import ContractError
from augend.metrics._estimate import Estimate
from augend.metrics._units import Units

_VERSION: Final = 1


class Offered(Protocol):
    """What a metric reads of a micro-batch: which batch it is of, and which offer of that batch."""

    @property
    def real_rows(self) -> int:
        """How many rows count; 0 for a filler."""

    @property
    def epoch(self) -> int:
        """The epoch of its batch."""

    @property
    def step(self) -> int:
        """The number of its batch."""

    @property
    def offer(self) -> int:
        """How often the batch was offered before."""


class _Position(NamedTuple):
    epoch: int
    step: int
    offer: int

    @property
    def batch(self) -> tuple[int, int]:
        return self.epoch, self.step


class Metric(ABC):
    """Exact sums over rows, from which an Estimate is formed when somebody asks.

    Everything is kept as exact fractions: any cut into micro-batches, any order and any sequence of merges gives the
    same bits. An ``update`` reads the values, so a GPU is waited for.
    """

    def __init__(self) -> None:
        self._closed = Units()  # of batches that will not be offered again
        self._open = Units()  # of the latest batch, at its latest offer
        self._position: _Position | None = None  # of the latest batch

    @abstractmethod
    def compute(self) -> Estimate:
        """Return the estimate over everything added so far. Changes nothing; not collective."""

    def merge(self, other: Self) -> Self:
        """Add everything that another metric of the same kind holds, from other rows, and return this one.

        Of a batch that both hold at different offers, the later offer is kept. Not collective.

        Raises:
            ContractError: The other is of another kind, or this very metric.
        """
        if other is self:
            raise ContractError(f"{type(self).__name__} cannot merge with itself: its rows would count twice")
        if type(other) is not type(self):
            raise ContractError(f"{type(self).__name__} merges with its own kind; got {type(other).__name__}")
        self._closed.add(other._closed)
        mine, theirs = self._position, other._position
        if theirs is None:
            return self
        if mine is None or theirs >= mine:
            self._turn_to(theirs)
            self._open.add(other._open)
        elif theirs.batch != mine.batch:
            self._closed.add(other._open)
        return self

    def state_dict(self) -> dict[str, Any]:
        """Return version, kind and exact sums as plain numbers and strings that JSON keeps exactly."""
        return {
            "version": _VERSION,
            "metric": type(self).__name__,
            "closed": self._closed.to_plain(),
            "open": self._open.to_plain(),
            "position": None if self._position is None else list(self._position),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what ``state_dict`` returned, instead of everything added so far.

        Raises:
            ContractError: The state is of another version or kind, or is damaged; the metric is left as it was.
        """
        expected = {"version": _VERSION, "metric": type(self).__name__}
        if state.keys() != {*expected, "closed", "open", "position"}:
            raise ContractError(f"the state of a metric has other keys than expected: {sorted(map(str, state))}")
        for key, value in expected.items():
            if state[key] != value:
                raise ContractError(f"the state's {key!r} must be {value!r}; got {state[key]!r:.80}")
        closed, latest = Units.from_plain(state["closed"]), Units.from_plain(state["open"])
        position = _position(state["position"])
        if position is None and latest.to_plain() != Units().to_plain():
            raise ContractError("the state holds rows of an open batch and not the batch's position")
        self._closed, self._open, self._position = closed, latest, position

    def _add(self, tally: Tally, microbatch: Offered | None, groups: Tensor | None) -> None:
        if microbatch is None:
            self._closed.add(Units.of(tally, groups))
            return
        units = Units.of(tally, groups) if microbatch.real_rows else Units()
        self._turn_to(_Position(microbatch.epoch, microbatch.step, microbatch.offer))
        self._open.add(units)

    def _turn_to(self, position: _Position) -> None:
        """Drop the earlier offer of the same batch; close any other batch."""
        before, self._position = self._position, position
        if before == position:
            return
        if before is not None and (before.batch != position.batch or before.offer > position.offer):
            self._closed.add(self._open)  # a lower offer is a new visit of the batch, as of a second pass
        self._open = Units()

    def _moments(self) -> Moments:
        """Return the moments of all units; a group may have rows in closed batches and in the open one."""
        units = Units()
        units.add(self._closed)
        units.add(self._open)
        return units.moments()


def _position(plain: object) -> _Position | None:
    if plain is None:
        return None
    if not isinstance(plain, (list, tuple)) or [type(part) for part in plain] != [int] * 3 or min(plain) < 0:
        raise ContractError(f"the position of a metric is epoch, step and offer; got {plain!r:.80}")
    return _Position(*plain)
