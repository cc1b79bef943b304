"""The split: exact sizes, disjoint, the same for everybody, with a recipe that says what was drawn."""

from __future__ import annotations

import copy
import hashlib
import pickle
import random
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import augend
from augend.errors import ContractError, SplitError


def rows_of(part):
    """All rows of a part of a split of a tensor."""
    return [int(row) for row in part]


@given(
    rows=st.integers(2, 500),
    fraction=st.fractions(Fraction(1, 100), Fraction(99, 100), max_denominator=1000),
    seed=st.integers(-(2**80), 2**80),
)
def test_parts_are_exact_disjoint_and_ascending(rows, fraction, seed):
    """Validation has round(N * fraction) rows, both parts keep the order, and together they are all rows once."""
    held_out = round(rows * fraction)
    if not 0 < held_out < rows:
        with pytest.raises(SplitError, match="both need at least one row"):
            augend.split(torch.arange(rows), fraction=fraction, seed=seed)
        return
    train, validation = augend.split(torch.arange(rows), fraction=fraction, seed=seed)
    assert held_out == len(validation)
    assert rows - held_out == len(train)
    assert sorted(rows_of(train)) == rows_of(train)
    assert sorted(rows_of(validation)) == rows_of(validation)
    assert list(range(rows)) == sorted(rows_of(train) + rows_of(validation))


@pytest.mark.parametrize(
    "fraction", [0.05, "1/20", "0.05", " 5e-2", Fraction(1, 20), Decimal("0.05"), np.float64(0.05)]
)
def test_a_fraction_means_the_number_written(fraction):
    """0.05 is 1/20 however it is written: 5 of 100 rows, the same ones."""
    train, validation = augend.split(torch.arange(100), fraction=fraction)
    assert 5 == len(validation)
    assert "1/20" == validation.state["fraction"]
    assert augend.split(torch.arange(100), fraction="1/20")[0].state == train.state


def test_ten_tenths_are_whole():
    """0.1 of 10 million rows is a million exactly, where binary floats of a sum would miss it."""
    assert 10**6 == len(augend.split(torch.arange(10**7), fraction=0.1)[1])


@pytest.mark.parametrize(
    "fraction", [0, 1, 0.0, 1.0, -0.1, 1.5, "2", True, None, "half", "1/0", float("nan"), float("inf")]
)
def test_what_is_no_fraction_is_refused(fraction):
    """Anything but a number strictly between 0 and 1 is an error that shows the value and how to write it."""
    with pytest.raises(SplitError, match=r"fraction must be .*got .*write it as 0\.05"):
        augend.split(torch.arange(100), fraction=fraction)


@pytest.mark.parametrize("fraction", [Decimal("NaN"), Decimal("Infinity")])
def test_what_is_no_decimal_is_refused(fraction):
    """Decimals that are no numbers are refused like floats."""
    with pytest.raises(SplitError, match="fraction must be a number"):
        augend.split(torch.arange(100), fraction=fraction)


def test_a_seed_is_an_integer():
    """A seed of another type is an error that names it."""
    with pytest.raises(SplitError, match=r"seed must be a whole number; got 0\.5"):
        augend.split(torch.arange(100), fraction=0.5, seed=0.5)


def test_neither_ranks_nor_generators_matter(monkeypatch):
    """N1: four ranks with their own random states, and any amount drawn before, hold out the same rows."""
    drawn = set()
    for rank in range(4):
        monkeypatch.setattr("augend.data._feed.rank_and_world", lambda mesh=None, rank=rank: (rank, 4))
        torch.manual_seed(rank)
        random.seed(rank)
        drawn.add(tuple(rows_of(augend.split(torch.arange(100), fraction=0.2)[1])))
    assert 1 == len(drawn)


def test_the_recipe_says_what_was_drawn():
    """N2: algorithm, N, exact fraction, seed and a digest of the rows: golden, so no release can draw other rows."""
    train, validation = augend.split(torch.arange(10), fraction=0.3, seed=-1)
    assert [0, 5, 6] == rows_of(validation)
    expected = {"algorithm": "augend.split/1", "rows": 10, "fraction": "3/10", "seed": -1, "within": ""}
    digest = hashlib.sha256(b"".join(row.to_bytes(8, "little") for row in (0, 5, 6))).hexdigest()
    assert {**expected, "part": "validation", "digest": digest} == validation.state
    assert {**expected, "part": "train", "digest": digest} == train.state


def test_a_run_does_not_go_on_with_another_split():
    """N2: the recipe is part of the contract of Batches; a state of another seed is refused, its own is taken."""

    def data(seed):
        train, _ = augend.split(torch.arange(100), fraction=0.2, seed=seed)
        return augend.Batches(train, batch_size=4, microbatch_size=2)

    state = data(0).state_dict()
    data(0).load_state_dict(copy.deepcopy(state))
    with pytest.raises(
        ContractError, match=r"split='algorithm=augend\.split/1 rows=100 fraction=1/5 seed=0 part=train"
    ):
        data(1).load_state_dict(state)


def test_a_part_can_be_split_again():
    """Three parts of one whole are disjoint and complete, and the recipe of the inner split names the outer."""
    rest, test = augend.split(torch.arange(60), fraction="1/6")
    train, validation = augend.split(rest, fraction="1/5", seed=1)
    assert [40, 10, 10] == [len(train), len(validation), len(test)]
    assert list(range(60)) == sorted(rows_of(train) + rows_of(validation) + rows_of(test))
    assert rest.split == train.state["within"]
    assert "part=train" in rest.split


def test_parts_fetch_lazily_and_at_once():
    """A part of columns gives rows as dicts, one by one or many at once, and collated columns to Batches."""
    columns = {"x": torch.arange(20), "y": np.arange(40).reshape(20, 2)}
    train, validation = augend.split(columns, fraction=0.25)
    row = train[-1]
    assert {"x", "y"} == set(row)
    assert [2 * int(row["x"]), 2 * int(row["x"]) + 1] == row["y"].tolist()
    assert [int(train[0]["x"]), int(train[2]["x"])] == [int(one["x"]) for one in train.__getitems__([0, 2])]
    with pytest.raises(IndexError):
        validation[5]
    data = augend.Batches(validation, batch_size=5, microbatch_size=5, epochs=1)
    (microbatch,) = next(iter(data))
    assert sorted(int(one["x"]) for one in validation) == sorted(microbatch["x"].tolist())
    assert torch.equal(2 * microbatch["x"], microbatch["y"][:, 0])


def test_parts_are_ordinary_datasets():
    """torch's own DataLoader takes a part, of any kind of rows, and a pickled part is the same part."""
    train, _ = augend.split([{"n": number} for number in range(8)], fraction=0.25)
    numbers = [row["n"] for row in train]
    loaded = [number for batch in DataLoader(train, batch_size=4) for number in batch["n"].tolist()]
    assert numbers == loaded
    assert numbers == [row["n"] for row in pickle.loads(pickle.dumps(train))]  # noqa: S301 - our own bytes
