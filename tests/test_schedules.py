"""Schedules are pure functions of the number of updates taken: against torch, and against their own promises."""

from __future__ import annotations

import math
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim import lr_scheduler

from augend import schedules
from augend.errors import ContractError

U = 2.0**-53


def sgd(*rates, **options):
    """Return an optimizer with one group a rate."""
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": rate} for rate in rates]
    return torch.optim.SGD(groups, **options)


def rates_of(optimizer):
    """Return the rates of all groups."""
    return [group["lr"] for group in optimizer.param_groups]


def by_torch(make, rate, steps):
    """Return the rates of a torch scheduler for steps from 0 on."""
    optimizer = sgd(rate)
    scheduler, rates = make(optimizer), []
    for _ in range(steps):
        rates += rates_of(optimizer)
        optimizer.step()
        scheduler.step()
    return rates


RATES = st.floats(1e-6, 10.0)


@st.composite
def any_schedule(draw):
    """Draw (schedule, rate, final, warmup_steps, steps) of every kind that falls."""
    rate, steps = draw(RATES), draw(st.integers(2, 60))
    warmup = draw(st.integers(0, steps - 2))
    final = rate * draw(st.sampled_from([0.0, 0.1, 1.0]))
    kind = draw(st.sampled_from(["linear", "cosine", "wsd", "exponential", "half_life", "steps", "constant"]))
    if kind in {"linear", "cosine"}:
        made = getattr(schedules, kind)(rate, steps=steps, final=final, warmup_steps=warmup)
    elif kind == "wsd":
        decay, shape = draw(st.integers(1, steps - warmup)), draw(st.sampled_from(["linear", "sqrt", "cosine"]))
        made = schedules.wsd(rate, steps=steps, decay_steps=decay, final=final, warmup_steps=warmup, shape=shape)
    elif kind == "exponential":
        made = schedules.exponential(rate, factor=draw(st.floats(0.1, 1.0)), final=final, warmup_steps=warmup)
    elif kind == "half_life":
        made = schedules.half_life(rate, half_life_steps=draw(st.floats(0.5, 50)), final=final, warmup_steps=warmup)
    elif kind == "steps":
        made, final = schedules.steps(rate, milestones=[warmup + 1, warmup + 3], warmup_steps=warmup), 0.0
    else:
        made, final = schedules.constant(rate, warmup_steps=warmup), 0.0
    return made, rate, final, warmup, steps


