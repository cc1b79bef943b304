"""What goes wrong on one rank goes wrong on all, with the same words; and nobody waits for ever."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import placed
import pytest
import torch
import torch.distributed
import zoo
from loops import ONE_BATCH
from placed import PLACES, Placed
from ranks import Died, Ranks
from torch import Tensor

import augend
import reference
from augend.errors import (
    AugendError,
    ContractError,
    CounterOverflowError,
    EmptyWindowError,
    LostRankError,
    NonFiniteError,
    StateError,
    TallyError,
    UnusedError,
)

EVERYWHERE = ["replicated", "last", "wrapped", "fsdp", "hsdp of 2 replicas", "hybrid of 2 replicas"]
Fault = Callable[[Placed, augend.Accumulator, int], None]


def here(rank: int) -> bool:
    """Say whether this is the rank that something goes wrong on."""
    return torch.distributed.get_rank() == rank


def backward(there: Placed, grads: augend.Accumulator, count: int = 2, factor: float = 1.0) -> None:
    """Run one micro-batch of one row."""
    x = torch.tensor([[1.0, 2.0, -1.0, 2.0]]) * factor
    grads.backward(augend.Tally(there.model(x).sum(1), torch.tensor([count])))


def start(place: str, **options: object) -> tuple[Placed, augend.Accumulator, dict[str, Tensor]]:
    """Return a placed model, its accumulator and its weights."""
    kind = zoo.KINDS["narrow"]
    there = PLACES[place](kind.build(), kind.blocks)
    return there, there.grads(**options), placed.weights(there.model)


def nan(place: str) -> None:
    """Make one gradient of rank 1 not a number."""
    there, grads, _ = start(place)
    backward(there, grads)
    backward(there, grads, factor=float("nan") if here(1) else 1.0)
    grads.step(torch.optim.SGD(there.model.parameters(), lr=1.0))


def empty(place: str) -> None:
    """Count nothing on any rank."""
    there, grads, _ = start(place)
    backward(there, grads, count=0, factor=0.0)
    grads.finish()


def overflow_on_one(place: str) -> None:
    """Count 2^63 items on rank 1."""
    there, grads, _ = start(place)
    for _ in range(2):
        backward(there, grads, count=2**62 if here(1) else 1)
    grads.finish()


def overflow_together(place: str) -> None:
    """Count 2^62 items on each of two ranks."""
    there, grads, _ = start(place)
    backward(there, grads, count=2**62)
    grads.finish()


def negative(place: str) -> None:
    """Count less than nothing on rank 1."""
    there, grads, _ = start(place)
    backward(there, grads, count=-1 if here(1) else 1)
    grads.finish()


def changed(place: str) -> None:
    """Freeze a parameter of rank 1 at the end of a batch."""
    there, grads, _ = start(place)
    backward(there, grads)
    if here(1):
        dict(placed.parameters(there.model))["third.bias"].requires_grad_(requires_grad=False)
    grads.finish()


def other_policy(place: str) -> None:
    """Clip on rank 1 at another length."""
    there, grads, _ = start(place)
    backward(there, grads)
    grads.finish(max_norm=2.0 if here(1) else 1.0)


def other_option(place: str) -> None:
    """Scale the loss on rank 1 by another factor."""
    start(place, loss_scale=2.0 if here(1) else 1.0)


def other_weights(place: str) -> None:
    """Begin with other weights on rank 1."""
    model = zoo.KINDS["narrow"].build()
    if here(1):
        model.third.bias.data[1] += 1
    PLACES[place](model, ()).grads()


def other_model(place: str) -> None:
    """Build another model on rank 1."""
    model = zoo.KINDS["narrow"].build()
    if here(1):
        model.third = torch.nn.Linear(5, 4)
    PLACES[place](model, ()).grads()


ALIKE = [
    (nan, NonFiniteError, "first.weight", EVERYWHERE),
    (empty, EmptyWindowError, "", EVERYWHERE),
    (overflow_on_one, CounterOverflowError, "", EVERYWHERE),
    (overflow_together, CounterOverflowError, "", EVERYWHERE),
    (negative, TallyError, "", EVERYWHERE),
    (changed, ContractError, "third.bias", EVERYWHERE),
    (other_policy, StateError, "policy", EVERYWHERE),
    (other_option, ContractError, "loss_scale", EVERYWHERE),
    (other_weights, ContractError, "third.bias", ["replicated", "last"]),
    (other_model, ContractError, "third", ["replicated", "last"]),
]


@pytest.mark.parametrize(
    ("case", "kind", "word", "place"),
    [
        pytest.param(case, kind, word, place, id=f"{case.__name__}-{place}")
        for case, kind, word, places in ALIKE
        for place in places
    ],
)
def test_every_rank_raises_the_same_error(ranks2: Ranks, case: Fault, kind: type, word: str, place: str) -> None:
    """An error is found by all ranks together: one type, one message, whichever rank it is from."""
    first, second = ranks2.outcomes(case, place)
    assert (kind, kind) == (type(first), type(second)), (first, second)
    assert str(first) == str(second)
    assert word in str(first)


def skipped(place: str) -> tuple[bool, bool, float, int]:
    """Let a policy skip what is not a number on rank 1; then take a step that is sound."""
    there, grads, before = start(place)
    optimizer = torch.optim.SGD(there.model.parameters(), lr=1.0)
    backward(there, grads, factor=float("inf") if here(1) else 1.0)
    done = grads.step(optimizer, nonfinite="skip")
    same = reference.digest(before) == reference.digest(placed.weights(there.model))
    backward(there, grads)
    again = grads.step(optimizer, nonfinite="skip")
    return done.skipped, same, again.norm, again.update


@pytest.mark.parametrize("place", EVERYWHERE)
def test_every_rank_skips_together(ranks2: Ranks, place: str) -> None:
    """An inf on one rank skips the step on both, weights stay as they were, and the next step is taken by both."""
    first, second = ranks2.run(skipped, place)
    assert first == second
    assert (True, True, 1) == (first[0], first[1], first[3])
    assert first[2] > 0


def kept(place: str) -> tuple[str, int, float]:
    """Finish an empty window, which keeps it; count something, and finish again."""
    there, grads, _ = start(place)
    backward(there, grads, count=0, factor=0.0)
    try:
        grads.finish()
    except EmptyWindowError as error:
        words = str(error)
    backward(there, grads)
    done = grads.finish()
    return words, done.microbatches, done.norm


@pytest.mark.parametrize("place", EVERYWHERE)
def test_an_empty_window_is_kept(ranks2: Ranks, place: str) -> None:
    """After the error every rank can go on, and the window still has its first micro-batches."""
    first, second = ranks2.run(kept, place)
    assert first == second
    assert 4 == first[1]


def filler_is_nan(place: str) -> augend.Finished:
    """Run a batch of three rows in micro-batches of one, where fillers run, and make what they compute inf."""
    there, grads, _ = start(place)
    rows = {"x": torch.tensor([[1.0, 2.0, -1.0, 2.0]] * 3)}
    for batch in there.batches(rows, batch_size=3, microbatch_size=1, shuffle=False, epochs=1):
        for microbatch in grads.microbatches(batch):
            out = there.model(microbatch["x"]).sum(1)
            factor = 1.0 if microbatch.real_rows else float("inf")
            grads.backward(augend.Tally(out * factor, torch.ones(1, dtype=torch.int64)))
        return grads.finish()
    raise AssertionError


@pytest.mark.parametrize("place", EVERYWHERE)
def test_a_filler_cannot_do_harm(ranks2: Ranks, place: str) -> None:
    """Gradients of a filler are zeroed before they are added, not by a zero times inf."""
    first, second = ranks2.run(filler_is_nan, place)
    assert first == second
    assert 3 == first.count == first.microbatches
    assert not first.skipped
    assert first.norm < float("inf")


def one_more(place: str) -> None:
    """Run one micro-batch more on rank 1, by hand."""
    there, grads, _ = start(place)
    for _ in range(2 if here(1) else 1):
        backward(there, grads)
    grads.finish()


@pytest.mark.parametrize("place", ["replicated", "last", "fsdp"])
def test_unequal_numbers_of_microbatches_end(ranks2: Ranks, place: str) -> None:
    """A rank that runs one more ends all of them within the group's time-out, and is told of."""
    before = time.monotonic()
    outcomes = ranks2.fatal(one_more, place, group_seconds=3)
    assert 50 > time.monotonic() - before
    for one in outcomes:
        assert isinstance(one, StateError | LostRankError) or place == "fsdp", one
        assert any(words in told(one) for words in ("number of micro-batches", "not all ranks come")), one


