"""Where the Rust port differs from ggml: each row of the specification's table, ggml against prism against default."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from ggml_runs import HALF_ULP, SIGN_STEPS, Model, drive, optimizer_of, options_of, training_of, upstream, weight_of

from augend.errors import ContractError, SplitError, StateError
from augend.ggml import (
    SGD,
    AdamW,
    Build,
    Dataset,
    Fit,
    Graph,
    Kind,
    Limits,
    Loss,
    Moment,
    Optimizer,
    Parameters,
    Random,
    Result,
    epoch,
    fit,
)

SIDES = [None, "ggml", "prism"]
SIDE_IDS = ["default", "ggml", "prism"]
every_side = pytest.mark.parametrize("compat", SIDES, ids=SIDE_IDS)


def zeros(rows: int, width: int) -> np.ndarray:
    """Data that costs nothing."""
    return np.zeros((rows, width), dtype=np.float32)


def single(compat: Any, loss: Loss = Loss.SUM, **settings: Any) -> tuple[Model, Optimizer]:
    """The model of one weight, with an optimizer that moves it by the gradient."""
    model = upstream(settings.pop("rows", 1))
    settings.setdefault("parameters", SIGN_STEPS)
    return model, optimizer_of(model, loss, compat=compat, **settings)


@every_side
def test_errors(compat: str | None) -> None:
    """ggml aborts and the port returns a message: here an exception of a type, which says what was expected."""
    with pytest.raises(ContractError, match="shard"):
        Dataset(zeros(4, 1), shard=0, compat=compat)


@pytest.mark.parametrize(
    ("rows", "width", "label_width"),
    [(4097, 1, 0), (8, 65, 0), (8, 1, 65)],
    ids=["rows", "width", "label-width"],
)
def test_bounds_of_data_sets(rows: int, width: int, label_width: int) -> None:
    """ggml has no bounds and the port has small ones: they are limits that can be asked for, beside the mode."""
    labels = zeros(rows, label_width) if label_width else None
    assert rows == Dataset(zeros(rows, width), labels).count
    assert rows == Dataset(zeros(rows, width), labels, compat="ggml").count
    with pytest.raises(ContractError):
        Dataset(zeros(rows, width), labels, limits=Limits.prism())


def test_shards_larger_than_the_data() -> None:
    """ggml then has no shards at all; the port and the default refuse."""
    assert 0 == Dataset(zeros(3, 1), shard=4, compat="ggml").shards
    for compat in (None, "prism"):
        with pytest.raises(ContractError):
            Dataset(zeros(3, 1), shard=4, compat=compat)


def test_bounds_of_tensors_and_names() -> None:
    """A name of up to 63 bytes is ggml's; the port takes 128 and keeps 63; its tensors are small."""
    Graph().tensor((65_537,))
    for shape in ((65_537,), (512, 513)):
        with pytest.raises(ContractError):
            Graph(limits=Limits.prism()).tensor(shape)
    assert "n" * 63 == Graph().tensor((1,), name="n" * 63).name
    with pytest.raises(ContractError):
        Graph().tensor((1,), name="n" * 64)
    assert "n" * 63 == Graph(limits=Limits.prism()).tensor((1,), name="n" * 128).name
    for name in ("n" * 129, "a\0b"):
        with pytest.raises(ContractError):
            Graph(limits=Limits.prism()).tensor((1,), name=name)


def test_shuffles() -> None:
    """ggml draws once for two positions, as libstdc++, which is the default too; the port draws for each."""
    orders = {}
    for compat in SIDES:
        dataset = Dataset(zeros(48, 1), compat=compat)
        dataset.shuffle(Random())
        orders[compat] = list(dataset.permutation)
        assert list(range(48)) == sorted(orders[compat])
    assert orders[None] == orders["ggml"]
    assert orders["ggml"] != orders["prism"]
    expected, random = list(range(48)), Random()
    for place in range(1, 48):
        other = random.bounded(place + 1)
        expected[place], expected[other] = expected[other], expected[place]
    assert expected == orders["prism"]


def test_shuffles_of_many() -> None:
    """From 65,536 entries on ggml draws for each too, and the port's stream is the same."""
    one, other = Random(), Random()
    first, second = list(range(65_536)), list(range(65_536))
    one.shuffle(first)
    other.shuffle_one_by_one(second)
    assert first == second


