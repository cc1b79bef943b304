"""dtype="exact" on ranks: two accumulators, two models, gradients made elsewhere, fit, and averages."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import placed
import pytest
import torch
import torch.distributed
import zoo
from job import PLACES, Job, hashed
from ranks import Ranks
from tasks import TASKS, named_tensors
from torch import Tensor, nn

import augend
from augend.errors import StateError

World = Callable[[int], Ranks]


def same(outcomes: list[Any]) -> Any:
    """Return what all ranks returned."""
    assert [outcomes[0]] * len(outcomes) == outcomes
    return outcomes[0]


# ---------------------------------------------------------------- two accumulators of one model


def second_loss(model: nn.Module, rows: Mapping[str, Tensor]) -> augend.Tally:
    """Return the tally of the second of two accumulators, of a very different size."""
    total = model(rows["x"]).square().sum(1)  # [rows]
    return augend.Tally(total * 2.0**15, torch.ones_like(total))


def train_two(place: str, dtypes: tuple[str, str], how: str) -> list[list[tuple[str, float, int]]]:
    """Go through batches with two accumulators; return digests of means, norms and micro-batches of each.

    Args:
        place: How the model lies.
        dtypes: Of the accumulators.
        how: "together" through one loop, or each "in turn".
    """
    kind = zoo.KINDS["smooth"]
    there = placed.PLACES[place](kind.build(), kind.blocks)
    accumulators = [there.grads(dtype=dtype) for dtype in dtypes]
    losses = dict(zip(accumulators, (zoo.classified, second_loss), strict=True))
    options = {"batch_size": zoo.BATCH, "microbatch_size": zoo.MICROBATCH, "shuffle": False, "epochs": 2}
    told: dict[augend.Accumulator, list[tuple[str, float, int]]] = {each: [] for each in accumulators}
    for batch in there.batches(zoo.rows(), **options):
        loops = [accumulators] if how == "together" else [[each] for each in accumulators]
        for leader, *others in loops:
            for rows in leader.microbatches(batch, together=others):
                for each in (leader, *others):
                    each.backward(losses[each](there.model, rows))
        for each in accumulators:
            done = each.finish(max_norm=1.0)
            told[each].append((hashed(placed.gradients(there.model)), done.norm, done.microbatches))
            there.model.zero_grad()
    return list(told.values())


@functools.cache
def two_alone(how: str) -> list[list[tuple[str, float, int]]]:
    """Do it in one process, with two exact ones."""
    return train_two("alone", ("exact", "exact"), how)


@pytest.mark.parametrize(
    ("place", "how"),
    [("fsdp", "together"), ("fsdp", "in turn"), ("hsdp of 2 replicas", "together"), ("replicated", "in turn")],
)
def test_two_accumulators_of_one_model_keep_to_themselves(ranks2: Ranks, place: str, how: str) -> None:
    """Two exact ones have one process's bits; beside an exact one a float32 one has the bits of one beside a float32.

    Nothing of the one's gradients goes to the other, though both listen to the same modules.
    """
    assert two_alone(how) == same(ranks2.run(train_two, place, ("exact", "exact"), how))
    first, second = same(ranks2.run(train_two, place, ("float32", "float32"), how))
    assert [two_alone(how)[0], second] == same(ranks2.run(train_two, place, ("exact", "float32"), how))
    assert [first, two_alone(how)[1]] == same(ranks2.run(train_two, place, ("float32", "exact"), how))
    assert first != two_alone(how)[0]


# ---------------------------------------------------------------- two models, and looking in on the way


def network(inputs: int, outputs: int, seed: int) -> nn.Module:
    """Return a small network."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(inputs, 7), nn.SiLU(), nn.Linear(7, outputs))


