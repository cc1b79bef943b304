"""What holds for every cut, every evaluation in between, every resume, and every short last batch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from ggml_runs import HALF_ULP, Model, drive, model_of, optimizer_of, oracle, same
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from augend.ggml import SGD, AdamW, Dataset, Kind, Loss, Optimizer, Parameters, Result, epoch

AFFINE = oracle("train_affine")["model"]
MLP = oracle("train_mlp")["model"]
WIDTH = 3
ROWS = 12
CUTS = [rows for rows in range(1, ROWS + 1) if ROWS % rows == 0]
UNLABELLED = [Loss.MEAN, Loss.SUM]
STEPS = Parameters(adamw=AdamW(alpha=0.01, wd=0.1), sgd=SGD(alpha=0.25, wd=0.125))

cuts = st.sampled_from(CUTS)
losses = st.sampled_from(list(Loss))
kinds = st.sampled_from(list(Kind))
seeds = st.integers(min_value=0, max_value=2**31 - 1)


def whole_numbers(seed: int, rows: int = ROWS) -> tuple[Tensor, Tensor]:
    """Data and labels of small whole numbers, with which the affine model does not round before it divides."""
    generator = torch.Generator().manual_seed(seed)
    shape = (rows, WIDTH)
    return tuple(torch.randint(-8, 9, shape, generator=generator).float() for _ in range(2))  # two


def reals(seed: int, width: int = WIDTH, rows: int = ROWS) -> tuple[Tensor, Tensor]:
    """Data of any kind, and labels that sum to 1."""
    generator = torch.Generator().manual_seed(seed)
    data = torch.randn(rows, width, generator=generator)
    return data, torch.softmax(torch.randn(rows, WIDTH, generator=generator), dim=1)


def whole_model(rows: int) -> Model:
    """The affine model with whole weights, for so many rows."""
    model = model_of(AFFINE, rows)
    model.graph.set_values(model.parameters["w"], [1.0, -2.0, 3.0])
    model.graph.set_values(model.parameters["b"], [4.0, 0.0, -2.0])
    return model


def window(model: Model, rows: int, loss: Loss, kind: Kind, data: Tensor, labels: Tensor) -> tuple[Optimizer, Result]:
    """Go through all rows in physical batches, as one window."""
    optimizer = optimizer_of(model, loss, kind, period=len(data) // rows, parameters=STEPS)
    result = Result()
    for x, y in zip(data.split(rows), labels.split(rows), strict=True):
        drive(optimizer, x, y if loss.has_labels else None, result=result)
    assert 2 == optimizer.iteration
    return optimizer, result


@given(seed=seeds, cut=cuts, loss=st.sampled_from([*UNLABELLED, Loss.MEAN_SQUARED_ERROR]), kind=kinds)
def test_the_cut_changes_no_bit_where_nothing_rounds(seed: int, cut: int, loss: Loss, kind: Kind) -> None:
    """On whole numbers every sum is exact, and the one division comes last: weights and moments have the same bits."""
    data, labels = whole_numbers(seed)
    states = []
    for rows in (ROWS, cut):
        model = whole_model(rows)
        optimizer, result = window(model, rows, loss, kind, data, labels)
        gradients = {f"gradient of {name}": optimizer.gradient(node) for name, node in model.parameters.items()}
        states.append(({**model.values(), **gradients}, result.count, result.loss()))
    assert same(states[0][0], states[1][0])
    assert states[0][1:] == states[1][1:]  # count, loss and its error bar


@given(seed=seeds, cut=cuts, loss=losses)
def test_the_cut_changes_an_update_by_roundings_alone(seed: int, cut: int, loss: Loss) -> None:
    """For any numbers two cuts' weights differ by no more than two float32 sums of the same rows may."""
    data, labels = reals(seed)
    ends, bounds = [], {}
    for rows in (ROWS, cut):
        model = model_of(AFFINE, rows)
        window(model, rows, loss, Kind.SGD, data, labels)
        ends.append(model.values())
    for name in ends[0]:
        sizes = row_gradients(name, loss, data, labels)  # [rows, width], of single rows, over what they are divided by
        chain = ROWS + 2 + 2  # additions, the quotient and the product with the rate; and some for the row itself
        spread = 2 * chain * HALF_ULP * sizes.sum(0) * STEPS.sgd.alpha
        bounds[name] = spread + 2 * HALF_ULP * ends[0][name].abs().clamp(min=1.0)
        assert bool(((ends[0][name] - ends[1][name]).abs() <= bounds[name]).all())