def told(error: Exception) -> str:
    """Return what an error says; to one of torch's own, which a sharded model raises, it is added as a note."""
    return "\n".join([str(error), *error.__notes__])


def raise_in_the_loop(place: str) -> None:
    """Raise in the user's own code on rank 1, in the middle of a batch."""
    there, grads, _ = start(place)
    backward(there, grads)
    if here(1):
        raise KeyError("the user's own")
    backward(there, grads)
    grads.finish()


def killed_in_the_loop(place: str) -> None:
    """Lose rank 1 in the middle of a batch."""
    there, grads, _ = start(place)
    backward(there, grads)
    if here(1):
        os.kill(os.getpid(), signal.SIGKILL)
    backward(there, grads)
    grads.finish()


def late(place: str) -> None:
    """Let rank 0, which keeps the store, take longer than the group's time-out."""
    there, grads, _ = start(place)
    backward(there, grads)
    if here(0):
        time.sleep(4)
    backward(there, grads)
    grads.finish()


@pytest.mark.parametrize("place", ["replicated", "last", "fsdp", "hsdp of 2 replicas"])
def test_an_exception_of_ones_own_ends_the_others(ranks2: Ranks, place: str) -> None:
    """The other rank is told which one raised, what, and what it waited for; it does not wait for the time-out."""
    before = time.monotonic()
    waited, raised = ranks2.fatal(raise_in_the_loop, place, group_seconds=60, seconds=90)
    assert 50 > time.monotonic() - before
    assert KeyError is type(raised)
    assert isinstance(waited, LostRankError) or place == "fsdp"
    assert 'rank 1 ended by KeyError: "the user\'s own"' in told(waited)
    assert "rank 0 waits for" in told(waited)


