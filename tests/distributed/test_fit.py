"""fit and evaluate on several ranks: the numbers of one, and every decision made alike."""

from __future__ import annotations

import signal
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import augend
from augend.errors import ContractError

ROWS = 23  # no world divides its micro-batches of 3 evenly


def rows() -> dict[str, torch.Tensor]:
    """Return rows whose losses are no round numbers."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(ROWS, 4, generator=generator)
    return {"x": x, "y": torch.arange(ROWS) % 3, "row": torch.arange(ROWS)}


def batches(batch_size: int = 6) -> augend.Batches:
    """Return the rows in batches of two micro-batches."""
    return augend.Batches(rows(), batch_size=batch_size, microbatch_size=3, seed=1)


def net() -> nn.Module:
    """Return a model with dropout, the same on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Dropout(0.2), nn.Linear(5, 3))


def placed(mode: str, world: int) -> nn.Module:
    """Return the model, sharded or not."""
    model = net()
    if mode == "fsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    return model


def loss(model: nn.Module, microbatch) -> augend.Tally:
    """Return the cross entropy of each row."""
    return augend.losses.cross_entropy(model(microbatch["x"]), microbatch["y"])


def accuracy(model: nn.Module, microbatch) -> augend.Accuracy:
    """Return hits that do not know of fillers."""
    metric = augend.Accuracy()
    metric.update(model(microbatch["x"]), microbatch["y"])
    return metric


