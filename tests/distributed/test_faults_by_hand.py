"""Faults that users of other systems met on several ranks: normalisation, synchronisation, norm, hangs, tied weights.

Micro-batches are written ``(g, n)``: the gradient of the loss SUM is g, over n items. The right values follow by hand.
"""

from __future__ import annotations

import math

import placed
import pytest
import torch
import torch.distributed
import zoo
from placed import PLACES, Placed
from ranks import Ranks
from torch import Tensor, nn

import augend
import reference
from augend.errors import PlacementError

Given = list[list[tuple[float, int]]]  # for each rank its micro-batches

PLACES_OF_TWO = ["replicated", "last", "wrapped", "fsdp", "hsdp of 2 replicas", "hybrid of 2 replicas"]
PLACES_OF_TWO += [pytest.param(place, marks=pytest.mark.long) for place in ("hsdp of 1 replica", "hybrid of 1 replica")]
PLACES_OF_ANY = ["replicated", "last", "wrapped", "fsdp"]


class Pair(nn.Module):
    """Two weights: outputs of the one and of the other for the same input."""

    def __init__(self) -> None:
        super().__init__()
        self.main = nn.Linear(1, 1, bias=False)
        self.other = nn.Linear(1, 1, bias=False)

    def forward(self, x: Tensor, which: str = "both") -> tuple[Tensor, Tensor]:
        main = self.main(x)
        return main, (self.other(x) if which == "both" else main)