class TestShapes:
    """What every schedule promises."""

    @given(any_schedule())
    def test_a_warm_up_rises_evenly_to_the_rate_and_then_it_never_rises(self, drawn):
        """Step t of the warm-up has (t + 1) / (warmup_steps + 1) of the rate, the next the whole, then none more."""
        made, rate, final, warmup, steps = drawn
        listed = [made(step) for step in range(2 * steps + 4)]
        assert [rate * ((t + 1) / (warmup + 1)) for t in range(warmup)] == listed[:warmup]
        assert rate == listed[warmup]
        # Two products and a sum round a rate that should be level or fall.
        assert all(
            later <= earlier + 3 * U * rate
            for earlier, later in zip(listed[warmup:], listed[warmup + 1 :], strict=False)
        )
        assert all(final - 3 * U * rate <= value <= rate + 3 * U * rate for value in listed[warmup:])

    @given(any_schedule(), st.randoms())
    def test_pure(self, drawn, random):
        """Order, repetition and a trip through pickle do not change a rate: there is no state."""
        made, _, _, _, steps = drawn
        asked = [random.randrange(2 * steps) for _ in range(20)]
        expected = {step: made(step) for step in range(2 * steps)}
        again = pickle.loads(pickle.dumps(made))  # noqa: S301  our own
        assert [expected[step] for step in asked] == [made(step) for step in asked]
        assert [expected[step] for step in asked] == [again(step) for step in asked]

    @given(any_schedule())
    def test_a_negative_step_is_refused(self, drawn):
        """There is no update before the first."""
        with pytest.raises(ContractError, match="-1"):
            drawn[0](-1)

    @pytest.mark.parametrize("kind", ["linear", "cosine"])
    @given(rate=RATES, steps=st.integers(1, 100), share=st.sampled_from([0.0, 0.3]))
    def test_the_end_is_reached_exactly(self, kind, rate, steps, share):
        """After `steps` updates the rate is `final` for good, and not before."""
        made = getattr(schedules, kind)(rate, steps=steps, final=share * rate)
        assert [share * rate] * 3 == [made(steps), made(steps + 1), made(10 * steps)]
        assert made(steps - 1) > share * rate

    def test_wsd_stays_and_falls(self):
        """The stable part has the whole rate; the shapes of the decay are those of the papers."""
        linear, root, cosine = (
            [schedules.wsd(2.0, steps=8, decay_steps=4, warmup_steps=1, shape=shape)(t) for t in range(10)]
            for shape in ("linear", "sqrt", "cosine")
        )
        assert [1.0, 2.0, 2.0, 2.0, 2.0, 1.5, 1.0, 0.5, 0.0, 0.0] == linear
        assert [1.0, 2.0, 2.0, 2.0, 2.0, 1.0] == root[:6]
        assert 2 * (1 - math.sqrt(0.5)) == root[6]
        assert [schedules.cosine(2.0, steps=4)(t) for t in range(6)] == cosine[4:]
        assert [2.0, 1.0, 0.0] == [schedules.wsd(2.0, steps=2, decay_steps=2)(t) for t in range(3)]

    def test_noam(self):
        """Step t is the paper's step t + 1; the largest rate comes after `warmup_steps` updates."""
        made = schedules.noam(1.0, width=512, warmup_steps=4000)
        assert 512**-0.5 * 1 * 4000**-1.5 == made(0)
        assert max(range(9000), key=made) == 3999
        assert abs(made(3999) - 1 / math.sqrt(512 * 4000)) <= 4 * U * made(3999)

    def test_half_life(self):
        """Each half-life halves the rate exactly, down to `final`."""
        made = schedules.half_life(1.0, half_life_steps=10, final=2.0**-4)
        assert [2.0**-n for n in range(5)] + [2.0**-4] == [made(10 * n) for n in range(6)]

    def test_a_chain_gives_each_its_own_steps(self):
        """Every part of a chain starts at its own step 0; parts can be any functions."""
        made = schedules.chain([lambda t: 10 + t, lambda t: 20 + t, lambda t: 30 + t], milestones=[2, 3])
        assert [10, 11, 20, 30, 31] == [made(t) for t in range(5)]
        assert [7, 8] == [schedules.chain([lambda t: 7 + t], milestones=[])(t) for t in range(2)]


class TestAgainstTorch:
    """Where torch has the same schedule. It multiplies its way from step to step, so its error grows with the step."""

    @staticmethod
    def agree(expected, made, rate, roundings):
        """Whether the lists agree within `roundings` a step of torch's and 16 of ours, of half an ulp of the rate."""
        for step, value in enumerate(expected):
            assert abs(value - made(step)) <= (roundings * step + 16) * U * rate

    @given(RATES, st.integers(1, 80), st.sampled_from([0.0, 0.1]))
    def test_linear(self, rate, steps, share):
        """`linear` is LinearLR from 1 to final / rate."""
        expected = by_torch(lambda o: lr_scheduler.LinearLR(o, 1.0, share, total_iters=steps), rate, steps + 3)
        self.agree(expected, schedules.linear(rate, steps=steps, final=share * rate), rate, 8)

    @given(RATES, st.integers(1, 80))
    def test_warm_up(self, rate, warmup):
        """The warm-up is LinearLR from 1 / (warmup_steps + 1) to 1."""
        expected = by_torch(
            lambda o: lr_scheduler.LinearLR(o, 1 / (warmup + 1), 1.0, total_iters=warmup), rate, warmup + 3
        )
        self.agree(expected, schedules.constant(rate, warmup_steps=warmup), rate, 8)

    @given(RATES, st.integers(1, 80), st.sampled_from([0.0, 0.1]))
    def test_cosine(self, rate, steps, share):
        """`cosine` is CosineAnnealingLR of one cycle."""
        expected = by_torch(lambda o: lr_scheduler.CosineAnnealingLR(o, steps, share * rate), rate, steps + 1)
        self.agree(expected, schedules.cosine(rate, steps=steps, final=share * rate), rate, 8)

    @given(RATES, st.floats(0.5, 1.0))
    def test_exponential(self, rate, factor):
        """`exponential` is ExponentialLR."""
        expected = by_torch(lambda o: lr_scheduler.ExponentialLR(o, factor), rate, 50)
        self.agree(expected, schedules.exponential(rate, factor=factor), rate, 2)

    @given(RATES, st.lists(st.integers(1, 40), unique=True, max_size=5).map(sorted), st.floats(0.1, 1.0))
    def test_steps(self, rate, milestones, factor):
        """`steps` is MultiStepLR."""
        expected = by_torch(lambda o: lr_scheduler.MultiStepLR(o, milestones, factor), rate, 45)
        self.agree(expected, schedules.steps(rate, milestones=milestones, factor=factor), rate, 2)

    def test_chain(self):
        """`chain` is SequentialLR."""

        def sequential(optimizer):
            parts = [lr_scheduler.ConstantLR(optimizer, 0.5, 99), lr_scheduler.ExponentialLR(optimizer, 0.5)]
            return lr_scheduler.SequentialLR(optimizer, parts, [3])

        made = schedules.chain([schedules.constant(0.5), schedules.exponential(1.0, factor=0.5)], milestones=[3])
        assert by_torch(sequential, 1.0, 8) == [made(t) for t in range(8)]