@pytest.mark.parametrize("place", ["replicated", "last", "fsdp", "hsdp of 2 replicas"])
def test_a_lost_rank_is_named(ranks2: Ranks, place: str) -> None:
    """A rank that is killed gives no sign: the other says so, long before the time-out."""
    before = time.monotonic()
    waited, lost = ranks2.fatal(killed_in_the_loop, place, group_seconds=60, seconds=90)
    assert 50 > time.monotonic() - before
    assert Died is type(lost)
    assert isinstance(waited, LostRankError) or place == "fsdp"
    assert "rank 1 gives no sign" in told(waited)


@pytest.mark.parametrize("place", ["replicated", "fsdp"])
def test_a_late_rank_is_waited_for_as_long_as_the_group_says(ranks2: Ranks, place: str) -> None:
    """After the time-out the one that waited is told whom it waited for; so is the one that comes too late."""
    before = time.monotonic()
    came, waited = ranks2.fatal(late, place, group_seconds=2)
    assert 50 > time.monotonic() - before
    assert "rank 1 waits for" in told(waited)
    assert "rank 0 waits for" in told(came)
    assert "rank 0" in told(waited)
    assert "rank 1" in told(came)


def skip_a_module(place: str) -> dict[str, Tensor]:
    """Skip an expert on one rank and another on the other; return the weights if that is let through."""
    kind = zoo.KINDS["skipping"]
    there = PLACES[place](kind.build(), kind.blocks)
    grads = there.grads(unused="zero")
    for batch in there.batches(zoo.rows(), **ONE_BATCH):
        for microbatch in grads.microbatches(batch):
            grads.backward(kind.loss(there.model, microbatch))
        grads.step(torch.optim.SGD(there.model.parameters(), lr=1.0))
        break
    return placed.weights(there.model)


@pytest.mark.parametrize("place", ["fsdp", "hsdp of 1 replica", "hybrid of 1 replica"])
def test_a_sharded_module_that_one_rank_skips_is_refused(ranks2: Ranks, place: str) -> None:
    """Torch would mix up the two experts without a word. No rank takes a step, and each is told what to do."""
    outcomes = ranks2.fatal(skip_a_module, place, group_seconds=5)
    for one in outcomes:
        assert isinstance(one, AugendError), one
        assert "experts" in str(one)
    assert str(outcomes[0]) == str(outcomes[1])


def disagree(place: str) -> None:
    """Use different branches on the two ranks."""
    kind = zoo.KINDS["conditional"]
    there = PLACES[place](kind.build(), kind.blocks)
    grads = there.grads()
    for batch in there.batches(zoo.rows(), **ONE_BATCH):
        for microbatch in grads.microbatches(batch):
            grads.backward(kind.loss(there.model, microbatch))
        grads.finish()


@pytest.mark.parametrize("place", EVERYWHERE)
def test_ranks_that_use_different_parameters_are_told(ranks2: Ranks, place: str) -> None:
    """With unused="error" nobody hangs: every rank has the name of the parameter and of the rank that lacks it."""
    first, second = ranks2.outcomes(disagree, place)
    assert (UnusedError, UnusedError) == (type(first), type(second)), first
    assert str(first) == str(second)
    assert "'even.weight'" in str(first)
    assert "rank 1" in str(first)
