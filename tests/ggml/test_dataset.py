"""A data set shuffles, batches and divides as ggml's, and without compat holds on to every row."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from augend.errors import ContractError, SplitError
from augend.ggml._dataset import Dataset
from augend.ggml._limits import Limits
from augend.ggml._random import Random

GOLDEN = Path(__file__).parents[1] / "golden" / "ggml"
BATCHES = json.loads((GOLDEN / "batches.json").read_text())["cases"]
SEQUENCES = json.loads((GOLDEN / "shuffle.json").read_text())["sequences"]
COMPATS = (None, "ggml", "prism")
# By default a short last shard is shuffled, too, so there only whole shards have ggml's permutations.
GGML_CASES = [(case, "ggml") for case in BATCHES]
GGML_CASES += [(case, None) for case in BATCHES if case["ndata"] % case["ndata_shard"] == 0]
GGML_SEQUENCES = [(case, "ggml") for case in SEQUENCES]
GGML_SEQUENCES += [(case, None) for case in SEQUENCES if case["ndata"] % case["ndata_shard"] == 0]
SIZES = st.tuples(st.integers(1, 40), st.integers(1, 6)).filter(lambda sizes: sizes[1] <= sizes[0])


def numbered(count: int, shard: int, compat=None) -> Dataset:
    """Return rows [i, i + 0.5] with labels 100 + i, as the oracle's."""
    rows = torch.arange(count)
    return Dataset(torch.stack([rows, rows + 0.5], dim=1), rows + 100, shard=shard, compat=compat)


def order(dataset: Dataset, rows: int) -> list[int]:
    """Return the rows of all batches."""
    return [int(row) for index in range(dataset.batches(rows)) for row in dataset.batch(rows, index)[0][:, 0]]


@pytest.mark.parametrize(("case", "compat"), GGML_CASES)
def test_batches_of_ggml(case: dict, compat) -> None:
    """After a shuffle from a fresh generator every batch has ggml's very data and labels."""
    dataset = numbered(case["ndata"], case["ndata_shard"], compat)
    dataset.shuffle(Random())
    assert tuple(case["permutation"]) == dataset.permutation
    assert len(case["batches"]) == dataset.batches(case["ndata_batch"])
    for index, batch in enumerate(case["batches"]):
        data, labels = dataset.batch(case["ndata_batch"], index)
        assert batch["data"] == data.reshape(-1).tolist()
        assert batch["labels"] == labels.reshape(-1).tolist()


@pytest.mark.parametrize(("case", "compat"), GGML_SEQUENCES)
def test_sequences_of_shuffles(case: dict, compat) -> None:
    """Shuffles of prefixes compose on the kept permutation, and draw as many words, as ggml's do."""
    dataset, random = numbered(case["ndata"], case["ndata_shard"], compat), Random()
    steps = zip(case["idata_sequence"], case["permutation_after_each"], case["next_rng_u32"], strict=True)
    for rows, permutation, word in steps:
        dataset.shuffle(random, None if rows < 0 else rows)
        peek = Random()
        peek.load_state_dict(random.state_dict())
        assert tuple(permutation) == dataset.permutation
        assert word == peek.next()