class TestApply:
    """`schedules.apply`."""

    @given(st.lists(RATES, min_size=1, max_size=4), any_schedule(), st.integers(0, 100))
    def test_groups_keep_their_ratio_however_often_it_is_applied(self, rates, drawn, step):
        """The first group gets the rate, the others in proportion to their beginning, and once more changes nothing."""
        optimizer, made = sgd(*rates), drawn[0]
        for earlier in (3, step, step):
            returned = schedules.apply(optimizer, made, earlier)
            expected = [made(earlier) if r == rates[0] else made(earlier) * (r / rates[0]) for r in rates]
            assert made(earlier) == returned
            assert expected == rates_of(optimizer)

    def test_equal_groups_get_the_rate_itself(self):
        """Groups that began alike get the schedule's own float, also where they began with 0."""
        for began in (0.1, 0.0):
            optimizer = sgd(began, began)
            schedules.apply(optimizer, schedules.linear(0.3, steps=7), 3)
            assert [0.3 * (4 / 7)] * 2 == rates_of(optimizer)

    def test_a_resume_keeps_the_ratios(self):
        """The beginning travels with the optimizer's state, so a resumed run has the same list of rates."""
        made, first, second = schedules.cosine(0.1, steps=10), sgd(0.1, 0.02), sgd(0.1, 0.02)
        schedules.apply(first, made, 4)
        second.load_state_dict(first.state_dict())
        for step in range(5, 12):
            schedules.apply(first, made, step)
            schedules.apply(second, made, step)
            assert rates_of(first) == rates_of(second)

    def test_a_group_that_joins_later(self):
        """A new group keeps the ratio of its own beginning to the first group's beginning."""
        optimizer = sgd(0.5)
        schedules.apply(optimizer, schedules.constant(0.25), 0)
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))], "lr": 1.0})
        schedules.apply(optimizer, schedules.constant(0.25), 1)
        assert [0.25, 0.5] == rates_of(optimizer)

    def test_a_rate_that_is_a_tensor_is_filled_in_place(self):
        """Compiled and captured optimizers hold on to the tensor."""
        rate = torch.tensor(1.0)
        optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=rate)
        schedules.apply(optimizer, schedules.constant(0.25), 0)
        assert optimizer.param_groups[0]["lr"] is rate
        assert 0.25 == rate.item()

    @pytest.mark.parametrize("value", [-0.1, math.nan, math.inf])
    def test_a_rate_that_is_none_is_refused_before_any_group_changes(self, value):
        """The message has step and value."""
        optimizer = sgd(0.5)
        with pytest.raises(ContractError, match=f"step 3 it returned {value}"):
            schedules.apply(optimizer, lambda _: value, 3)
        assert [0.5] == rates_of(optimizer)

    def test_a_ratio_to_zero_is_refused(self):
        """No ratio to a first group that began with 0."""
        optimizer = sgd(0.0, 0.5)
        with pytest.raises(ContractError, match=r"lr 0\.0, 0\.5"):
            schedules.apply(optimizer, schedules.constant(0.25), 0)
        assert [0.0, 0.5] == rates_of(optimizer)


def used_rates(schedule, *, updates, skipped=(), microbatches=1):
    """Train as a loop does, and return the rate of every update really taken."""
    optimizer, taken, rates, attempt = sgd(1.0), 0, [], 0
    while taken < updates:
        for _ in range(microbatches):
            optimizer.param_groups[0]["params"][0].grad = torch.ones(1)
        schedules.apply(optimizer, schedule, taken)
        if attempt not in skipped:
            optimizer.step()
            rates += rates_of(optimizer)
            taken += 1
        attempt += 1
    return rates


