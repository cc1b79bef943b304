"""dtype="exact": which grid a batch is summed on, when it is offered again, and that nothing else can be seen of it."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from exactly import Carried, Dealt, Part, batches, carried, check_batch, feed, lists, named, one_row, tally_of
from torch import Tensor

import augend
import reference
from augend.errors import ContractError, GradientError, NonFiniteError, StateError
from models import rows, tally, terms_of, tower

NEXT = {down: float(np.nextafter(np.float32(1), np.float32(0 if down else 2))) for down in (True, False)}


def gradients(*values: float, name: str = "a") -> list[Part]:
    """Return micro-batches with one gradient of one element each."""
    return [{name: torch.tensor([value])} for value in values]


def pair(*values: tuple[float, float]) -> list[Part]:
    """Return micro-batches with a gradient of ``a`` and one of ``b``."""
    return [{"a": torch.tensor([a]), "b": torch.tensor([b])} for a, b in values]


def one(batch: augend.Batches) -> augend.data.Batch:
    """Return the first batch."""
    return next(iter(batch))


def made(parts: list[Part], **options: object) -> tuple[augend.Accumulator, Carried]:
    """Return an accumulator of exact sums for gradients like these."""
    model = carried(parts[0])
    return augend.Accumulator(model, dtype="exact", **options), model


def scales(grads: augend.Accumulator, term: str = "loss") -> dict[str, int]:
    """Return the scales that a state knows."""
    return named(grads.state_dict()["scales"][term])


def trained(parts: list[Part], history: list[list[Part]], order: int | None = None, **finish: object) -> list[str]:
    """Return the bits of every batch's sums, means and record, over a history of batches, dealt in any order."""
    grads, model = made(parts)
    outcomes = []
    for step, batch in enumerate(history):
        seed = None if order is None else order + step
        ranking = list(range(len(batch)))
        if seed is not None:
            ranking = torch.randperm(len(batch), generator=torch.Generator().manual_seed(seed)).tolist()
        feed(grads, model, Dealt(one_row(batch), ranking, step))
        done = grads.finish(**finish)
        outcomes.append(reference.digest({n: p.grad for n, p in model.held.items() if p.grad is not None}, repr(done)))
        model.zero_grad()
    return outcomes


# ------------------------------------------------------------------ when a batch is offered again


def test_the_first_batch_is_measured_and_then_added() -> None:
    """Nothing is known of the first batch: every micro-batch comes twice; of later ones, once. Records say so."""
    parts = gradients(1.0, -3.0, 0.1)
    grads, model = made(parts)
    assert [0, 0, 0, 1, 1, 1] == feed(grads, model, one(batches(parts)))
    assert (3, 3) == (grads.state.microbatches, grads.state.count)
    done = grads.finish()
    assert (2, 3, 3) == (done.offers, done.microbatches, done.count)
    assert [0, 0, 0] == feed(grads, model, one(batches(parts)))
    assert 1 == grads.finish().offers


def test_while_measuring_nothing_is_added() -> None:
    """In the first pass sums are zeros, and no norm can be told; rows are counted all the same."""
    parts = gradients(1.0, -3.0)
    grads, model = made(parts)
    loop = grads.microbatches(Dealt(one_row(parts)))
    grads.backward(tally_of(model, next(loop)))
    assert {"a": [0]} == {name: total.tolist() for name, total in named(grads.pending).items()}
    assert torch.int64 == grads.pending["held.a"].dtype
    with pytest.raises(StateError, match="no grid yet"):
        grads.norm()
    assert 1 == grads.state.count
    grads.backward(tally_of(model, next(loop)))
    grads.backward(tally_of(model, next(loop)))  # the first micro-batch, in the second offer
    assert (1, 1.0) == (grads.state.count, grads.norm())


def test_the_norm_can_be_looked_at_in_mid_batch() -> None:
    """What came so far may be small on the batch's grid, as larger gradients may come; what is beyond it is no norm."""
    usual = gradients(1.0)
    grads, model = made(usual)
    feed(grads, model, Dealt(one_row(usual)))
    grads.finish()
    loop = grads.microbatches(Dealt(one_row(gradients(2.0**-12, 1.0, 1e9)), step=1))
    for expected in (2.0**-12, (1 + 2.0**-12) / 2):
        grads.backward(tally_of(model, next(loop)))
        assert expected == grads.norm()
    grads.backward(tally_of(model, next(loop)))
    with pytest.raises(StateError, match="'held.a'"):
        grads.norm()


@pytest.mark.parametrize("size", [1e-9, 1e-3, 1e3])
def test_what_belongs_to_no_row_may_come_after_the_loop(size: float) -> None:
    """A gradient added behind the loop of every batch, smaller or larger: summed on the same grid, never refused."""
    parts = gradients(1.0, -0.5)
    grads, model = made(parts)
    offers = []
    for step in range(3):
        feed(grads, model, Dealt(one_row(parts), step=step))
        (before,) = named(grads.pending)["a"].tolist()
        k = scales(grads)["a"]
        grads.add({"held.a": torch.tensor([size])}, 0)
        assert [before + reference.rounded_to(k, float(np.float32(size)))] == named(grads.pending)["a"].tolist()
        offers.append(grads.finish().offers)
    assert [2, 1, 1] == offers


def test_what_comes_after_the_loop_and_does_not_fit_is_refused_once() -> None:
    """One a million times larger is refused, as nobody can offer it again; after a reset there is room for it."""
    parts = gradients(1.0, -0.5)
    grads, model = made(parts)
    batch = Dealt(one_row(parts))
    for attempt in range(2):
        feed(grads, model, batch)
        grads.add({"held.a": torch.tensor([1e6])}, 0)
        if attempt == 0:
            with pytest.raises(StateError, match=r"'held.a' is 1e\+06.*reset\(\)"):
                grads.finish()
            grads.reset()
    assert (1e6 + 0.5) / 2 == grads.finish().norm


@pytest.mark.parametrize("spike", [0, 2, 3])
def test_a_spike_is_offered_again(spike: int) -> None:
    """One micro-batch 10^6 times as large as the batch before: offered again, the same bits as exact sums have."""
    usual = gradients(1.0, -0.3, 0.1, 1e-3)
    spiked = [*usual]
    spiked[spike] = gradients(1e6)[0]
    grads, model = made(usual)
    twin = reference.ExactTwin()
    offers = [
        check_batch(grads, model, parts, twin, one(batches(parts, seed))).offers
        for seed, parts in enumerate([usual, usual, spiked, usual, usual])
    ]
    assert [2, 1, 2, 2, 1] == offers  # the grid of a million, 2^-14, is too coarse for the 1 that follows


