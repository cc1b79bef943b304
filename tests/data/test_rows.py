"""Where rows come from: each accepted kind gives the same rows, and everything else is refused by name."""

from __future__ import annotations

import pickle
import random
import sys
import tempfile

import datasets
import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset

import augend
from augend.data._rows import adapt
from augend.errors import SplitError

X = torch.arange(12.0).reshape(6, 2)
Y = torch.arange(6)


class Pairs(Dataset):
    """The same rows as a map-style dataset."""

    def __len__(self):
        return 6

    def __getitem__(self, index):
        return {"x": X[index], "y": Y[index]}


class Together(Pairs):
    """The same, with torch's way to fetch many rows at once; says how many."""

    def __init__(self):
        self.calls = []

    def __getitems__(self, indices):
        self.calls.append(list(indices))
        return [self[index] for index in indices]


class Noise(Dataset):
    """Rows that draw from every generator, as augmentations do."""

    def __len__(self):
        return 7

    def __getitem__(self, index):
        numbers = torch.rand(()), random.random(), np.random.rand()  # noqa: NPY002, S311 - as users do
        return {"row": index, **{str(key): float(number) for key, number in enumerate(numbers)}}


def seen(rows, **options):
    """All micro-batches of one epoch in the given order of the rows."""
    data = augend.Batches(rows, batch_size=4, microbatch_size=3, shuffle=False, epochs=1, **options)
    return [microbatch for batch in data for microbatch in batch]


def mapped(tmp_path, array, **options):
    """An array in a file, mapped read-only."""
    np.save(tmp_path / "rows.npy", array, **options)
    return np.load(tmp_path / "rows.npy", mmap_mode="r")