@given(sizes=SIZES, shards=st.integers(1, 5), shuffles=st.integers(0, 3), seed=st.integers(0, 1000))
def test_every_row_is_in_one_batch(sizes: tuple[int, int], shards: int, shuffles: int, seed: int) -> None:
    """By default the batches are a permutation of all rows, also where shards and batches do not divide them."""
    count, shard = sizes
    dataset, random = numbered(count, shard), Random(seed)
    for _ in range(shuffles):
        dataset.shuffle(random)
    rows = order(dataset, shards * shard)
    assert list(range(count)) == sorted(rows)
    expected = [
        row for one in dataset.permutation for row in range(one * shard, min((one + 1) * shard, count))
    ]  # shards stay together
    assert expected == rows
    assert -(-count // (shards * shard)) == dataset.batches(shards * shard)


@given(sizes=SIZES, shards=st.integers(1, 5), compat=st.sampled_from(["ggml", "prism"]), seed=st.integers(0, 1000))
def test_with_compat_what_is_left_over_is_never_seen(sizes: tuple[int, int], shards: int, compat, seed: int) -> None:
    """Only complete shards are shuffled, and only complete batches exist."""
    count, shard = sizes
    dataset = numbered(count, shard, compat)
    dataset.shuffle(Random(seed))
    assert count // shard == dataset.shards
    assert list(range(count // shard)) == sorted(dataset.permutation)
    assert (count // shard) // shards == dataset.batches(shards * shard)
    assert set(order(dataset, shards * shard)) <= set(range(count // shard * shard))


@given(sizes=SIZES, rows=st.integers(0, 40), seed=st.integers(0, 1000), compat=st.sampled_from(COMPATS))
def test_a_prefix_keeps_its_rows(sizes: tuple[int, int], rows: int, seed: int, compat) -> None:
    """A shuffle of the first rows moves no row out of them, wherever a short shard is."""
    count, shard = sizes
    dataset, random = numbered(count, shard, compat), Random(seed)
    dataset.shuffle(random)
    before, rows = order(dataset, shard), min(rows, count) // shard * shard
    dataset.shuffle(random, rows)
    after = order(dataset, shard)
    assert set(before[:rows]) == set(after[:rows])
    assert before[rows:] == after[rows:]


def test_prism_draws_once_for_each_shard() -> None:
    """With "prism" the permutation is that of the one-by-one shuffle, not of ggml's."""
    permutations = {}
    for compat in COMPATS:
        dataset = numbered(12, 1, compat)
        dataset.shuffle(Random())
        permutations[compat] = dataset.permutation
    expected = list(range(12))
    Random().shuffle_one_by_one(expected)
    assert tuple(expected) == permutations["prism"]
    assert permutations["ggml"] == permutations[None] != permutations["prism"]


@given(sizes=SIZES, share=st.integers(0, 40), seeds=st.lists(st.integers(0, 1000), min_size=2, max_size=4))
def test_a_second_division_is_the_first(sizes: tuple[int, int], share: int, seeds: list[int]) -> None:
    """Whatever was shuffled in between, and whatever is drawn, the same rows are held out; each draws as much."""
    count, shard = sizes
    dataset, rows = numbered(count, shard), min(share, count) // shard * shard
    chosen = []
    for seed in seeds:
        random, other = Random(seed), Random(seed)
        dataset.divide(random, rows)
        other.shuffle(list(range(dataset.shards)))
        assert other.next() == random.next()
        chosen.append(order(dataset, shard))
        dataset.shuffle(random, rows)
    assert all(chosen[0] == one for one in chosen)


@given(sizes=SIZES, share=st.integers(0, 40), seed=st.integers(0, 1000))
def test_a_division_cuts_no_shard(sizes: tuple[int, int], share: int, seed: int) -> None:
    """No shard is trained on and held out at once: with a short one among them, that one is held out."""
    count, shard = sizes
    dataset, rows = numbered(count, shard), min(share, count) // shard * shard
    dataset.divide(Random(seed), rows)
    chosen = order(dataset, shard)
    assert set() == {row // shard for row in chosen[:rows]} & {row // shard for row in chosen[rows:]}


def test_a_division_is_a_full_shuffle() -> None:
    """Without a short shard the rows chosen are the first of ggml's own first shuffle."""
    dataset, expected = numbered(12, 2), numbered(12, 2, "ggml")
    dataset.shuffle(Random(7))
    dataset.divide(Random(), 8)
    expected.shuffle(Random())
    assert expected.permutation == dataset.permutation


def test_another_division_must_be_asked_for() -> None:
    """Another number of rows to train on is refused, with nothing drawn, until the division is forgotten."""
    dataset, random = numbered(12, 2), Random()
    dataset.divide(Random(), 8)
    with pytest.raises(SplitError, match=r"8 rows .* now 10 .*forget_division"):
        dataset.divide(random, 10)
    assert Random().next() == random.next()
    dataset.forget_division()
    dataset.divide(Random(3), 10)
    expected = list(range(6))
    Random(3).shuffle(expected)
    assert tuple(expected) == dataset.permutation


def test_ggml_divides_without_memory() -> None:
    """With compat a division is a shuffle of the present permutation, so a second one mixes the rows."""
    dataset, expected = numbered(12, 1, "ggml"), numbered(12, 1, "ggml")
    for _ in range(2):
        dataset.divide(Random(), 8)
        expected.shuffle(Random())
    assert expected.permutation == dataset.permutation
    dataset.divide(Random(), 4)


@given(sizes=SIZES, divided=st.booleans(), seed=st.integers(0, 1000))
def test_a_saved_state_is_taken_back(sizes: tuple[int, int], divided: bool, seed: int) -> None:
    """Permutation and division of a loaded data set are those of the saved one."""
    count, shard = sizes
    dataset, other = numbered(count, shard), numbered(count, shard)
    if divided:
        dataset.divide(Random(seed), 0)
    dataset.shuffle(Random(seed + 1))
    other.divide(Random(5), shard)
    other.batch(shard, 0)
    other.load_state_dict(dataset.state_dict())
    assert order(dataset, shard) == order(other, shard)
    for one in (dataset, other):
        one.divide(Random(9), 0)
    assert dataset.permutation == other.permutation


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "version 2; here it is 1"),
        ({"more": 1}, "with the keys"),
        ({"count": 13}, "count 13; here it is 12"),
        ({"label_width": 0}, "label_width 0"),
        ({"permutation": [0, 1, 2, 3, 4, 5]}, "int64"),
        ({"permutation": torch.arange(6.0)}, "int64"),
        ({"permutation": torch.arange(5)}, "6 shards, each once"),
        ({"permutation": torch.zeros(6, dtype=torch.int64)}, "6 shards, each once"),
        ({"divided": torch.zeros(6, dtype=torch.int64)}, "6 shards, each once"),
        ({"divided": torch.zeros(0, dtype=torch.int64)}, "6 shards, each once"),
        ({"divided": None}, "int64"),
        ({"divided_rows": 3}, "whole shards"),
        ({"divided_rows": 14}, "from 0 to 12"),
        ({"divided_rows": "4"}, "from 0 to 12"),
    ],
)
def test_a_damaged_state_changes_nothing(change: dict, message: str) -> None:
    """A state of another data set, or none at all, is refused."""
    dataset = numbered(12, 2)
    dataset.divide(Random(), 8)
    before = dataset.permutation
    with pytest.raises(ContractError, match=message):
        dataset.load_state_dict({**dataset.state_dict(), **change})
    dataset.shuffle(Random())
    dataset.divide(Random(), 8)
    assert before == dataset.permutation


@pytest.mark.parametrize(
    "data",
    [
        torch.arange(6).reshape(3, 2),
        np.arange(6, dtype=np.float64).reshape(3, 2),
        [[0, 1], [2, 3], [4, 5]],
        torch.arange(6.0, requires_grad=True).reshape(3, 2, 1),
    ],
    ids=["tensor", "numpy", "list", "3-d"],
)
def test_data_are_copied_as_float32(data) -> None:
    """Anything of numbers becomes rows of float32 of its own; writing to them changes the batches, not the source."""
    dataset = Dataset(data)
    assert torch.float32 == dataset.data.dtype
    assert not dataset.data.requires_grad
    assert [[0, 1], [2, 3], [4, 5]] == dataset.data.tolist()
    assert (3, 2, 0, 1, 3) == (dataset.count, dataset.width, dataset.label_width, dataset.shard, dataset.shards)
    assert dataset.labels is None
    dataset.data[0, 0] = 9
    batch, labels = dataset.batch(2, 0)
    assert [[9, 1], [2, 3]] == batch.tolist()
    assert labels is None
    assert 0 == Dataset(data).data[0, 0].item()


def test_float32_data_are_copied_too() -> None:
    """The data set keeps rows of its own also where no conversion is needed; a batch is a copy as well."""
    data = torch.zeros(2, 2)
    dataset = Dataset(data, data)
    data.fill_(1)
    dataset.batch(1, 0)[0].fill_(2)
    assert [[0, 0], [0, 0]] == dataset.data.tolist() == dataset.labels.tolist()


def test_labels_of_no_width_are_none() -> None:
    """Labels without elements are ggml's way to say that there are none."""
    dataset = Dataset([1, 2], torch.zeros(2, 0))
    assert dataset.labels is None
    assert 0 == dataset.label_width
    assert dataset.batch(2, 0)[1] is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"data": []}, r"at least one row; got torch.float64 \[0\]"),
        ({"data": 1.0}, "at least one row"),
        ({"data": torch.zeros(3, 0)}, "at least one element"),
        ({"data": torch.zeros(3, dtype=torch.complex64)}, "real numbers"),
        ({"data": "text"}, "data must be real numbers"),
        ({"data": [[1, 2], [3]]}, "data must be real numbers"),
        ({"data": [1, 2], "labels": [None, 1]}, "labels must be real numbers"),
        ({"data": [1, 2], "labels": [1]}, "as many rows; got 2 and 1"),
        ({"data": [1, 2], "shard": 0}, "from 1 to 2; got 0"),
        ({"data": [1, 2], "shard": 3}, "from 1 to 2; got 3"),
        ({"data": [1, 2], "shard": 3, "compat": "prism"}, "from 1 to 2; got 3"),
        ({"data": [1, 2], "shard": 1.0}, "whole number"),
        ({"data": [1, 2], "shard": True}, "whole number"),
        ({"data": [1, 2], "compat": "rust"}, "compat"),
        ({"data": torch.zeros(1, 65), "limits": Limits.prism()}, r"data may be \[4096, 64\] at most; got \[1, 65\]"),
        ({"data": torch.zeros(4097, 1), "limits": Limits.prism()}, r"got \[4097, 1\]"),
        ({"data": [1], "labels": torch.zeros(1, 65), "limits": Limits.prism()}, r"labels may be \[4096, 64\]"),
    ],
)
def test_what_is_no_data_set(arguments: dict, message: str) -> None:
    """Data, labels and shards that do not fit are refused with what came."""
    with pytest.raises(ContractError, match=message):
        Dataset(**arguments)