def test_a_drop_is_offered_again() -> None:
    """A batch 2^-20 as large as the one before would lie on a grid of 2^-14 of it: offered again on a finer one."""
    large, small = gradients(1.0, -0.7), gradients(0.9 * 2.0**-20, 0.7 * 2.0**-21)
    grads, model = made(large)
    twin = reference.ExactTwin()
    offers = [
        check_batch(grads, model, parts, twin, one(batches(parts))).offers for parts in (large, small, small, large)
    ]
    assert [2, 2, 1, 2] == offers


@pytest.mark.parametrize(
    ("after", "offers"),
    [
        (2.0**12, 1),
        (2.0**12 / NEXT[True], 1),
        (2.0**13, 1),
        (2.0**13 * NEXT[False], 2),
        (2.0**-9, 1),
        (2.0**-9 * NEXT[True], 2),
    ],
)
def test_the_bounds_of_a_grid_are_where_they_are_said_to_be(after: float, offers: int) -> None:
    """After a largest gradient of 1 < 2^1: up to 2^12 · 2^1, and down to where 2^-33 is 2^-24 of the largest."""
    before = gradients(1.0)
    grads, model = made(before)
    twin = reference.ExactTwin()
    check_batch(grads, model, before, twin, one(batches(before)))
    assert 33 == scales(grads)["a"]
    assert offers == check_batch(grads, model, gradients(-after), twin, one(batches(gradients(-after)))).offers


def test_zeros_keep_the_grid() -> None:
    """A batch of zeros is not offered again, and neither is the next if it is as large as the one before the zeros."""
    usual, zeros = gradients(1.5, -0.2), gradients(0.0, -0.0)
    grads, model = made(usual)
    twin = reference.ExactTwin()
    offers = []
    for parts in (usual, zeros, zeros, usual):
        offers.append(check_batch(grads, model, parts, twin, one(batches(parts))).offers)
        assert {"a": 33} == scales(grads)
    assert [2, 1, 1, 1] == offers


def test_zeros_first_are_a_batch_too() -> None:
    """Before anything is known, a batch of zeros has a mean of zeros, at once; the first other batch is measured."""
    zeros, usual = gradients(0.0, 0.0), gradients(1.0, 2.0)
    grads, model = made(zeros)
    twin = reference.ExactTwin()
    assert 1 == check_batch(grads, model, zeros, twin, one(batches(zeros))).offers
    assert [0.0] == model.held["a"].grad.tolist()
    assert {} == scales(grads)
    assert 2 == check_batch(grads, model, usual, twin, one(batches(usual))).offers
    assert 1 == check_batch(grads, model, zeros, twin, one(batches(zeros))).offers


def test_a_tensor_without_a_grid_takes_the_coarsest() -> None:
    """What was zero so far is summed on the coarsest grid of its term, without an offer more, if that serves it."""

    def batch(*rows: tuple[float, float, float]) -> list[Part]:
        return [{name: torch.tensor([x]) for name, x in zip("abc", row, strict=True)} for row in rows]

    first = batch((4.0, 1e-6, 0.0), (1.0, 0.0, 0.0))
    grads, model = made(first)
    twin = reference.ExactTwin()
    check_batch(grads, model, first, twin, one(batches(first)))
    known = {"a": 31, "b": 34 + 19}
    assert known == scales(grads)
    state = grads.state_dict()
    second = batch((4.0, 1e-6, 0.3), (1.0, 0.0, -0.1))
    feed(grads, model, one(batches(second)))
    expected = sum(reference.rounded_to(31, part["c"].double().item()) for part in second)
    assert [expected] == named(grads.pending)["c"].tolist()
    grads.reset()
    assert 1 == check_batch(grads, model, second, twin, one(batches(second))).offers
    assert known | {"c": 35} == scales(grads)
    grads.load_state_dict(state)
    twin = reference.ExactTwin()
    twin.scales = known
    third = batch((4.0, 1e-6, 2.0**-12), (1.0, 0.0, 0.0))  # too fine for that grid
    assert 2 == check_batch(grads, model, third, twin, one(batches(third))).offers


