"""Padding: ragged rows on the right, everything else stacked, and every misfit named."""

from __future__ import annotations

import math
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from augend.data import pad
from augend.errors import SplitError


@given(lengths=st.lists(st.integers(0, 9), min_size=1, max_size=6))
def test_rows_are_padded_on_the_right(lengths):
    """Each row stands at the left in full, and behind it stands the number of its key."""
    rows = [
        {"tokens": torch.arange(1, length + 1), "labels": torch.arange(length, dtype=torch.int32)} for length in lengths
    ]
    batch = pad(tokens=0, labels=-100)(rows)
    assert ["tokens", "labels"] == list(batch)
    assert torch.int32 == batch["labels"].dtype
    for key, fill in (("tokens", 0), ("labels", -100)):
        assert (len(rows), max(lengths)) == tuple(batch[key].shape)
        for row, padded in zip(rows, batch[key].tolist(), strict=True):
            assert row[key].tolist() + [fill] * (max(lengths) - len(row[key])) == padded


def test_what_is_not_ragged_is_stacked():
    """Numbers, arrays, lists and tensors of one shape become a tensor with a row each; text stays a list."""
    rows = [
        {"number": 1, "weight": 0.5, "array": np.array([1, 2]), "list": [3, 4], "image": torch.ones(2, 2), "name": "a"},
        {
            "number": 2,
            "weight": 1.5,
            "array": np.array([5, 6]),
            "list": [7, 8],
            "image": torch.zeros(2, 2),
            "name": "b",
        },
    ]
    batch = pad()(rows)
    assert [1, 2] == batch["number"].tolist()
    assert [0.5, 1.5] == batch["weight"].tolist()
    assert [[1, 2], [5, 6]] == batch["array"].tolist()
    assert [[3, 4], [7, 8]] == batch["list"].tolist()
    assert (2, 2, 2) == tuple(batch["image"].shape)
    assert ["a", "b"] == batch["name"]


def test_features_of_every_position_are_padded_together():
    """Rows of [length, features] are filled up with whole positions."""
    batch = pad(x=9.0)([{"x": torch.zeros(1, 2)}, {"x": torch.zeros(3, 2)}])
    assert [[[0, 0], [9, 9], [9, 9]], [[0, 0], [0, 0], [0, 0]]] == batch["x"].tolist()


@pytest.mark.parametrize(
    "others", [[[1, 2]], [[0.5]], [[True]], [torch.ones(2, dtype=torch.int16)], [np.ones(2, "f4")]]
)
@pytest.mark.parametrize("place", [0, 1])
def test_an_empty_list_has_the_dtype_of_the_others(others, place):
    """A list without numbers has no dtype of its own, wherever in the micro-batch it stands."""
    rows = [{"x": value} for value in others]
    expected = pad(x=1)(rows)["x"]
    rows.insert(place, {"x": []})
    actual = pad(x=1)(rows)["x"]
    assert expected.dtype == actual.dtype
    assert torch.equal(torch.ones_like(expected[0]), actual[place])
    assert torch.equal(expected[0], actual[1 - place])


def test_an_empty_list_has_the_features_of_the_others():
    """No positions of two features each are filled up with whole positions."""
    assert [[[9, 9]], [[1, 2]]] == pad(x=9)([{"x": []}, {"x": [[1, 2]]}])["x"].tolist()


@pytest.mark.parametrize(("number", "dtype"), [(0, torch.int64), (0.0, torch.float64)])
def test_empty_lists_alone_have_the_dtype_of_the_number(number, dtype):
    """A micro-batch may hold nothing but empty lists; then the dtype is that of a list of such numbers."""
    assert dtype == pad(x=number)([{"x": []}, {"x": []}])["x"].dtype


