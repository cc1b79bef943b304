"""Feeding: ranks, random state, workers, and a stream that is set anew where it would bring other rows."""

from __future__ import annotations

import gc
import multiprocessing
import pickle
import random
import traceback
import warnings

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, get_worker_info

import augend
from augend.data import pad
from augend.data._feed import Feed
from augend.data._fetch import Fetched, Request
from augend.errors import StateError

# forking a process with threads is deprecated from Python 3.12 on, and still what torch does on Linux
FORKS = [pytest.mark.timeout(60), pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")]


def forks(test):
    """Mark a test that starts workers: it may not hang."""
    for mark in FORKS:
        test = mark(test)
    return test


class Owner:
    """What an accumulator is to the data."""


class Noise(Dataset):
    """Ragged rows that draw from every generator, and say which process fetched them."""

    def __len__(self):
        return 11

    def __getitem__(self, index):
        numbers = [torch.rand(()).item(), random.random(), np.random.rand()]  # noqa: NPY002, S311 - as users do
        worker = get_worker_info()
        place = -1 if worker is None else worker.id
        return {"row": index, "tokens": torch.arange(index), "noise": torch.tensor(numbers), "worker": place}


def drawn():
    """One number of each global generator."""
    return torch.rand(()).item(), random.random(), np.random.rand()  # noqa: NPY002, S311 - the ones users draw from


def at_world(monkeypatch, rank, world):
    """Pretend to be one of several ranks."""
    monkeypatch.setattr("augend.data._feed.rank_and_world", lambda mesh=None: (rank, world))


def run(data, owner, steps=None):
    """Train over what is left; return what each real micro-batch was: place, rows, and what the model drew."""
    seen = []
    for batch in data:
        if batch.step == steps:
            break
        for part in batch.remaining(owner):
            if part.real_rows:
                seen.append((batch.step, part.first_row, part["row"].tolist(), part["noise"].tolist(), drawn()))
            batch.progress(owner).rows_done = part.rows_done
        batch.progress(owner).closed = True
        seen.append((batch.step, "end", drawn()))
    return seen


def noisy(**options):
    """Ragged noisy rows in batches of 5 by 2."""
    return augend.Batches(Noise(), batch_size=5, microbatch_size=2, epochs=2, collate_fn=pad(tokens=0), **options)


@forks
@pytest.mark.parametrize("prefetch_factor", [1, 3])
def test_workers_change_nothing(prefetch_factor):
    """L: rows, augmentation, padding and random state are those of the main process, in whatever worker."""
    expected = run(noisy(), Owner())
    data = noisy(num_workers=2, prefetch_factor=prefetch_factor)
    assert expected == run(data, Owner())


@forks
def test_workers_live_across_epochs_and_end_with_the_data():
    """The same two workers fetch all epochs; they end with the last batch, or with the last reference."""
    gc.collect()
    before = set(multiprocessing.active_children())
    data = noisy(num_workers=2)
    workers, alive = set(), set()
    for batch in data:
        workers |= {place for part in batch for place in part["worker"].tolist()}
        alive |= set(multiprocessing.active_children()) - before
    assert {0, 1} == workers
    assert 2 == len(alive)
    assert before == set(multiprocessing.active_children())
    data = noisy(num_workers=2)
    for batch in data:
        list(batch)
        break
    assert 2 == len(set(multiprocessing.active_children()) - before)
    gc.disable()  # references alone must do: nothing in the data waits for the collector
    try:
        del batch, data
        assert before == set(multiprocessing.active_children())
    finally:
        gc.enable()


@forks
def test_the_same_workers_go_on_after_a_load():
    """Setting the stream anew does not start other processes."""
    before = set(multiprocessing.active_children())
    data = noisy(num_workers=1)
    state = data.state_dict()
    iterator = iter(data)
    list(next(iterator))
    workers = set(multiprocessing.active_children()) - before
    data.load_state_dict(state)
    list(next(iterator))
    assert workers == set(multiprocessing.active_children()) - before


def test_the_stream_is_set_anew_only_where_it_must_be(monkeypatch):
    """One stream runs through batches and epochs, also from the middle of a batch; a second pass sets it once."""
    settings = []
    setting = Feed._set
    monkeypatch.setattr(Feed, "_set", lambda self, cursor: settings.append(cursor) or setting(self, cursor))
    data, owner = noisy(), Owner()
    batch = next(iter(data))
    part = next(batch.remaining(owner))
    batch.progress(owner).rows_done = part.rows_done
    resumed = noisy()
    resumed.load_state_dict(data.state_dict())
    run(resumed, Owner())
    assert [(0, 0, 0), (0, 2, 0)] == settings
    list(batch.remaining(owner))  # the first stream stands where this pass begins
    list(batch)
    assert [(0, 0, 0), (0, 2, 0), (0, 0, 0)] == settings


@forks
def test_prefetching_does_not_survive_a_load_a_skip_or_a_second_pass():
    """Whatever the workers had fetched ahead, what comes is what was asked for."""
    data, first, second = noisy(num_workers=2), Owner(), Owner()
    state = data.state_dict()
    iterator = iter(data)
    batch = next(iterator)
    order = batch.indices.tolist()
    for owner in (first, second, first):  # a second pass, and one more
        assert order == [row for part in batch.remaining(owner) for row in part["row"].tolist()]
    next(iterator)
    later = next(iterator)  # skipped one
    assert later.indices.tolist() == [row for part in later for row in part["row"].tolist()]
    data.load_state_dict(state)
    again = next(iterator)
    running = again.remaining(first)
    assert order[:2] == next(running)["row"].tolist()
    assert order[:2] == next(iter(again))["row"].tolist()  # another reader in between
    assert order[2:4] == next(running)["row"].tolist()


@forks
def test_a_state_moves_between_numbers_of_workers():
    """Saved with workers that have fetched ahead, resumed without, and back: the stream is the uninterrupted one."""
    expected = run(noisy(), Owner())
    data = noisy(num_workers=2)
    seen = run(data, Owner(), steps=2)
    resumed = noisy()
    resumed.load_state_dict(data.state_dict())
    seen += run(resumed, Owner(), steps=4)
    last = noisy(num_workers=1)
    last.load_state_dict(resumed.state_dict())
    assert expected == seen + run(last, Owner())


class Torn(Dataset):
    """A dataset whose row 3 cannot be read at first; the file says whether it can by now."""

    def __init__(self, mended):
        self.mended = mended

    def __len__(self):
        return 8

    def __getitem__(self, index):
        if index == 3 and not self.mended.exists():
            raise OSError("row 3 cannot be read")
        return index


def failure(parts):
    """Return what the next micro-batch fails with."""
    try:
        next(parts)
    except OSError as error:
        # torch's exception and frames hold each other; workers that the collector must free take ten seconds to end
        traceback.clear_frames(error.__traceback__)
        return str(error)
    return "nothing"


@forks
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_row_that_cannot_be_read(tmp_path, num_workers):
    """The dataset's own exception arrives; once it is mended the same micro-batch comes, and then the others."""
    mended = tmp_path / "mended"
    data = augend.Batches(
        Torn(mended), batch_size=4, microbatch_size=2, shuffle=False, epochs=1, num_workers=num_workers
    )
    owner = Owner()
    iterator = iter(data)
    batch = next(iterator)
    running = batch.remaining(owner)
    part = next(running)
    seen = part[0].tolist()
    batch.progress(owner).rows_done = part.rows_done
    for parts in (running, batch.remaining(owner)):
        assert "row 3 cannot be read" in failure(parts)
    assert [0, 1] == seen
    mended.touch()
    seen += [row for part in batch.remaining(owner) for row in part[0].tolist()]
    batch.progress(owner).closed = True
    assert [*range(8)] == seen + [row for part in next(iterator) for row in part[0].tolist()]


def told(worker):
    """Leave a note in the worker's copy of the rows, as a worker_init_fn that opens files would."""
    get_worker_info().dataset.rows.note = worker + 1


class Told(Dataset):
    """Rows that carry the note."""

    note = 0

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return self.note


@forks
def test_a_worker_init_fn_finds_the_rows():
    """worker_init_fn reaches the user's dataset through torch's get_worker_info."""
    for rows in (Told(), augend.split(Told(), fraction=0.5)[0]):
        data = augend.Batches(rows, batch_size=4, microbatch_size=1, epochs=1, num_workers=2, worker_init_fn=told)
        assert [1, 2] == [part[0].item() for batch in data for part in batch][:2]


def test_what_spawned_workers_get_is_small_and_fetches_the_same(tmp_path):
    """Workers that are not forked get the fetcher by pickle: memory maps by name, and the same rows."""
    np.save(tmp_path / "rows.npy", np.arange(100_000))
    whole = {"x": np.load(tmp_path / "rows.npy", mmap_mode="r")}
    for rows in (whole, augend.split(whole, fraction="1/1000")[0]):
        fetcher = augend.Batches(rows, batch_size=5, microbatch_size=5)._feed._loader.dataset
        sent = pickle.dumps(fetcher)
        assert len(sent) < 3000
        again = pickle.loads(sent)  # noqa: S301 - our own bytes
        for request in (Request(0, 0, 5), Request(99_999, 1, 3)):
            assert torch.equal(fetcher[request].data["x"], again[request].data["x"])


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_rows_and_random_state_do_not_depend_on_the_world(monkeypatch, world):
    """L, M4: at every world the same micro-batches with the same draws in rows and model, and one end marker."""
    expected = sorted(run(noisy(), Owner()), key=repr)
    seen = []
    for rank in range(world):
        at_world(monkeypatch, rank, world)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            seen.append(run(noisy(), Owner()))
    parts = [part for rank in seen for part in rank if part[1] != "end"]
    ends = [[part for part in rank if part[1] == "end"] for rank in seen]
    assert [part for part in expected if part[1] != "end"] == sorted(parts, key=repr)
    assert [[part for part in expected if part[1] == "end"]] * world == ends


def test_a_filler_is_the_first_micro_batch_again(monkeypatch):
    """A rank without rows runs the batch's first micro-batch: same rows, same random state, no real rows."""
    first = next(iter(next(iter(noisy()))))
    state = drawn()
    at_world(monkeypatch, 0, 4)
    with pytest.warns(UserWarning, match="fillers"):  # the first rank alone speaks of them
        next(iter(next(iter(noisy()))))
    at_world(monkeypatch, 3, 4)
    filler = next(iter(next(iter(noisy()))))
    assert state == drawn()
    assert (0, 0, 5) == (filler.real_rows, filler.first_row, filler.rows_done)
    assert torch.equal(first["noise"], filler["noise"])


def test_worlds_change_inside_a_batch(monkeypatch):
    """M4: 3 ranks, then 2, then 3 within one batch of 12 rows: each row once, as one rank alone would see them."""
    state, seen = None, []
    for world, rounds in ((3, 1), (2, 1), (3, 9)):
        states = []
        for rank in range(world):
            at_world(monkeypatch, rank, world)
            data, owner = augend.Batches(torch.arange(12), batch_size=12, microbatch_size=1), Owner()
            if state is not None:
                data.load_state_dict(state)
            batch = next(iter(data))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)
                for _, part in zip(range(rounds), batch.remaining(owner), strict=False):
                    seen += part[0].tolist() if part.real_rows else []
                    batch.progress(owner).rows_done = part.rows_done
            states.append(data.state_dict())
        assert [states[0]] * world == states
        state = states[0]
    assert [12, False] == state["ledger"][0]
    assert batch.indices.tolist() == sorted(seen, key=batch.indices.tolist().index)