class Experts(torch.nn.Module):
    """A mixture of which each batch uses one expert, after a layer that all use."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.common = torch.nn.Linear(6, 6)
        self.experts = torch.nn.ModuleList([torch.nn.Linear(6, 3) for _ in range(experts)])

    def forward(self, x: Tensor, expert: int) -> Tensor:
        return self.experts[expert](torch.tanh(self.common(x)))


def test_rare_experts_cost_hardly_any_offer(record_property) -> None:
    """Of 64 experts each batch uses one, 256 batches long: one batch, the first, is offered again. The share is told.

    A new expert takes the coarsest grid, which serves magnitudes over twenty binades; a rare one has a grid of the
    last batch that it was in.
    """
    torch.manual_seed(0)
    model = Experts(64)
    grads = augend.Accumulator(model, dtype="exact")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    chosen = torch.randint(0, 64, (256,), generator=torch.Generator().manual_seed(1)).tolist()
    again = 0
    for step, expert in enumerate(chosen):
        x, y = torch.randn(4, 6, generator=torch.Generator().manual_seed(step)), torch.arange(4) % 3
        parts = [{"x": x[at : at + 2], "y": y[at : at + 2]} for at in (0, 2)]
        feed(
            grads,
            model,
            Dealt(parts, step=step),
            lambda net, part, expert=expert: augend.losses.cross_entropy(net(part["x"], expert), part["y"]),
        )
        again += grads.step(optimizer, max_norm=1.0).offers - 1
    share = again / len(chosen)
    record_property("share of re-offered batches with 64 rare experts", share)
    assert 64 - 3 <= len(set(chosen))
    assert 1 == again


# ------------------------------------------------------------------ inf and nan

FINITE = [pair((1.0, 0.5), (-0.5, 3.0), (0.25, 1e-3)), pair((0.5, 0.25), (1.0, -1.0), (0.1, 0.7))]


def history_with(bad: float, at: int) -> list[list[Part]]:
    """Return four batches, in one micro-batch of one of which a gradient of ``a`` is not finite."""
    history = [FINITE[0], FINITE[1], FINITE[0], FINITE[1]]
    parts = [dict(part) for part in history[at]]
    parts[1]["a"] = torch.tensor([bad])
    history[at] = parts
    return history


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("at", [0, 2])
def test_a_skipped_batch_is_the_same_on_any_cut(bad: float, at: int) -> None:
    """nonfinite="skip": offered once, teaches nothing, and all that follows has the same bits, whatever the order."""
    history = history_with(bad, at)
    outcomes = [trained(FINITE[0], history, order, nonfinite="skip") for order in (None, 1, 2, 3)]
    assert all(outcomes[0] == other for other in outcomes)
    grads, model = made(FINITE[0])
    offers = []
    for step, parts in enumerate(history):
        before = scales(grads)
        feed(grads, model, Dealt(one_row(parts), step=step))
        done = grads.finish(nonfinite="skip", max_norm=1.0)
        assert (step == at) == done.skipped
        if step == at:
            assert before == scales(grads)
        offers.append(done.offers)
    assert ([1, 2, 1, 1] if at == 0 else [2, 1, 1, 1]) == offers


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_an_allowed_batch_is_the_same_on_any_cut(bad: float) -> None:
    """nonfinite="allow": the whole tensor is nan, the other is right, and all of it is the same whatever the order."""
    history = history_with(bad, 2)
    outcomes = [trained(FINITE[0], history, order, nonfinite="allow") for order in (None, 1, 2, 3)]
    assert all(outcomes[0] == other for other in outcomes)
    grads, model = made(FINITE[0])
    for step, parts in enumerate(history[:3]):
        feed(grads, model, Dealt(one_row(parts), step=step))
        done = grads.finish(nonfinite="allow")
    assert math.isnan(model.held["a"].grad.item())
    exact = sum(part["b"].double().item() for part in history[2]) / 3
    assert float(np.float32(exact)) == model.held["b"].grad.item()
    assert (False, 3, 1) == (done.skipped, done.update, done.offers)
    assert math.isnan(done.norm)


def test_what_could_not_be_summed_is_never_a_number() -> None:
    """With an inf beside it, what has no grid or is beyond its own is nan too: such a batch is not offered again."""
    for history in (
        [pair((math.inf, 1.0))],
        [pair((1.0, 1.0)), pair((math.inf, 1e9))],
        [pair((1.0, 1.0)), pair((math.nan, 1e-9))],
    ):
        grads, model = made(history[0])
        for step, parts in enumerate(history):
            feed(grads, model, Dealt(one_row(parts), step=step))
            grads.finish(nonfinite="allow")
        assert math.isnan(model.held["a"].grad.item())
        assert math.isnan(model.held["b"].grad.item())


@pytest.mark.parametrize("first", [True, False])
def test_a_refused_batch_is_named_and_can_be_dropped(first: bool) -> None:
    """nonfinite="raise": named, kept, dropped by reset; it taught nothing, and the rest is as if it had not been."""
    good, bad = FINITE[0], history_with(math.nan, 0)[0]
    grads, model = made(good)
    if not first:
        feed(grads, model, Dealt(one_row(good)))
        grads.finish()
    known = scales(grads)
    assert [0, 0, 0] == feed(grads, model, Dealt(one_row(bad), step=1))
    with pytest.raises(NonFiniteError, match="'held.a'"):
        grads.finish()
    grads.reset()
    assert known == scales(grads)
    feed(grads, model, Dealt(one_row(FINITE[1]), step=2))
    actual = grads.finish()
    other, twin = made(good)
    if not first:
        feed(other, twin, Dealt(one_row(good)))
        other.finish()
    feed(other, twin, Dealt(one_row(FINITE[1]), step=2))
    assert (repr(other.finish().norm), 1 + first) == (repr(actual.norm), actual.offers)


# ------------------------------------------------------------------ terms, members, scales of the loss


def test_terms_have_grids_of_their_own() -> None:
    """A second loss term, a million times smaller and measured a batch later, keeps its own scales, sums and count."""
    parts = gradients(1.0, -0.3, 0.7)
    model = carried(parts[0])
    grads = augend.Accumulator(model, dtype="exact", terms=("main", "side"))
    twins = {"main": reference.ExactTwin(), "side": reference.ExactTwin()}
    offers, expected = [], []
    for step, factor in enumerate((0.0, 2.0**-20, 2.0**-20)):
        for microbatch in grads.microbatches(Dealt(one_row(parts), step=step)):
            main = tally_of(model, microbatch)
            side = augend.Tally(model(microbatch) * factor, torch.ones(1, dtype=torch.int64) * 2)
            grads.backward({"main": main, "side": side})
        small = [{"a": part["a"] * factor} for part in parts]
        batch = {name: twins[name].batch(lists(p), n) for name, p, n in (("main", parts, 3), ("side", small, 6))}
        pending = {term: named(one) for term, one in grads.pending.items()}
        assert {term: one.sums["a"] for term, one in batch.items()} == {
            term: one["a"].tolist() for term, one in pending.items()
        }
        done = grads.finish(term_weights={"main": 0.5, "side": 3.0})
        offers.append(done.offers)
        expected.append(max(one.offers for one in batch.values()))
        mean = 0.0
        for term, weight, count in (("main", 0.5, 3), ("side", 3.0, 6)):
            k = batch[term].scales["a"]
            mean += float(batch[term].sums["a"][0]) * 2.0**-k / count * weight
        assert float(np.float32(mean)) == model.held["a"].grad.item()
    assert expected == offers == [2, 2, 1]
    assert {"main": {"a": 33}, "side": {"a": 53}} == {term: scales(grads, term) for term in ("main", "side")}


def test_members_of_one_loop_are_offered_again_together() -> None:
    """Where an exact member wants a batch again, a float32 member gets it again too, and neither counts twice."""
    parts = gradients(1.0, -3.0, 0.25)
    for order in ((0, 1), (1, 0)):
        models = [carried(parts[0]), carried(parts[0])]
        members = [augend.Accumulator(models[0], dtype="exact"), augend.Accumulator(models[1])]
        seen = []
        for step in range(2):
            leader, other = (members[at] for at in order)
            for microbatch in leader.microbatches(Dealt(one_row(parts), step=step), together=[other]):
                seen.append(microbatch.offer)
                for grads, model in zip(members, models, strict=True):
                    grads.backward(tally_of(model, microbatch))
            means = []
            for grads, model in zip(members, models, strict=True):
                done = grads.finish()
                means.append(model.held["a"].grad.item())
                assert (3, 3, 2 - step) == (done.count, done.microbatches, done.offers)
            assert [-1.75 / 3] * 2 == pytest.approx(means, abs=2.0**-24)
        assert [0, 0, 0, 1, 1, 1, 0, 0, 0] == seen


def test_two_exact_members_with_different_needs() -> None:
    """Only one of two exact members needs the batch again: both get it, both with the bits that they have alone."""
    parts, spiked = gradients(1.0, -3.0), gradients(1.0, 1e7)

    def alone(history: list[list[Part]]) -> list[float]:
        grads, model = made(parts)
        means = []
        for step, batch in enumerate(history):
            feed(grads, model, Dealt(one_row(batch), step=step))
            grads.finish()
            means.append(model.held["a"].grad.item())
        return means

    expected = alone([parts, parts]), alone([parts, spiked])
    (a, first), (b, second) = made(parts), made(parts)
    found: tuple[list[float], list[float]] = ([], [])
    for step, batch in enumerate((parts, spiked)):
        both = [{"a": own["a"], "b": other["a"]} for own, other in zip(parts, batch, strict=True)]
        for microbatch in a.microbatches(Dealt(one_row(both), step=step), together=[b]):
            a.backward(tally_of(first, microbatch))
            b.backward(tally_of(second, {"a": microbatch["b"]}))
        assert (2, 2) == (a.finish().offers, b.finish().offers)
        for means, model in zip(found, (first, second), strict=True):
            means.append(model.held["a"].grad.item())
    assert expected == found


def test_a_member_that_is_not_finite_goes_along() -> None:
    """One member's nan asks for no offer; the other, which needs one, gets it, and the nan is still the policy's."""
    parts = pair((1.0, 1.0), (1e7, math.nan))
    (a, first), (b, second) = made(gradients(1.0)), made(gradients(1.0))
    for step, batch in enumerate((pair((1.0, 1.0), (0.5, 0.5)), parts)):
        for microbatch in a.microbatches(Dealt(one_row(batch), step=step), together=[b]):
            a.backward(tally_of(first, microbatch))
            b.backward(tally_of(second, {"a": microbatch["b"]}))
        done = a.finish(), b.finish(nonfinite="skip")
    assert [(2, False), (2, True)] == [(one.offers, one.skipped) for one in done]
    assert (1e7 + 1) / 2 == first.held["a"].grad.item()
    assert {"a": 33} == scales(b)


@pytest.mark.parametrize("power", [16, -16, 3])
def test_a_loss_scale_that_is_a_power_of_two_changes_no_bit(power: int) -> None:
    """Loss scales of 2^16, 2^-16 and 8: means, norms and offers are those without, bit for bit."""
    history = [*FINITE, pair((1e6, 1e-9), (1.0, 1.0)), pair((0.0, 2.0**-60), (2.0**-100, 0.0))]
    outcomes = []
    for loss_scale in (1.0, 2.0**power):
        grads, model = made(history[0], loss_scale=loss_scale)
        found = []
        for step, parts in enumerate(history):
            feed(grads, model, Dealt(one_row(parts), step=step))
            done = grads.finish(max_norm=0.7)
            found.append((repr(done), {name: p.grad.tolist() for name, p in model.held.items()}))
        outcomes.append(found)
    assert outcomes[0] == outcomes[1]


# ------------------------------------------------------------------ parameters


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_parameters_are_summed_exactly(dtype: torch.dtype) -> None:
    """The gradients that autograd makes for 16-bit parameters are summed as they are, in any order, and trained on."""
    generator = torch.Generator().manual_seed(0)
    history = [[{"a": torch.randn(5, generator=generator).to(dtype).float()} for _ in range(6)] for _ in range(4)]
    outcomes = set()
    for seed in range(4):
        model = carried(history[0][0], dtype)
        grads = augend.Accumulator(model, dtype="exact")
        optimizer = augend.optim.MasterWeights(model.parameters(), lambda groups: torch.optim.AdamW(groups, lr=0.01))
        twin = reference.ExactTwin()
        found = []
        for step, parts in enumerate(history):
            order = torch.randperm(6, generator=torch.Generator().manual_seed(seed * 10 + step)).tolist()
            feed(grads, model, Dealt(one_row(parts), order, step))
            expected = twin.batch(lists(parts), 6)
            assert expected.sums["a"] == named(grads.pending)["a"].tolist()
            done = grads.step(optimizer, max_norm=0.5)
            assert (expected.norm, expected.offers) == (done.norm, done.offers)
            found.append(repr(done))
        outcomes.add(reference.digest(model.held["a"], optimizer.state_dict(), found))
    assert 1 == len(outcomes)


def test_tied_and_frozen_parameters_and_some_that_are_never_used() -> None:
    """A tied weight has one grid and one sum, a frozen or idle one has none; any order of micro-batches, same bits."""
    outcomes = set()
    for order in itertools.permutations(range(3)):
        model = tower()
        grads = augend.Accumulator(model, dtype="exact")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            parts = [dict(zip(("x", "y"), rows(4, seed=3 * step + at), strict=True)) for at in range(3)]
            feed(grads, model, Dealt(parts, order, step), lambda net, part: tally(net, part["x"], part["y"]))
            assert {"first.weight", "first.bias", "head.weight", "head.bias"} == set(grads.pending)
            grads.step(optimizer, max_norm=0.3)
        assert {"first.weight", "first.bias", "head.weight", "head.bias"} == set(grads.state_dict()["scales"]["loss"])
        outcomes.add(reference.digest(dict(model.named_parameters())))
    assert 1 == len(outcomes)


def test_numbers_and_odd_layouts_are_parameters_too() -> None:
    """0-d parameters, transposed ones and 1 x 1 ones are summed as others are."""
    shapes = {"point": (), "matrix": (3, 5), "single": (1, 1)}
    generator = torch.Generator().manual_seed(1)
    parts = [{name: torch.randn(shape, generator=generator) for name, shape in shapes.items()} for _ in range(4)]
    model = carried(parts[0])
    model.held["matrix"] = torch.nn.Parameter(torch.zeros(5, 3).T)
    grads, twin = augend.Accumulator(model, dtype="exact"), reference.ExactTwin()
    for seed in range(2):
        check_batch(grads, model, parts, twin, one(batches(parts, seed)))
    assert (1, 3) == grads._pending.zeros("held.matrix").stride()


def test_parameters_in_float64_are_refused() -> None:
    """A float64 parameter has more bits than the mean, which is float32: refused at construction, by name."""
    with pytest.raises(ContractError, match="'weight' is float64"):
        augend.Accumulator(torch.nn.Linear(1, 1, dtype=torch.float64), dtype="exact")


def test_more_microbatches_than_there_is_head_room_for_are_refused() -> None:
    """At most 2^20 micro-batches a batch; the limit that was chosen holds, and belongs to the contract."""
    model = torch.nn.Linear(1, 1)
    with pytest.raises(ContractError, match=r"max_microbatches must be at most 1,048,576 with dtype=.exact."):
        augend.Accumulator(model, dtype="exact", max_microbatches=2**20 + 1)
    assert 2**20 == augend.Accumulator(model, dtype="exact", max_microbatches=2**20).contract.max_microbatches
    assert 65_536 == augend.Accumulator(model, dtype="exact").contract.max_microbatches
    assert augend.Accumulator(model).contract.max_microbatches is None
    parts = gradients(1.0, 1.0, 1.0)
    grads, model = made(parts, max_microbatches=2)
    with pytest.raises(StateError, match="holds 2 micro-batches, which is max_microbatches"):
        feed(grads, model, Dealt(one_row(parts)))


@pytest.mark.parametrize("most", [1, 3, 1000, 2**20])
def test_the_head_room_chooses_the_grid(most: int) -> None:
    """Fewer micro-batches leave a finer grid; the sums are the twin's for any limit."""
    parts = gradients(1.0, -0.3, 0.7)[: min(most, 3)]
    grads, model = made(parts, max_microbatches=most)
    check_batch(grads, model, parts, reference.ExactTwin(most), one(batches(parts)))
    assert {"a": 49 - reference.head_bits(most)} == scales(grads)


