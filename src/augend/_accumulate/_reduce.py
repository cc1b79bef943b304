"""What all ranks' windows are together: counters, moments, and which parameters were used. Two small collectives."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, Protocol, final

from torch import Tensor

from augend._accumulate._bits import Fingerprint
from augend._accumulate._contract import Contract
from augend._accumulate._scales import Sizes, deciding, in_numbers
from augend._accumulate._slots import Slots
from augend._accumulate._window import Window
from augend._group import Group
from augend._numerics import COUNT_LIMIT, LIMBS, Moments, from_limbs, to_limbs
from augend._placement import Placement
from augend.errors import (
    AugendError,
    ContractError,
    CounterOverflowError,
    GradientError,
    StateError,
    TallyError,
    UnusedError,
)

Unused = Literal["error", "zero"]
_POISONING: Final = (TallyError, GradientError, CounterOverflowError, UnusedError)


class Held(Protocol):
    """A window, and what belongs to it."""

    @property
    def window(self) -> Window:
        """What was added since the last finish, as far as this rank holds it."""

    @property
    def placement(self) -> Placement:
        """Where parameters and sums lie."""

    @property
    def slots(self) -> Slots:
        """The live parameters."""

    @property
    def contract(self) -> Contract:
        """What the sums belong to."""

    @property
    def fingerprint(self) -> Fingerprint:
        """What the bits of exact sums depend on besides data and code."""

    @property
    def max_microbatches(self) -> int:
        """The most micro-batches of a window, over all ranks."""

    def zeros(self, name: str) -> Tensor:
        """Return this rank's part of a sum of nothing."""


@final
@dataclass(frozen=True, slots=True)
class Reduced:
    """One window of all ranks.

    Args:
        microbatches: How many were made, fillers not counted.
        loose: Whether some did not come from the loop over a batch.
        moments: Every term's, exactly.
        present: For every term the parameters that had a gradient somewhere, in the model's order.
        offer: How often the batch was offered before.
        largest: Of exact sums, the largest gradient of every term and parameter that had one other than 0.
        scales: Of exact sums, what each of those that are present is held with; None while it is only measured.
    """

    microbatches: int
    loose: bool
    moments: Mapping[str, Moments]
    present: Mapping[str, tuple[str, ...]]
    offer: int = 0
    largest: Sizes = field(default_factory=dict)
    scales: Mapping[str, Mapping[str, int | None]] = field(default_factory=dict)

    @property
    def sizes(self) -> Sizes:
        """The largest gradients that decide on grids."""
        return deciding(self.largest, {term: one.count for term, one in self.moments.items()})


def reduce_window(held: Held, what: str, unused: Unused, **alike: object) -> Reduced:
    """Agree on what a window holds, or raise the same error on every rank. Collective; changes no sums.

    Args:
        held: The window, and what belongs to it.
        what: What this rank waits for, in words.
        unused: Whether a parameter that some ranks used and others did not is an error: in mid-batch it never is.
        **alike: What must be equal on all ranks besides, by what it is called in messages.

    Raises:
        StateError: Ranks made different numbers of micro-batches, are at different rows, or differ in ``alike``.
        UnusedError: Ranks used different parameters, and that is an error. The window cannot go on.
        TallyError, GradientError, CounterOverflowError: As ``Window.moments``, of whichever rank.
    """
    window, group = held.window, held.placement.group
    moments, error = _own(held)
    numbers = {
        "the number of micro-batches": window.rounds,
        "the batch": -1 if window.step is None else window.step,
        "the number of rows done": window.rows_done,
        **{name.replace("_", " "): value for name, value in alike.items()},
    }
    try:
        group.same(what, numbers, error)
        present, largest = _present(held, what, unused)
        microbatches, loose, added = _added(held, what, moments)
        _check(held, microbatches, added)
    except _POISONING as refused:
        window.broken = window.broken or f"its values were refused ({refused})"
        raise
    return Reduced(microbatches, loose, added, present, window.offer, largest, _scales(window, present))


@final
@dataclass(frozen=True, slots=True)
class Sizing:
    """What all ranks know of a pass through a batch whose sums are exact.

    Args:
        loose: Whether some micro-batches came from elsewhere.
        sizes: The largest gradients that decide on grids.
        seen: Those of all terms, as integers.
    """

    loose: bool
    sizes: Sizes
    seen: tuple[int, ...]


def agree_sizes(held: Held, what: str) -> Sizing:
    """Return how large the gradients of all ranks are. Collective.

    Args:
        held: The window, and what belongs to it.
        what: What this rank waits for, in words.
    """
    window, keys = held.window, _keys(held)
    counted = window.counted()
    loose, *numbers = held.placement.group.maximum(what, [window.loose, *counted.values(), *_ordered(window, keys)])
    counts, ordered = numbers[: len(counted)], numbers[len(counted) :]
    largest = _sizes(keys, ordered)
    return Sizing(bool(loose), deciding(largest, dict(zip(counted, counts, strict=True))), tuple(ordered))


