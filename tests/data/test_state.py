"""The saved position: any stop is as if nothing had happened, and a state that does not fit is refused."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import augend
from augend.errors import ContractError, StateError


class Owner:
    """What an accumulator is to the data."""


def batches(rows=10, *, batch_size=4, microbatch_size=2, epochs=4, **options):
    """Numbered rows in batches."""
    source = {"row": torch.arange(rows)}
    return augend.Batches(source, batch_size=batch_size, microbatch_size=microbatch_size, epochs=epochs, **options)


def train(data, owners, stop=-1):
    """Run the loop over what is left, or stop before a backward; return (owner, epoch, step, rows) of each."""
    seen = []
    for batch in data:
        for ordinal, owner in enumerate(owners):
            for microbatch in batch.remaining(owner):
                if len(seen) == stop:
                    return seen
                seen.append((ordinal, batch.epoch, batch.step, tuple(microbatch["row"].tolist())))
                batch.progress(owner).rows_done = microbatch.rows_done
            batch.progress(owner).closed = True
    return seen


def resumed(state, **options):
    """Batches of a new process, which got the state through JSON."""
    data = batches(**options)
    data.load_state_dict(json.loads(json.dumps(state)))
    return data


@given(
    stops=st.lists(st.integers(0, 12), min_size=1, max_size=6), accumulators=st.integers(1, 2), register=st.booleans()
)
def test_any_stops_are_as_if_nothing_had_happened(stops, accumulators, register):
    """K: stop after any micro-batch, in any epoch, again and again, also right after a load: the same stream."""
    expected = train(batches(), [Owner() for _ in range(accumulators)])
    seen, state = [], batches().state_dict()
    for stop in [*stops, -1]:
        data, owners = resumed(state), [Owner() for _ in range(accumulators)]
        if register:
            for owner in owners:
                data.register(owner)
        seen += train(data, owners, stop)
        state = data.state_dict()
        assert state == resumed(state).state_dict()
    assert expected == seen


def test_an_epoch_number_is_not_lost():
    """K1: 10 rows, stopped in epoch 1 at row 4: the rest of epoch 1's own permutation follows."""
    data, owner = batches(batch_size=10), Owner()
    seen = train(data, [owner], stop=7)
    rest = train(resumed(data.state_dict(), batch_size=10), [Owner()])
    order = list(batches(batch_size=10))[1].indices.tolist()
    assert order[:4] == [row for _, epoch, _, rows in seen if epoch == 1 for row in rows]
    assert order[4:] == [row for _, epoch, _, rows in rest if epoch == 1 for row in rows]


def test_save_load_advance_save_load():
    """K4: save, load, advance 2, save, load, then two more epochs: equal to the stream without a stop."""
    expected = train(batches(), [Owner()])
    first = batches()
    seen = train(first, [Owner()], stop=3)
    second = resumed(first.state_dict())
    seen += train(second, [Owner()], stop=2)
    seen += train(resumed(resumed(second.state_dict()).state_dict()), [Owner()])
    assert expected == seen


def test_a_save_at_the_end_of_a_step():
    """K5: saved after a step but before the next batch was asked for, the next batch comes, not the same again."""
    data, owner = batches(), Owner()
    for batch in data:
        batch.progress(owner).rows_done, batch.progress(owner).closed = batch.rows, True
        if batch.step == 2:
            break
    again = resumed(data.state_dict())
    again.register(Owner())
    assert 3 == next(iter(again)).step


def test_all_rows_done_but_not_closed_resumes_at_the_step():
    """Saved behind the last backward and before the step, the batch comes again with nothing left to run."""
    data, owner = batches(), Owner()
    next(iter(data)).progress(owner).rows_done = 4
    again, owner = resumed(data.state_dict()), Owner()
    batch = next(iter(again))
    assert 0 == batch.step
    assert [] == list(batch.remaining(owner))
    assert 4 == batch.progress(owner).rows_done


def test_a_closed_batch_comes_again_for_those_who_have_not_enrolled():
    """Without registration the loaded batch is yielded once more; who closed it finds nothing to do, others go on."""
    data, first, second = batches(), Owner(), Owner()
    batch = next(iter(data))
    batch.progress(first).rows_done, batch.progress(first).closed = 4, True
    batch.progress(second)
    state = data.state_dict()
    assert [[4, True], [0, False]] == state["ledger"]
    again, first, second = resumed(state), Owner(), Owner()
    again.register(first)
    batch = next(iter(again))
    assert [] == list(batch.remaining(first))
    assert [0, 2] == [part.first_row for part in batch.remaining(second)]


