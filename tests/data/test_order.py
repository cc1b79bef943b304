"""The order of an epoch: a bijection for every size, seed and epoch, near uniform, and the same for ever."""

from __future__ import annotations

import hashlib
import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from augend.data._order import ORDER, GivenOrder, Permutation, ShuffledOrder

SEEDS = st.one_of(st.integers(-3, 3), st.integers(-(2**200), 2**200))
WORD = 2**64 - 1


def mixed(word):
    """SplitMix64's finaliser on Python's integers."""
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 & WORD
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB & WORD
    return word ^ (word >> 31)


def twin(slot, *, size, name, seed, epoch):
    """The permutation of docs/decisions/0003-order.md, one element at a time, on Python's integers."""
    bits = max(8, (size - 1).bit_length())
    low, high = bits - bits // 2, bits // 2
    words = b"".join(hashlib.sha256(repr((name, seed, epoch, block)).encode()).digest() for block in range(2))
    keys = [int.from_bytes(words[8 * index : 8 * index + 8], "little") for index in range(8)]
    element = slot
    while True:
        left, right = element >> low, element & (2**low - 1)
        for index, key in enumerate(keys):
            if index % 2:
                right ^= mixed(left ^ key) >> (64 - low)
            else:
                left ^= mixed(right ^ key) >> (64 - high)
        element = left << low | right
        if element < size:
            return element


@given(size=st.integers(1, 3000), seed=SEEDS, epoch=st.integers(0, 2**40))
def test_every_element_stands_at_one_slot(size, seed, epoch):
    """It is a permutation, and slot_of is its inverse, for sizes with a table and without."""
    permutation = Permutation(size, name="test", seed=seed, epoch=epoch)
    elements = permutation.at(np.arange(size))
    assert list(range(size)) == sorted(elements.tolist())
    for slot in {0, size // 2, size - 1}:
        assert slot == permutation.slot_of(int(elements[slot]))


@given(size=st.one_of(st.integers(1, 600), st.integers(1, 2**62)), seed=SEEDS, data=st.data())
def test_it_is_the_documented_algorithm(size, seed, data):
    """A twin written on Python's integers gives the same elements, up to 2^62 of them: no overflow, no rounding."""
    slots = data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=4))
    elements = Permutation(size, name="test", seed=seed, epoch=3).at(np.array(slots))
    assert [twin(slot, size=size, name="test", seed=seed, epoch=3) for slot in slots] == elements.tolist()


def test_it_never_changes():
    """Golden values: a saved position means nothing if these change; another algorithm needs another name."""
    assert ORDER == "augend.order/1"
    assert [8, 7, 4, 6, 5, 0, 9, 3, 2, 1] == Permutation(10, name=ORDER, seed=0, epoch=0).at(np.arange(10)).tolist()
    large = Permutation(10**10, name=ORDER, seed=-7, epoch=11)
    assert [8588704530, 180348240, 6517103294] == large.at(np.array([0, 10**9, 10**10 - 1])).tolist()


def test_ten_billion_rows_take_no_memory():
    """Any part of an order of 10^10 rows is found at once, and back again."""
    order = ShuffledOrder(10**10, shard_size=1, seed=0, epoch=0)
    rows = order.rows_at(np.arange(9 * 10**9, 9 * 10**9 + 1000))
    assert 1000 == len(set(rows.tolist()))
    assert 0 <= rows.min() < rows.max() < 10**10
    permutation = Permutation(10**10, name=ORDER, seed=0, epoch=0)
    assert 9 * 10**9 == permutation.slot_of(int(rows[0]))


@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_a_handful_of_rows_is_near_uniform(size):
    """Chi-square over all size! orders for 2,400 seeds: within four standard deviations of its mean."""
    draws = 2400
    orders = Counter(
        tuple(Permutation(size, name=ORDER, seed=seed, epoch=0).at(np.arange(size)).tolist()) for seed in range(draws)
    )
    cells = math.factorial(size)
    expected = draws / cells
    statistic = sum((count - expected) ** 2 for count in orders.values()) / expected
    statistic += (cells - len(orders)) * expected
    freedom = cells - 1  # mean of chi-square, whose variance is twice that
    assert abs(statistic - freedom) <= 4 * math.sqrt(2 * freedom)


@pytest.mark.parametrize("rows", [7, 300])
def test_every_row_comes_first_equally_often(rows):
    """Chi-square of the first row over epochs, with and without a table and with a short last shard."""
    draws = 20 * rows
    first = Counter(
        int(ShuffledOrder(rows, shard_size=2, seed=1, epoch=epoch).rows_at(np.zeros(1, dtype=np.int64))[0]) // 2
        for epoch in range(draws)
    )
    cells = -(-rows // 2)
    expected = draws / cells
    statistic = sum((first[cell] - expected) ** 2 for cell in range(cells)) / expected
    assert abs(statistic - (cells - 1)) <= 4 * math.sqrt(2 * (cells - 1))


def test_epochs_seeds_and_names_have_their_own_orders():
    """Nobody has to announce an epoch: the orders of 40 (name, seed, epoch) all differ."""
    orders = {
        tuple(Permutation(100, name=name, seed=seed, epoch=epoch).at(np.arange(100)).tolist())
        for name in ("a", "b")
        for seed in (-1, 0, 1, 2**64)
        for epoch in range(5)
    }
    assert 40 == len(orders)


@given(rows=st.integers(1, 400), shard_size=st.integers(1, 450), seed=SEEDS, epoch=st.integers(0, 9))
def test_shards_stay_whole_and_every_row_comes_once(rows, shard_size, seed, epoch):
    """Shards of consecutive rows follow each other whole, the short last one too, wherever it lands."""
    order = ShuffledOrder(rows, shard_size=shard_size, seed=seed, epoch=epoch)
    visited = order.rows_at(np.arange(rows)).tolist()
    assert list(range(rows)) == sorted(visited)
    starts = [position for position, row in enumerate(visited) if row % shard_size == 0]
    for start, end in zip(starts, [*starts[1:], rows], strict=True):
        whole = range(visited[start], min(visited[start] + shard_size, rows))
        assert list(whole) == visited[start:end]
    # any positions in any order are found alone as well
    assert visited[::-1] == order.rows_at(np.arange(rows)[::-1]).tolist()


def test_the_short_shard_is_shuffled_like_the_others():
    """Over epochs the short last shard lands at every slot."""
    slots = set()
    for epoch in range(60):
        visited = ShuffledOrder(7, shard_size=2, seed=0, epoch=epoch).rows_at(np.arange(7)).tolist()
        slots.add(visited.index(6))
    assert {0, 2, 4, 6} == slots


def test_a_given_order_is_the_identity():
    """Without a shuffle, position and row are the same."""
    assert [5, 0] == GivenOrder().rows_at(np.array([5, 0])).tolist()