def test_fillers_are_announced_once_with_their_cost(monkeypatch):
    """A world that does not divide the micro-batches warns once, with cost and remedy; another is silent."""
    at_world(monkeypatch, 0, 4)
    data = augend.Batches(torch.arange(24), batch_size=12, microbatch_size=2, epochs=2)
    message = (
        r"12 rows make 6 micro-batches of up to 2, which 4 ranks cannot share evenly: 2 of 8 are fillers .*"
        r"\(25% of the work\); choose microbatch_size so that the number of micro-batches is a multiple of 4"
    )
    with pytest.warns(UserWarning, match=message) as caught:
        assert [2, 2, 2, 2] == [len(list(batch)) for batch in data]
    assert 1 == len(caught)
    at_world(monkeypatch, 0, 3)
    for batch in augend.Batches(torch.arange(24), batch_size=12, microbatch_size=2, epochs=2):
        list(batch)


def test_random_state_belongs_to_the_micro_batch_and_the_accumulator():
    """L: what a model draws depends on (seed, epoch, step, first row, ordinal), and not on what was drawn before."""
    data, first, second = augend.Batches(torch.arange(8), batch_size=4, microbatch_size=2), Owner(), Owner()
    batch = next(iter(data))
    draws = [(owner, [drawn() for _ in batch.remaining(owner)], drawn()) for owner in (first, second)]
    torch.manual_seed(9)
    assert [
        (owner, [(drawn(), drawn())[0] for _ in batch.remaining(owner)], drawn()) for owner in (first, second)
    ] == draws
    numbers = [number for _, parts, end in draws for numbers in [*parts, end] for number in numbers]
    assert 18 == len(set(numbers))
    plain = [drawn() for _ in batch]
    assert draws[0][1] == plain  # a plain loop is the first accumulator's
    assert draws[0][2] == drawn()


