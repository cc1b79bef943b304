"""The deal: for worlds of 1 to 64 ranks every row once, in one cut, with no more fillers than there must be."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from augend.data._deal import Round, Rounds

ROWS, SIZES, WORLDS = st.integers(1, 300), st.integers(1, 50), st.integers(1, 64)


def all_rounds(rows, rows_done, size, world):
    """The rounds of every rank."""
    return [list(Rounds(rows, rows_done, size, rank, world)) for rank in range(world)]


def micro_batches(ranks):
    """(first row, rows) of what is not a filler, over all ranks."""
    return sorted((each.first_row, each.rows) for rounds in ranks for each in rounds if each.real_rows)


@given(rows=ROWS, done=st.integers(0, 300), size=SIZES, world=WORLDS)
def test_remaining_rows_are_dealt_once_in_the_cut_of_one_rank(rows, done, size, world):
    """The ranks together run exactly the micro-batches that one rank alone would."""
    done = min(done, rows)
    ranks = all_rounds(rows, done, size, world)
    cut = micro_batches(ranks)
    assert micro_batches(all_rounds(rows, done, size, 1)) == cut
    assert list(range(done, rows)) == [row for first, count in cut for row in range(first, first + count)]


@given(rows=ROWS, done=st.integers(0, 300), size=SIZES, world=WORLDS)
def test_rounds_are_equally_many_and_fillers_as_few_as_can_be(rows, done, size, world):
    """Every rank has the same rounds; fillers stand only in the last one, and are the batch's first micro-batch."""
    done = min(done, rows)
    ranks = all_rounds(rows, done, size, world)
    left = -(-(rows - done) // size)
    assert {-(-left // world)} == {len(rounds) for rounds in ranks}
    fillers = [(index, each) for rounds in ranks for index, each in enumerate(rounds) if not each.real_rows]
    assert -left % world == len(fillers) == Rounds(rows, done, size, 0, world).fillers
    for index, each in fillers:
        assert len(ranks[0]) - 1 == index
        assert Round(first_row=0, rows=min(size, rows), real_rows=0, rows_done=rows) == each


@given(rows=ROWS, done=st.integers(0, 300), size=SIZES, world=WORLDS)
def test_what_is_done_is_a_prefix(rows, done, size, world):
    """After each round exactly the rows below rows_done are done, on which all ranks agree; the last is the end."""
    done = min(done, rows)
    ranks = all_rounds(rows, done, size, world)
    seen = set(range(done))
    for each_rank in zip(*ranks, strict=True):
        assert 1 == len({each.rows_done for each in each_rank})
        before = len(seen)
        for each in each_rank:
            seen |= set(range(each.first_row, each.first_row + each.real_rows))
        assert set(range(each_rank[0].rows_done)) == seen
        assert len(seen) > before
    assert set(range(rows)) == seen


@given(rows=ROWS, stops=st.lists(st.tuples(WORLDS, SIZES, st.integers(0, 5)), max_size=8), world=WORLDS, size=SIZES)
def test_interrupted_and_resumed_on_other_ranks_with_another_cut(rows, stops, world, size):
    """Stop after any round and come back with any world and micro-batch size: every row is done once."""
    done, seen = 0, []
    for next_world, next_size, rounds in [*stops, (world, size, rows)]:
        ranks = all_rounds(rows, done, next_size, next_world)
        for each_rank in list(zip(*ranks, strict=True))[:rounds]:
            seen += [row for each in each_rank for row in range(each.first_row, each.first_row + each.real_rows)]
            done = each_rank[0].rows_done
    assert list(range(rows)) == sorted(seen)
    assert rows == done


def test_a_batch_on_three_ranks_by_hand():
    """12 rows by 2 on 3 ranks are 2 full rounds; 8 rows are 4 micro-batches, hence one full round and 2 fillers."""
    assert [Round(2, 2, 2, 6), Round(8, 2, 2, 12)] == list(Rounds(12, 0, 2, 1, 3))
    assert [Round(2, 2, 2, 6), Round(0, 2, 0, 8)] == list(Rounds(8, 0, 2, 1, 3))
    # J5: 4 rows done in micro-batches of 2, the rest in micro-batches of 3
    assert [Round(4, 3, 3, 7), Round(7, 1, 1, 8)] == list(Rounds(8, 4, 3, 0, 1))


def test_rounds_are_a_sequence():
    """Rounds are found one by one, from the end and by slices, without a list of them: 10^12 cost nothing."""
    rounds = Rounds(10**12, 0, 1, 0, 1)
    assert 10**12 == len(rounds)
    assert Round(10**12 - 1, 1, 1, 10**12) == rounds[-1]
    assert [rounds[3], rounds[4]] == rounds[3:5]
    with pytest.raises(IndexError):
        rounds[10**12]