def test_operations() -> None:
    """The port can add, multiply and scale; ggml's others are here as well, and differentiate."""
    graph = Graph()
    inputs = graph.tensor((2, 1))
    weight = graph.tensor((2, 2), parameter=True)
    graph.set_values(weight, [[1.0, 2.0], [3.0, 4.0]])
    model = Model(graph, inputs, graph.relu(graph.mul_mat(weight, inputs)), {"w": weight})
    optimizer = optimizer_of(model, Loss.SUM, period=2)
    drive(optimizer, [1.0, -1.0])
    assert [[0.0, 0.0], [0.0, 0.0]] == optimizer.gradient(weight).tolist()
    drive(optimizer, [1.0, 1.0])
    assert [[1.0, 1.0], [1.0, 1.0]] == optimizer.gradient(weight).tolist()


def test_gradients_of_a_window_of_one() -> None:
    """ggml has none to show at period 1 and the port makes it an error; the default shows what the step used."""
    model, optimizer = single(None)
    drive(optimizer, [1.0])
    assert 1.0 == float(optimizer.gradient(model.parameters["weight"]))
    for compat in ("ggml", "prism"):
        model, optimizer = single(compat)
        drive(optimizer, [1.0])
        with pytest.raises(StateError):
            optimizer.gradient(model.parameters["weight"])


@every_side
def test_build_types(compat: str | None) -> None:
    """The port can only update; ggml can also only evaluate; gradients alone work by default."""
    model = upstream()

    def built(build: Build) -> Optimizer:
        return Optimizer(model.graph, training_of(model, Loss.SUM, period=2, build=build), compat=compat)

    assert 4.0 == drive(built(Build.FORWARD), [1.0], backward=False)
    optimizer = built(Build.GRADIENT)
    for _ in range(3):  # a window of two, of which there is never an update
        drive(optimizer, [1.0])
    assert (3.0, 3.0) == (weight_of(model), float(optimizer.gradient(model.parameters["weight"])))


def updates(parameters: Parameters, kind: Kind, compat: Any) -> bool:
    """Whether an update is made with these parameters."""
    try:
        drive(single(compat, kind=kind, parameters=parameters)[1], [1.0])
    except ContractError:
        return False
    return True


@pytest.mark.parametrize(
    ("parameters", "kind", "expected"),
    [
        (Parameters(adamw=AdamW(alpha=math.inf)), Kind.ADAMW, {"ggml"}),
        (Parameters(adamw=AdamW(alpha=math.nan)), Kind.SGD, {"ggml"}),
        (Parameters(sgd=SGD(wd=math.inf)), Kind.ADAMW, {"ggml"}),
        (Parameters(adamw=AdamW(beta2=1.0)), Kind.ADAMW, {"ggml", "prism"}),
        (Parameters(adamw=AdamW(alpha=-1.0)), Kind.SGD, {None, "ggml", "prism"}),
        (Parameters(adamw=AdamW(alpha=-1.0)), Kind.ADAMW, set()),
    ],
    ids=["inf-rate", "other-nan", "other-inf", "beta-1", "other-negative", "negative"],
)
def test_parameter_checks(parameters: Parameters, kind: Kind, expected: set[str | None]) -> None:
    """ggml checks the active set and takes inf; the port wants all seven finite; the default also betas below 1."""
    assert expected == {compat for compat in SIDES if updates(parameters, kind, compat)}


def test_when_parameters_are_checked() -> None:
    """The port checks where the optimizer is made and ggml at the first update; the default as early as it can."""
    bad = Parameters(sgd=SGD(alpha=-1.0))
    for compat in (None, "prism"):
        with pytest.raises(ContractError):
            single(compat, parameters=bad)
    _, optimizer = single("ggml", parameters=bad, period=2)
    drive(optimizer, [1.0])
    with pytest.raises(ContractError):
        drive(optimizer, [1.0])


@every_side
def test_schedules(compat: str | None) -> None:
    """ggml asks a callback for each update and the port takes a list with one entry an epoch: both are taken."""
    rates = [0.5, 0.25, 0.125]
    listed = [Parameters(sgd=SGD(alpha=rate)) for rate in rates]
    asked: list[Moment] = []

    def schedule(moment: Moment) -> Parameters:
        asked.append(moment)
        return listed[moment.epoch - 1]

    ends = []
    for parameters in (listed, schedule):
        model = upstream()
        training = training_of(model, Loss.SUM, Kind.SGD)
        fit(
            model.graph, training, Dataset(zeros(2, 1), compat=compat), options_of(3, 1, 0.0, parameters), compat=compat
        )
        ends.append(weight_of(model))
    assert [3.0 - 2 * sum(rates)] * 2 == ends
    assert [Moment(1, 1), Moment(1, 2), Moment(2, 3), Moment(2, 4), Moment(3, 5), Moment(3, 6)] == asked
    with pytest.raises(ContractError):
        fit(model.graph, training, Dataset(zeros(2, 1), compat=compat), options_of(2, 1, 0.0, listed), compat=compat)


