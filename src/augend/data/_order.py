"""The order of an epoch: a permutation of shards that is computed, never stored.

A keyed bijection on ``0 .. size - 1``: an alternating Feistel network (Luby and Rackoff 1988) on the smallest power
of two that is at least ``size``, walked until it falls inside (Black and Rogaway 2002, "Ciphers with arbitrary finite
domains", §3). Its round function is the finaliser of SplitMix64 (Steele, Lea and Flood 2014), its round keys are
SHA-256 of (name, seed, epoch). Integers alone are used: no library's generator can change it under a run.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, final

import numpy as np
from numpy.typing import NDArray

from augend.data._random import digest

Indices = NDArray[np.int64]
_Words = NDArray[np.uint64]

ORDER: Final = "augend.order/1"  # the name of this algorithm; another one gets another number
_ROUNDS: Final = 8
_LEAST_BITS: Final = 8  # halves of four bits: with fewer, a handful of rows would be far from uniform
_TABLE: Final = 2**_LEAST_BITS  # up to here most of the domain is outside, and a table costs less than walking


@final
class Permutation:
    """A permutation of ``0 .. size - 1`` drawn by (name, seed, epoch): O(1) memory, O(1) access.

    Args:
        size: How many elements, 1 to 2^62.
        name: What it is for; different names with the same seed are unrelated.
        seed: Any integer.
        epoch: Any integer; each epoch has its own order.
    """

    __slots__ = ("_keys", "_left", "_right", "_size", "_table")

    def __init__(self, size: int, *, name: str, seed: int, epoch: int) -> None:
        bits = max(_LEAST_BITS, (size - 1).bit_length())
        self._size = np.uint64(size)
        self._left = bits // 2
        self._right = bits - self._left
        words = b"".join(digest(name, seed, epoch, block) for block in range(_ROUNDS * 8 // 32))
        self._keys = np.frombuffer(words, dtype="<u8").astype(np.uint64)  # [rounds]
        self._table = self._tabulate(size) if size <= _TABLE else None

    def at(self, slots: Indices) -> Indices:
        """Return the elements at the given slots, ``[slots]``."""
        if self._table is not None:
            return self._table[slots]
        return self._walk(slots, range(_ROUNDS))

    def slot_of(self, element: int) -> int:
        """Return the slot at which an element stands: the inverse of `at`."""
        if self._table is not None:
            return int(np.flatnonzero(self._table == element)[0])
        return int(self._walk(np.array([element], dtype=np.int64), range(_ROUNDS - 1, -1, -1))[0])

    def _walk(self, values: Indices, rounds: Iterable[int]) -> Indices:
        order = tuple(rounds)
        words = self._feistel(values.astype(np.uint64), order)
        outside = np.flatnonzero(words >= self._size)
        while outside.size:
            moved = self._feistel(words[outside], order)
            words[outside] = moved
            outside = outside[moved >= self._size]
        return words.astype(np.int64)

    def _tabulate(self, size: int) -> Indices:
        """Return the whole permutation by walking a table of the domain: the same values, found in one pass."""
        domain = self._feistel(np.arange(_TABLE, dtype=np.uint64), range(_ROUNDS)).tolist()
        table = np.empty(size, dtype=np.int64)
        for slot in range(size):
            element = domain[slot]
            while element >= size:
                element = domain[element]
            table[slot] = element
        return table

    def _feistel(self, words: _Words, rounds: Iterable[int]) -> _Words:
        """Apply rounds, each its own inverse: in reverse order they undo each other."""
        left_down, right_down = np.uint64(64 - self._left), np.uint64(64 - self._right)
        left = words >> np.uint64(self._right)
        right = words & np.uint64(2**self._right - 1)
        for index in rounds:
            if index % 2:
                right = right ^ (_mixed(left ^ self._keys[index]) >> right_down)
            else:
                left = left ^ (_mixed(right ^ self._keys[index]) >> left_down)
        return (left << np.uint64(self._right)) | right


def _mixed(words: _Words) -> _Words:
    """Return SplitMix64's finaliser of each word (Steele, Lea and Flood 2014, variant 13 of Stafford's)."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


@final
class ShuffledOrder:
    """Which row stands at which position of an epoch, when shards of consecutive rows are shuffled.

    The last shard may be short. It is shuffled like the others; its slot, found through the inverse of the
    permutation, tells by how much the positions behind it are shifted.

    Args:
        rows: How many rows.
        shard_size: How many consecutive rows stay together, in their order.
        seed: Any integer.
        epoch: Which epoch.
    """

    __slots__ = ("_missing", "_shard_size", "_shards", "_short_end")

    def __init__(self, rows: int, *, shard_size: int, seed: int, epoch: int) -> None:
        shards = -(-rows // shard_size)
        self._shard_size = shard_size
        self._shards = Permutation(shards, name=ORDER, seed=seed, epoch=epoch)
        self._missing = shards * shard_size - rows
        self._short_end = rows  # the first position behind the short shard: nowhere if there is none
        if self._missing:
            self._short_end = (self._shards.slot_of(shards - 1) + 1) * shard_size - self._missing

    def rows_at(self, positions: Indices) -> Indices:
        """Return the row ids at positions of the epoch, ``[positions]``."""
        moved = positions + self._missing * (positions >= self._short_end)
        slots, offsets = np.divmod(moved, self._shard_size)
        return self._shards.at(slots) * self._shard_size + offsets


@final
class GivenOrder:
    """The rows as they come: position and row id are the same."""

    __slots__ = ()

    def rows_at(self, positions: Indices) -> Indices:
        """Return the row ids at positions of the epoch, ``[positions]``."""
        return positions