def test_the_largest_of_the_rust_port_fit() -> None:
    """The bounds themselves are allowed."""
    dataset = Dataset(torch.zeros(4096, 64), torch.zeros(4096, 64), shard=4096, limits=Limits.prism(), compat="prism")
    assert (4096, 64, 64, 1) == (dataset.count, dataset.width, dataset.label_width, dataset.shards)
    assert "prism" == dataset.compat


def test_ggml_accepts_a_shard_that_is_too_large() -> None:
    """With "ggml" it leaves no shard and no batch, and reading one is an error here, not the end of the process."""
    dataset = numbered(2, 3, "ggml")
    dataset.shuffle(Random())
    assert (0, ()) == (dataset.shards, dataset.permutation)
    with pytest.raises(ContractError, match="0 batches of 3 rows"):
        dataset.batch(3, 0)


@pytest.mark.parametrize("compat", COMPATS)
def test_batches_that_do_not_exist(compat) -> None:
    """A batch beyond the end, before the start or of parts of shards is refused."""
    dataset = numbered(12, 2, compat)
    for index in (-1, 3, 0.0, True):
        with pytest.raises(ContractError, match=rf"3 batches of 4 rows, .* got {index}"):
            dataset.batch(4, index)
    for rows in (0, -2, 2.0, True):
        with pytest.raises(ContractError, match=f"got {rows}"):
            dataset.batch(rows, 0)
    with pytest.raises(ContractError, match="whole shards of 2 rows; got 3"):
        dataset.batches(3)


@pytest.mark.parametrize("compat", COMPATS)
def test_prefixes_that_do_not_exist(compat) -> None:
    """A prefix of too many rows or of parts of shards is refused, and nothing is drawn."""
    dataset, random = numbered(12, 2, compat), Random()
    for rows in (-2, 3, 14, 4.0):
        with pytest.raises(ContractError, match=f"got {rows}"):
            dataset.shuffle(random, rows)
    if compat is None:
        with pytest.raises(ContractError, match="trained on must be whole shards"):
            dataset.divide(random, 3)
    else:
        with pytest.raises(ContractError, match="whole shards"):
            numbered(11, 2, compat).shuffle(random, 11)
    assert Random().next() == random.next()
    assert tuple(range(6)) == dataset.permutation


def test_all_rows_are_whole_also_with_a_short_shard() -> None:
    """By default all rows can be named by their number, although the last shard is short."""
    dataset, expected = numbered(11, 2), list(range(6))
    dataset.shuffle(Random(), 11)
    Random().shuffle(expected)
    assert tuple(expected) == dataset.permutation
    dataset.divide(Random(1), 11)