@pytest.mark.parametrize(
    "options",
    [options_of(4097, 1), options_of(0, 1), options_of(1, 0), options_of(1, 4097), options_of(1, 1, math.nan)],
    ids=["epochs", "no-epochs", "no-batch", "batch", "nan"],
)
def test_bounds_of_fits(options: Fit) -> None:
    """The port bounds epochs and batches: a limit here; nothing at all to do is an error in every mode."""
    model = upstream(limits=Limits.prism())
    training = training_of(model, Loss.SUM, Kind.SGD)
    with pytest.raises((ContractError, SplitError)):
        fit(model.graph, training, Dataset(zeros(4, 1)), options)


def test_bounds_of_periods() -> None:
    """A window of a million physical batches is the most, as in the port."""
    for compat in SIDES:
        single(compat, period=1_000_000)
        with pytest.raises(ContractError):
            single(compat, period=1_000_001)


def test_splits() -> None:
    """Both truncate in float32, also where the default is exact: 0.7 of ten leaves three, in float32 perhaps not."""
    trained = {}
    for compat in SIDES:
        model = upstream()
        training = training_of(model, Loss.SUM, Kind.SGD, parameters=SIGN_STEPS)
        fit(model.graph, training, Dataset(zeros(10, 1), compat=compat), options_of(1, 1, 0.7), compat=compat)
        trained[compat] = round(3.0 - weight_of(model))
    expected = int(np.float32(np.float32(1) - np.float32(0.7)) * np.float32(10))
    assert {None: 3, "ggml": expected, "prism": expected} == trained


def cross_entropy_gradient(compat: Any, logits: torch.Tensor, labels: torch.Tensor, period: int = 2) -> torch.Tensor:
    """The accumulated gradient of one evaluation."""
    rows, classes = logits.shape
    graph = Graph()
    inputs = graph.tensor((classes, rows))
    weight = graph.tensor((classes, rows), parameter=True)
    graph.set_values(weight, logits)
    model = Model(graph, inputs, graph.add(weight, inputs), {"w": weight})
    optimizer = optimizer_of(model, Loss.CROSS_ENTROPY, period=period, compat=compat)
    drive(optimizer, torch.zeros(rows, classes), labels)
    return optimizer.gradient(weight).reshape(rows, classes)