def perplexity(model: nn.Module, microbatch) -> augend.Perplexity:
    """Return a perplexity of rows that were sampled in fours, which micro-batches tear apart."""
    metric = augend.Perplexity()
    metric.update(loss(model, microbatch), microbatch, groups=microbatch["row"] // 4)
    return metric


METRICS = {"accuracy": accuracy, "perplexity": perplexity}


def quietly(function, *arguments: object) -> object:
    """Run a case without its warnings of fillers, which are not its matter."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*fillers")
        return function(*arguments)


def evaluated(mode: str, world: int, batch_size: int) -> dict[str, augend.Estimate]:
    """Evaluate, twice more with a group that is kept, and check that this changes nothing."""
    model = placed(mode, world)
    kept = augend.metrics.Ranks()
    first, *others = (
        augend.evaluate(model, batches(batch_size), loss=loss, metrics=METRICS, ranks=ranks)
        for ranks in (None, kept, kept)
    )
    assert [first, first] == others
    return first


@pytest.mark.parametrize("batch_size", [3, 6, ROWS])
@pytest.mark.parametrize("mode", ["replicated", "fsdp"])
@pytest.mark.parametrize("world", [2, 3])
def test_evaluate_has_the_bits_of_one_rank(ranks, world, mode, batch_size):
    """Loss, metrics, errors and counts are equal to the bit, with fillers and with ranks that have no row at all."""
    alone = augend.evaluate(net(), batches(batch_size), loss=loss, metrics=METRICS)
    assert [alone] * world == ranks(world).run(quietly, evaluated, mode, world, batch_size)


def fitted(mode: str, world: int, patience: int | None) -> tuple[augend.History, list[object], list[torch.Tensor]]:
    """Train, and return the history, what the listener heard, and the weights."""
    model = placed(mode, world)
    heard: list[object] = []
    history = augend.fit(
        model,
        batches(),
        loss=loss,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
        steps=9,
        validation=batches(5),
        validate_every=1,
        patience=patience,
        metrics=METRICS,
        listeners=[heard.append],
    )
    weights = [value.full_tensor() if mode == "fsdp" else value for value in model.state_dict().values()]
    return history, heard, weights


@pytest.mark.parametrize("patience", [None, 2])
@pytest.mark.parametrize("mode", ["replicated", "fsdp"])
@pytest.mark.parametrize("world", [2, 3])
def test_fit_is_alike_on_all_ranks(ranks, world, mode, patience):
    """Histories are equal on all ranks, seconds too; weights to the bit; only the first one calls its listeners."""
    alone, _, _ = fitted("replicated", 1, patience)
    results = ranks(world).run(quietly, fitted, mode, world, patience)
    history, heard, weights = results[0]
    for other, nothing, same in results[1:]:
        assert (history, []) == (other, nothing)
        assert all(map(torch.equal, weights, same))
    kinds = [type(event).__name__ for event in heard]
    assert ["Begin", *["Step", "Validation"] * len(history.steps), "End"] == kinds
    assert world == heard[0].world
    assert [step.count for step in alone.steps][: len(history.steps)] == [step.count for step in history.steps]
    assert alone.steps[0].losses == history.steps[0].losses
    assert (alone.stopped, len(alone.steps)) == (history.stopped, len(history.steps))


def stopped_in_a_validation(directory: str, who: int) -> tuple[object, int]:
    """Ask one rank to stop in the middle of its second validation; return the exit code and the losses looked at."""
    model, rank = placed("fsdp", 2), torch.distributed.get_rank()
    looks = []

    def measured(model: nn.Module, microbatch) -> augend.Tally:
        if not model.training:
            looks.append(1)
            if len(looks) == 6 and rank == who:
                signal.raise_signal(signal.SIGTERM)
        return loss(model, microbatch)

    code: object = None
    with augend.Checkpoint(directory, background=False) as checkpoint:
        try:
            augend.fit(
                model,
                batches(),
                loss=measured,
                optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
                steps=9,
                validation=batches(5),
                validate_every=2,
                checkpoint=checkpoint,
            )
        except SystemExit as stop:
            code = stop.code
    return code, len(looks)


@pytest.mark.parametrize("who", [0, 1])
def test_a_signal_to_one_rank_stops_a_validation_on_all(ranks2, tmp_path, who):
    """The other rank leaves the validation at the same micro-batch; both save and end with 3, before the third step."""
    results = ranks2.run(quietly, stopped_in_a_validation, str(tmp_path), who)
    assert [(3, 6)] * 2 == results
    assert 4 == augend.inspect(tmp_path).step


def merged(dealt: list[list[float]]) -> tuple[str, augend.Estimate]:
    """Merge what the ranks were dealt; a rank without values has run fillers only."""
    ranks = augend.metrics.Ranks()
    mean = augend.Mean()
    mine = torch.tensor(dealt[ranks.rank], dtype=torch.float64)
    if len(mine):
        mean.update(augend.Tally(mine, torch.ones(len(mine), dtype=torch.int64)))
    else:
        mean.update(augend.Tally(torch.tensor([7.0]), torch.ones(1)))  # of a filler
    before = str(mean.state_dict())
    result = ranks.merge({"a": mean}, own=bool(len(mine)))["a"]
    assert before == str(mean.state_dict())
    return str(result.state_dict()), result.compute()


VALUES = st.lists(st.floats(-1e300, 1e300), max_size=4)


@settings(max_examples=15, deadline=None)
@given(first=VALUES, second=VALUES)
def test_any_deal_is_merged_to_the_bit(ranks2, first, second):
    """However rows are dealt to two ranks, both get the state and the bits of one rank with all of them."""
    if not first and not second:
        first = [1.0]
    alone = augend.Mean()
    alone.update(
        augend.Tally(torch.tensor([*first, *second], dtype=torch.float64), torch.ones(len(first) + len(second)))
    )
    results = ranks2.run(merged, [first, second])
    assert results[0][0] == results[1][0]
    assert [repr(alone.compute())] * 2 == [repr(estimate) for _, estimate in results]


def disagreeing() -> tuple[str, bool, bool, list[float]]:
    """Merge different things, and ask around."""
    ranks = augend.metrics.Ranks()
    kinds = {"a": augend.Mean()} if ranks.rank == 0 else {"a": augend.Accuracy()}
    with pytest.raises(ContractError) as caught:
        ranks.merge(kinds)
    some, none = ranks.any(ranks.rank == 1), ranks.any(ranks.rank == 5)
    return str(caught.value), some, none, ranks.from_first([ranks.rank + 0.1, 2.0])


def test_ranks_that_measure_different_things_all_hear_of_it(ranks2):
    """Names and kinds must be the same: else one error on all; flags are or-ed, and numbers are the first rank's."""
    message = "rank 0 measures a (Mean) and rank 1 a (Accuracy); give each rank the same metrics"
    assert [(message, True, False, [0.1, 2.0])] * 2 == ranks2.run(disagreeing)


def nothing_at_all() -> str:
    """Merge metrics of which none counts."""
    with pytest.raises(ContractError) as caught:
        augend.metrics.Ranks().merge({"a": augend.Mean()}, own=False)
    return str(caught.value)


def test_nothing_on_any_rank_is_refused_alike(ranks2):
    """Where no rank has a row there is nothing to merge."""
    assert ["no rank has anything to add; at least one must have rows that count"] * 2 == ranks2.run(nothing_at_all)


def test_a_process_alone_merges_copies():
    """World 1: the metrics as they are, but others; no process group is needed."""
    ranks = augend.metrics.Ranks()
    mean = augend.Mean()
    mean.update(augend.Tally(torch.tensor([3.0]), torch.tensor([1])))
    result = ranks.merge({"a": mean})["a"]
    mean.update(augend.Tally(torch.tensor([5.0]), torch.tensor([1])))
    assert (0, 1, 3.0, 4.0) == (ranks.rank, ranks.world, result.compute().value, mean.compute().value)
    assert ([1.5], True, False) == (ranks.from_first([1.5]), ranks.any(True), ranks.any(False))
