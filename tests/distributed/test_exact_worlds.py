"""dtype="exact": the same bits on any number of ranks, however a batch is dealt and however the model lies."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
from exact_cases import STEPS, alike, order, train, train_rare, train_terms
from job import Outcome, hashed
from loops import train as train_zoo
from ranks import Ranks
from runs import Run, expected_forwards
from tasks import TASKS

from augend.errors import NonFiniteError

World = Callable[[int], Ranks]

FEW = 8  # steps: two epochs

GRID = [
    *[("llama", 1, "fsdp", None), ("mlp", 1, "replicated", None), ("mlp", 1, "fsdp", "shuffled")],
    *[("llama", 2, "fsdp", None), ("llama", 2, "fsdp", "uneven"), ("mlp", 2, "fsdp", "block")],
    *[("llama", 2, "fsdp, kept", "shuffled"), ("mlp", 2, "fsdp, kept", None)],
    *[("llama", 2, "hsdp of 1 replica", None), ("mlp", 2, "hsdp of 2 replicas", "shuffled")],
    *[("llama", 2, "replicated", "block"), ("mlp", 2, "last", "uneven")],
    *[("llama", 3, "fsdp", "shuffled"), ("mlp", 3, "fsdp", None), ("mlp", 3, "hsdp of 3 replicas", "block")],
    *[("llama", 3, "last", None), ("mlp", 3, "replicated", "uneven")],
]
LONG = [
    *[(2, "replicated", None), (3, "fsdp, kept", None), (4, "hsdp of 4 replicas", None)],
    *[(world, place, None) for world in (4, 8) for place in ("fsdp", "fsdp, kept", "replicated", "last")],
    *[(4, f"hsdp of {replicas}", deal) for replicas in ("1 replica", "2 replicas") for deal in (None, "uneven")],
    *[(world, "fsdp", deal) for world in (4, 8) for deal in ("block", "shuffled", "uneven")],
]
LONG = [pytest.param(kind, *one, marks=pytest.mark.long) for kind in ("llama", "mlp") for one in LONG]


@functools.cache
def alone(kind: str, steps: int = STEPS, weights: tuple[tuple[int, float], ...] = (), **options: Any) -> Outcome:
    """Train in one process without a group."""
    return train(kind, steps=steps, weights=dict(weights), options=options)


# ---------------------------------------------------------------- one digest for all


@pytest.mark.parametrize(("kind", "world", "place", "deal"), [*GRID, *LONG])
def test_every_cut_ends_in_the_same_bits(ranks: World, kind: str, world: int, place: str, deal: str | None) -> None:
    """Weights and optimizer state after 12 clipped AdamW steps with dropout have the digests of one process's.

    So do every step's norm, scale, loss, error bar, count and number of offers. Over all ranks the model is called for
    each micro-batch and filler, once for each time its batch was offered: nothing is computed everywhere.
    """
    outcomes = ranks(world).run(train, kind, place, deal)
    expected = alone(kind)
    alike(expected, outcomes)
    assert [2] + [1] * (STEPS - 1) == [told.offers for told in expected.steps]
    assert any(told.done.scale < 1 for told in expected.steps)
    run = Run(ranks=world, place=place, deal=deal)
    assert expected_forwards(run, TASKS[kind](), expected) == sum(each.forwards for each in outcomes)


@pytest.mark.parametrize("kind", ["llama", "mlp"])
def test_float32_ends_otherwise_on_every_number_of_ranks(ranks: World, kind: str) -> None:
    """The control: without exact sums each cut has weights and optimizer state of its own."""
    digests = {alone(kind, 4, dtype="float32").digest}
    for world, deal in ((2, None), (2, "shuffled"), (3, None)):
        outcomes = ranks(world).run(train, kind, "replicated", deal, 4, None, {"dtype": "float32"})
        digests |= {one.digest for one in outcomes}
    assert 4 == len(digests)


def test_parameters_in_bfloat16_of_fsdp_are_the_same_on_any_world(ranks: World) -> None:
    """Forward and backward round, micro-batch by micro-batch, before anything is added: the cut still does not show."""
    expected, *others = [
        one for world in (1, 2, 3) for one in ranks(world).run(train, "llama", "fsdp in bfloat16", None, FEW)
    ]
    alike(expected, others)
    assert alone("llama", FEW).weights != expected.weights


ZOO = [
    *[(2, "replicated", kind) for kind in ("narrow", "tied", "half")],
    *[(2, "wrapped", kind) for kind in ("smooth", "conditional")],
    *[(2, "fsdp", kind) for kind in ("narrow", "smooth", "tied", "frozen", "adapted", "conditional", "experts")],
    *[(2, "hybrid of 2 replicas", kind) for kind in ("smooth", "tied")],
    *[(2, "hsdp of 2 replicas", "conditional"), (2, "last", "scaled")],
    *[(3, "fsdp", kind) for kind in ("narrow", "experts")],
]


@pytest.mark.parametrize(("world", "place", "kind"), ZOO)
def test_unusual_models_too(ranks: World, world: int, place: str, kind: str) -> None:
    """Parameters that are narrow, tied, frozen, conditional, 0-d, 16-bit: norm, gradient and step to the bit."""
    steps = ranks(world).run(train_zoo, kind, place, {"dtype": "exact"})
    expected = train_zoo(kind, "alone", {"dtype": "exact"})
    for rank in steps:
        for one, other in zip(expected, rank, strict=True):
            assert (one.norm, repr(one.done)) == (other.norm, repr(other.done))
            assert hashed(one.gradients) == hashed(other.gradients)
            assert hashed(one.after) == hashed(other.after)


# ---------------------------------------------------------------- batches that are offered again


def spiked(row: int) -> list[int]:
    """Return in which of the steps a row is trained on."""
    return [step for step, rows in enumerate(order(FEW)) if row in rows]


@pytest.mark.parametrize(
    ("world", "place", "deal"), [(2, "fsdp", None), (2, "replicated", "uneven"), (3, "fsdp", "block")]
)
def test_a_spike_on_one_rank_is_redone_on_all(ranks: World, world: int, place: str, deal: str | None) -> None:
    """One row's gradient is 10^6 times larger: its batch is offered again, and so is the next one, on a finer grid.

    Nothing is clamped or coarse: the bits are those of one process, which offers the same batches again.
    """
    row = 17
    at = {0, *spiked(row), *(step + 1 for step in spiked(row))}
    expected = alone("mlp", FEW, weights=((row, 1e6),))
    assert [1 + (step in at) for step in range(FEW)] == [told.offers for told in expected.steps]
    alike(expected, ranks(world).run(train, "mlp", place, deal, FEW, {row: 1e6}))


@pytest.mark.parametrize(
    ("world", "place", "deal", "first"),
    [(2, "fsdp", None, 0), (2, "last", "uneven", 2), (3, "fsdp, kept", "block", 0), (3, "replicated", None, 2)],
)
def test_a_nan_is_skipped_alike(ranks: World, world: int, place: str, deal: str | None, first: int) -> None:
    """A batch with a nan in one micro-batch is skipped, is not offered again and teaches nothing; all else goes on.

    Where it is the first, the next one is measured in its place.
    """
    row = order(FEW)[first][-1]
    assert first == spiked(row)[0]
    expected = alone("mlp", FEW, weights=((row, float("nan")),), step=(("nonfinite", "skip"),))
    assert [step in spiked(row) for step in range(FEW)] == [told.done.skipped for told in expected.steps]
    measured = int(first == 0)
    assert [1 + (step == measured) for step in range(FEW)] == [told.offers for told in expected.steps]
    options = {"step": (("nonfinite", "skip"),)}
    alike(expected, ranks(world).run(train, "mlp", place, deal, FEW, {row: float("nan")}, options))


def test_a_nan_is_an_error_on_all_ranks_if_it_is_not_skipped(ranks: World) -> None:
    """``nonfinite="raise"`` names the same parameter everywhere as in one process, whichever rank had it."""
    with pytest.raises(NonFiniteError) as alone_error:
        train("mlp", weights={17: float("nan")})
    for world, deal in ((2, None), (3, "uneven")):
        errors = ranks(world).outcomes(train, "mlp", "fsdp", deal, FEW, {17: float("nan")})
        assert [NonFiniteError] * world == [type(one) for one in errors]
        assert {str(alone_error.value)} == {str(one) for one in errors}


@pytest.mark.parametrize(
    ("world", "place", "deal"), [(2, "fsdp", "shuffled"), (2, "hsdp of 2 replicas", None), (3, "last", "uneven")]
)
def test_a_term_that_begins_late_is_measured_then(ranks: World, world: int, place: str, deal: str | None) -> None:
    """Two terms of very different sizes have grids of their own; the batch in which one begins is offered again."""
    expected = train_terms("replicated", None)
    assert [2, 1, 2, 1, 1, 1] == [told.offers for told in expected.steps]
    alike(expected, ranks(world).run(train_terms, place, deal))


def test_rare_experts_are_seldom_offered_again(ranks: World) -> None:
    """Of 64 experts a batch uses one, so that most scales are old, or guessed: few batches are offered again.

    On two ranks the bits are the same.
    """
    steps = 192
    told = train_rare("replicated", None, steps, "skipped").steps
    again = [each.step for each in told if each.offers > 1]
    print(f"64 experts, one a batch: {len(again)} of {steps} batches were offered again: {again}")  # noqa: T201  to be read with -rA
    assert len(again) <= steps / 20
    few = ("shuffled", 6, "empty")
    alike(train_rare("replicated", *few), ranks(2).run(train_rare, "fsdp", *few))