def test_a_ledger_waits_for_its_owner():
    """Pending rows that nobody has claimed are kept by a save, and are not left behind by the loop."""
    data, owner = batches(), Owner()
    next(iter(data)).progress(owner).rows_done = 2
    again = resumed(data.state_dict())
    iterator = iter(again)
    next(iterator)
    assert [[2, False]] == again.state_dict()["ledger"]
    with pytest.raises(StateError, match="accumulator 0 of the loaded state, which nobody has claimed, holds 2 rows"):
        next(iterator)


def test_a_shorter_ledger_leaves_new_owners_at_the_start():
    """A state of fewer accumulators than are enrolled: the others have done nothing."""
    data, first, second = batches(), Owner(), Owner()
    data.register(first)
    data.register(second)
    data.load_state_dict({**data.state_dict(), "ledger": [[2, False]]})
    batch = next(iter(data))
    assert [2, 0] == [batch.progress(owner).rows_done for owner in (first, second)]


def test_a_load_in_the_loop():
    """The running iterator goes on with the loaded position; the batch at hand is over."""
    data, owner = batches(), Owner()
    start = data.state_dict()
    steps = []
    for batch in data:
        steps.append(batch.step)
        if len(steps) == 3:
            data.load_state_dict(start)
            with pytest.raises(StateError, match="the batch of step 2 is over: the data is at step 0 now"):
                batch.progress(owner)
        if len(steps) == 5:
            break
    assert [0, 1, 2, 0, 1] == steps


def test_fetching_ahead_does_not_move_the_position():
    """A micro-batch handed out without its backward is not done: it comes again."""
    data, owner = batches(), Owner()
    batch = next(iter(data))
    running = batch.remaining(owner)
    next(running)
    batch.progress(owner).rows_done = 2
    next(running)
    assert [[2, False]] == data.state_dict()["ledger"]


@given(first=st.integers(1, 4), second=st.integers(1, 4), stop=st.integers(0, 30))
def test_another_cut_after_a_stop(first, second, stop):
    """J5: a batch begun in one micro-batch size is finished in another; every row of every batch comes once."""
    data = batches(microbatch_size=first)
    seen = train(data, [Owner()], stop)
    seen += train(resumed(data.state_dict(), microbatch_size=second), [Owner()])
    rows = {}
    for _, _, step, part in seen:
        rows.setdefault(step, []).extend(part)
    assert {batch.step: batch.indices.tolist() for batch in batches()} == rows


def test_more_epochs_after_a_stop():
    """The number of epochs may change: a finished run goes on where it ended."""
    data = batches(epochs=1)
    assert 3 == len(list(data))
    more = resumed(data.state_dict(), epochs=2)
    assert [3, 4, 5] == [batch.step for batch in more]
    assert [] == list(resumed(data.state_dict(), epochs=1))


def test_the_state_is_plain():
    """Numbers, text and lists alone: it survives JSON, and says what it belongs to."""
    state = batches(seed=-(2**70), shard_size=3).state_dict()
    assert state == json.loads(json.dumps(state))
    assert {
        "version": 1,
        "contract": {
            "algorithm": "augend.order/1",
            "rows": 10,
            "batch_size": 4,
            "shard_size": 3,
            "seed": -(2**70),
            "shuffle": True,
            "drop_last": False,
            "split": "",
        },
        "microbatch_size": 2,
        "step": 0,
        "ledger": [],
    } == state


def broken(**changes):
    """A good state with some fields replaced, or without those that are None."""
    state = {**batches().state_dict(), "step": 5, "ledger": [[2, False]], **changes}
    return {field: value for field, value in state.items() if value is not None}