class TestFaults:
    """Faults that users of other systems met."""

    @pytest.mark.parametrize("microbatches", [1, 4, 12])
    def test_the_unit_is_the_update(self, microbatches):
        """With 1/(t + 1), twelve micro-batches in threes of four have the rates 1, 1/2, 1/3."""
        assert [1, 1 / 2, 1 / 3] == used_rates(lambda t: 1 / (t + 1), updates=3, microbatches=microbatches)

    @pytest.mark.parametrize("world", [1, 2, 4])
    def test_no_world(self, world):
        """Linear to 0 over three updates is one list for every world, and ends at 0."""
        made = schedules.linear(1.0, steps=3)
        assert [1.0, 2 / 3, 1 / 3] == used_rates(made, updates=3, microbatches=4 // world)
        assert 0.0 == made(3)

    def test_a_skipped_update_does_not_move_it(self):
        """Skipping updates gives the same list of rates."""
        made = schedules.cosine(1.0, steps=20, warmup_steps=5)
        assert used_rates(made, updates=20) == used_rates(made, updates=20, skipped=(0, 3, 4, 11))


MISFITS = {
    "negative rate": (lambda: schedules.constant(-1.0), "rate.*-1.0"),
    "nan rate": (lambda: schedules.noam(math.nan, width=1, warmup_steps=1), "rate.*nan"),
    "infinite rate": (lambda: schedules.steps(math.inf, milestones=[]), "rate.*inf"),
    "final above": (lambda: schedules.linear(0.1, steps=3, final=0.2), r"final.*0\.1.*0\.2"),
    "final below": (lambda: schedules.half_life(0.1, half_life_steps=3, final=-0.2), r"final.*-0\.2"),
    "no steps": (lambda: schedules.cosine(0.1, steps=0), "steps.*0"),
    "half a step": (lambda: schedules.cosine(0.1, steps=2.5), r"steps.*2\.5"),
    "a flag as steps": (lambda: schedules.cosine(0.1, steps=True), "steps.*True"),
    "negative warm-up": (lambda: schedules.exponential(0.1, factor=0.5, warmup_steps=-1), "warmup_steps.*-1"),
    "only warm-up": (lambda: schedules.linear(0.1, steps=3, warmup_steps=3), "fewer than steps.*3 of 3"),
    "a decay too long": (lambda: schedules.wsd(0.1, steps=5, decay_steps=4, warmup_steps=2), r"2 \+ 4 of 5"),
    "no decay": (lambda: schedules.wsd(0.1, steps=5, decay_steps=0), "decay_steps.*0"),
    "an unknown shape": (
        lambda: schedules.wsd(0.1, steps=5, decay_steps=1, shape="round"),
        "linear, sqrt, cosine.*'round'",
    ),
    "factor 0": (lambda: schedules.exponential(0.1, factor=0.0), r"factor.*0\.0"),
    "factor above 1": (lambda: schedules.steps(0.1, milestones=[1], factor=1.5), r"factor.*1\.5"),
    "half-life 0": (lambda: schedules.half_life(0.1, half_life_steps=0), "half_life_steps.*0"),
    "half-life inf": (lambda: schedules.half_life(0.1, half_life_steps=math.inf), "half_life_steps.*inf"),
    "falling milestones": (lambda: schedules.steps(0.1, milestones=[3, 3]), r"rise.*\[3, 3\]"),
    "a milestone in the warm-up": (lambda: schedules.steps(0.1, milestones=[3], warmup_steps=4), "at least 4.*3"),
    "a milestone at 0": (lambda: schedules.steps(0.1, milestones=[0]), "at least 1.*0"),
    "width 0": (lambda: schedules.noam(1.0, width=0, warmup_steps=1), "width.*0"),
    "no noam warm-up": (lambda: schedules.noam(1.0, width=1, warmup_steps=0), "warmup_steps.*0"),
    "a chain without a milestone": (lambda: schedules.chain([abs, abs], milestones=[]), "2 schedules and 0 milestones"),
    "an empty chain": (lambda: schedules.chain([], milestones=[]), "0 schedules and 0 milestones"),
    "a chain that falls back": (lambda: schedules.chain([abs, abs, abs], milestones=[4, 2]), r"rise.*\[4, 2\]"),
}


@pytest.mark.parametrize("name", MISFITS)
def test_what_does_not_fit_is_refused(name):
    """Every argument out of its range is a ContractError that names argument and value."""
    call, message = MISFITS[name]
    with pytest.raises(ContractError, match=message):
        call()
