"""Cases of test_uses: what can be done with accumulators beside the plain loop, each in the middle of real ranks."""

from __future__ import annotations

from collections.abc import Callable

import placed
import torch
import zoo
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import augend
from augend.errors import StateError

KIND = zoo.KINDS["narrow"]
Made = dict[str, Tensor]


def there(place: str) -> placed.Placed:
    """Return the model, placed."""
    return placed.PLACES[place](KIND.build(), KIND.blocks)


def only_batch(model: placed.Placed) -> augend.data.Batch:
    """Return the first batch."""
    data = model.batches(zoo.rows(), batch_size=zoo.BATCH, microbatch_size=zoo.MICROBATCH, shuffle=False)
    return next(iter(data))


def run(model: placed.Placed, grads: augend.Accumulator, batch: augend.data.Batch) -> None:
    """Go through what is left of a batch."""
    for microbatch in grads.microbatches(batch):
        grads.backward(KIND.loss(model.model, microbatch))


def finished(model: placed.Placed, grads: augend.Accumulator) -> Made:
    """Finish, and return whole gradients."""
    grads.finish()
    return placed.gradients(model.model)


def plain(place: str) -> list[Made]:
    """Train as always."""
    model = there(place)
    grads = model.grads()
    run(model, grads, only_batch(model))
    return [finished(model, grads)]


def two_in_turn(place: str) -> list[Made]:
    """Make two accumulators of one model, and use the first, the second, and the first again."""
    model = there(place)
    first, second = model.grads(), model.grads()
    made = []
    for grads in (first, second, first):
        run(model, grads, only_batch(model))
        made.append(finished(model, grads))
        model.model.zero_grad()
    return made


def two_together(place: str) -> list[Made]:
    """Go through one batch with two models and their accumulators."""
    one, other = there(place), there(place)
    first, second = one.grads(), other.grads()
    for microbatch in first.microbatches(only_batch(one), together=[second]):
        second.backward(KIND.loss(other.model, microbatch))
        first.backward(KIND.loss(one.model, microbatch))
    return [finished(one, first), finished(other, second)]


def foreign_dropped(place: str) -> list[Made]:
    """Let another loss flow through the model before each backward."""
    model = there(place)
    grads = model.grads(foreign="drop")
    for microbatch in grads.microbatches(only_batch(model)):
        (model.model(microbatch["x"]).sum() * 3).backward()
        grads.backward(KIND.loss(model.model, microbatch))
    return [finished(model, grads)]


def reset_in_between(place: str) -> list[Made]:
    """Drop the first micro-batch and begin the batch again."""
    model = there(place)
    grads, batch = model.grads(), only_batch(model)
    for microbatch in grads.microbatches(batch):
        grads.backward(KIND.loss(model.model, microbatch))
        break
    grads.reset()
    run(model, grads, batch)
    return [finished(model, grads)]


class Stumbles(torch.autograd.Function):
    """Raises on the way back."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        """Pass on."""
        return x.clone()

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        """Raise."""
        raise ValueError("on the way back")


def failed_backward(place: str) -> list[Made]:
    """Let a backward fail on all ranks, drop the window, and begin the batch again."""
    model = there(place)
    grads, batch = model.grads(), only_batch(model)
    for microbatch in grads.microbatches(batch):
        tally = KIND.loss(model.model, microbatch)
        try:
            grads.backward(augend.Tally(Stumbles.apply(tally.total), tally.count))
        except ValueError:
            break
    try:
        grads.finish()
    except StateError:
        grads.reset()
    run(model, grads, batch)
    return [finished(model, grads)]


def recomputed(place: str) -> list[Made]:
    """Recompute activations in the backward."""
    model = there(place)
    inner = model.model.second.forward
    model.model.second.forward = lambda x: checkpoint(inner, x, use_reentrant=False)
    grads = model.grads()
    run(model, grads, only_batch(model))
    return [finished(model, grads)]


def drained(place: str) -> list[Made]:
    """Drain the sums and go on from them in a new accumulator."""
    model = there(place)
    grads = model.grads()
    run(model, grads, only_batch(model))
    sums = grads.finish_sums()
    more = augend.Accumulator.from_sums(model.model, sums, grads.contract, **model.accumulator)
    means = more.finish_mean()
    return [{name: placed.whole(one) for name, one in means.gradients.items()}]


def given(place: str) -> list[Made]:
    """Give gradients that were made elsewhere: every rank its own, of which one is rank 0's alone."""
    model = there(place)
    grads = model.grads()
    world, rank = (1, 0) if place == "alone" else (placed.world(), torch.distributed.get_rank())
    shapes = {name: one.shape for name, one in placed.parameters(model.model)}
    made = {name: torch.full(shape, 6.0 / world) for name, shape in shapes.items() if name != "first.bias"}
    if rank == 0:
        made["first.bias"] = torch.full(shapes["first.bias"], 6.0)
    grads.add(made, 6 // world)
    return [finished(model, grads)]


def given_summed(place: str) -> list[Made]:
    """Give all ranks the sum."""
    model = there(place)
    grads = model.grads()
    made = {name: torch.full(one.shape, 6.0) for name, one in placed.parameters(model.model)}
    grads.add(made, 6, summed=True)
    return [finished(model, grads)]


USES: dict[str, Callable[[str], list[Made]]] = {
    one.__name__: one
    for one in (
        plain,
        two_in_turn,
        two_together,
        foreign_dropped,
        reset_in_between,
        failed_backward,
        recomputed,
        drained,
        given,
        given_summed,
    )
}