# ------------------------------------------------------------------ gradients made elsewhere


def test_add_in_the_loop_is_as_good_as_a_backward() -> None:
    """Gradients made by hand in the loop are measured and offered again as others are."""
    parts = gradients(1.0, -3.0, 0.1)
    expected = trained(parts, [parts, parts])
    grads, model = made(parts)
    outcomes = []
    for step in range(2):
        for microbatch in grads.microbatches(Dealt(one_row(parts), step=step)):
            grads.add({"held.a": microbatch["a"][0]}, 1)
        done = grads.finish()
        outcomes.append((done.offers, done.norm, model.held["a"].grad.item()))
    exact = float(np.float32(sum(float(part["a"].double()) for part in parts) / 3))
    assert [(2, abs(exact), exact), (1, abs(exact), exact)] == outcomes
    assert 2 == len(expected)


@pytest.mark.parametrize("ending", ["finish", "finish_mean", "finish_sums", "step"])
def test_add_alone_cannot_be_offered_again(ending: str) -> None:
    """Outside of microbatches() nobody can offer a batch again: refused by name, and right after a reset."""
    parts = gradients(1.0, -3.0)
    grads, model = made(parts)
    calls = {"step": lambda: grads.step(torch.optim.SGD(model.parameters(), lr=1.0))}

    def add() -> None:
        for part in parts:
            grads.add({"held.a": part["a"]}, 1)

    add()
    with pytest.raises(StateError, match="'held.a' is 3, and its exact sum has no grid yet"):
        grads.norm()  # which is not asked to go on
    with pytest.raises(StateError, match=r"'held.a' is 3, and its exact sum has no grid yet.*call reset\(\)"):
        calls.get(ending, getattr(grads, ending, None))()
    grads.reset()
    add()
    assert 1.0 == grads.norm()
    assert 1 == grads.finish().offers
    grads.add({"held.a": torch.tensor([1e9])}, 1)
    with pytest.raises(StateError, match="a grid for other magnitudes"):
        grads.finish()
    grads.reset()
    grads.add({"held.a": torch.tensor([1e9])}, 1)
    grads.finish()
    assert [1e9] == model.held["a"].grad.tolist()