class TiedPair(nn.Module):
    """One weight as an embedding and as a head: gradient 2 by the one way and 3 by the other."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(1, 1)
        self.head = nn.Linear(1, 1, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return 2 * self.embed(torch.zeros(len(x), dtype=torch.int64)) + 3 * self.head(x)


class Pieces(nn.Module):
    """Weights in pieces, whose gradients are what is asked for."""

    def __init__(self, sizes: list[int], dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.pieces = nn.ParameterList([nn.Parameter(torch.zeros(size, dtype=dtype)) for size in sizes])

    def forward(self, gradient: Tensor) -> Tensor:
        parts = gradient.split([len(one) for one in self.pieces])
        return (
            torch.stack([(one * part).sum() for one, part in zip(self.pieces, parts, strict=True)])
            .sum()
            .reshape(1)
            .clone()
        )


def mine(given: list) -> object:
    """Return what is given for this rank."""
    return given[torch.distributed.get_rank()]


def scalar(place: str, given: Given) -> tuple[float, float, augend.Finished]:
    """Return gradient, weight after a step of rate 1/8, and the record, of one weight that begins with 1."""
    there = PLACES[place](ones(), ())
    grads = there.grads()
    optimizer = torch.optim.SGD(there.model.parameters(), lr=0.125)
    for gradient, count in mine(given):
        grads.backward(augend.Tally(there.model(torch.tensor([[float(gradient)]])).sum(1), torch.tensor([count])))
    done = grads.finish()
    (gradient,) = placed.gradients(there.model).values()
    optimizer.step()
    (weight,) = placed.weights(there.model).values()
    return float(gradient), float(weight), done


def ones(outputs: int = 1) -> nn.Linear:
    """Return a layer of one input whose weights are one."""
    model = nn.Linear(1, outputs, bias=False)
    nn.init.ones_(model.weight)
    return model


BY_HAND = {
    "B1: each rank divides by its own items": ([[(3, 1), (8, 4)], [(6, 2), (4, 1)]], 21, 8),
    "B4: the average of means": ([[(9, 3)], [(7, 1)]], 16, 4),
    "C1: the last micro-batch is not reduced": ([[(1, 1), (2, 1)], [(3, 1), (6, 1)]], 12, 4),
    "C2: only the last micro-batch survives": ([[(1, 1), (2, 1)], [(3, 1), (4, 1)]], 10, 4),
    "A5: counters reduced more than once": ([[(19, 5), (19, 10)], [(19, 20), (19, 3)]], 76, 38),
    "a rank with nothing to count": ([[(3, 2), (5, 2)], [(0, 0), (0, 0)]], 8, 4),
}


@pytest.mark.parametrize("place", PLACES_OF_TWO)
@pytest.mark.parametrize("name", BY_HAND)
def test_whole_sums_over_two_ranks(ranks2: Ranks, place: str, name: str) -> None:
    """The gradient is all sums over all counts, on every rank, and so are loss and weights."""
    given, total, count = BY_HAND[name]
    loss = total / count  # the weight is 1, so a loss sum is its gradient
    for gradient, weight, done in ranks2.run(scalar, place, given):
        assert (total / count, 1 - 0.125 * total / count) == (gradient, weight)
        assert (count, loss, abs(total / count)) == (done.count, done.loss.value, done.norm)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_the_loss_does_not_depend_on_how_many_replicas_there_are(ranks, world: int) -> None:
    """B10: means of 2.0 on every rank are a mean of 2.0, with 3 ranks, 2 or 1."""
    given = [[(2.0 * (rank + 1), rank + 1)] for rank in range(world)]
    for gradient, _, done in ranks(world).run(scalar, "replicated", given):
        assert (2.0, 2.0) == (gradient, done.loss.value)


def pair_of_terms(place: str) -> tuple[dict[str, Tensor], augend.Finished]:
    """Return the gradients of a loss and of an auxiliary term whose mean is always 2.0, with factor 0.01."""
    rank = torch.distributed.get_rank()
    there = PLACES[place](Pair(), ())
    grads = there.grads(terms=("loss", "balance"))
    for part in range(2):
        main, other = there.model(torch.ones(1, 1))
        items, groups = 5 * (rank + 1) + part, 1 + rank + 3 * part
        loss = augend.Tally(main.sum(1) * 3, torch.tensor([items]))
        grads.backward({"loss": loss, "balance": augend.Tally(other.sum(1) * 2 * groups, torch.tensor([groups]))})
    done = grads.finish(term_weights={"balance": 0.01})
    return placed.gradients(there.model), done


@pytest.mark.parametrize("place", PLACES_OF_ANY)
@pytest.mark.parametrize("world", [1, 2, 3])
def test_an_auxiliary_term_keeps_its_strength(ranks, world: int, place: str) -> None:
    """B8: a term of factor 0.01 and mean 2.0 contributes 0.02 on any number of ranks, whatever the main count is."""
    items = sum(5 * (rank + 1) + part for rank in range(world) for part in range(2))
    for gradients, done in ranks(world).run(pair_of_terms, place):
        assert abs(0.02 - float(gradients["other.weight"])) <= reference.gamma(2 + world + 3, torch.float32) * 0.02
        exact = 6 * world / items
        bound = reference.gamma(2 + world + 3, torch.float32) * exact
        assert abs(exact - float(gradients["main.weight"])) <= bound
        assert items == done.count


def terms_of_columns(place: str) -> tuple[dict[str, Tensor], str]:
    """Return the gradients of a loss and an auxiliary term of a model that tensor parallelism may split."""
    there = PLACES[place](zoo.KINDS["columns"].build(), ())
    grads = there.grads(terms=("loss", "size"))
    for batch in there.batches(zoo.rows(), batch_size=8, microbatch_size=2, shuffle=False, epochs=1):
        for microbatch in grads.microbatches(batch):
            out = there.model(microbatch["x"]).sum(1)
            size = augend.Tally(out * 2, torch.full((len(out),), 3))
            grads.backward({"loss": augend.Tally(out * microbatch["count"], microbatch["count"]), "size": size})
        done = grads.finish(term_weights={"size": 0.01})
        return placed.gradients(there.model), str(done)
    raise AssertionError


@pytest.mark.parametrize("place", ["tensor", "tensor beside whole", "tensor and fsdp", "fsdp", "replicated"])
def test_terms_are_alike_under_tensor_parallelism(ranks2: Ranks, place: str) -> None:
    """B8: counts and terms of ranks that run the same rows are counted once: bitwise the numbers of one process."""
    gradients, done = terms_of_columns("alone")
    for others, record in ranks2.run(terms_of_columns, place):
        assert reference.digest(gradients) == reference.digest(others)
        assert done.partition("norm")[0] == record.partition("norm")[0]
        assert done.partition("losses")[2] == record.partition("losses")[2]


def updates(rows: int, batch_size: int) -> tuple[int, list[int], float]:
    """Return updates, counts and the weight after two epochs of micro-batches of one row."""
    model = ones()
    grads = augend.Accumulator(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
    there = Placed(model)
    counts = []
    data = there.batches({"x": torch.ones(rows, 1)}, batch_size=batch_size, microbatch_size=1, epochs=2)
    for batch in data:
        for microbatch in grads.microbatches(batch):
            out = model(microbatch["x"]).sum(1)
            grads.backward(augend.Tally(out, torch.ones(len(out), dtype=torch.int64)))
        counts.append(grads.step(optimizer).count)
    return grads.updates, counts, float(model.weight.detach())


@pytest.mark.parametrize(
    ("rows", "batch_size", "counts"),
    [(4, 2, [2, 2] * 2), (5, 2, [2, 2, 1] * 2), (8, 8, [8] * 2), (5, 5, [5] * 2)],
    ids=["B7", "C10", "P2", "P1"],
)
def test_every_row_counts_once_and_every_batch_is_a_step(
    ranks2: Ranks, rows: int, batch_size: int, counts: list
) -> None:
    """Updates and counts follow from rows and batch size, also where ranks cannot share them evenly."""
    weight = 1 - 0.125 * len(counts)  # every mean gradient is 1
    assert [(len(counts), counts, weight)] * 2 == ranks2.run(updates, rows, batch_size)


def used_once(place: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Use the other weight in the first micro-batch only, with gradient 1 on rank 0 and 3 on rank 1."""
    there = PLACES[place](Pair(), ())
    grads = there.grads()
    _, other = there.model(torch.tensor([[1.0 + 2 * torch.distributed.get_rank()]]))
    grads.backward(augend.Tally(other.sum(1), torch.tensor([1])))
    main, _ = there.model(torch.tensor([[1.0]]), "main")
    grads.backward(augend.Tally(main.sum(1) * 0, torch.tensor([0])))
    grads.finish()
    gradients = placed.gradients(there.model)
    torch.optim.SGD(there.model.parameters(), lr=1.0).step()
    return gradients, placed.weights(there.model)