def row_gradients(name: str, loss: Loss, data: Tensor, labels: Tensor) -> Tensor:
    """How large each row's part of the mean gradient is, in float64."""
    model = model_of(AFFINE, 1)
    leaves = {key: value.double().requires_grad_() for key, value in model.values().items()}
    parts = []
    for x, y in zip(data.double(), labels.double(), strict=True):
        out = (x * leaves["w"] + leaves["b"]) * 0.5
        value = {
            Loss.MEAN: lambda out=out: out.mean() / ROWS,
            Loss.SUM: lambda out=out: out.sum(),
            Loss.CROSS_ENTROPY: lambda out=out, y=y: -(torch.log_softmax(out, 0) * y).sum() / ROWS,
            Loss.MEAN_SQUARED_ERROR: lambda out=out, y=y: ((out - y) ** 2).mean() / ROWS,
        }[loss]()
        # What cancels within a row is rounded where it was large: softmax and labels are of size 1, outputs of theirs.
        (gradient,) = torch.autograd.grad(value, leaves[name])
        floor = (x.abs() if name == "w" else torch.ones(WIDTH)) * (1.0 + out.abs().detach() + y.abs()) / ROWS
        parts.append(gradient.abs() + floor * (ROWS if loss is Loss.SUM else 1))
    return torch.stack(parts).float()


@given(seed=seeds, cut=cuts)
def test_counts_and_error_bars_are_over_rows(seed: int, cut: int) -> None:
    """Accuracy, count and their error bars have the same bits for every cut: the row is what was sampled."""
    data, labels = reals(seed, width=4)
    statistics = []
    for rows in (ROWS, cut):
        model = model_of(MLP, rows)
        optimizer = optimizer_of(model, Loss.CROSS_ENTROPY)
        result = Result()
        for x, y in zip(data.split(rows), labels.split(rows), strict=True):
            drive(optimizer, x, y, backward=False, result=result)
        statistics.append((result.count, result.accuracy(), result.predictions().tolist()))
    assert statistics[0] == statistics[1]


@given(
    seed=seeds,
    evaluations=st.lists(st.booleans(), min_size=1, max_size=14),
    loss=losses,
    kind=kinds,
    period=st.integers(min_value=1, max_value=4),
)
def test_an_evaluation_in_between_changes_nothing(
    seed: int, evaluations: list[bool], loss: Loss, kind: Kind, period: int
) -> None:
    """Whatever is evaluated without gradients, and wherever, training goes on with the same bits."""
    data, labels = reals(seed, rows=len(evaluations))
    states = []
    for watched in (True, False):
        model = model_of(AFFINE, 1)
        optimizer = optimizer_of(model, loss, kind, period=period, parameters=STEPS)
        for x, y, backward in zip(data, labels, evaluations, strict=True):
            if backward or watched:
                drive(optimizer, x, y if loss.has_labels else None, backward=backward)
        gradients = {f"gradient of {name}": optimizer.gradient(node) for name, node in model.parameters.items()}
        states.append(({**model.values(), **gradients}, optimizer.index, optimizer.iteration))
    assert same(states[0][0], states[1][0])
    assert states[0][1:] == states[1][1:]


