"""Random: the generator and the shuffles of ggml-opt and of its Rust port, to the last bit."""

from __future__ import annotations

from collections.abc import Mapping, MutableSequence
from typing import Any, Final, final

import numpy as np
import torch
from torch import Tensor

from augend.errors import ContractError
from augend.ggml._given import check_same, mapping, whole_number

_VERSION: Final = 1
_WORDS: Final = 624  # of the generator's state, and made at once
_RANGE: Final = 2**32  # of a word
_MASK: Final = _RANGE - 1


@final
class Random:
    """A 32-bit Mersenne Twister, as ``std::mt19937``, and shuffles that draw from it.

    Args:
        seed: From 0 to 2^32 - 1. ggml-opt knows only the default one.

    Raises:
        ContractError: The seed is no such number.

    Numerics:
        The words are those of Matsumoto and Nishimura (1998), seeded as in their version of 2002. The shuffle is that
        of libstdc++ since GCC 11, on every machine; other C++ libraries shuffle otherwise.

    Example:
        >>> from augend.ggml import Random
        >>> Random().next()
        3499211612
        >>> values = [0, 1, 2, 3]
        >>> Random().shuffle(values)
        >>> values
        [2, 3, 0, 1]
    """

    def __init__(self, seed: int = 5489) -> None:
        if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < _RANGE:
            raise ContractError(f"the seed must be an integer from 0 to 2^32 - 1; got {seed!r:.80}")
        self._bits = np.random.MT19937(0)
        self._words: list[int] = []  # of the state at hand
        self._used = 0  # of them
        self._load(_key_of(seed), _WORDS)

    def next(self) -> int:
        """Return the next word, from 0 to 2^32 - 1."""
        if self._used == _WORDS:
            self._words = self._bits.random_raw(_WORDS).tolist()
            self._used = 0
        self._used += 1
        return self._words[self._used - 1]

    def bounded(self, count: int) -> int:
        """Return a number from 0 to ``count - 1``, all equally likely (Lemire 2019).

        Args:
            count: From 1 to 2^32 - 1.

        Raises:
            ContractError: It is not.
        """
        whole_number("the number that a draw stays below", count, 1, _MASK)
        product = self.next() * count
        if product & _MASK < count:
            threshold = (_RANGE - count) % count
            while product & _MASK < threshold:
                product = self.next() * count
        return product >> 32

    def shuffle(self, values: MutableSequence[int], count: int | None = None) -> None:
        """Shuffle in place, as ``std::shuffle`` of libstdc++: one draw for two positions up to 65,535 values.

        Args:
            values: What is shuffled.
            count: How many values from the first on; all if None. Fewer than two draw nothing.

        Raises:
            ContractError: There are not so many values.
        """
        count = _checked(values, count)
        if count > _MASK // max(count, 1):
            self.shuffle_one_by_one(values, count)
            return
        if count > 1 and count % 2 == 0:
            _swap(values, 1, self.bounded(2))
        for position in range(2 - count % 2, count, 2):
            size = position + 2  # of the second position's choice
            first, second = divmod(self.bounded((position + 1) * size), size)
            _swap(values, position, first)
            _swap(values, position + 1, second)

    def shuffle_one_by_one(self, values: MutableSequence[int], count: int | None = None) -> None:
        """Shuffle in place with one draw for each position, as ggml-opt's Rust port (Fisher and Yates 1938).

        Args:
            values: What is shuffled.
            count: How many values from the first on; all if None. Fewer than two draw nothing.

        Raises:
            ContractError: There are not so many values.
        """
        for position in range(1, _checked(values, count)):
            _swap(values, position, self.bounded(position + 1))

    def state_dict(self) -> dict[str, Any]:
        """Return version, the 624 words of the state (int64) and how many of them were drawn."""
        key = self._bits.state["state"]["key"]
        return {"version": _VERSION, "key": torch.from_numpy(key.astype(np.int64)), "used": self._used}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where ``state_dict`` was called.

        Raises:
            ContractError: It is something else; the generator is as it was.
        """
        mapping("the state of a generator", state, ["version", "key", "used"])
        check_same("a generator", state, {"version": _VERSION})
        key, used = state["key"], state["used"]
        if not isinstance(key, Tensor) or key.dtype != torch.int64 or key.shape != (_WORDS,):
            raise ContractError(f"the key of a generator must be {_WORDS} words, int64; got {key!r:.80}")
        if not (bool((key >= 0).all()) and bool((key < _RANGE).all()) and bool(key.any())):
            raise ContractError("the key of a generator must be words from 0 to 2^32 - 1, and not all of them 0")
        if isinstance(used, bool) or not isinstance(used, int) or not 0 <= used <= _WORDS:
            raise ContractError(f"the words that a generator has used must be from 0 to {_WORDS}; got {used!r:.80}")
        self._load(key.numpy(force=True).astype(np.uint32), used)

    def _load(self, key: np.ndarray[Any, np.dtype[np.uint32]], used: int) -> None:
        """Take a state; what is left of its words is drawn, so that the next draw makes a new state."""
        self._bits.state = {"bit_generator": "MT19937", "state": {"key": key, "pos": used}}
        self._words = [0] * used + self._bits.random_raw(_WORDS - used).tolist()
        self._used = used


def _key_of(seed: int) -> np.ndarray[Any, np.dtype[np.uint32]]:
    key = [seed]
    for index in range(1, _WORDS):
        key.append((1_812_433_253 * (key[-1] ^ (key[-1] >> 30)) + index) & _MASK)
    return np.array(key, dtype=np.uint32)


def _checked(values: MutableSequence[int], count: int | None) -> int:
    if count is None:
        return len(values)
    return whole_number("the number of values that are shuffled", count, 0, len(values))


def _swap(values: MutableSequence[int], one: int, other: int) -> None:
    values[one], values[other] = values[other], values[one]