@pytest.mark.parametrize("place", PLACES_OF_TWO)
def test_a_parameter_of_an_early_microbatch_is_reduced(ranks2: Ranks, place: str) -> None:
    """C4: what only the first micro-batch used is added over ranks all the same: (1 + 3) / 2 on both."""
    (gradients, weights), (others, same) = ranks2.run(used_once, place)
    assert 2.0 == float(gradients["other.weight"]) == float(others["other.weight"])
    assert reference.digest(weights) == reference.digest(same)


def static_graph() -> None:
    """Wrap a model into DDP with a static graph."""
    placed.wrapped(ones(), (), static_graph=True).grads()


def test_a_static_graph_is_refused(ranks2: Ranks) -> None:
    """C5: DDP with a static graph crashes or stops averaging where nobody expects it; every rank is told the remedy."""
    first, second = ranks2.outcomes(static_graph)
    assert (PlacementError, PlacementError) == (type(first), type(second))
    assert "static_graph" in str(first)
    assert str(first) == str(second)


def three_steps(place: str) -> list[float]:
    """Return the weight after each of three steps of two micro-batches."""
    there = PLACES[place](ones(), ())
    grads = there.grads()
    optimizer = torch.optim.SGD(there.model.parameters(), lr=0.125)
    weights = []
    for step in range(3):
        for part in range(2):
            x = torch.tensor([[float(1 + step + part + 4 * torch.distributed.get_rank())]])
            grads.backward(augend.Tally(there.model(x).sum(1), torch.tensor([1])))
        grads.step(optimizer)
        (weight,) = placed.weights(there.model).values()
        weights.append(float(weight))
    return weights