def test_a_plain_loop_cannot_be_offered_again() -> None:
    """for microbatch in batch: the first batch is refused at its end, and a reset makes the grids for it."""
    parts = gradients(1.0, -3.0)
    grads, model = made(parts)
    for attempt in range(2):
        for microbatch in one(batches(parts)):
            grads.backward(tally_of(model, microbatch))
        if attempt == 0:
            with pytest.raises(StateError, match="cannot be offered again"):
                grads.finish()
            grads.reset()
    assert 1.0 == grads.finish().norm


# ------------------------------------------------------------------ models that no second offer can serve


def test_a_model_that_is_not_deterministic_is_found() -> None:
    """Gradients of another size in the second offer than in the first: refused by name, as nothing can be promised."""
    parts = gradients(1.0, 1.0)
    grads, model = made(parts)
    calls = itertools.count()

    def drifting(net: torch.nn.Module, part: Part) -> augend.Tally:
        return augend.Tally(net(part) * 1e4 ** next(calls), torch.ones(1, dtype=torch.int64))

    with pytest.raises(StateError, match="offered again, and its gradients are others than before"):
        feed(grads, model, Dealt(one_row(parts)), drifting)
    grads.reset()
    feed(grads, model, Dealt(one_row(parts)))
    assert 1.0 == grads.finish().norm


class Counting(torch.nn.Module):
    """A model with buffers: one that its forward may change, in one of several ways, and one that stays."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.weight = torch.nn.Parameter(torch.ones(1))
        self.register_buffer("seen", torch.zeros(2))
        self.register_buffer("constant", torch.full((1,), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "in place":
            self.seen += 1
        elif self.how == "set anew":
            self.seen = self.seen + 1
        elif self.how == "past autograd":
            self.seen.numpy()[0] += 1
        elif self.how == "a new one":
            self.register_buffer("late", torch.zeros(1))
        return (x * self.weight * self.constant).sum(dim=1)


@pytest.mark.parametrize(
    ("how", "name"),
    [("in place", "seen"), ("set anew", "seen"), ("past autograd", "seen"), ("a new one", "late")],
)
def test_a_buffer_that_a_forward_changes_is_refused_by_name(how: str, name: str) -> None:
    """What one micro-batch leaves behind for the next would show their order: refused, however it is changed."""
    parts = [{"x": torch.ones(1, 2)} for _ in range(2)]
    loss = lambda net, part: augend.Tally(net(part["x"]), torch.ones(1, dtype=torch.int64))  # noqa: E731  as a user's
    model = Counting(how)
    grads = augend.Accumulator(model, dtype="exact")
    with pytest.raises(StateError, match=f"buffer '{name}' was changed while a batch was worked through"):
        feed(grads, model, Dealt(parts), loss)
        grads.finish()  # what is written unseen is found by its values, at the end
    model = Counting("not at all")
    grads = augend.Accumulator(model, dtype="exact")
    for step in range(2):
        feed(grads, model, Dealt(parts, step=step), loss)
        grads.finish()
        model.seen += 1  # between batches buffers are the user's


def test_batch_normalisation_is_refused_in_training_only() -> None:
    """BatchNorm in train mode is named; in eval mode, or in float32, it trains."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    parts = [{"x": torch.randn(5, 3)} for _ in range(2)]
    loss = lambda net, part: augend.losses.mean((net(part["x"]) ** 2).sum(dim=1))  # noqa: E731  as a user writes it
    grads = augend.Accumulator(model, dtype="exact")
    with pytest.raises(StateError, match=r"buffer '1\..*batch normalisation.*eval mode"):
        feed(grads, model, Dealt(parts), loss)
    grads.reset()
    model.eval()
    feed(grads, model, Dealt(parts), loss)
    assert 2 == grads.finish().offers
    model.zero_grad()
    plain = augend.Accumulator(model.train())
    feed(plain, model, Dealt(parts), loss)
    assert 1 == plain.finish().offers


