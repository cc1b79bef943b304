"""The generator and its shuffles give a real ggml's words and permutations."""

from __future__ import annotations

import json
import random as python_random
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from augend.errors import ContractError
from augend.ggml._random import Random

ORACLE = json.loads((Path(__file__).parents[1] / "golden" / "ggml" / "shuffle.json").read_text())
SEEDS = st.integers(0, 2**32 - 1)


def fnv1a64(values: list[int]) -> str:
    """Hash integers as the oracle does: their 8 bytes each, the lowest first."""
    result = 1_469_598_103_934_665_603  # where the oracle's programs began: FNV's own basis has one more digit
    for value in values:
        for byte in value.to_bytes(8, "little"):
            result = (result ^ byte) * 0x100000001B3 & 0xFFFFFFFFFFFFFFFF
    return f"{result:016x}"


class Scripted:
    """A generator whose words are given."""

    def __init__(self, words: list[int]) -> None:
        self.random = Random()
        self.random._words = words + [0] * (624 - len(words))
        self.random._used = 0


@given(seed=SEEDS, words=st.integers(0, 1500))
def test_words_are_those_of_pythons_own_twister(seed: int, words: int) -> None:
    """From any state on, the words are those of the Mersenne Twister in the standard library."""
    random = Random(seed)
    other = python_random.Random()  # noqa: S311  # the same generator, not cryptography
    other.setstate((3, (*random.state_dict()["key"].tolist(), 624), None))
    for _ in range(words):
        random.next()
        other.getrandbits(32)
    assert other.getrandbits(32) == random.next()


def test_first_words() -> None:
    """A fresh generator has ggml's seed and gives its first sixteen words."""
    random = Random()
    assert ORACLE["mt19937_first16"] == [random.next() for _ in range(16)]


def test_the_ten_thousandth_word_is_that_of_the_cpp_standard() -> None:
    """The 10,000th word is 4123659995, which the C++ standard requires of std::mt19937 ([rand.predef])."""
    random = Random()
    for _ in range(9_999):
        random.next()
    assert random.next() == 4_123_659_995


@pytest.mark.parametrize("case", ORACLE["full"], ids=lambda case: str(case["n_shards"]))
def test_full_shuffles(case: dict) -> None:
    """Repeated shuffles of all entries compose to ggml's permutations, and draw as many words."""
    random, permutation = Random(), list(range(case["n_shards"]))
    for expected, word in zip(case["after_each_shuffle"], case["next_rng_u32"], strict=True):
        random.shuffle(permutation)
        peek = Random()
        peek.load_state_dict(random.state_dict())
        assert expected == permutation
        assert word == peek.next()


@pytest.mark.parametrize("case", ORACLE["large"], ids=lambda case: str(case["n_shards"]))
def test_large_shuffles(case: dict) -> None:
    """Up to 65,535 entries two positions share a draw, beyond that each has its own: ggml's permutations exactly."""
    random, permutation = Random(), list(range(case["n_shards"]))
    random.shuffle(permutation)
    assert case["head8"] == permutation[:8]
    assert case["tail8"] == permutation[-8:]
    assert case["fnv1a64_of_int64_le"] == fnv1a64(permutation)
    assert case["next_rng_u32"] == random.next()


def test_65_536_entries_are_shuffled_one_by_one() -> None:
    """From 65,536 entries on the two shuffles are one; below they are not."""
    for count, same in ((65_535, False), (65_536, True)):
        pairs, single = list(range(count)), list(range(count))
        Random().shuffle(pairs)
        Random().shuffle_one_by_one(single)
        assert same == (pairs == single)


@given(seed=SEEDS, count=st.integers(0, 70), rest=st.integers(0, 5), one=st.booleans())
def test_shuffle_is_a_permutation_of_the_prefix(seed: int, count: int, rest: int, one: bool) -> None:
    """What lies behind the prefix stays, and the prefix keeps its values; fewer than two draw nothing."""
    random, values = Random(seed), list(range(count + rest))
    (random.shuffle_one_by_one if one else random.shuffle)(values, count)
    assert list(range(count, count + rest)) == values[count:]
    assert list(range(count)) == sorted(values[:count])
    assert (count < 2) == (random.next() == Random(seed).next())