@pytest.mark.parametrize(
    ("number", "values"),
    [
        (math.nan, [[0.5], [1.0, 2.0]]),
        (-math.inf, [torch.ones(1).half(), torch.ones(2).half()]),
        (0.1, [torch.ones(1), torch.ones(2)]),
        (255.0, [torch.ones(1, dtype=torch.uint8), torch.ones(2, dtype=torch.uint8)]),
        (True, [[True], [False, True]]),
    ],
)
def test_a_number_that_the_dtype_holds_is_filled_in(number, values):
    """Whole numbers written as floats, infinities, NaN, and what is rounded to the nearest float: all are held."""
    joined = pad(x=number)([{"x": value} for value in values])["x"]
    assert torch.equal(torch.isnan(torch.tensor(float(number))), torch.isnan(joined[0, 1].double()))
    assert str(torch.tensor(number).to(joined.dtype)) == str(joined[0, 1])


def test_read_only_rows_are_copied():
    """A row of a read-only array does not make torch warn, and the batch is writable."""
    array = np.arange(3)
    array.flags.writeable = False
    pad()([{"x": array}])["x"][0, 0] = 7
    assert 0 == array[0]


def test_it_can_be_pickled():
    """Workers that are spawned get it by pickle."""
    rows = [{"x": torch.ones(1)}, {"x": torch.ones(2)}]
    again = pickle.loads(pickle.dumps(pad(x=0)))  # noqa: S301 - our own bytes
    assert torch.equal(pad(x=0)(rows)["x"], again(rows)["x"])


ONE, TWO = {"x": torch.ones(1)}, {"x": torch.ones(2)}


@pytest.mark.parametrize(
    ("fill", "rows", "message"),
    [
        ({}, [ONE, TWO], r"'x' has the shapes \[1\] and \[2\] .*write pad\(x=\.\.\.\)"),
        ({"y": 0}, [ONE], r"a number for 'y', but the rows have only \['x'\]"),
        ({"x": 0}, [ONE, {"y": 1}], r"same keys; row 1 .* differs in \['x', 'y'\]"),
        ({"x": 0}, [ONE, torch.ones(1)], r"row 1 of the micro-batch is a Tensor; let the dataset return a dict"),
        (
            {"x": 0},
            [{"x": torch.ones(1, 2)}, {"x": torch.ones(1, 3)}],
            r"only the first dimension.*\[1, 2\] and \[1, 3\]",
        ),
        ({"x": 0}, [{"x": torch.tensor(1.0)}, TWO], r"only the first dimension.*\[\] and \[2\]"),
        ({"x": 0}, [{"x": [1, 2]}, {"x": [0.5]}], r"'x' has the dtypes int64 and float64 in rows 0 and 1"),
        ({}, [{"x": 1}, {"x": 2}, {"x": 0.5}], r"'x' has the dtypes int64 and float64 in rows 0 and 2"),
        ({"x": 0}, [{"x": torch.tensor([])}, {"x": torch.tensor([1])}], r"'x' has the dtypes float32 and int64"),
        ({"x": 0.5}, [{"x": [1, 2]}, {"x": [3]}], r"pad\(x=0\.5\) does not fit 'x', whose rows are int64"),
        ({"x": 0.5}, [{"x": [1, 2]}], r"pad\(x=0\.5\) does not fit 'x'"),
        ({"x": -100}, [{"x": np.ones(1, "u1")}], r"pad\(x=-100\) does not fit 'x', whose rows are uint8"),
        ({"x": math.nan}, [{"x": [1]}], r"pad\(x=nan\) does not fit"),
        ({"x": 2}, [{"x": [True]}], r"pad\(x=2\) does not fit 'x', whose rows are bool"),
        ({"x": 1e5}, [{"x": torch.ones(1).half()}], r"pad\(x=100000\.0\) does not fit 'x', whose rows are float16"),
        ({}, [{"x": object()}], "'x' holds a object, which is no tensor"),
        ({}, [{"x": [[1], [2, 3]]}], "'x' holds a list, which is no tensor"),
    ],
)
def test_what_does_not_fit_is_named(fill, rows, message):
    """A ragged key without a number, an unknown or missing key, and shapes that no padding helps: each by name."""
    with pytest.raises(SplitError, match=message):
        pad(**fill)(rows)
