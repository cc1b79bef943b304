"""What is allowed is right, and what is not is refused on all ranks, also where torch or a user makes it difficult."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import pytest
import rough
import torch
from ranks import Ranks


@functools.cache
def expected(case: Callable[[], rough.Made] = rough.alone) -> rough.Made:
    """Return what one process makes of it."""
    return case()


def same(one: rough.Made, other: rough.Made) -> bool:
    """Compare gradients bit by bit."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


RIGHT = [
    *[(rough.grouped, (shape,)) for shape in ((2,), (2, 1), (1, 2))],
    *[(rough.failed_midway, (shape,)) for shape in ((2,), (2, 1))],
    *[(rough.made_while_gathered, (how,)) for how in ("forward", "unshard")],
    (rough.unsynced_foreign, ("drop",)),
    (rough.inside_except, ()),
    *[(rough.looked_at_in_inference_mode, (shape,)) for shape in ((2,), (2, 1))],
]


@pytest.mark.parametrize(("case", "arguments"), RIGHT)
def test_the_gradient_is_that_of_one_process(
    ranks2: Ranks, case: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    """All sums are exact, so it is the same to the bit, on both ranks."""
    for made in ranks2.run(case, *arguments):
        assert same(expected(), made)


def test_a_frozen_base_in_16_bits(ranks2: Ranks) -> None:
    """What is not trained may be reduced in any dtype: it never is."""
    for made in ranks2.run(rough.frozen_base):
        assert same(expected(rough.frozen_base), made)


@pytest.mark.long
def test_parameters_that_are_resharded_to_fewer_ranks(ranks4: Ranks) -> None:
    """Between forward and backward they are neither gathered nor as optimizers hold them."""
    for made in ranks4.run(rough.partly_resharded):
        assert same(expected(), made)


@pytest.mark.long
def test_two_jobs_in_one_world(ranks4: Ranks) -> None:
    """Each adds up over its own ranks, whatever other groups there are and have been."""
    for made, count in ranks4.run(rough.two_jobs):
        assert same(expected(), made)
        assert count > 0


REFUSED = [
    (rough.unsynced_foreign, ("error",), "GradientError: module '' holds gradients that this accumulator did not make"),
    (rough.frozen_that_differ, (), r"ContractError: parameter 'first\.bias' is not the same on all ranks"),
    (rough.out_of_order, (), "PlacementError: along axis 'data' of the mesh ranks stand in another order"),
    (rough.no_names, (), "PlacementError: the axes of .* have no names; make it with mesh_dim_names="),
    (rough.two_meshes, (), "PlacementError: the parameters lie on .*, which is no part of .*pass it as mesh="),
    (rough.spread_tally, (), r"TallyError: the tally of term 'loss' is spread over a mesh.*full_tensor\(\)"),
    (rough.mistake, ("construction",), "ContractError: rank 1: loss_scale must be positive"),
    (rough.mistake, ("count",), "TallyError: rank 1: the count of term 'loss' must be finite and not negative"),
    (rough.mistake, ("policy",), "ContractError: rank 1: eps must be a finite number"),
    (rough.mistake, ("optimizer",), r"ContractError: rank 1: parameter 'first\.bias' is trained, but no optimizer"),
    (
        rough.different_places,
        (),
        "StateError: ranks are at different places: rank 0 waits for .*, rank 1 waits for the end",
    ),
]


@pytest.mark.parametrize(("case", "arguments", "words"), REFUSED)
def test_all_ranks_refuse_alike(
    ranks2: Ranks, case: Callable[..., str], arguments: tuple[Any, ...], words: str
) -> None:
    """Also what only one rank does wrong: no rank waits for another that has stopped."""
    first, second = ranks2.run(case, *arguments)
    assert first == second
    assert re.search(words, first), first


def test_a_total_that_the_model_has_nothing_to_do_with(ranks2: Ranks) -> None:
    """The rank that gave it is told at once; the other does not wait for longer than the time-out."""
    waited, wrong = ranks2.fatal(rough.beside_the_model, group_seconds=5)
    assert "TallyError: the tally's graph does not lead through the sharded model" in wrong
    assert "LostRankError: rank 0 waits for the end of backward 0" in waited


@pytest.mark.parametrize(("option", "values"), [("seed", (0, 1)), ("shuffle", (True, False)), ("rows", (12, 13))])
def test_other_data_on_each_rank(ranks2: Ranks, option: str, values: tuple[object, ...]) -> None:
    """Ranks that deal from other batches would train on some rows twice and on others never: told before the first."""
    for training, evaluation in ranks2.run(rough.other_data, option):
        told = f"must be the same on all ranks; it is {values[0]} on rank 0, {values[1]} on rank 1"
        assert f"StateError: the beginning of the next batch: {option} of the data {told}" in training
        assert f"StateError: an evaluation: {option} {told}" in evaluation


@pytest.mark.parametrize("option", ["microbatch_size", "batch_size"])
def test_another_cut_on_each_rank(ranks2: Ranks, option: str) -> None:
    """The same of the sizes, by whichever of their consequences is seen first."""
    for training, evaluation in ranks2.run(rough.other_data, option):
        assert "StateError: the beginning of the next batch:" in training
        assert f"StateError: an evaluation: {option} must be the same on all ranks" in evaluation


@pytest.mark.parametrize("width", [2, 4])
def test_a_gradient_that_is_split_where_its_parameter_is_not(ranks2: Ranks, width: int) -> None:
    """Torch leaves it as its last operation made it: it is put together, and never broadcast."""
    for found, right in ranks2.run(rough.split_gradient, width):
        assert right == found


def test_a_given_gradient_that_is_split_otherwise(ranks2: Ranks) -> None:
    """It is laid as its parameter lies."""
    assert [[0.0, 1.0, 2.0, 3.0]] * 2 == ranks2.run(rough.given_split_otherwise)


def test_the_most_microbatches_after_a_load(ranks2: Ranks) -> None:
    """All ranks refuse one more, not the one that holds the saved ones alone."""
    for words, count in ranks2.run(rough.most_microbatches):
        assert "StateError: the window holds 2 micro-batches, which is max_microbatches" in words
        assert "2" == count


def test_nothing_is_left_behind(ranks2: Ranks) -> None:
    """Accumulators that are gone have closed their connections, and taken their hooks with them."""
    for early, late, hooks in ranks2.run(rough.left_behind):
        assert early == late
        assert 0 == hooks


@pytest.mark.parametrize(
    ("dtype", "shape", "said"),
    [
        ("float32", None, "nothing was raised"),
        ("exact", None, "GradientError: the gradient of 'layer.* comes in several pieces.*use_reentrant=False"),
        *[
            (dtype, shape, "GradientError: the gradient of 'layer.* comes in several pieces, of which FSDP2 loses some")
            for dtype in ("float32", "exact")
            for shape in ((2,), (2, 1))
        ],
    ],
)
def test_gradients_in_pieces_are_refused_where_they_cannot_be_summed(
    ranks2: Ranks, dtype: str, shape: tuple[int, ...] | None, said: str
) -> None:
    """FSDP2 loses pieces, and exact sums would round each by itself on one placement and their sum on another."""
    for told in ranks2.run(rough.in_pieces, dtype, shape):
        assert re.match(said, told), told
