"""Exact sums: any finite gradients, in any order, cut, dealt and interrupted anywhere: the same bits, and near."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import torch
from exactly import Dealt, Part, batches, carried, check_batch, feed, lists, named, one_row
from hypothesis import example, given
from hypothesis import strategies as st

import augend
import reference

TINY = 2.0**-149

anything = st.floats(allow_nan=False, allow_infinity=False, width=32)
subnormal = st.integers(-(2**23), 2**23).map(lambda n: n * TINY)
even = st.sampled_from([1e-30, -1e-30])
mixed = st.builds(lambda sign, power: sign * 10.0**power, st.sampled_from([-1, 1]), st.integers(-30, 30))
ordinary = st.floats(-4, 4, width=32)
nothing = st.just(0.0)
KINDS = {"anything": anything, "subnormal": subnormal, "even": even, "mixed": mixed, "near 1": ordinary, "0": nothing}


@st.composite
def batch_of_gradients(draw: st.DrawFn, sizes: dict[str, int], *, largest: int = 6) -> list[Part]:
    """Draw the micro-batches of one batch: every parameter's gradients of a kind."""
    microbatches = draw(st.integers(1, largest))
    parts: list[dict[str, torch.Tensor]] = [{} for _ in range(microbatches)]
    for name, size in sizes.items():
        kind = KINDS[draw(st.sampled_from(sorted(KINDS)))]
        for part in parts:
            part[name] = torch.tensor(draw(st.lists(kind, min_size=size, max_size=size)))
    return parts


def run(history: Sequence[Sequence[Part]], deal, **options: object) -> list[tuple[str, str, int]]:
    """Finish every batch and return the bits of sums, means, norm and clipped gradients, and how often it was offered.

    Args:
        history: Batches of micro-batches.
        deal: Called with a batch's number and micro-batches; returns what is offered.
        **options: Of the accumulator.
    """
    model = carried(history[0][0])
    grads = augend.Accumulator(model, dtype="exact", **options)
    outcomes = []
    for step, parts in enumerate(history):
        feed(grads, model, deal(step, parts))
        sums = reference.digest(dict(grads.pending))
        done = grads.finish(max_norm=1.0, nonfinite="allow")  # a mean over few rows may be beyond float32
        means = reference.digest({name: one.grad for name, one in model.held.items()}, repr(done))
        outcomes.append((sums, means, done.offers))
    return outcomes


@given(st.data(), st.sampled_from([1.0, 0.25, 2.0**-40]), st.sampled_from([2, 65_536, 2**20]))
def test_sums_mean_and_norm_are_those_of_rational_arithmetic(data, loss_scale: float, most: int) -> None:
    """Over four batches of any finite gradients: grid, offers, sums, mean and norm are the twin's, to the bit.

    Micro-batches come in the order that the data's seed gives; the scales of a batch are the next one's.
    """
    sizes = {"a": 1, "b": 2, "c": 1}
    model, twin, grads = None, reference.ExactTwin(max(most, 6)), None
    for _ in range(4):
        parts = data.draw(batch_of_gradients(sizes))
        if grads is None:
            model = carried(parts[0])
            grads = augend.Accumulator(model, dtype="exact", loss_scale=loss_scale, max_microbatches=max(most, 6))
        if all(not torch.isinf(sum_of(parts, name)).any() for name in sizes):
            check_batch(grads, model, parts, twin, next(iter(batches(parts, data.draw(st.integers(0, 99))))))


def sum_of(parts: Sequence[Part], name: str) -> torch.Tensor:
    """Return a float32 mean, to find one that float32 cannot hold."""
    exact = torch.stack([part[name].double() for part in parts]).sum(dim=0) / len(parts)
    return exact.float()


@given(st.data())
@example(None)
def test_any_order_and_any_deal_have_the_same_bits(data) -> None:
    """Two runs over the same micro-batches, permuted, with fillers between: equal sums, means, norms and offers."""
    if data is None:  # 1e30 and its negative between grains that a float32 sum would lose
        history = [one_row([{"a": torch.tensor([x])} for x in (1e30, 1.0, -1e30, 1e-30)])]
        orders = [[[0, 1, 2, 3]], [[0, 2, 1, 3]], [[3, None, 0, 1, None, 2, None]]]
    else:
        history = [one_row(data.draw(batch_of_gradients({"a": 1, "b": 2}))) for _ in range(3)]
        orders = [[data.draw(orders_of(len(parts))) for parts in history] for _ in range(2)]
    outcomes = [
        run([[{n: g[0] for n, g in part.items()} for part in parts] for parts in history], deal_of(history, order))
        for order in orders
    ]
    assert all(outcomes[0] == one for one in outcomes)


def deal_of(history: Sequence[Sequence[Part]], orders: Sequence[Sequence[int | None]]):
    """Return what deals every batch of a history in its own order."""
    return lambda step, _: Dealt(history[step], orders[step])