def test_generators_are_seeded_before_and_after_a_fetch(monkeypatch):
    """Whatever a fetch in the main process draws, from any device, it finds the micro-batch's state and leaves it."""
    calls = []
    fetch = Feed.fetch
    monkeypatch.setattr("augend.data._batch.seed_all", lambda *parts: calls.append(parts))
    monkeypatch.setattr(Feed, "fetch", lambda *arguments: calls.append("fetch") or fetch(*arguments))
    list(next(iter(augend.Batches(torch.arange(4), batch_size=4, microbatch_size=2, seed=7))))
    first, second = ("micro-batch", 7, 0, 0, 0, 0), ("micro-batch", 7, 0, 0, 2, 0)
    assert [first, "fetch", first, second, "fetch", second, ("end of batch", 7, 0, 0, 4, 0)] == calls


def test_the_state_before_rows_are_collated_is_seeded():
    """A collation of rows that need no seeds still finds a random state of its micro-batch's own."""
    drawn_by_source = []

    def collate(rows):
        drawn_by_source.append(drawn())
        return torch.stack(rows)

    for seed in (1, 2):
        torch.manual_seed(seed)
        list(next(iter(augend.Batches(torch.arange(4), batch_size=4, microbatch_size=2, collate_fn=collate))))
    assert drawn_by_source[:2] == drawn_by_source[2:]