@pytest.mark.parametrize("place", PLACES_OF_TWO)
def test_every_step_is_reduced(ranks2: Ranks, place: str) -> None:
    """C5, C7, C8: means are 3.5, 4.5 and 5.5, and weights follow 1 - Σ mean/8, on both ranks, in every step."""
    assert [[0.5625, 0.0, -0.6875]] * 2 == ranks2.run(three_steps, place)


def clipped(place: str, given: list[list[list[float]]]) -> tuple[Tensor, augend.Finished]:
    """Return the gradient clipped to length 1 of a weight [n, 1], for gradients of one item each."""
    rows = mine(given)
    there = PLACES[place](ones(len(rows[0])), ())
    grads = there.grads()
    for row in rows:
        total = (there.model(torch.ones(1, 1)) * torch.tensor([row])).sum(1)
        grads.backward(augend.Tally(total, torch.tensor([1])))
    done = grads.finish(max_norm=1.0)
    (gradient,) = placed.gradients(there.model).values()
    return gradient.flatten(), done


@pytest.mark.parametrize("place", PLACES_OF_TWO)
def test_the_norm_is_that_of_all_shards_once(ranks2: Ranks, place: str) -> None:
    """E1, E2: shards [3] and [4] have norm 5, not one each, and not 7.07 with two replicas; clipped: [0.6, 0.8]."""
    for gradient, done in ranks2.run(clipped, place, [[[3.0, 4.0]], [[3.0, 4.0]]]):
        assert abs(5.0 - done.norm) <= 5e-12
        bound = reference.gamma(1 + 2 + 3, torch.float32) * torch.tensor([0.6, 0.8], dtype=torch.float64)
        assert bool(((gradient.double() - torch.tensor([0.6, 0.8], dtype=torch.float64)).abs() <= bound).all())


@pytest.mark.parametrize("place", PLACES_OF_TWO)
def test_clipping_is_done_once(ranks2: Ranks, place: str) -> None:
    """E7: [2, 0] on one rank and [0, 2] on the other, clipped to 1, are [0.7071, 0.7071]."""
    root = math.sqrt(0.5)
    for gradient, done in ranks2.run(clipped, place, [[[2.0, 0.0]], [[0.0, 2.0]]]):
        assert abs(math.sqrt(2) - done.norm) <= 1e-12 * math.sqrt(2)
        assert all(abs(root - float(one)) <= reference.gamma(1 + 2 + 3, torch.float32) * root for one in gradient)


def norm_of_pieces(place: str, sizes: list[int], dtype: torch.dtype) -> float:
    """Return the norm of one random gradient, cut into parameters, half of it from each rank."""
    gradient = torch.randn(sum(sizes), generator=torch.Generator().manual_seed(1)).to(dtype)
    there = PLACES[place](Pieces(sizes, dtype), ())
    grads = there.grads()
    keep = torch.arange(len(gradient)) % torch.distributed.get_world_size() == torch.distributed.get_rank()
    grads.backward(augend.Tally(there.model(gradient * keep).float(), torch.tensor([1])))
    return grads.finish().norm


@pytest.mark.parametrize("place", ["replicated", "last", "fsdp", "hsdp of 2 replicas"])
def test_the_norm_does_not_depend_on_grouping(ranks2: Ranks, place: str) -> None:
    """E4: one gradient in 1, 2 or 7 parameters, over shards and replicas, has one norm."""
    gradient = torch.randn(70, generator=torch.Generator().manual_seed(1))
    exact = reference.norm({"all": gradient}) / 2  # of two items
    for sizes in ([70], [33, 37], [1, 2, 3, 4, 10, 20, 30]):
        for norm in ranks2.run(norm_of_pieces, place, sizes, torch.float32):
            assert abs(exact - norm) <= 1e-12 * exact