@given(
    seed=seeds,
    stop=st.integers(min_value=0, max_value=7),
    loss=losses,
    kind=kinds,
    period=st.integers(min_value=1, max_value=4),
    compat=st.sampled_from([None, "ggml", "prism"]),
)
def test_a_resume_changes_nothing(seed: int, stop: int, loss: Loss, kind: Kind, period: int, compat: Any) -> None:
    """A run whose graph and optimizer are saved after any batch, and restored in new ones, ends with the same bits."""
    data, labels = reals(seed, rows=8)
    steps = list(zip(data, labels, strict=True))

    def made() -> tuple[Model, Optimizer]:
        model = model_of(AFFINE, 1)
        return model, optimizer_of(model, loss, kind, period=period, parameters=STEPS, compat=compat)

    def go(optimizer: Optimizer, part: list[tuple[Tensor, Tensor]], start: int) -> None:
        for place, (x, y) in enumerate(part, start):
            # In compat, evaluations take places in the window, and are part of the state.
            drive(optimizer, x, y if loss.has_labels else None, backward=place % 3 != 2)

    model, optimizer = made()
    go(optimizer, steps, 0)
    other, first = made()
    go(first, steps[:stop], 0)
    saved = copy.deepcopy((other.graph.state_dict(), first.state_dict()))
    go(first, steps[stop:], stop)  # what was saved is not shared with the run that goes on
    other, second = made()
    other.graph.load_state_dict(saved[0])
    second.load_state_dict(saved[1])
    go(second, steps[stop:], stop)
    assert same(model.values(), other.values())
    assert (optimizer.index, optimizer.iteration) == (second.index, second.iteration)
    assert optimizer.random.next() == second.random.next()


@given(
    seed=seeds,
    rows=st.integers(min_value=1, max_value=17),
    physical=st.integers(min_value=1, max_value=6),
    period=st.integers(min_value=1, max_value=4),
)
def test_short_last_batches_count(seed: int, rows: int, physical: int, period: int) -> None:
    """Windows are cut from the rows in order; each, the last and short one too, moves by the mean over its own rows."""
    data, labels = whole_numbers(seed, rows)
    model = whole_model(physical)
    parameters = Parameters(sgd=SGD(alpha=0.25))
    optimizer = optimizer_of(model, Loss.MEAN, Kind.SGD, period=period, parameters=parameters)
    result = Result()
    epoch(optimizer, Dataset(data), train=result)
    weights = torch.tensor([1.0, -2.0, 3.0])
    for part in data.split(physical * period):  # the gradient of the mean does not depend on the weights
        mean = (part.sum(0) * 0.5) / torch.tensor(float(len(part) * WIDTH))
        weights = weights - 0.25 * mean
    assert torch.equal(weights, model.values()["w"])
    assert rows == result.count
    assert -(-rows // (physical * period)) == optimizer.iteration - 1
    assert 0 == optimizer.index
    assert labels.shape == data.shape


@given(seed=seeds, rows=st.integers(min_value=1, max_value=13), physical=st.integers(min_value=1, max_value=6))
def test_short_evaluations_count(seed: int, rows: int, physical: int) -> None:
    """The mean over a data set is that over its rows, with the last batch at its own size: the same for every cut."""
    data, labels = whole_numbers(seed, rows)
    found = []
    for size in (physical, rows):
        result = Result()
        optimizer = optimizer_of(whole_model(size), Loss.MEAN_SQUARED_ERROR)
        epoch(optimizer, Dataset(data, labels), split=0, evaluate=result)
        found.append((result.count, result.loss()))
    assert repr(found[0]) == repr(found[1])  # repr: the error bar of one row is NaN
    outputs = (data.double() * torch.tensor([1.0, -2.0, 3.0]) + torch.tensor([4.0, 0.0, -2.0])) * 0.5
    squares = (outputs - labels.double()).square()
    assert rows == found[0][0]
    assert float(squares.mean()) == pytest.approx(found[0][1].value, rel=2.0**-51)  # one quotient, and this one
