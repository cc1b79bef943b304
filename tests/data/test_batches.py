"""Batches: sizes, order, and the rules of the loop: what `next` yields, when it refuses, and what it forgets."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import augend
from augend.data import Progress
from augend.errors import PlacementError, SplitError, StateError


class Owner:
    """What an accumulator is to the data."""

    def do(self, batch, microbatches=None):
        """Run micro-batches of a batch, close it if all are run, and return the rows seen."""
        progress, seen = batch.progress(self), []
        for number, microbatch in enumerate(batch.remaining(self)):
            if number == microbatches:
                return seen
            if microbatch.real_rows:
                seen += microbatch["row"].tolist()
            progress.rows_done = microbatch.rows_done
        progress.closed = True
        return seen


def batches(rows=10, *, batch_size=4, microbatch_size=2, **options):
    """Numbered rows in batches."""
    return augend.Batches(
        {"row": torch.arange(rows)}, batch_size=batch_size, microbatch_size=microbatch_size, **options
    )


@given(
    rows=st.integers(1, 60),
    batch_size=st.integers(1, 20),
    cut=st.integers(1, 20),
    shard_size=st.integers(1, 8),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
    epochs=st.integers(1, 3),
)
def test_every_epoch_visits_every_row_once(rows, batch_size, cut, shard_size, shuffle, drop_last, epochs):
    """H, M: batches and micro-batches of every size cover each epoch exactly, the short last batch included."""
    options = {"shard_size": shard_size, "shuffle": shuffle, "drop_last": drop_last, "epochs": epochs}
    if drop_last and rows < batch_size:
        with pytest.raises(SplitError, match=r"drop_last=True would drop every row: .* lower batch_size"):
            batches(rows, batch_size=batch_size, microbatch_size=1, **options)
        return
    cut = min(cut, batch_size)
    data = batches(rows, batch_size=batch_size, microbatch_size=cut, **options)
    steps = rows // batch_size if drop_last else -(-rows // batch_size)
    kept = steps * batch_size if drop_last else rows
    assert (steps, kept) == (data.steps_per_epoch, data.rows_per_epoch)
    visited = [[] for _ in range(epochs)]
    for step, batch in enumerate(data):
        assert (step, step // steps, (step + 1) % steps == 0) == (batch.step, batch.epoch, batch.last)
        seen = [row for microbatch in batch for row in microbatch["row"].tolist()]
        assert batch.indices.tolist() == seen
        assert batch.rows == len(seen)
        visited[batch.epoch] += seen
    for epoch in visited:
        assert kept == len(set(epoch)) == len(epoch)
    if not shuffle:
        assert [list(range(kept))] * epochs == visited


def test_epochs_have_their_own_orders_without_a_call():
    """M1: nobody announces an epoch, and yet the orders differ while each is complete."""
    data = batches(50, batch_size=50, microbatch_size=50, epochs=3)
    orders = [tuple(batch.indices.tolist()) for batch in data]
    assert 3 == len(set(orders))
    assert [tuple(range(50))] * 3 == [tuple(sorted(order)) for order in orders]
    again = batches(50, batch_size=50, microbatch_size=50, epochs=3)
    assert orders == [tuple(batch.indices.tolist()) for batch in again]


def test_the_number_of_epochs_is_known():
    """epochs is what was asked for: a number, or None for ever."""
    assert (3, None) == (batches(epochs=3).epochs, batches().epochs)


def test_a_batch_says_what_it_is():
    """A short last batch is whole in itself, and a batch shows its place."""
    *_, last = batches(epochs=1)
    assert "Batch(step=2, epoch=0, rows=2, last=True)" == repr(last)
    assert [2] == [microbatch.rows_done for microbatch in last]
    assert torch.int64 == last.indices.dtype


def test_without_epochs_it_never_ends():
    """epochs=None goes on for ever, and epoch() is the rest of one."""
    data = batches()
    for expected, batch in zip(range(31), data, strict=False):
        assert expected == batch.step
    assert 30 == data.state_dict()["step"]
    assert [30, 31, 32] == [batch.step for batch in data.epoch()]
    assert [33, 34, 35] == [batch.step for batch in data.epoch()]


def test_an_epoch_is_what_is_left_of_it():
    """epoch() begins at the position and ends with its epoch; behind the last one there is nothing."""
    data, owner = batches(epochs=2), Owner()
    owner.do(next(iter(data)))
    assert [1, 2] == [batch.step for batch in data.epoch()]
    assert [3, 4, 5] == [batch.step for batch in data.epoch()]
    assert [] == list(data.epoch())
    assert [] == list(data)


def test_a_closed_last_batch_ends_its_epoch():
    """Resumed behind the last batch of an epoch, epoch() yields nothing: what happens between epochs comes next."""
    data, owner = batches(epochs=2), Owner()
    for batch in data.epoch():
        owner.do(batch)
        if batch.last:
            state = data.state_dict()
    resumed, owner = batches(epochs=2), Owner()
    resumed.register(owner)
    resumed.load_state_dict(state)
    assert [] == list(resumed.epoch())
    assert [3, 4, 5] == [batch.step for batch in resumed.epoch()]


def test_a_running_epoch_follows_a_load():
    """epoch() that is running when a state of another epoch is loaded goes on with the rest of that one."""
    data = batches(epochs=3)
    state = {**data.state_dict(), "step": 7}
    steps = []
    for batch in data.epoch():
        steps.append(batch.step)
        if steps == [0, 1]:
            data.load_state_dict(state)
    assert [0, 1, 7, 8] == steps


def test_an_untouched_batch_is_skipped():
    """Asking for the next batch without having begun this one skips it on purpose."""
    data, owner = batches(), Owner()
    iterator = iter(data)
    next(iterator).progress(owner)
    assert 1 == next(iterator).step
    assert Progress() == data._position.ledger[0]


def test_a_batch_with_pending_rows_is_not_left():
    """Asking for the next batch while rows of this one are pending is an error that names step and rows."""
    data, other, owner = batches(), Owner(), Owner()
    data.register(other)
    iterator = iter(data)
    batch = next(iterator)
    owner.do(batch, microbatches=1)
    for _ in range(2):  # the error changes nothing
        with pytest.raises(
            StateError, match=r"step 0 is not finished: accumulator 1 holds 2 rows of it; call its step"
        ):
            next(iterator)
    owner.do(batch)
    assert 1 == next(iterator).step


def test_a_reset_progress_lets_go():
    """What reset() does to the batch makes it untouched: it is offered whole again, or skipped."""
    data, owner = batches(), Owner()
    iterator = iter(data)
    batch = next(iterator)
    rows = owner.do(batch)
    batch.progress(owner).rows_done, batch.progress(owner).closed = 0, False
    assert rows == owner.do(batch, microbatches=2)
    batch.progress(owner).rows_done = 0
    assert 1 == next(iterator).step


def test_a_new_iterator_begins_at_the_position_and_ends_the_old():
    """Beginning anew yields the same batch with its progress kept; older iterators and batches are over."""
    data, owner = batches(), Owner()
    old = iter(data)
    owner.do(next(old))
    batch = next(old)
    rows = batch.indices.tolist()
    assert rows[:2] == owner.do(batch, microbatches=1)
    new = iter(data)
    with pytest.raises(StateError, match="this iterator ended when a newer one"):
        next(old)
    with pytest.raises(StateError, match="the batch of step 1 is over: the data is at step 1 now"):
        batch.progress(owner)
    again = next(new)
    assert (1, rows[2:]) == (again.step, owner.do(again))


def test_a_new_iterator_does_not_repeat_a_closed_batch():
    """A batch that everybody has closed is over, also for an iterator begun behind it."""
    data, owner = batches(), Owner()
    owner.do(next(iter(data)))
    assert 1 == next(iter(data)).step


def test_a_batch_is_over_when_the_data_moves_on():
    """A batch kept behind the next one refuses progress, also to a loop that is running over it."""
    data, owner = batches(), Owner()
    iterator = iter(data)
    batch = next(iterator)
    batch.check_live()
    running = batch.remaining(owner)
    next(running)
    next(iterator)
    with pytest.raises(StateError, match="the batch of step 0 is over: the data is at step 1 now"):
        next(running)
    with pytest.raises(StateError, match="take batches from the newest iterator"):
        batch.check_live()


def test_two_accumulators_keep_their_own_progress():
    """A batch is over when both have closed it; each sees every row."""
    data, first, second = batches(), Owner(), Owner()
    iterator = iter(data)
    for step in range(7):
        batch = next(iterator)
        assert step == batch.step
        rows = batch.indices.tolist()
        assert rows[:2] == first.do(batch, microbatches=1)
        assert rows == second.do(batch)
        if batch.rows > 2:
            with pytest.raises(StateError, match="accumulator 0 holds 2 rows"):
                next(iterator)
        assert rows[2:] == first.do(batch)
    assert (0, 1) == (data.register(first), data.register(second))


def test_accumulators_are_told_apart_by_identity():
    """Two that compare equal are still two."""

    class Alike:
        def __eq__(self, other):
            return True

        __hash__ = object.__hash__

    data, owners = batches(), [Alike(), Alike(), Alike()]
    assert [0, 1, 2, 1] == [data.register(owner) for owner in [*owners, owners[1]]]


def test_iterating_a_batch_tracks_nothing():
    """A plain loop over a batch leaves the position alone and may be repeated, also behind its time."""
    data = batches(epochs=1)
    kept = list(data)
    for batch in kept:
        rows = batch.indices.tolist()
        assert [rows, rows] == [[row for part in batch for row in part["row"].tolist()] for _ in range(2)]
    assert [] == data.state_dict()["ledger"]


def test_a_closed_batch_offers_nothing():
    """remaining() of a batch that is closed for its owner is empty."""
    data, owner = batches(), Owner()
    batch = next(iter(data))
    batch.progress(owner).closed = True
    assert [] == list(batch.remaining(owner))


def test_an_offer_is_marked():
    """What is offered again says so."""
    data, owner = batches(), Owner()
    batch = next(iter(data))
    assert [(0, 0), (0, 2)] == [(part.offer, part.first_row) for part in batch.remaining(owner)]
    assert [(3, 0), (3, 2)] == [(part.offer, part.first_row) for part in batch.remaining(owner, offer=3)]


def test_fresh_shares_nothing_but_the_rows():
    """fresh() begins at step 0, visits every row once in their order, and moves nobody's position."""
    data, owner = (
        batches(drop_last=True, seed=4, epochs=5, collate_fn=lambda rows: {"row": torch.tensor(len(rows))}),
        Owner(),
    )
    batch = next(iter(data))
    batch.progress(owner).rows_done = 2
    state = data.state_dict()
    fresh = data.fresh()
    assert [0, 1, 2] == [batch.step for batch in fresh]
    assert [2, 2, 2, 2, 2] == [int(part["row"]) for batch in data.fresh() for part in batch]
    assert torch.equal(torch.arange(10), torch.cat([batch.indices for batch in data.fresh()]))
    assert 6 == len(list(data.fresh(epochs=2, shuffle=True)))
    batch.check_live()
    assert state == data.state_dict()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size must be at least 1; got 0; it is the rows of one optimizer step"),
        ({"batch_size": -4}, "batch_size must be at least 1; got -4"),
        ({"batch_size": True}, r"batch_size must be a whole number; got True \(bool\)"),
        ({"batch_size": 4.0}, r"batch_size must be a whole number; got 4\.0 \(float\)"),
        ({"batch_size": "4"}, r"batch_size must be a whole number; got '4' \(str\)"),
        ({"batch_size": None}, r"batch_size must be a whole number; got None"),
        ({"microbatch_size": 0}, "microbatch_size must be at least 1; got 0; it is the rows of one forward"),
        ({"microbatch_size": 5}, "microbatch_size must be at most batch_size; got 5 > 4; .*lower microbatch_size"),
        ({"microbatch_size": 1.5}, r"microbatch_size must be a whole number; got 1\.5"),
        ({"shard_size": 0}, "shard_size must be at least 1; got 0; 1 shuffles row by row"),
        ({"seed": 0.5}, r"seed must be a whole number; got 0\.5"),
        ({"seed": True}, "seed must be a whole number; got True"),
        ({"epochs": 0}, "epochs must be at least 1; got 0; None goes on for ever"),
        ({"epochs": 1.0}, "epochs must be a whole number"),
        ({"shuffle": 1}, r"shuffle must be True or False; got 1 \(int\)"),
        ({"drop_last": None}, "drop_last must be True or False; got None"),
        ({"seed_random": "no"}, "seed_random must be True or False; got 'no'"),
        ({"sampler": []}, "sampler= cannot be passed to the DataLoader: the order follows from seed.*; leave it away"),
        ({"batch_sampler": []}, "batch_sampler= cannot be passed"),
        ({"generator": None}, "generator= cannot be passed"),
        ({"persistent_workers": True}, "persistent_workers= cannot be passed"),
        ({"in_order": False}, "in_order= cannot be passed"),
        ({"dataset": []}, "dataset= cannot be passed"),
    ],
)
def test_what_cannot_be_meant_is_refused(options, message):
    """Each argument out of its domain is an error that names it, its value and the remedy."""
    with pytest.raises(SplitError, match=message):
        batches(**options)