def agree_contract(group: Group, contract: Contract, settings: Mapping[str, object]) -> None:
    """Raise ContractError, on all ranks alike, if ranks made their accumulators of different models or arguments.

    Args:
        group: All ranks.
        contract: This rank's.
        settings: Its other arguments, by name.
    """
    what = "the construction of the accumulator"
    plain = {**contract.to_plain(), **settings}
    highest, lowest = group.maximum(what, [mark(plain), -mark(plain)])
    if highest == -lowest:
        return
    first, *others = (json.loads(one) for one in group.exchange(what, json.dumps(plain).encode()))
    for rank, other in enumerate(others, start=1):
        for name, value in first.items():
            if name != "tensors" and other[name] != value:
                raise ContractError(
                    f"{name} is {value!r} on rank 0 and {other[name]!r} on rank {rank}: make it the same"
                )
        _compare(first["tensors"], other["tensors"], rank)


def _compare(first: Mapping[str, object], other: Mapping[str, object], rank: int) -> None:
    for name in sorted(first.keys() | other.keys()):
        if first.get(name) != other.get(name):
            raise ContractError(
                f"parameter {name!r} is {first.get(name)} on rank 0 and {other.get(name)} on rank {rank}: "
                "build the same model on all ranks"
            )


def _own(held: Held) -> tuple[dict[str, Moments], AugendError | None]:
    """Return this rank's moments, and what is wrong with them."""
    try:
        held.window.guard()
        held.slots.check()
        return held.window.moments(), None
    except AugendError as error:
        return {}, error


def _added(held: Held, what: str, moments: Mapping[str, Moments]) -> tuple[int, bool, dict[str, Moments]]:
    """Add up micro-batches and moments over ranks, exactly."""
    window, placement = held.window, held.placement
    if placement.group.world == 1:
        return window.microbatches, window.loose, dict(moments)
    mine = [window.microbatches, window.loose, *(limb for one in moments.values() for limb in to_limbs(one))]
    if not placement.counts:  # another rank runs the same rows
        mine = [0] * len(mine)
    microbatches, loose, *limbs = placement.group.total(what, mine)
    terms = enumerate(window.sums)
    added = {term: from_limbs(limbs[place * LIMBS : (place + 1) * LIMBS]) for place, term in terms}
    return microbatches, bool(loose), added


def _keys(held: Held) -> list[tuple[str, str]]:
    return [(term, name) for term in held.window.sums for name in held.slots.parameters]


def _ordered(window: Window, keys: Sequence[tuple[str, str]]) -> list[int]:
    return [] if window.scales is None else window.scales.ordered(keys)


def _sizes(keys: Sequence[tuple[str, str]], ordered: Sequence[int]) -> dict[str, dict[str, float]]:
    sizes: dict[str, dict[str, float]] = {term: {} for term, _ in keys}
    for (term, name), size in zip(keys, in_numbers(ordered), strict=bool(ordered)):
        if size:
            sizes[term][name] = size
    return sizes


def _scales(window: Window, present: Mapping[str, Sequence[str]]) -> dict[str, dict[str, int | None]]:
    scales = window.scales
    if scales is None:
        return {}
    return {term: {name: scales.of(term, name) for name in names} for term, names in present.items()}


def _present(held: Held, what: str, unused: Unused) -> tuple[dict[str, tuple[str, ...]], Sizes]:
    """Return what had a gradient on any rank, and how large they were where that matters."""
    window, placement = held.window, held.placement
    keys = _keys(held)
    mine = [name in window.used[term] for term, name in keys]
    told = placement.group.maximum(what, [*mine, *(not one for one in mine), *_ordered(window, keys)])
    some, lacking, ordered = told[: len(keys)], told[len(keys) : 2 * len(keys)], told[2 * len(keys) :]
    differ = [key for key, used, missing in zip(keys, some, lacking, strict=True) if used and missing]
    if differ and unused == "error":
        term, name = differ[0]
        have = placement.group.gather(what, [name in window.used[term]])
        without = ", ".join(str(rank) for rank, (one,) in enumerate(have) if not one)
        raise UnusedError(
            f"parameter {name!r} had a gradient on some ranks, and none on rank {without} ({len(differ)} parameters in "
            'all): pass unused="zero" if rows decide which parameters they use, or let every row use all of them'
        )
    present = {
        term: tuple(name for (one, name), used in zip(keys, some, strict=True) if used and one == term)
        for term in window.sums
    }
    return present, _sizes(keys, ordered)


def _check(held: Held, microbatches: int, moments: Mapping[str, Moments]) -> None:
    for term, one in moments.items():
        if one.count > COUNT_LIMIT:
            raise CounterOverflowError(
                f"the counts of term {term!r} sum to {one.count} over all ranks, and at most 2^63 - 1 = {COUNT_LIMIT} "
                "can be held; use smaller weights or batches"
            )
    if microbatches > held.max_microbatches:
        raise StateError(
            f"the window holds {microbatches} micro-batches over all ranks, and max_microbatches is "
            f"{held.max_microbatches}"
        )


def mark(value: object) -> int:
    """Return a number that tells plain values apart."""
    text = json.dumps(value, sort_keys=True, default=repr).encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "little") >> 2