def norm_of_half() -> float:
    """Return the norm of a gradient of 1.003 for a bfloat16 weight, that one rank adds."""
    model = Pieces([2], torch.bfloat16)
    grads = augend.Accumulator(model)
    value = 1.003 if torch.distributed.get_rank() == 1 else 0.0
    grads.add({"pieces.0": torch.tensor([value, 0.0])}, int(value))
    return grads.finish().norm


def test_a_norm_is_not_rounded_to_16_bits(ranks2: Ranks) -> None:
    """E5: a norm of 1.003 is reported as such for bfloat16 parameters, not as 1.0."""
    assert [float(torch.tensor(1.003))] * 2 == ranks2.run(norm_of_half)


def tied(place: str) -> tuple[dict[str, Tensor], float, bool, Tensor]:
    """Return gradients, norm, whether the tie held, and the weight after a step."""
    model = TiedPair()
    nn.init.ones_(model.head.weight)
    there = PLACES[place](model, ())
    inner = there.model.module if place == "wrapped" else there.model
    grads = there.grads()
    grads.backward(augend.Tally(there.model(torch.ones(1, 1)).sum(1), torch.tensor([1])))
    done = grads.finish()
    gradients = placed.gradients(there.model)
    torch.optim.SGD(there.model.parameters(), lr=1.0).step()
    return gradients, done.norm, inner.embed.weight is inner.head.weight, placed.whole(inner.head.weight)


@pytest.mark.parametrize("place", PLACES_OF_TWO)
def test_a_tied_weight_is_one_weight(ranks2: Ranks, place: str) -> None:
    """S1, S2: gradients 2 and 3 of one tied weight are one gradient 5 of norm 5, and it is still tied after a step."""
    for gradients, norm, held, weight in ranks2.run(tied, place):
        assert {"embed.weight": 5.0} == {name: float(one) for name, one in gradients.items()}
        assert (5.0, True, -4.0) == (norm, held, float(weight))


def adapted(place: str, pause: bool) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the weights before and after a step of four adapted layers, perhaps with a save and load in mid-batch."""
    kind = zoo.KINDS["adapted"]
    there = PLACES[place](kind.build(), kind.blocks)
    with torch.no_grad():
        for one in placed.local(dict(there.model.named_parameters())).values():
            one.add_(0.5)  # no zeros, which would keep gradients from the adapters beside them
    before = placed.weights(there.model)
    grads = there.grads()
    optimizer = torch.optim.AdamW(there.model.parameters(), lr=0.125)
    rows = zoo.rows()
    for part in range(3):
        cut = slice(part * 4 + torch.distributed.get_rank() * 2, part * 4 + torch.distributed.get_rank() * 2 + 2)
        count = torch.tensor([1, 2])
        grads.backward(augend.Tally(there.model(rows["x"][cut] + 1).sum(1) * count, count))
        if pause and part == 1:
            state = grads.state_dict()
            grads = there.grads()
            grads.load_state_dict(state)
    grads.step(optimizer)
    return before, placed.weights(there.model)


@pytest.mark.parametrize("place", PLACES_OF_TWO)
def test_adapters_learn_and_resume(ranks2: Ranks, place: str) -> None:
    """S4: a step changes all eight adapter tensors and no base; saved and loaded in mid-batch, bitwise the same."""
    (before, after), (_, same) = ranks2.run(adapted, place, False)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert {f"layers.{layer}.{part}.weight" for layer in range(4) for part in ("down", "up")} == changed
    assert reference.digest(after) == reference.digest(same)
    (_, resumed), (_, again) = ranks2.run(adapted, place, True)
    assert [reference.digest(after)] * 2 == [reference.digest(resumed), reference.digest(again)]
