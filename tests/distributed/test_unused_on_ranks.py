"""What a micro-batch does not use: on one rank, on all, in turn; with NaN in it; under every placement."""

from __future__ import annotations

import math

import placed
import pytest
import torch
import torch.distributed
import zoo
from loops import Step, off, train
from placed import PLACES, Placed
from ranks import Ranks
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import augend
import reference

EVERYWHERE = ["replicated", "last", "wrapped", "fsdp", "hsdp of 2 replicas", "hybrid of 2 replicas"]
EVERYWHERE += [pytest.param(place, marks=pytest.mark.long) for place in ("hsdp of 1 replica", "hybrid of 1 replica")]
SHARDED = ["fsdp", "hsdp of 2 replicas", "hybrid of 2 replicas", *EVERYWHERE[-2:]]


def turns(
    place: str, unused: str, given: list[list[int]], poison: bool
) -> tuple[dict, dict, dict, augend.Finished, str]:
    """Run the branches that are given for this rank, one micro-batch each.

    Returns:
        The parts that this rank made, by a plain copy of the model, the gradients, the weights after an AdamW step,
        the record, and the names of the parameters with an optimizer state.
    """
    kind = zoo.KINDS["conditional"]
    model, copy = kind.build(), kind.build()
    if poison:
        for one in (model, copy):
            one.idle.weight.data.fill_(math.nan)
            one.idle.bias.data.fill_(math.inf)
    there = PLACES[place](model, kind.blocks)
    grads = there.grads(unused=unused)
    optimizer = torch.optim.AdamW(there.model.parameters(), lr=0.125, weight_decay=0.5)
    rank = torch.distributed.get_rank()
    parts = []
    for number, branch in enumerate(given[rank]):
        x = zoo.rows(24)["x"][3 * (number + 4 * rank) :][:3]
        count = torch.tensor([1, 2, number])
        grads.backward(augend.Tally(there.model(x, branch).sum(1) * count, count))
        part = reference.part(copy, copy(x, branch).sum(1) * count, float(count.sum()))
        parts.append((part.gradients, part.total, part.count))
    done = grads.finish()
    gradients = placed.gradients(there.model)
    optimizer.step()
    held = " ".join(name for name, one in placed.parameters(there.model) if optimizer.state[one])
    return parts, gradients, placed.weights(there.model), done, held


@pytest.mark.parametrize("place", EVERYWHERE)
@pytest.mark.parametrize(
    ("unused", "given"),
    [
        pytest.param("error", [[0, 0], [0, 0]], id="one branch on no rank"),
        pytest.param("error", [[0, 1], [1, 0]], id="both on both, never together"),
        pytest.param("zero", [[0, 0], [1, 1]], id="one on each"),
        pytest.param("zero", [[0, 1, 0], [0, 0, 0]], id="one on one rank, once"),
    ],
)
def test_conditional_parameters_get_the_right_gradient(ranks2: Ranks, place: str, unused: str, given: list) -> None:
    """Sums are exact, whoever used what when; what nobody used has no gradient, no state and no decay, NaN or not."""
    first, second = ranks2.run(turns, place, unused, given, True)
    made = [[reference.Part(*part) for part in each[0]] for each in (first, second)]
    means, sizes = reference.whole_mean(made)
    _, gradients, weights, done, held = first
    assert 1 >= off(means, sizes, gradients, len(given[0]) * 2 + 2 + 3)
    assert " ".join(name for name in weights if name in means) == held == second[4]
    assert reference.digest(weights) == reference.digest(second[2])
    assert done == second[3]
    before = zoo.KINDS["conditional"].build().state_dict()
    for name, weight in weights.items():
        if name.startswith("idle"):
            assert bool(weight.isnan().all() if name == "idle.weight" else (weight == math.inf).all())
        elif name not in means:
            assert torch.equal(before[name], weight)
    exact = math.sqrt(sum(float((mean**2).sum()) for mean in means.values()))
    assert abs(exact - done.norm) <= 1e-12 * exact