def test_nothing_is_seeded_if_not_wanted():
    """seed_random=False leaves every generator alone, in fetching and in handing out."""
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002 - the global one is meant
    torch.manual_seed(1)
    expected = [drawn(), drawn()]
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002 - the global one is meant
    torch.manual_seed(1)
    first = drawn()
    data = augend.Batches(torch.arange(4), batch_size=4, microbatch_size=2, seed_random=False)
    for one in (data, data.fresh()):
        list(next(iter(one)))
    assert expected == [first, drawn()]


@forks
def test_workers_of_unseeded_rows_follow_the_seed():
    """With seed_random=False torch seeds the workers, from the seed of the data and not from the global generator."""

    def noise(seed):
        torch.manual_seed(random.randrange(2**30))  # noqa: S311 - any
        data = noisy(num_workers=1, seed_random=False, seed=seed, shuffle=False)
        return torch.cat([part["noise"] for batch in data for part in batch]).tolist()

    assert noise(0) == noise(0)
    assert noise(0) != noise(1)


def test_other_rows_than_due_are_an_error(monkeypatch):
    """If the loader brings other rows than the stream asked for, the loop stops instead of training on them."""
    data = augend.Batches(torch.arange(8), batch_size=4, microbatch_size=2, shuffle=False)
    batch = next(iter(data))
    wrong = Fetched(Request(0, 2, 2), torch.tensor([2, 3]))
    monkeypatch.setattr("augend.data._fetch.Fetcher.__getitem__", lambda self, request: wrong)
    with pytest.raises(
        StateError, match=r"the DataLoader brought Request\(step=0, first_row=2, rows=2\) where .*first_row=0"
    ):
        list(batch)
    monkeypatch.undo()
    assert [[0, 1], [2, 3]] == [part[0].tolist() for part in batch]