# ------------------------------------------------------------------ the loop, left and entered


def moments_of_the_loop() -> list[int]:
    """Return at which of the six micro-batches of two offers a loop is left."""
    return list(range(1, 6))


@pytest.mark.parametrize("stop", moments_of_the_loop())
@pytest.mark.parametrize("reset", [False, True])
def test_a_loop_that_was_left_goes_on(stop: int, reset: bool) -> None:
    """Left after any micro-batch of either offer, and entered again, or reset and offered anew: the same bits."""
    parts = gradients(1.0, -3.0, 0.1)
    grads, model = made(parts)
    batch = Dealt(one_row(parts))
    for done, microbatch in enumerate(grads.microbatches(batch), start=1):
        grads.backward(tally_of(model, microbatch))
        if done == stop:
            break
    if stop == 3 and not reset:
        with pytest.raises(StateError, match=r"microbatches\(\) offers such a batch again"):
            grads.finish()
    elif not reset:
        with pytest.raises(StateError, match=f"has {stop % 3} of 3 rows done"):
            grads.finish()
    if reset:
        grads.reset()
    offers = feed(grads, model, batch)
    done = grads.finish()
    twin = reference.ExactTwin().batch(lists(parts), 3)
    assert (twin.norm, twin.means["a"]) == (done.norm, model.held["a"].grad.tolist())
    assert (([0] * 3 + [1] * 3)[0 if reset else stop :], 2) == (offers, done.offers)


@pytest.mark.parametrize("stop", [1, 4])
def test_an_exception_in_either_offer_can_be_dropped(stop: int) -> None:
    """A body that fails before its backward, or a backward that fails: the same bits afterwards."""
    parts = gradients(1.0, -3.0, 0.1)
    twin = reference.ExactTwin().batch(lists(parts), 3)
    for inside in (False, True):
        grads, model = made(parts)
        batch = Dealt(one_row(parts))
        calls = itertools.count()

        def fail(gradient: Tensor, calls=calls) -> None:
            if next(calls) == stop:
                raise ZeroDivisionError

        handle = model.held["a"].register_hook(fail) if inside else None
        with pytest.raises(ZeroDivisionError):
            for at, microbatch in enumerate(grads.microbatches(batch)):
                if at == stop and not inside:
                    raise ZeroDivisionError
                grads.backward(tally_of(model, microbatch))
        if handle is not None:
            handle.remove()
            with pytest.raises(StateError, match="half added"):
                feed(grads, model, batch)
            grads.reset()
        feed(grads, model, batch)
        assert twin.norm == grads.finish().norm
        assert twin.means["a"] == model.held["a"].grad.tolist()


def test_a_loop_must_be_gone_through_to_its_end() -> None:
    """Left by break after the last backward, the batch was not judged yet: entering the loop again does that."""
    parts = gradients(1.0, -3.0)
    grads, model = made(parts)
    batch = Dealt(one_row(parts))
    for microbatch in grads.microbatches(batch):
        grads.backward(tally_of(model, microbatch))
        if microbatch.rows_done == 2:
            break
    with pytest.raises(StateError, match="no grid yet"):
        grads.finish()
    assert [1, 1] == feed(grads, model, batch)
    assert 2 == grads.finish().offers
    for microbatch in grads.microbatches(Dealt(one_row(parts), step=1)):
        grads.backward(tally_of(model, microbatch))
        if microbatch.rows_done == 2:
            break  # its grid serves it: nothing is missing
    assert 1 == grads.finish().offers


def test_random_state_is_the_same_in_both_offers() -> None:
    """Dropout and noise of a micro-batch are drawn again as they were, from the generators of torch and numpy."""
    drawn: list[tuple[int, float, float]] = []
    parts = gradients(1.0, -3.0, 0.1)
    grads, model = made(parts)
    data = batches(parts)
    for batch in data:
        for microbatch in grads.microbatches(batch):
            drawn.append((microbatch.first_row, torch.rand(1).item(), np.random.rand()))  # noqa: NPY002  as users do
            grads.backward(tally_of(model, microbatch))
        grads.finish()
    assert 6 == len(drawn)
    assert drawn[:3] == drawn[3:]
    assert 3 == len(set(drawn))


class Noisy(torch.utils.data.Dataset):
    """Rows with noise of their own, drawn where they are fetched."""

    def __len__(self) -> int:
        return 9

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        return {"a": torch.tensor([float(row)]) + torch.rand(1)}


def test_rows_are_fetched_again_as_they_were() -> None:
    """Augmented rows, fetched here or ahead of time by a worker, are the same in both offers, and so is the run."""
    outcomes = []
    for workers in ({}, {"num_workers": 1, "prefetch_factor": 2}):
        model = carried({"a": torch.zeros(1)})
        grads = augend.Accumulator(model, dtype="exact")
        seen: list[tuple[int, int, float]] = []
        for batch in augend.Batches(Noisy(), batch_size=4, microbatch_size=2, seed=1, epochs=1, **workers):
            for microbatch in grads.microbatches(batch):
                seen.append((batch.step, microbatch.offer, microbatch["a"].sum().item()))
                grads.backward(tally_of(model, microbatch))
            seen.append((batch.step, -1, grads.finish().norm))
        assert [total for *_, total in seen[:2]] == [total for *_, total in seen[2:4]]
        outcomes.append(seen)
    assert outcomes[0] == outcomes[1]


def test_metrics_count_the_later_offer() -> None:
    """A metric that is told the micro-batch forgets what it was told in the first offer."""
    parts = gradients(1.0, -3.0, 0.5)
    grads, model = made(parts)
    losses, plain = augend.Mean(), augend.Mean()
    for step in range(2):
        for microbatch in grads.microbatches(Dealt(one_row(parts), step=step)):
            out = augend.Tally(microbatch["a"][:, 0] + microbatch.offer, torch.ones(1, dtype=torch.int64))
            losses.update(out, microbatch)
            plain.update(out)
            grads.backward(tally_of(model, microbatch))
        grads.finish()
    assert (6, (-1.5 + 3 - 1.5) / 6) == (losses.compute().count, losses.compute().value)
    assert 9 == plain.compute().count