KINDS = {
    "mapping of tensors": lambda: {"x": X, "y": Y},
    "mapping of arrays": lambda: {"x": X.numpy(), "y": Y.numpy()},
    "mapping of both": lambda: {"x": X, "y": Y.numpy()[::1]},
    "dataset": Pairs,
    "dataset of many at once": Together,
    "list of dicts": lambda: [{"x": X[index], "y": Y[index]} for index in range(6)],
    "subset": lambda: Subset(Pairs(), range(6)),
    "Hugging Face": lambda: datasets.Dataset.from_dict({"x": X.tolist(), "y": Y.tolist()}).with_format("torch"),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed_random", [True, False])
def test_every_kind_gives_the_same_rows(kind, seed_random):
    """Keys, values and dtypes do not depend on what holds the rows, nor on whether rows are seeded one by one."""
    microbatches = seen(KINDS[kind](), seed_random=seed_random)
    assert [3, 1, 2] == [microbatch.real_rows for microbatch in microbatches]
    for microbatch in microbatches:
        assert {"x", "y"} == set(microbatch)
        assert torch.int64 == microbatch["y"].dtype
    assert torch.equal(X, torch.cat([microbatch["x"] for microbatch in microbatches]))
    assert torch.equal(Y, torch.cat([microbatch["y"] for microbatch in microbatches]))


@pytest.mark.parametrize("rows", [(X, Y), (X.numpy(), Y), TensorDataset(X, Y), list(zip(X, Y, strict=True))])
def test_tuples_have_numbers_for_keys(rows):
    """Columns or rows without names are found at 0, 1, ..."""
    microbatches = seen(rows)
    assert [[0, 1]] * 3 == [list(microbatch) for microbatch in microbatches]
    assert torch.equal(X, torch.cat([microbatch[0] for microbatch in microbatches]))
    assert torch.equal(Y, torch.cat([microbatch[1] for microbatch in microbatches]))


@pytest.mark.parametrize("rows", [X, X.numpy(), list(X), range(6)])
def test_a_single_value_is_found_at_0(rows):
    """One column, or rows that are one value each, have the key 0."""
    microbatches = seen(rows)
    assert [[0]] * 3 == [list(microbatch) for microbatch in microbatches]
    expected = Y if isinstance(rows, range) else X
    assert torch.equal(expected, torch.cat([microbatch[0] for microbatch in microbatches]))


def test_a_microbatch_says_what_it_is():
    """A micro-batch is a mapping of keys, and shows its place and not its contents."""
    microbatch = seen({"x": X})[1]
    assert 1 == len(microbatch)
    assert "Microbatch(step=0, first_row=3, real_rows=1, keys=['x'])" == repr(microbatch)


def test_memory_maps_are_mapped_not_read(tmp_path):
    """Rows of a file of 10^10 rows, far larger than memory, are read alone; read-only maps do not make torch warn."""
    path = tmp_path / "sparse"
    with path.open("wb") as file:
        file.truncate(10**10)
        file.seek(10**10 - 1)
        file.write(b"\x07")
    rows = np.memmap(path, mode="r", dtype=np.uint8)
    data = augend.Batches({"byte": rows}, batch_size=2**20, microbatch_size=3)
    microbatch = next(iter(next(iter(data))))
    assert [0, 0, 0] == microbatch["byte"].tolist()
    microbatch["byte"][0] = 1  # a copy: writable
    assert 0 == rows[int(next(iter(data)).indices[0])]
    last = augend.Batches(rows, batch_size=2, microbatch_size=2, shuffle=False, epochs=1)
    last.load_state_dict({**last.state_dict(), "step": last.steps_per_epoch - 1})
    assert [[0, 7]] == [microbatch[0].tolist() for microbatch in next(iter(last))]


@pytest.mark.parametrize("order", ["C", "F"])
def test_memory_maps_go_to_other_processes_by_name(tmp_path, order):
    """What is pickled for a worker is the way to the file, and the rows found there are the same."""
    array = np.asarray(np.arange(40_000).reshape(20_000, 2), order=order)
    sent = pickle.dumps(adapt(mapped(tmp_path, array)))
    assert len(sent) < 1000
    again = pickle.loads(sent)  # noqa: S301 - our own bytes
    assert torch.equal(torch.from_numpy(array[[19_999, 5]]), again.collated(np.array([19_999, 5])))


def test_views_of_memory_maps_and_plain_columns_are_pickled_whole(tmp_path):
    """A view has lost its place in the file, and a map of an open file its name: their contents go along."""
    array = np.arange(30)
    view = mapped(tmp_path, array)[10:20]
    with tempfile.TemporaryFile() as file:
        file.write(bytes(range(30)))
        file.flush()
        nameless = np.memmap(file, mode="r", dtype=np.uint8)
    for rows in (view, nameless, array, torch.arange(30)):
        source = adapt(rows)
        again = pickle.loads(pickle.dumps(source))  # noqa: S301 - our own bytes
        assert torch.equal(source.collated(np.arange(10)), again.collated(np.arange(10)))


@pytest.mark.parametrize("rows", [X, {"x": X, "y": Y.numpy()}, (X, Y), Pairs()])
def test_a_collate_fn_gets_a_list_of_rows(rows):
    """With a collate_fn of the user's, rows of every kind come as torch's DataLoader would bring them."""
    lists = []

    def collate(part):
        lists.append(part)
        return {"number": torch.tensor(len(part))}

    microbatches = seen(rows, collate_fn=collate)
    assert [3, 1, 2] == [len(part) for part in lists] == [int(microbatch["number"]) for microbatch in microbatches]
    first = lists[2][1]
    x = first if isinstance(rows, torch.Tensor) else first[0] if isinstance(rows, tuple) else first["x"]
    assert torch.equal(X[5], x)


def test_many_at_once_only_where_nothing_is_seeded():
    """A dataset that can fetch many rows at once is asked for them if rows need not be seeded one by one."""
    rows = Together()
    seen(rows)
    assert [] == rows.calls
    seen(rows, seed_random=False)
    assert [[0, 1, 2], [3], [4, 5]] == rows.calls


def test_hugging_face_rows_are_fetched_at_once_unless_transformed(monkeypatch):
    """Without a transform of the user's nothing can be drawn, and rows come in one call; with one they come seeded."""
    rows = datasets.Dataset.from_dict({"y": list(range(6))})
    calls = []
    many = datasets.Dataset.__getitems__
    monkeypatch.setattr(datasets.Dataset, "__getitems__", lambda self, keys: calls.append(keys) or many(self, keys))
    assert [[0, 1, 2], [3], [4, 5]] == [microbatch["y"].tolist() for microbatch in seen(rows)]
    assert [[0, 1, 2], [3], [4, 5]] == calls
    noisy = rows.with_transform(lambda part: {"z": [y + torch.rand(()).item() for y in part["y"]]})
    first = torch.cat([microbatch["z"] for microbatch in seen(noisy)])
    assert 3 == len(calls)
    (whole,) = augend.Batches(noisy, batch_size=6, microbatch_size=1, epochs=1)
    again = torch.cat([microbatch["z"] for microbatch in whole])
    assert set(first.tolist()) == set(again.tolist())


def noise(rows=None, *, batch_size, microbatch_size, **options):
    """What each row drew in each epoch, by row."""
    data = augend.Batches(rows or Noise(), batch_size=batch_size, microbatch_size=microbatch_size, epochs=2, **options)
    drawn = {}
    for batch in data:
        for microbatch in batch:
            columns = [microbatch[key].tolist() for key in ("row", "0", "1", "2")]
            drawn |= {(batch.epoch, row): tuple(numbers) for row, *numbers in zip(*columns, strict=True)}
    return drawn


def test_augmentation_belongs_to_the_row_and_the_epoch():
    """L: what a row draws depends on (seed, epoch, row): not on the batch, the cut, or what was drawn before."""
    expected = noise(batch_size=3, microbatch_size=1)
    assert 14 == len(set(expected.values()))
    torch.manual_seed(5)
    assert expected == noise(batch_size=7, microbatch_size=4)
    assert expected == noise(batch_size=3, microbatch_size=2)
    assert set(expected.values()).isdisjoint(noise(batch_size=3, microbatch_size=1, seed=1).values())


def test_a_random_collate_fn_depends_on_its_micro_batch_alone():
    """L: a collation that draws (masking, say) is seeded by (seed, epoch, step, first row)."""

    def collate(rows):
        return {"noise": torch.rand(len(rows))}

    first = [microbatch["noise"].tolist() for microbatch in seen(X, collate_fn=collate)]
    torch.manual_seed(5)
    again = [microbatch["noise"].tolist() for microbatch in seen(Pairs(), collate_fn=collate)]
    assert first == again
    assert 6 == len({number for part in first for number in part})


def test_without_seeding_nothing_is_seeded_and_fetching_draws_nothing():
    """seed_random=False leaves the generators to the user: neither the loader nor the order draws from them."""
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    first = torch.rand(1)
    seen(X, seed_random=False)
    seen(Pairs(), seed_random=False, collate_fn=lambda rows: torch.stack([row["x"] for row in rows]))
    assert torch.equal(expected, torch.cat([first, torch.rand(1)]))


class Stream(IterableDataset):
    """A dataset without numbers for its rows."""

    def __iter__(self):
        return iter(range(3))


class Endless(Dataset):
    """A map-style dataset that forgot its length."""

    def __getitem__(self, index):
        return index


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (Stream(), "Stream is a stream; write it to a file or a list once and pass a map-style dataset"),
        (datasets.Dataset.from_dict({"x": [1]}).to_iterable_dataset(), "IterableDataset is a stream"),
        (Endless(), r"with len\(\) and \[\]; got Endless; give the dataset __len__ and __getitem__"),
        (iter([1, 2]), "got list_iterator"),
        ("text", "got str"),
        (b"bytes", "got bytes"),
        (3, "got int"),
        ({}, "a mapping without columns"),
        ({"x": X, "y": Y[:5]}, "'x' has 6 and 'y' has 5; cut or complete one of them"),
        ((X, Y[:5]), "0 has 6 and 1 has 5"),
        ({"x": X, "name": ["a"] * 6}, "column 'name' must be a tensor or an array; got list"),
        (datasets.DatasetDict(train=datasets.Dataset.from_dict({"x": [1]})), "column 'train' must be .*got Dataset"),
        ({"x": torch.tensor(1.0)}, "column 'x' is a single number; its first dimension must count the rows"),
        (np.array(["a", "b"]), "column 'rows' has dtype <U1, of which torch can make no tensor"),
        ({"x": np.zeros(3, dtype=">f4")}, "column 'x' has dtype >f4"),
        (torch.zeros(0, 3), "rows must hold at least one row; this Tensor is empty"),
        ([], "this list is empty"),
    ],
)
def test_what_cannot_be_numbered_is_refused(rows, message):
    """Streams, single numbers, text and columns that do not fit: the message names the column and the remedy."""
    with pytest.raises(SplitError, match=message):
        augend.Batches(rows, batch_size=1, microbatch_size=1)


def test_datasets_need_not_be_installed(monkeypatch):
    """A program that never imported `datasets` has none of its datasets, and streams are refused all the same."""
    monkeypatch.delitem(sys.modules, "datasets")
    assert 3 == len(seen(Pairs()))
    with pytest.raises(SplitError, match="is a stream"):
        seen(Stream())