def test_the_gradient_of_cross_entropy() -> None:
    """ggml and the port take softmax - label, one rounding apart from each other; the default the derivative."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(8, 5, generator=generator)
    labels = torch.rand(8, 5, generator=generator)
    exact = torch.softmax(logits.double(), 1)
    shared = (exact - labels.double()) / 8 / 2
    for compat in ("ggml", "prism"):
        # Softmax to 3 or 4 half units of at most 1, the difference, and two factors, all over 16.
        assert 8 * HALF_ULP / 16 >= float((cross_entropy_gradient(compat, logits, labels) - shared).abs().max())
    true = (exact * labels.double().sum(1, keepdim=True) - labels.double()) / 8
    model = cross_entropy_gradient(None, logits, labels, period=1)
    assert 8 * 5 * HALF_ULP / 8 >= float((model - true).abs().max())
    assert 1e-2 < float((model - 2 * shared).abs().max())


def test_ties() -> None:
    """ggml predicts the last of equal logits; the port and the default the first."""
    assert {None: 0, "ggml": 3, "prism": 0} == {compat: predicted(compat, [[2.0, 2.0, 1.0, 2.0]]) for compat in SIDES}


def predicted(compat: Any, logits: list[list[float]]) -> int:
    """What is predicted for one row."""
    graph = Graph()
    inputs = graph.tensor((len(logits[0]), 1))
    weight = graph.tensor((1,), parameter=True)
    model = Model(graph, inputs, graph.add(inputs, weight), {"w": weight})
    optimizer = optimizer_of(model, Loss.CROSS_ENTROPY, compat=compat)
    drive(optimizer, logits, torch.eye(len(logits[0]))[:1], backward=False)
    predictions = optimizer.predictions()
    assert predictions is not None
    return int(predictions[0])


def test_a_nan_among_the_logits() -> None:
    """The port keeps the largest before a NaN; ggml starts anew after it; by default such a row predicts nothing."""
    logits = [[5.0, math.nan, 1.0, 0.0]]
    assert 2 == predicted("ggml", logits)
    assert 0 == predicted("prism", logits)
    assert -1 == predicted(None, logits)


@every_side
def test_a_scale_of_one_changes_nothing(compat: str | None) -> None:
    """At period 1 the port scales the loss of cross entropy by 1.0, which ggml leaves out: the value is the same."""
    graph = Graph()
    inputs = graph.tensor((3, 1))
    weight = graph.tensor((3,), parameter=True)
    model = Model(graph, inputs, graph.add(inputs, weight), {"w": weight})
    loss = drive(optimizer_of(model, Loss.CROSS_ENTROPY, compat=compat), [0.0, 0.0, 0.0], [0.0, 1.0, 0.0])
    assert float(np.float32(math.log(3))) == loss


def test_results_keep_predictions_and_merge() -> None:
    """ggml keeps predictions and cannot merge; the port merges and keeps none: every mode does both."""
    for compat in SIDES:
        parts = [Result(compat=compat), Result(compat=compat)]
        for place, part in enumerate(parts):
            graph = Graph()
            inputs = graph.tensor((3, 2))
            weight = graph.tensor((3,), parameter=True)
            model = Model(graph, inputs, graph.add(inputs, weight), {"w": weight})
            optimizer = optimizer_of(model, Loss.CROSS_ENTROPY, compat=compat)
            x, y = torch.eye(3)[[place, 2]], torch.eye(3)[[place, 1]]
            drive(optimizer, x, y, backward=False, result=part)
        parts[0].append(parts[1])
        assert 4 == parts[0].count
        assert [0, 2, 1, 2] == parts[0].predictions().tolist()
        assert 0.5 == parts[0].accuracy().value


@every_side
def test_counting_needs_labels(compat: str | None) -> None:
    """Accuracy is there for cross entropy alone, in ggml, in the port and here: else it is NaN."""
    result = Result(compat=compat)
    _, optimizer = single(compat)
    drive(optimizer, [1.0], result=result)
    assert optimizer.correct() is None
    assert math.isnan(result.accuracy().value)


def test_epochs() -> None:
    """The port's epoch needs a split of at most the rows and has no callbacks; here ggml's are there in every mode."""
    for compat in SIDES:
        model, optimizer = single(compat)
        seen: list[tuple[bool, int, int]] = []

        def see(event: Any, seen: list[tuple[bool, int, int]] = seen) -> None:
            seen.append((event.train, event.batch, event.batches))

        dataset = Dataset(zeros(4, 1), compat=compat)
        epoch(optimizer, dataset, split=3, on_train=see, on_evaluate=see)
        assert [(True, 1, 3), (True, 2, 3), (True, 3, 3), (False, 1, 1)] == seen
        epoch(optimizer, dataset)
        assert 3.0 - 7 == weight_of(model)
        with pytest.raises((ContractError, SplitError)):
            epoch(optimizer, dataset, split=5)


@every_side
def test_reset(compat: str | None) -> None:
    """A reset clears gradients, with True also moments and the update's number: the same on all sides."""
    model, optimizer = single(compat, kind=Kind.ADAMW, period=2, parameters=Parameters())
    for _ in range(3):
        drive(optimizer, [1.0])
    optimizer.reset(True)
    weight = model.parameters["weight"]
    assert [0.0] * 3 == [float(value) for value in (optimizer.gradient(weight), *optimizer.moments(weight))]
    assert 1 == optimizer.iteration


def test_forward_evaluations() -> None:
    """A forward evaluation takes a place in ggml's window and in the port's; by default it takes none."""
    places = {}
    for compat in SIDES:
        _, optimizer = single(compat, period=4)
        drive(optimizer, [1.0])
        drive(optimizer, [1.0], backward=False)
        places[compat] = optimizer.index
    assert {None: 1, "ggml": 2, "prism": 2} == places


@pytest.mark.parametrize("compat", ["ggml", "prism"])
def test_lazy_clearing(compat: str) -> None:
    """Both clear gradients where the next window begins, and only if an update came last: else old ones leak in."""
    model, optimizer = single(compat, period=2)
    for backward in (True, True, True, False):  # the last wraps the window around with a gradient in it
        drive(optimizer, [1.0], backward=backward)
    assert 1.0 == float(optimizer.gradient(model.parameters["weight"]))
    drive(optimizer, [1.0])
    assert 2.0 == float(optimizer.gradient(model.parameters["weight"]))
    drive(optimizer, [1.0])
    assert 3.0 == float(optimizer.gradient(model.parameters["weight"]))
    assert 3.0 - 2.0 - 3.0 == weight_of(model)