@given(seed=SEEDS, count=st.integers(0, 70))
def test_one_by_one_draws_once_for_each_position(seed: int, count: int) -> None:
    """The Rust port's loop: position i is swapped with a number below i + 1, for i from 1."""
    random, other, values = Random(seed), Random(seed), list(range(count))
    random.shuffle_one_by_one(values)
    expected = list(range(count))
    for position in range(1, count):
        chosen = other.bounded(position + 1)
        expected[position], expected[chosen] = expected[chosen], expected[position]
    assert expected == values


def test_bounded_is_uniform_by_rejection() -> None:
    """A word that would make small numbers more likely is drawn again, any other is used at once.

    Below 3 the words 0 and 2^32/3 · k differ: (2^32 - 3) mod 3 = 1, so the word with a low product of 0 is rejected.
    """
    assert Scripted([0, 2**32 - 1]).random.bounded(3) == 2
    assert Scripted([1, 2**32 - 1]).random.bounded(3) == 0
    assert Scripted([2**31, 0]).random.bounded(2) == 1


@given(seed=SEEDS, count=st.one_of(st.integers(1, 50), st.integers(1, 2**32 - 1)))
def test_bounded_stays_below(seed: int, count: int) -> None:
    """Any number of choices gives one of them."""
    assert 0 <= Random(seed).bounded(count) < count


@given(seed=SEEDS, words=st.integers(0, 1300), more=st.integers(0, 700))
def test_a_saved_generator_goes_on(seed: int, words: int, more: int) -> None:
    """A generator that was saved after any word draws what the saved one draws."""
    random, other = Random(seed), Random(1)
    for _ in range(words):
        random.next()
    other.load_state_dict(random.state_dict())
    assert [random.next() for _ in range(more)] == [other.next() for _ in range(more)]
    assert random.state_dict()["used"] == other.state_dict()["used"]
    assert torch.equal(random.state_dict()["key"], other.state_dict()["key"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "version 2; here it is 1"),
        ({"more": 0}, "with the keys"),
        ({"key": [1] * 624}, "624 words"),
        ({"key": torch.ones(623, dtype=torch.int64)}, "624 words"),
        ({"key": torch.ones(624)}, "624 words"),
        ({"key": torch.full((624,), -1)}, "from 0 to"),
        ({"key": torch.full((624,), 2**32)}, "from 0 to"),
        ({"key": torch.zeros(624, dtype=torch.int64)}, "not all of them 0"),
        ({"used": -1}, "from 0 to 624"),
        ({"used": 625}, "from 0 to 624"),
        ({"used": 1.0}, "from 0 to 624"),
        ({"used": True}, "from 0 to 624"),
    ],
)
def test_a_damaged_state_changes_nothing(change: dict, message: str) -> None:
    """A state that is none is refused, and the generator goes on as it was."""
    random = Random()
    with pytest.raises(ContractError, match=message):
        random.load_state_dict({**random.state_dict(), **change})
    assert ORACLE["mt19937_first16"][0] == random.next()


@pytest.mark.parametrize("seed", [-1, 2**32, 1.0, "1", True])
def test_a_seed_is_a_word(seed: object) -> None:
    """Anything but an integer of 32 bits is refused."""
    with pytest.raises(ContractError, match="seed"):
        Random(seed)


def test_misuse_is_named() -> None:
    """Bounds and prefixes that do not exist are errors that draw nothing."""
    random = Random()
    for count in (0, -1, 2**32):
        with pytest.raises(ContractError, match=f"got {count}"):
            random.bounded(count)
    for count in (-1, 4):
        for shuffle in (random.shuffle, random.shuffle_one_by_one):
            with pytest.raises(ContractError, match="from 0 to 3"):
                shuffle([1, 2, 3], count)
    assert ORACLE["mt19937_first16"][0] == random.next()
