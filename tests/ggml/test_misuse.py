"""The 47 misuses that were probed on a real ggml: no abort, but a typed error, or a better answer than ggml's."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from ggml_runs import Model, drive, optimizer_of, options_of, oracle, training_of, upstream, weight_of

from augend.errors import AugendError, ContractError, SplitError, StateError
from augend.ggml import (
    SGD,
    AdamW,
    Bar,
    Build,
    Dataset,
    Graph,
    Kind,
    Loss,
    Optimizer,
    Parameters,
    Random,
    Result,
    epoch,
    fit,
)

PROBED = oracle("aborts")["cases"]
ENTRIES: dict[str, Callable[[Any], None]] = {}
SIDES = [None, "ggml", "prism"]
SIDE_IDS = ["default", "ggml", "prism"]


def entry(name: str) -> Callable[[Callable[[Any], None]], Callable[[Any], None]]:
    """Enter an answer to one probed misuse, under the name that it has in the oracle."""

    def enter(answer: Callable[[Any], None]) -> Callable[[Any], None]:
        assert name not in ENTRIES
        ENTRIES[name] = answer
        return answer

    return enter


@pytest.mark.parametrize("name", [case["case"] for case in PROBED])
@pytest.mark.parametrize("compat", SIDES, ids=SIDE_IDS)
def test_a_misuse_is_answered(name: str, compat: str | None) -> None:
    """Each probed misuse is a typed error, or what ggml accepts, or better than that; the process goes on."""
    ENTRIES[name](compat)


def test_every_probed_misuse_has_an_answer() -> None:
    """No case of the oracle is left out, and none is made up."""
    names = [case["case"] for case in PROBED]
    assert 47 == len(names) == len(set(names))
    assert set(names) == ENTRIES.keys()


def column(rows: int) -> np.ndarray:
    """Datapoints 0, 1, 2, ... of width 1."""
    return np.arange(rows, dtype=np.float32).reshape(rows, 1)


def data(rows: int = 6, compat: Any = None, **settings: Any) -> Dataset:
    """A data set without labels."""
    return Dataset(column(rows), compat=compat, **settings)


def pair(rows: int = 6, compat: Any = None, width: int = 1) -> Dataset:
    """A data set with labels."""
    return Dataset(column(rows), np.zeros((rows, width), dtype=np.float32), compat=compat)


def summed(compat: Any, rows: int = 1, **settings: Any) -> tuple[Model, Optimizer]:
    """A model and its optimizer, with the sum of the outputs as its loss."""
    model = upstream(rows)
    return model, optimizer_of(model, Loss.SUM, compat=compat, **settings)


# Data sets.


@entry("dataset ne_datapoint=0")
def _(compat: Any) -> None:
    with pytest.raises(ContractError, match="width|element"):
        Dataset(np.zeros((4, 0), dtype=np.float32), compat=compat)


@entry("dataset ne_label=-1")
def _(compat: Any) -> None:
    # A width cannot be negative here; the nearest mistakes are labels of other rows than the data, or of none at all.
    for labels in (np.zeros((3, 1)), np.zeros(())):
        with pytest.raises(ContractError, match="label"):
            Dataset(column(4), labels, compat=compat)


@entry("dataset ndata=0")
def _(compat: Any) -> None:
    with pytest.raises(ContractError, match="row|datapoint"):
        Dataset(np.zeros((0, 2), dtype=np.float32), compat=compat)


@entry("dataset ndata_shard=0")
def _(compat: Any) -> None:
    for shard in (0, -1):
        with pytest.raises(ContractError, match="shard"):
            data(4, compat, shard=shard)


@entry("dataset shard>ndata accepted (0 shards)")
def _(compat: Any) -> None:
    if compat == "ggml":
        dataset = data(4, compat, shard=5)
        assert (0, ()) == (dataset.shards, dataset.permutation)
        with pytest.raises(ContractError):
            dataset.batch(5, 0)
    else:
        with pytest.raises(ContractError, match="shard"):
            data(4, compat, shard=5)


@entry("dataset ndata%shard!=0 accepted (tail dropped)")
def _(compat: Any) -> None:
    dataset = data(7, compat, shard=3)
    rows = [row for index in range(dataset.batches(3)) for row in dataset.batch(3, index)[0].flatten().tolist()]
    assert list(range(7 if compat is None else 6)) == rows  # better: the tail is a short shard of its own


@entry("shuffle idata>ndata")
def _(compat: Any) -> None:
    with pytest.raises(ContractError, match="5"):
        data(4, compat).shuffle(Random(), 5)


@entry("shuffle idata not multiple of shard")
def _(compat: Any) -> None:
    with pytest.raises(ContractError, match="shard"):
        data(4, compat, shard=2).shuffle(Random(), 3)


@entry("shuffle idata=0 ok")
def _(compat: Any) -> None:
    dataset, random = data(4, compat), Random()
    dataset.shuffle(random, 0)
    assert (0, 1, 2, 3) == dataset.permutation
    assert 3499211612 == random.next()  # nothing was drawn


@entry("get_batch not multiple of shard")
def _(compat: Any) -> None:
    with pytest.raises(ContractError, match="shard"):
        data(4, compat, shard=2).batch(3, 0)


@entry("get_batch out of range")
def _(compat: Any) -> None:
    for index in (2, -1):
        with pytest.raises(ContractError):
            data(4, compat).batch(2, index)


@entry("get_batch labels mismatch")
def _(compat: Any) -> None:
    # There is no call that could ask for labels which are not there: None is what comes back.
    assert data(4, compat).batch(2, 0)[1] is None
    labels = pair(4, compat).batch(2, 0)[1]
    assert labels is not None
    assert (2, 1) == tuple(labels.shape)


# Optimizers.


@entry("opt_period=0")
def _(compat: Any) -> None:
    for period in (0, -1):
        with pytest.raises(ContractError, match="period"):
            summed(compat, period=period)


@entry("build_type GRAD static")
def _(compat: Any) -> None:
    model, optimizer = summed(compat, period=4, build=Build.GRADIENT)
    for count in range(1, 4):  # better: gradients only, and never a step
        drive(optimizer, [1.0])
        assert float(count) == float(optimizer.gradient(model.parameters["weight"]))
    assert (3.0, 1) == (weight_of(model), optimizer.iteration)


@entry("build_type FORWARD then backward alloc")
def _(compat: Any) -> None:
    model, optimizer = summed(compat, build=Build.FORWARD)
    with pytest.raises((ContractError, StateError), match="FORWARD|forward"):
        optimizer.allocate(True)
    assert 4.0 == drive(optimizer, [1.0], backward=False)  # and it can still evaluate
    assert 3.0 == weight_of(model)


@entry("alloc twice")
def _(compat: Any) -> None:
    _, optimizer = summed(compat)
    optimizer.allocate(False)
    with pytest.raises(StateError):
        optimizer.allocate(False)


@entry("eval without alloc")
def _(compat: Any) -> None:
    _, optimizer = summed(compat)
    with pytest.raises(StateError, match="allocate"):
        optimizer.evaluate()


def refused(compat: Any, kind: Kind, word: str, parameters: Callable[[], Parameters]) -> None:
    """Parameters are refused, at the latest at the first update, and nothing has moved then."""
    model = upstream()
    with pytest.raises(ContractError, match=word):
        drive(optimizer_of(model, Loss.SUM, kind, parameters=parameters(), compat=compat), [1.0])
    assert 3.0 == weight_of(model)
    # The same from a schedule, of which nothing is known before it is asked.
    model = upstream()
    optimizer = optimizer_of(model, Loss.SUM, kind, parameters=lambda moment: parameters(), compat=compat)
    with pytest.raises(ContractError, match=word):
        drive(optimizer, [1.0])
    assert (3.0, 1) == (weight_of(model), optimizer.iteration)


def accepted(compat: Any, kind: Kind, parameters: Parameters) -> float:
    """Parameters are accepted: the weight after one update."""
    model = upstream()
    drive(optimizer_of(model, Loss.SUM, kind, parameters=parameters, compat=compat), [1.0])
    return weight_of(model)


@entry("hyper adamw alpha=0")
def _(compat: Any) -> None:
    refused(compat, Kind.ADAMW, "alpha", lambda: Parameters(adamw=AdamW(alpha=0.0)))


@entry("hyper adamw alpha=nan")
def _(compat: Any) -> None:
    refused(compat, Kind.ADAMW, "alpha", lambda: Parameters(adamw=AdamW(alpha=math.nan)))


@entry("hyper adamw alpha=inf")
def _(compat: Any) -> None:
    parameters = Parameters(adamw=AdamW(alpha=math.inf))
    if compat == "ggml":
        assert not math.isfinite(accepted(compat, Kind.ADAMW, parameters))
    else:
        refused(compat, Kind.ADAMW, "alpha", lambda: parameters)


@entry("hyper adamw beta1=1.1")
def _(compat: Any) -> None:
    refused(compat, Kind.ADAMW, "beta1", lambda: Parameters(adamw=AdamW(beta1=1.1)))


@entry("hyper adamw beta1=1 (allowed, inf bias correction)")
def _(compat: Any) -> None:
    parameters = Parameters(adamw=AdamW(beta1=1.0))
    if compat is None:
        refused(compat, Kind.ADAMW, "beta1", lambda: parameters)
    else:
        assert not math.isfinite(accepted(compat, Kind.ADAMW, parameters))


@entry("hyper adamw beta2=-0.1")
def _(compat: Any) -> None:
    refused(compat, Kind.ADAMW, "beta2", lambda: Parameters(adamw=AdamW(beta2=-0.1)))


@entry("hyper adamw eps=-1")
def _(compat: Any) -> None:
    refused(compat, Kind.ADAMW, "eps", lambda: Parameters(adamw=AdamW(eps=-1.0)))


@entry("hyper adamw wd=1.5")
def _(compat: Any) -> None:
    refused(compat, Kind.ADAMW, "wd", lambda: Parameters(adamw=AdamW(wd=1.5)))


@entry("hyper adamw ok but sgd alpha=0")
def _(compat: Any) -> None:
    parameters = Parameters(adamw=AdamW(alpha=0.5), sgd=SGD(alpha=0.0))
    assert abs(2.5 - accepted(compat, Kind.ADAMW, parameters)) < 1e-6


@entry("hyper sgd alpha=0")
def _(compat: Any) -> None:
    refused(compat, Kind.SGD, "alpha", lambda: Parameters(sgd=SGD(alpha=0.0)))


@entry("hyper sgd wd=-1")
def _(compat: Any) -> None:
    refused(compat, Kind.SGD, "wd", lambda: Parameters(sgd=SGD(wd=-1.0)))


@entry("hyper sgd ok but adamw alpha=0")
def _(compat: Any) -> None:
    assert 2.5 == accepted(compat, Kind.SGD, Parameters(adamw=AdamW(alpha=0.0), sgd=SGD(alpha=0.5)))


@entry("no trainable parameters")
def _(compat: Any) -> None:
    graph = Graph()
    inputs = graph.tensor((1, 2))
    model = Model(graph, inputs, graph.sqr(inputs), {})
    with pytest.raises(ContractError, match="parameter"):
        optimizer_of(model, Loss.SUM, compat=compat)


@entry("static graphs without inputs")
def _(compat: Any) -> None:
    model = upstream()
    stranger = upstream().inputs
    nobody: Any = None
    for inputs in (nobody, stranger):
        with pytest.raises(ContractError):
            Optimizer(model.graph, training_of(Model(model.graph, inputs, model.outputs, {}), Loss.SUM), compat=compat)


# Epochs.


@entry("epoch: ndata%batch")
def _(compat: Any) -> None:
    model, optimizer = summed(compat, rows=4, parameters=Parameters(sgd=SGD(alpha=1.0)))
    dataset, result = data(6, compat), Result(compat=compat)
    if compat is None:
        epoch(optimizer, dataset, train=result)  # better: the last two rows are a batch of their own
        assert 6 == result.count
        assert 3.0 - 4.0 - 2.0 == weight_of(model)
    else:
        with pytest.raises(ContractError):
            epoch(optimizer, dataset, train=result)
        assert (0, 3.0) == (result.count, weight_of(model))


@entry("epoch: split not multiple of batch")
def _(compat: Any) -> None:
    _, optimizer = summed(compat, rows=2)
    with pytest.raises((ContractError, SplitError)):
        epoch(optimizer, data(6, compat), split=3)


@entry("epoch: width mismatch")
def _(compat: Any) -> None:
    _, optimizer = summed(compat)
    with pytest.raises(ContractError, match="width|2"):
        epoch(optimizer, Dataset(np.zeros((4, 2), dtype=np.float32), compat=compat))


@entry("epoch: dataset labels but loss has none")
def _(compat: Any) -> None:
    _, optimizer = summed(compat)
    with pytest.raises(ContractError, match="label"):
        epoch(optimizer, pair(4, compat))


@entry("epoch: loss needs labels, dataset has none")
def _(compat: Any) -> None:
    model = upstream()
    with pytest.raises(ContractError, match="label"):
        epoch(optimizer_of(model, Loss.MEAN_SQUARED_ERROR, compat=compat), data(4, compat))
    assert 3.0 == weight_of(model)


@entry("epoch: split>ndata")
def _(compat: Any) -> None:
    _, optimizer = summed(compat)
    for split in (7, -2):
        with pytest.raises((ContractError, SplitError)):
            epoch(optimizer, data(6, compat), split=split)


@entry("epoch: label width mismatch")
def _(compat: Any) -> None:
    model = upstream()
    with pytest.raises(ContractError, match="label"):
        epoch(optimizer_of(model, Loss.MEAN_SQUARED_ERROR, compat=compat), pair(4, compat, width=2))


@entry("epoch: progress bar with NULL result")
def _(compat: Any) -> None:
    _, optimizer = summed(compat)
    stream = io.StringIO()
    epoch(optimizer, data(4, compat), split=2, on_train=Bar(stream), on_evaluate=Bar(stream))
    assert "train: [" in stream.getvalue()
    assert "val:   [" in stream.getvalue()


# Fits.


def fitted(compat: Any, rows: int, physical: int, logical: int, split: float, **others: Any) -> float:
    """Fit for one epoch of SGD with a rate of 1 on the mean: the weight afterwards."""
    model = upstream(physical)
    parameters = Parameters(sgd=SGD(alpha=1.0))
    training = training_of(model, Loss.MEAN, Kind.SGD, parameters=parameters)
    fit(model.graph, training, data(rows, compat), options_of(1, logical, split), compat=compat, **others)
    return weight_of(model)


@entry("fit ndata%logical")
def _(compat: Any) -> None:
    if compat is None:
        assert 1.0 == fitted(compat, 6, 2, 4, 0.0)  # better: a whole update and one of the two rows that are left
    else:
        with pytest.raises(ContractError):
            fitted(compat, 6, 2, 4, 0.0)


@entry("fit logical%physical")
def _(compat: Any) -> None:
    with pytest.raises(ContractError, match="physical"):
        fitted(compat, 6, 2, 3, 0.0)


@entry("fit val_split=1")
def _(compat: Any) -> None:
    with pytest.raises((ContractError, SplitError)):
        fitted(compat, 6, 1, 1, 1.0)


@entry("fit val_split<0")
def _(compat: Any) -> None:
    with pytest.raises((ContractError, SplitError)):
        fitted(compat, 6, 1, 1, -0.1)


@entry("fit val_split nan")
def _(compat: Any) -> None:
    for split in (math.nan, math.inf):
        with pytest.raises((ContractError, SplitError)):
            fitted(compat, 6, 1, 1, split)


@entry("fit val_split so large that no training batch remains (accepted)")
def _(compat: Any) -> None:
    if compat is None:
        with pytest.raises(SplitError):
            fitted(compat, 6, 1, 1, 0.9)
    else:
        assert 3.0 == fitted(compat, 6, 1, 1, 0.9)


# Results.


@entry("result reuse across different period")
def _(compat: Any) -> None:
    result = Result(compat=compat)
    for period in (1, 2):
        _, optimizer = summed(compat, period=period)
        if period == 2 and compat is not None:
            with pytest.raises(ContractError, match="period"):
                drive(optimizer, [1.0], result=result)
        else:
            drive(optimizer, [1.0], result=result)
    assert (1 if compat else 2) == result.count  # better: the statistics are of rows, which have no period


@entry("result reuse across loss kind (mean then sum)")
def _(compat: Any) -> None:
    result = Result(compat=compat)
    drive(optimizer_of(upstream(), Loss.MEAN, compat=compat), [1.0], result=result)
    _, optimizer = summed(compat)
    with pytest.raises(ContractError):
        drive(optimizer, [1.0], result=result)
    assert 1 == result.count


@pytest.mark.parametrize("compat", SIDES, ids=SIDE_IDS)
def test_one_except_catches_all(compat: str | None) -> None:
    """Each of augend's errors is an AugendError, so that a caller can go on after any of them."""
    survived = 0
    for misuse in (
        lambda: data(4, compat, shard=0),
        lambda: summed(compat, period=0),
        lambda: fitted(compat, 6, 1, 1, 2),
    ):
        try:
            misuse()
        except AugendError as error:
            survived += len(str(error)) > 20
    assert 3 == survived