def test_what_torch_refuses_is_refused_at_once():
    """Options of torch's DataLoader are judged by torch, when Batches is built and not in the middle of a run."""
    with pytest.raises(ValueError, match="prefetch_factor option could only be specified in multiprocessing"):
        batches(prefetch_factor=2)
    with pytest.raises(TypeError, match="number_of_workers"):
        batches(number_of_workers=2)


def test_what_is_no_mesh_is_refused():
    """It is said when they are built, and what a mesh is."""
    with pytest.raises(PlacementError, match="mesh must be a torch DeviceMesh"):
        batches(mesh="mesh")


def test_integers_of_numpy_count_and_seeds_are_any_integer():
    """numpy's integers are whole numbers; a seed may be negative or larger than any machine word."""
    expected = batches(epochs=1)
    numbers = [torch.tensor(4).numpy()[()], torch.tensor(2).numpy()[()]]
    data = batches(batch_size=numbers[0], microbatch_size=numbers[1], epochs=1)
    assert expected.state_dict() == data.state_dict()
    assert int is type(data.state_dict()["contract"]["batch_size"])
    orders = {
        tuple(next(iter(batches(100, batch_size=100, seed=seed))).indices.tolist()) for seed in (-1, 1, 2**70, -(2**70))
    }
    assert 4 == len(orders)


def test_an_owner_that_is_gone_holds_nothing_up():
    """A dropped accumulator's pending rows go with it, its ordinal goes to the next, and no batch comes twice."""
    data = batches(epochs=1)
    seen = []
    for _ in range(3):
        owner = Owner()
        for batch in data:
            seen.append(batch.step)
            progress = batch.progress(owner)
            assert 0 == data.register(owner)
            progress.rows_done, progress.closed = batch.rows, True
            break
        del owner, progress
    assert [0, 1, 2] == seen
    data, lost = batches(epochs=1), Owner()
    iterator = iter(data)
    next(iterator).progress(lost).rows_done = 2
    with pytest.raises(StateError, match="accumulator 0 holds 2 rows"):
        next(iterator)
    del lost
    assert 1 == next(iterator).step


def test_a_later_owner_takes_the_place_of_one_that_is_gone():
    """In the same batch a new accumulator starts at the first row, with the ordinal and draws of the lost one."""
    data, kept, lost = batches(epochs=1), Owner(), Owner()
    batch = next(iter(data))
    assert (0, 1) == (data.register(lost), data.register(kept))
    batch.progress(lost).rows_done = 2
    del lost
    new = Owner()
    assert (0, 0) == (batch.progress(new).rows_done, data.register(new))