@st.composite
def orders_of(draw: st.DrawFn, microbatches: int) -> list[int | None]:
    """Draw an order of micro-batches with fillers in it."""
    order: list[int | None] = list(draw(st.permutations(range(microbatches))))
    for at in draw(st.lists(st.integers(0, microbatches), max_size=3)):
        order.insert(at, None)
    return order


@given(st.data())
def test_any_partition_into_loops_and_lives_has_the_same_bits(data) -> None:
    """Left and entered again, or saved and loaded into a new accumulator, after any micro-batch: the same bits."""
    history = [data.draw(batch_of_gradients({"a": 2, "b": 1}, largest=4)) for _ in range(2)]
    expected = run(history, lambda step, parts: Dealt(one_row(parts), step=step))
    model = carried(history[0][0])
    grads = augend.Accumulator(model, dtype="exact")
    outcomes = []
    for step, parts in enumerate(history):
        batch = Dealt(one_row(parts), data.draw(st.permutations(range(len(parts)))), step)
        while unfinished(grads, model, batch, data.draw(st.integers(1, 3))):
            if data.draw(st.booleans()):
                progress, state = batch.progress(grads), grads.state_dict()
                grads = augend.Accumulator(model, dtype="exact")
                grads.load_state_dict(state)
                batch._progress = {id(grads): progress}
        sums = reference.digest(dict(grads.pending))
        done = grads.finish(max_norm=1.0, nonfinite="allow")
        means = reference.digest({name: one.grad for name, one in model.held.items()}, repr(done))
        outcomes.append((sums, means, done.offers))
        model.zero_grad()
    assert expected == outcomes


def unfinished(grads: augend.Accumulator, model: torch.nn.Module, batch: Dealt, most: int) -> bool:
    """Give at most so many micro-batches their backward; tell whether the loop was left before its end."""
    for done, microbatch in enumerate(grads.microbatches(batch)):
        if done == most:
            return True
        total = model(microbatch)
        grads.backward(augend.Tally(total, torch.ones(1, dtype=torch.int64)))
    return False


@given(st.data(), st.sampled_from([1.0, 65_536.0, 2.0**-10]))
def test_the_mean_is_within_its_bound_of_the_exact_one(data, loss_scale: float) -> None:
    """|mean - Σg/N| <= (M · 2^-(k+1) and three roundings in float64) / N + 2^-24 · |mean| + 2^-150, element by element.

    Batches of one kind follow each other, so that grids of an earlier batch are used too.
    """
    sizes = {"a": 2}
    history = [data.draw(batch_of_gradients(sizes)) for _ in range(3)]
    model = carried(history[0][0])
    grads = augend.Accumulator(model, dtype="exact", loss_scale=loss_scale)
    for parts in history:
        scaled = [part["a"] * loss_scale for part in parts]
        if not torch.isfinite(torch.stack(scaled)).all() or torch.isinf(sum_of(parts, "a")).any():
            continue
        feed(grads, model, next(iter(batches(parts))))
        k = named(grads.state_dict()["scales"]["loss"]).get("a", 0)
        grads.finish()
        divisor = Fraction(loss_scale) * len(parts)
        for at, mean in enumerate(model.held["a"].grad.tolist()):
            elements = [float(one[at]) for one in scaled]
            exact = sum(map(Fraction, elements), Fraction(0)) / divisor
            assert abs(Fraction(mean) - exact) <= reference.exact_bound(elements, k, divisor)


@given(st.data())
def test_the_grid_is_fine_enough_for_what_a_batch_brings(data) -> None:
    """Whatever came before, a grid is at most 2^-24 of the batch's largest gradient, and no sum wraps.

    So a sum differs from the exact one by at most M · 2^-25 of its parameter's largest gradient.
    """
    sizes = {"a": 2, "b": 1}
    history = [data.draw(batch_of_gradients(sizes)) for _ in range(3)]
    model = carried(history[0][0])
    grads = augend.Accumulator(model, dtype="exact")
    for parts in history:
        feed(grads, model, next(iter(batches(parts))))
        pending = {name: one.flatten().tolist() for name, one in named(grads.pending).items()}
        scales = named(grads.state_dict()["scales"]["loss"])
        grads.finish(nonfinite="allow")
        for name in sizes:
            columns = list(zip(*[part[name] for part in lists(parts)], strict=True))
            largest = max(abs(Fraction(x)) for column in columns for x in column)
            if not largest:
                assert not any(pending[name])
                continue
            k = scales.get(name, min(scales.values()))
            for total, column in zip(pending[name], columns, strict=True):
                exact = sum(map(Fraction, column), Fraction(0))
                assert abs(total * Fraction(2) ** -k - exact) <= len(parts) * Fraction(2) ** -(k + 1)
                assert len(parts) * Fraction(2) ** -(k + 1) <= len(parts) * largest / 2**25