@pytest.mark.parametrize("place", SHARDED)
def test_experts_that_get_zero_rows_are_right(ranks2: Ranks, place: str) -> None:
    """A sharded module that a rank does not need is called with no rows: the remedy that the refusal prints."""
    alone = train("experts", "alone")
    for steps in ranks2.run(train, "experts", place):
        for number, (expected, step) in enumerate(zip(alone, steps, strict=True)):
            assert expected.done.count == step.done.count
            if number == 0:
                assert reference.digest(expected.gradients) == reference.digest(step.gradients)
                assert reference.digest(expected.after) == reference.digest(step.after)


def scalar_model(place: str) -> str:
    """Place a model that has a parameter without a dimension, and return what it says to that."""
    kind = zoo.KINDS["scaled"]
    try:
        PLACES[place](kind.build(), kind.blocks)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("place", ["fsdp", "hsdp of 2 replicas"])
def test_a_sharded_parameter_has_a_dimension(ranks2: Ranks, place: str) -> None:
    """Torch itself refuses to shard a 0-d parameter, by name and with the remedy; replicated they are served."""
    for words in ranks2.run(scalar_model, place):
        assert "temperature" in words
        assert "1D tensor" in words


def half(place: str, reduce: bool) -> list[dict[str, Tensor]]:
    """Accumulate 1024 and eight times 0.125 in a 16-bit weight, and return the mean of one item in 32 bits."""
    model = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    options = {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float32)} if reduce else {}
    full = placed.mesh((torch.distributed.get_world_size(),), ("shard",))
    there = Placed(placed.sharded(model, (), full, **options)) if place == "fsdp" else PLACES[place](model, ())
    grads = there.grads()
    for part in range(5):
        value = 1024.0 if part == torch.distributed.get_rank() == 0 else 0.125 if part else 0.0
        total = there.model(torch.tensor([[value]], dtype=torch.bfloat16)).sum(1)
        grads.backward(augend.Tally(total, torch.tensor([int(part == torch.distributed.get_rank() == 0)])))
    means = grads.finish_mean().gradients
    return {name: placed.whole(one) for name, one in means.items()}


@pytest.mark.parametrize("place", ["replicated", "last", "wrapped"])
def test_small_gradients_of_16_bit_weights_add_up(ranks2: Ranks, place: str) -> None:
    """Ranks are added in the work dtype: 1024 + 8 · 0.125 = 1025, which bfloat16 cannot hold."""
    for means in ranks2.run(half, place, False):
        assert {"weight": 1025.0} == {name: float(one) for name, one in means.items()}


def test_16_bit_sums_of_a_sharded_model_are_refused(ranks2: Ranks) -> None:
    """Where FSDP2 would add ranks up in 16 bits, every rank is told how to let it add them up in 32."""
    first, second = ranks2.outcomes(half, "fsdp", False)
    assert str(first) == str(second)
    assert "reduce_dtype=torch.float32" in str(first)
    assert isinstance(first, augend.errors.PlacementError)


def test_16_bit_weights_of_a_sharded_model_add_up(ranks2: Ranks) -> None:
    """With reduce_dtype=torch.float32 the sums are taken before FSDP2 casts them back: 1025."""
    for means in ranks2.run(half, "fsdp", True):
        assert {"weight": 1025.0} == {name: float(one) for name, one in means.items()}


def tidy_step(step: Step) -> str:
    """Return the bits of a step."""
    return reference.digest(step.gradients, step.after)


@pytest.mark.parametrize("kind", ["tied", "frozen", "adapted"])
@pytest.mark.parametrize("place", ["replicated", "fsdp", "hsdp of 2 replicas"])
def test_what_does_not_learn_has_neither_gradient_nor_state(ranks2: Ranks, kind: str, place: str) -> None:
    """Frozen parameters, and one of two tied names, have no gradient and no state, and stay as they were."""
    steps, others = ranks2.run(train, kind, place)
    trained = {name for name, one in zoo.KINDS[kind].build().named_parameters() if one.requires_grad}
    for step, other in zip(steps, others, strict=True):
        assert trained == set(step.gradients)
        assert [] == [
            name for name, one in step.before.items() if name not in trained and not torch.equal(one, step.after[name])
        ]
        assert tidy_step(step) == tidy_step(other)