def other_contract(**changes):
    """A good state of another contract."""
    return broken(contract={**batches().state_dict()["contract"], **changes})


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (None, "what state_dict\\(\\) returned, a mapping; got NoneType"),
        ([], "got list"),
        (broken(version=2), "version 2; this augend reads version 1"),
        (broken(version=True), "version True"),
        (broken(version=None), "version None"),
        (broken(step=None), r"exactly the fields .* differs in \['step'\]"),
        (broken(extra=1), r"differs in \['extra'\]"),
        (broken(microbatch_size=0), "microbatch_size of the data state must be at least 1; got 0"),
        (broken(microbatch_size="2"), "microbatch_size .* got '2'"),
        (broken(contract=3), "contract of the data state must have exactly the fields .* got 3"),
        (other_contract(more=1), "contract of the data state must have exactly the fields"),
        (other_contract(rows=11), "saved with rows=11, but this Batches has 10; build Batches over the same rows"),
        (other_contract(batch_size=8), "saved with batch_size=8, but this Batches has 4"),
        (other_contract(seed=1), "saved with seed=1"),
        (other_contract(seed=0.0), r"saved with seed=0\.0"),
        (other_contract(shuffle=False), "saved with shuffle=False"),
        (other_contract(shuffle=1), "saved with shuffle=1"),
        (other_contract(shard_size=2), "saved with shard_size=2"),
        (other_contract(drop_last=True), "saved with drop_last=True"),
        (other_contract(algorithm="augend.order/2"), "saved with algorithm='augend.order/2'"),
        (other_contract(split="another"), "saved with split='another'"),
        (broken(step=-1), "step of the data state must be a whole number of at least 0; got -1"),
        (broken(step=1.0), r"step .* got 1\.0"),
        (broken(step=True), "step .* got True"),
        (broken(step=13), "at step 13, but epochs=4 of 3 steps end at step 12; raise epochs"),
        (broken(ledger={"0": [0, False]}), "ledger of the data state must be a list; got dict"),
        (broken(ledger=[[3, False]]), r"ledger\[0\] .* 0 to 2 rows of this step's batch.* got \[3, False\]"),
        (broken(ledger=[[0, False], [-1, False]]), r"ledger\[1\] .* got \[-1, False\]"),
        (broken(ledger=[[True, False]]), r"ledger\[0\] .* got \[True, False\]"),
        (broken(ledger=[[1.0, False]]), r"ledger\[0\] .* got \[1\.0, False\]"),
        (broken(ledger=[[1, 0]]), r"ledger\[0\] .* got \[1, 0\]"),
        (broken(ledger=[[1]]), r"ledger\[0\] .* got \[1\]"),
        (broken(ledger=["ab"]), r"ledger\[0\] .* got 'ab'"),
        (broken(step=12, ledger=[[1, False]]), r"ledger\[0\] .* 0 to 0 rows"),
    ],
)
def test_a_state_that_does_not_fit_changes_nothing(state, message):
    """Every field out of its domain or against the live contract is refused by name, and the position stays."""
    data, owner = batches(), Owner()
    batch = next(iter(data))
    batch.progress(owner).rows_done = 2
    before, given_state = data.state_dict(), copy.deepcopy(state)
    with pytest.raises(ContractError, match=message):
        data.load_state_dict(state)
    assert before == data.state_dict()
    assert given_state == state
    batch.check_live()


def test_prepare_load_stays_where_the_data_is():
    """A position that was prepared is taken by the call that came back, and not before."""
    data = batches()
    start = data.state_dict()
    train(data, [Owner()], stop=7)
    later = data.state_dict()
    commit = data.prepare_load(start)
    assert later == data.state_dict() != start
    commit()
    assert start["step"] == data.state_dict()["step"]
    with pytest.raises(ContractError, match="version"):
        data.prepare_load({**start, "version": 9})


def test_unregister_gives_the_ordinal_to_the_next():
    """An accumulator that is forgotten waits for nothing any more, and the next new one has its ordinal."""
    data = batches()
    first, second, third = Owner(), Owner(), Owner()
    assert [0, 1] == [data.register(first), data.register(second)]
    train(data, [first], stop=1)
    data.unregister(first)
    data.unregister(Owner())
    assert [0, 1] == [data.register(third), data.register(second)]
    assert [[0, False], [0, False]] == data.state_dict()["ledger"]


def test_the_epoch_at_hand_stays_until_the_next_begins():
    """Right after the last step of an epoch it is still that one, after a load too; behind the loop it is the next."""
    data, owner = batches(), Owner()
    for epoch in range(data.current_epoch, 3):
        for batch in data.epoch():
            batch.progress(owner).closed = True
            assert epoch == batch.epoch == data.current_epoch == resumed(data.state_dict()).current_epoch
        assert epoch + 1 == data.current_epoch


def test_who_tells_what_is_done():
    """Tracked is what nobody has taken yet, and what an accumulator goes through; owners are told by their ordinals."""
    data, owner = batches(), Owner()
    assert (True, ()) == (data.tracked, data.owners)
    batch = next(iter(data))
    assert not data.tracked
    batch.progress(owner)
    assert (True, (owner,)) == (data.tracked, data.owners)
    del owner
    assert (False, (None,)) == (data.tracked, data.owners)


def test_ordinals_can_be_given():
    """Arranged owners have what the ledger says at their ordinals; who was there is forgotten."""
    data, first, second = batches(), Owner(), Owner()
    data.register(second)
    data.register(first)
    train(data, [second], stop=1)
    state = data.state_dict()
    assert [[2, False], [0, False]] == state["ledger"]
    other, third, fourth = batches(), Owner(), Owner()
    other.register(third)
    other.load_state_dict(state)
    other.arrange({1: third, 2: fourth})
    assert (None, third, fourth) == other.owners
    assert [*state["ledger"], [0, False]] == other.state_dict()["ledger"]
    batch = next(iter(other))
    assert 0 == batch.progress(third).rows_done
    other.arrange({0: third})
    assert (third, None, fourth) == other.owners
    assert 2 == batch.progress(third).rows_done
    other.arrange({})
    assert (third, None, fourth) == other.owners