def train_gan(place: str) -> tuple[str, str, str]:
    """Train a critic and a generator, whose loss flows through the critic; return both digests and what they told."""
    critic, generator = (PLACES[place](network(*each), ("0",)) for each in ((2, 1, 1), (4, 2, 2)))
    judged = augend.Accumulator(critic, foreign="drop", dtype="exact")
    made = augend.Accumulator(generator, dtype="exact")
    step_critic, step_generator = (torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (critic, generator))
    points = torch.randn(20, 2, generator=torch.Generator().manual_seed(0))
    bce, told = augend.losses.binary_cross_entropy, []
    for batch in augend.Batches(points, batch_size=12, microbatch_size=2, epochs=2):
        for rows in judged.microbatches(batch, together=[made]):
            fake = generator(torch.randn(len(rows[0]), 4))
            made.backward(bce(critic(fake), torch.ones(len(fake), 1)))
            scores, invented = critic(rows[0]), critic(fake.detach())
            judged.backward(bce(scores, torch.ones_like(scores)) + bce(invented, torch.zeros_like(invented)))
        told += [judged.step(step_critic, max_norm=1.0), made.step(step_generator, max_norm=1.0)]
    return hashed(named_tensors(critic)), hashed(named_tensors(generator)), repr(told)


@pytest.mark.parametrize("place", ["fsdp", "replicated"])
def test_a_loss_that_flows_through_another_sharded_model_leaves_nothing_in_its_sums(ranks2: Ranks, place: str) -> None:
    """Critic and generator have the bits of one process, though each backward of the one's passes the other."""
    assert train_gan("replicated") == same(ranks2.run(train_gan, place))


def look_in(place: str) -> tuple[str, list[str]]:
    """Measure and look at the norm and the state in the middle of batches; return the digest and what was seen."""
    task = TASKS["mlp"]()
    job = Job(task, place)
    held_out, seen = augend.Batches(task.rows, batch_size=11, microbatch_size=3), []
    for at in job.moments(3):
        if at.rows_done == 8:  # on one rank and on two
            seen.append(repr(augend.evaluate(job.model, held_out, loss=task.loss)))
        if at.rows_done == 8 and (at.step or at.offer):
            seen.append(f"{job.grads.norm().hex()} {job.grads.state.count}")
    return job.outcome().digest, seen


def test_looking_in_changes_nothing(ranks2: Ranks) -> None:
    """An evaluation and a norm in mid-batch are the same on two ranks, and what comes after is as without them."""
    digest, seen = look_in("replicated")
    assert digest == Job(TASKS["mlp"]()).train(3).digest
    assert (digest, seen) == same(ranks2.run(look_in, "fsdp"))


# ---------------------------------------------------------------- gradients made elsewhere


def made(model: nn.Module, number: int) -> dict[str, Tensor]:
    """Return gradients as if they had come from elsewhere: those of one micro-batch of several."""
    generator = torch.Generator().manual_seed(number)
    return {
        name: torch.randn(one.shape, generator=generator) * 2.0**number
        for name, one in model.named_parameters()
        if "idle" not in name
    }


def add_some(grads: augend.Accumulator, model: nn.Module, numbers: tuple[int, ...], how: str) -> None:
    """Add gradients: each rank its share, or all of them as sums of all ranks, or spread as the parameters are."""
    rank, world = (torch.distributed.get_rank(), torch.distributed.get_world_size()) if how != "alone" else (0, 1)
    for number in numbers[rank::world] if how in ("alone", "own") else numbers:
        given = made(model, number)
        grads.add(given, 1, summed=how == "summed")


def add_and_finish(place: str, how: str) -> tuple[str, str, float, int]:
    """Add, hand the sums over, go on from them with more, and finish; return digests of sums and mean."""
    kind = zoo.KINDS["smooth"]
    there = placed.PLACES[place](kind.build(), kind.blocks)
    grads = there.grads(dtype="exact")
    add_some(grads, there.model, (0, 1, 2, 3), how)
    with pytest.raises(StateError, match="again"):  # nobody has seen such gradients yet, and nobody can offer them
        grads.finish_sums()
    grads.reset()
    add_some(grads, there.model, (0, 1, 2, 3), how)
    sums = grads.finish_sums()
    assert {torch.int64} == {one.dtype for one in sums.gradients.values()}
    other = augend.Accumulator.from_sums(there.model, sums, grads.contract, **there.accumulator)
    add_some(other, there.model, (4, 5), how)
    mean = other.finish_mean()
    return hashed(dict(sums.gradients)), hashed(dict(mean.gradients)), float(mean.state.count), mean.state.microbatches