# ------------------------------------------------------------------ other endings


def test_drained_sums_are_whole_numbers_and_their_scales() -> None:
    """finish_sums hands over the twin's integers with their scales; from_sums goes on from them to the same bits."""
    parts, more = FINITE
    grads, model = made(parts)
    twin = reference.ExactTwin()
    check_batch(grads, model, parts, twin, Dealt(one_row(parts)))
    feed(grads, model, Dealt(one_row(more), step=1))
    expected = twin.batch(lists(more), 3)
    sums = grads.finish_sums()
    assert expected.sums == {name: total.tolist() for name, total in named(sums.gradients).items()}
    assert expected.scales == named(sums.state.scales["loss"])
    assert ("exact", 3, 3) == (sums.state.dtype, sums.state.count, sums.state.microbatches)
    fresh = carried(parts[0])
    made_again = augend.Accumulator.from_sums(fresh, sums, grads.contract)
    assert grads.contract == made_again.contract
    done = made_again.finish()
    assert expected.norm == done.norm
    assert expected.means == {name: one.grad.tolist() for name, one in fresh.held.items()}
    feed(grads, model, Dealt(one_row(parts), step=2))
    assert 1 == grads.finish().offers  # what was drained has taught its grids


def test_drained_sums_cannot_hide_an_inf() -> None:
    """Whole numbers hold neither inf nor nan, so they are not handed over as if they did: refused by name, and kept."""
    parts = gradients(1.0, 2.0)
    grads, model = made(parts)
    feed(grads, model, Dealt(one_row(parts)))
    grads.finish()
    grads.add({"held.a": torch.tensor([math.inf])}, 1)
    with pytest.raises(NonFiniteError, match="'held.a'"):
        grads.finish_sums()
    grads.reset()
    grads.add({"held.a": torch.tensor([1.0])}, 1)
    assert 1 == grads.finish_sums().state.count


def test_sums_that_were_drained_can_be_gone_on_with() -> None:
    """Micro-batches added to an accumulator made of sums: the bits of one batch of both."""
    parts, more = FINITE
    grads, model = made(parts)
    feed(grads, model, Dealt(one_row(parts)))
    grads.finish()
    for part in (*parts, *more):
        grads.add({f"held.{name}": one for name, one in part.items()}, 1)
    expected = grads.finish().norm
    for part in parts:
        grads.add({f"held.{name}": one for name, one in part.items()}, 1)
    other = augend.Accumulator.from_sums(carried(parts[0]), grads.finish_sums(), grads.contract)
    for part in more:
        other.add({f"held.{name}": one for name, one in part.items()}, 1)
    assert expected == other.finish().norm


def test_a_mean_can_be_handed_over() -> None:
    """finish_mean gives the twin's float32 means, leaves .grad alone, and goes on with the grids of its batch."""
    parts, more = FINITE
    grads, model = made(parts)
    twin = reference.ExactTwin()
    for step, batch in enumerate((parts, more)):
        feed(grads, model, Dealt(one_row(batch), step=step))
        expected = twin.batch(lists(batch), 3)
        means = grads.finish_mean()
        assert expected.means == {name: mean.tolist() for name, mean in named(means.gradients).items()}
        assert {torch.float32} == {mean.dtype for mean in means.gradients.values()}
        assert all(parameter.grad is None for parameter in model.parameters())


def test_clipping_is_a_product_with_one_factor() -> None:
    """The clipped gradient is the float32 mean times a factor rounded to float32: what clipping of the mean gives."""
    parts = FINITE[0]
    grads, model = made(parts)
    feed(grads, model, Dealt(one_row(parts)))
    done = grads.finish(max_norm=0.25)
    twin = reference.ExactTwin().batch(lists(parts), 3)
    assert 0.25 / twin.norm == done.scale
    factor = np.float32(done.scale)
    assert {name: [float(np.float32(x) * factor) for x in mean] for name, mean in twin.means.items()} == {
        name: one.grad.tolist() for name, one in model.held.items()
    }


def test_an_empty_batch_follows_its_policy() -> None:
    """Nothing counted: refused, skipped, divided by one, or zeros, as in float32; its gradients are measured too."""
    parts = gradients(2.0, -0.5)
    nothing = lambda net, part: augend.Tally(net(part), torch.zeros(1, dtype=torch.int64))  # noqa: E731  as a user's
    for empty, expected in (("skip", None), ("one", [1.5]), ("zero", [0.0])):
        grads, model = made(parts)
        feed(grads, model, Dealt(one_row(parts)), nothing)
        done = grads.finish(empty=empty)
        assert (0, 2, empty == "skip") == (done.count, done.offers, done.skipped)
        assert expected == (None if model.held["a"].grad is None else model.held["a"].grad.tolist())


@pytest.mark.parametrize("left", [1e30, math.nan])
def test_an_empty_term_beside_a_full_one_is_zero(left: float) -> None:
    """A term that counted nothing adds exact zeros to the mean, whatever gradients its masked rows left behind."""
    parts = gradients(1.0, -0.3)
    model = carried(parts[0])
    grads = augend.Accumulator(model, dtype="exact", terms=("main", "rare"))
    for step in range(2):
        for microbatch in grads.microbatches(Dealt(one_row(parts), step=step)):
            rare = augend.Tally(model(microbatch) * left, torch.zeros(1, dtype=torch.int64))
            grads.backward({"main": tally_of(model, microbatch), "rare": rare})
        done = grads.finish(nonfinite="allow", term_weights={"rare": 5.0})
        assert math.isnan(done.losses["rare"].value)
    exact = sum(part["a"].double().item() for part in parts) / 2
    assert float(np.float32(exact)) == model.held["a"].grad.item()
    assert done.norm == abs(model.held["a"].grad.item())


def test_a_wrong_gradient_is_refused_as_in_float32() -> None:
    """Unknown names, other shapes and foreign gradients are refused, and change nothing."""
    parts = gradients(1.0)
    grads, model = made(parts)
    for given in ({"x": torch.zeros(1)}, {"held.a": torch.zeros(2)}):
        with pytest.raises(GradientError):
            grads.add(given, 1)
    model.held["a"].grad = torch.ones(1)
    with pytest.raises(GradientError, match="did not make"):
        grads.add({"held.a": torch.zeros(1)}, 1)
    model.held["a"].grad = None
    feed(grads, model, Dealt(one_row(parts)))
    assert 1 == grads.finish().microbatches