@pytest.mark.parametrize("how", ["own", "summed"])
@pytest.mark.parametrize("place", ["replicated", "last", "fsdp", "hsdp of 2 replicas"])
def test_gradients_made_elsewhere_are_added_alike(ranks2: Ranks, place: str, how: str) -> None:
    """``add``, ``finish_sums`` and ``from_sums`` have the bits of one process, whoever brings which gradients."""
    assert add_and_finish("alone", "alone") == same(ranks2.run(add_and_finish, place, how))


# ---------------------------------------------------------------- what else a loop does


def fit(place: str) -> tuple[str, str, str]:
    """Train by ``augend.fit``, validating on the way; return digests, and what it and an evaluation tell."""
    task = TASKS["llama"]()
    job = Job(task, place)
    held_out = augend.Batches(task.rows, batch_size=11, microbatch_size=3)

    def accuracy(model: nn.Module, rows: Any) -> augend.Accuracy:
        metric = augend.Accuracy()
        metric.update(model(rows["tokens"])[:, :-1], rows["labels"][:, 1:], microbatch=rows)
        return metric

    linear, cosine = augend.schedules.linear(1e-2, steps=9, warmup_steps=2), augend.schedules.cosine(3e-3, steps=5)
    options = {"loss": task.loss, "metrics": {"accuracy": accuracy}}
    history = augend.fit(
        job.model,
        job.data,
        optimizer=job.optimizer,
        steps=6,
        max_norm=task.max_norm,
        schedule=augend.schedules.chain([linear, cosine], milestones=[3]),
        validation=held_out,
        validate_every=3,
        accumulator=job.grads,
        digest_every=2,
        **options,
    )
    steps = [dataclasses.replace(each, seconds=0.0) for each in history.steps]
    validations = [dataclasses.replace(each, seconds=0.0) for each in history.validations]
    estimates = augend.evaluate(job.model, held_out, **options)
    outcome = job.outcome()
    return outcome.weights, outcome.optimizer, repr((steps, validations, estimates))


@pytest.mark.parametrize(("world", "place"), [(2, "fsdp"), (2, "replicated"), (3, "hsdp of 3 replicas")])
def test_fit_and_evaluate_tell_the_same_everywhere(ranks: World, world: int, place: str) -> None:
    """Schedules, clipping, validation, metrics with their error bars, and digests on the way: bit by bit."""
    assert fit("replicated") == same(ranks(world).run(fit, place))


def average(place: str) -> tuple[str, str]:
    """Train with a moving average of the parameters beside, on what this rank holds; return both digests."""
    job = Job(TASKS["mlp"](), place)
    averages = {name: one.detach().clone() for name, one in named_tensors(job.model).items()}
    seen = 0
    for _ in job.moments(12):
        if job.grads.updates > seen:
            seen = job.grads.updates
            for name, one in named_tensors(job.model).items():
                averages[name].lerp_(one.detach(), 0.1)
    return job.outcome().weights, hashed(averages)


@pytest.mark.parametrize(("world", "place"), [(2, "fsdp"), (3, "fsdp"), (2, "replicated")])
def test_a_moving_average_of_the_parameters_is_the_same(ranks: World, world: int, place: str) -> None:
    """It is elementwise, ``torch.lerp`` on the shards."""
    weights, averages = average("replicated")
    assert weights != averages
    assert (weights, averages) == same(ranks(world).run(average, place))