# ------------------------------------------------------------------ whole trainings


class Net(torch.nn.Module):
    """A network with dropout and dimensions that divide nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.drop = torch.nn.Linear(5, 7), torch.nn.Linear(7, 3), torch.nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.drop(torch.tanh(self.a(x))))


def epoch(step: int) -> list[dict[str, Tensor]]:
    """Return a batch of six micro-batches of three rows."""
    generator = torch.Generator().manual_seed(step)
    return [
        {"x": torch.randn(3, 5, generator=generator), "y": torch.randint(0, 3, (3,), generator=generator)}
        for _ in range(6)
    ]


def cross_entropy(net: torch.nn.Module, part: Part) -> augend.Tally:
    """Return the loss of rows."""
    return augend.losses.cross_entropy(net(part["x"]), part["y"])


def network(dtype: str, order: int | None) -> str:
    """Train for twelve steps with clipping, AdamW and dropout; micro-batches dealt in an order, fillers among them."""
    torch.manual_seed(0)
    model = Net()
    grads = augend.Accumulator(model, dtype=dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    log = []
    for step in range(12):
        ranking: list[int | None] = list(range(6))
        if order is not None:
            ranking = torch.randperm(6, generator=torch.Generator().manual_seed(100 * order + step)).tolist()
            ranking.insert(step % 6, None)
        feed(grads, model, Dealt(epoch(step), ranking, step), cross_entropy)
        log.append(repr(grads.step(optimizer, max_norm=0.2)))
    return reference.digest(dict(model.named_parameters()), optimizer.state_dict(), log)


def test_a_training_has_the_same_bits_in_any_order() -> None:
    """Twelve AdamW steps with dropout and clipping: one hash for four orders; in float32 the hashes differ."""
    assert 1 == len({network("exact", order) for order in (None, 1, 2, 3)})
    assert 1 < len({network("float32", order) for order in (None, 1, 2, 3)})


def test_evaluation_in_between_changes_nothing() -> None:
    """Measured between batches and in the middle of either offer of one, the training has the same bits."""
    source = {"x": torch.randn(18, 5), "y": torch.arange(18) % 3}
    outcomes = []
    for evaluated in (False, True):
        torch.manual_seed(0)
        model = Net()
        grads = augend.Accumulator(model, dtype="exact")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        data = augend.Batches(source, batch_size=9, microbatch_size=3, seed=1, epochs=2)
        held_out = augend.Batches(source, batch_size=6, microbatch_size=6, epochs=1)
        for batch in data:
            for microbatch in grads.microbatches(batch):
                grads.backward(cross_entropy(model, microbatch))
                if evaluated:
                    augend.evaluate(model, held_out, loss=cross_entropy)
            outcomes.append(repr(grads.step(optimizer)))
        outcomes.append(reference.digest(dict(model.named_parameters())))
    half = len(outcomes) // 2
    assert outcomes[:half] == outcomes[half:]


def test_fit_takes_an_exact_accumulator() -> None:
    """fit(accumulator=) trains as the loop written out does, and its history tells how often batches were offered."""
    source = {"x": torch.randn(18, 5), "y": torch.arange(18) % 3}
    outcomes = []
    for fitted in (False, True):
        torch.manual_seed(0)
        model = Net()
        grads = augend.Accumulator(model, dtype="exact")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        data = augend.Batches(source, batch_size=9, microbatch_size=3, seed=1, epochs=2)
        if fitted:
            history = augend.fit(model, data, loss=cross_entropy, optimizer=optimizer, max_norm=1.0, accumulator=grads)
            log = [(one.norm, one.scale, one.loss.value, one.count, one.offers) for one in history.steps]
        else:
            log = []
            for batch in data:
                feed(grads, model, batch, cross_entropy)
                done = grads.step(optimizer, max_norm=1.0)
                log.append((done.norm, done.scale, done.loss.value, done.count, done.offers))
        outcomes.append((log, reference.digest(dict(model.named_parameters()))))
    assert outcomes[0] == outcomes[1]
    assert [2, 1, 1, 1] == [offers for *_, offers in outcomes[0][0]]


def test_terms_in_a_network_have_the_same_bits_in_any_order() -> None:
    """Two terms of one tower, weighted, in every order of three micro-batches, with and without fillers."""
    outcomes = set()
    for order in (*itertools.permutations(range(3)), (None, 0, None, 2, 1, None)):
        model = tower()
        grads = augend.Accumulator(model, dtype="exact", terms=("loss", "size"))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            parts = [dict(zip(("x", "y"), rows(4, seed=3 * step + at), strict=True)) for at in range(3)]
            for microbatch in grads.microbatches(Dealt(parts, order, step)):
                grads.backward(terms_of(model, microbatch["x"], microbatch["y"], ("loss", "size")))
            log = repr(grads.step(optimizer, max_norm=0.3, term_weights={"size": 0.1}))
        outcomes.add(reference.digest(dict(model.named_parameters()), log))
    assert 1 == len(outcomes)


def test_a_member_that_is_closed_cannot_go_along_again() -> None:
    """Two went through a batch, one finished it, and after a load the other needs it again: it must go alone."""
    rows = {"x": torch.tensor([[1.0], [-0.5]])}

    def job() -> tuple[augend.Batches, list[augend.Accumulator], list[torch.nn.Module]]:
        models = [torch.nn.Linear(1, 1, bias=False) for _ in range(2)]
        kinds = ("float32", "exact")
        members = [augend.Accumulator(one, dtype=kind) for one, kind in zip(models, kinds, strict=True)]
        data = augend.Batches(rows, batch_size=2, microbatch_size=1, shuffle=False)
        for one in members:
            data.register(one)
        return data, members, models

    def add(members: list[augend.Accumulator], models: list[torch.nn.Module], part: Part) -> None:
        for one, model in zip(members, models, strict=True):
            one.backward(augend.Tally(model(part["x"]).sum(dim=1), torch.ones(1, dtype=torch.int64)))

    data, members, models = job()
    loop = members[0].microbatches(next(iter(data)), together=members[1:])
    for _ in range(2):  # and the loop is left before it can offer again
        add(members, models, next(loop))
    members[0].finish()
    states = [one.state_dict() for one in (data, *members)]
    data, members, models = job()
    for one, state in zip((data, *members), states, strict=True):
        one.load_state_dict(state)
    batch = next(iter(data))
    with pytest.raises(StateError, match="go through it with those alone that have not"):
        next(members[0].microbatches(batch, together=members[1:]))
    for part in members[1].microbatches(batch):
        add(members[1:], models[1:], part)
    assert 2 == members[1].finish().offers
