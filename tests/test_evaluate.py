"""evaluate: one number whatever the cut, and no trace left behind."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import augend
from augend.errors import ContractError, TallyError

UNIT = 2.0**-24  # unit roundoff of float32


def squares(model: nn.Module, microbatch) -> augend.Tally:
    """Return the sum of squared errors of each row over its number of outputs."""
    errors = (model(microbatch["x"]) - microbatch["y"]) ** 2  # [rows, outputs]
    return augend.Tally(errors.sum(dim=1), torch.full((len(errors),), errors.shape[1]))


def scored(model: nn.Module, microbatch) -> augend.Tally:
    """Return the cross entropy of each row."""
    losses = F.cross_entropy(model(microbatch["x"]), microbatch["y"], reduction="none")  # [rows]
    return augend.Tally(losses, torch.ones(len(losses), dtype=torch.int64))


def given_tally(_: nn.Module, microbatch) -> augend.Tally:
    """Return the totals and counts that the rows themselves are."""
    return augend.Tally(microbatch["total"], microbatch["count"])


def accuracy(model: nn.Module, microbatch) -> augend.Accuracy:
    """Return the accuracy of one micro-batch."""
    metric = augend.Accuracy()
    metric.update(model(microbatch["x"]), microbatch["y"], microbatch=microbatch)
    return metric


def measured(model: nn.Module, rows, size: int, batch_size: int, **options) -> dict[str, augend.Estimate]:
    """Evaluate with one cut."""
    return augend.evaluate(model, augend.Batches(rows, batch_size=batch_size, microbatch_size=size), **options)


def integers(*shape: int) -> torch.Tensor:
    """Draw small whole numbers as float32."""
    return torch.randint(-4, 5, shape).float()


def integer_model() -> nn.Module:
    """Return two layers whose weights, and hence all outputs of whole numbers, are whole numbers."""
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(integers(*parameter.shape))
    return model


def test_the_cut_does_not_change_a_bit_on_an_integer_valued_model():
    """At micro-batch sizes 1, 7 and 512 value, error and count have the same bits where every row's total has."""
    model = integer_model()
    rows = {"x": integers(600, 6), "y": integers(600, 3)}
    whole, *others = (measured(model, rows, size, 512, loss=squares)["loss"] for size in (512, 1, 7))
    assert [whole, whole] == others
    exact = ((model(rows["x"]).double() - rows["y"]) ** 2).sum().item() / (600 * 3)
    assert exact == whole.value


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 40))
def test_no_cut_changes_a_bit_given_the_same_totals(rows, batch_size, size):
    """Whatever the numbers, batch and micro-batch sizes: the same per-row totals give the same bits."""
    data = {"total": torch.randn(rows) * 10.0 ** torch.randint(-20, 20, (rows,)), "count": torch.randint(0, 5, (rows,))}
    whole = measured(nn.Identity(), data, rows, rows, loss=given_tally)
    assert repr(whole) == repr(measured(nn.Identity(), data, min(size, batch_size), batch_size, loss=given_tally))


@pytest.mark.parametrize("size", [1, 7, 512])
def test_the_cut_changes_a_real_model_by_rounding_only(size):
    """On a real network the loss differs from the float64 one by no more than the rounding of its own sums."""
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    rows = {"x": torch.rand(600, 64), "y": torch.randint(0, 10, (600,))}
    value = measured(model, rows, size, 512, loss=scored)["loss"].value
    x = rows["x"].double()
    first, second = ((layer.weight.double(), layer.bias.double()) for layer in (model[0], model[2]))
    hidden = F.relu(x @ first[0].T + first[1])
    logits = hidden @ second[0].T + second[1]
    exact = F.cross_entropy(logits, rows["y"]).item()
    # A dot product of n terms and a bias is off by γ(n+1)·Σ|terms| in any order (Higham 2002, §3.1), also after ReLU.
    off_hidden = gamma(65) * (x.abs() @ first[0].abs().T + first[1].abs())
    off_logits = off_hidden @ second[0].abs().T + gamma(33) * (
        (hidden + off_hidden) @ second[0].abs().T + second[1].abs()
    )
    # log-sum-exp and the difference to one logit: each moves by at most the largest error of the logits; their own
    # arithmetic: a subtraction, exp (2 units), a sum of 10, log (2 units), a difference of numbers <= 2·max|z| + 3.
    own = gamma(16) * (2 * logits.abs().amax(dim=1) + 3)
    bound = (2 * off_logits.amax(dim=1) + own).mean().item()
    assert abs(value - exact) <= bound
    assert bound < 1e-3


def gamma(terms: int) -> float:
    """Return γ(k) = k·u / (1 - k·u)."""
    return terms * UNIT / (1 - terms * UNIT)


@pytest.mark.parametrize(
    ("totals", "counts", "expected"),
    [([1.0] * 8 + [6.0] * 2, [1] * 10, 2.0), ([2.0, 90.0], [1, 9], 9.2), ([2.0] * 12, [1] * 12, 2.0)],
)
@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_a_loss_is_never_a_mean_of_means(totals, counts, expected, size):
    """Short last micro-batches and unequal counts weigh what they hold, in every cut."""
    rows = {"total": torch.tensor(totals), "count": torch.tensor(counts)}
    assert expected == measured(nn.Identity(), rows, size, 8, loss=given_tally)["loss"].value


def test_metrics_of_all_kinds_are_merged():
    """Tally, Mean, Accuracy and Perplexity are merged over micro-batches; 80 of 100 right are 0.80 ± 0.0402."""
    right = torch.arange(100) % 5 != 0
    rows = {"x": torch.eye(2)[right.long()], "y": torch.ones(100, dtype=torch.int64)}

    def mean(_, microbatch):
        metric = augend.Mean()
        metric.update(augend.Tally(microbatch["x"][:, 0], torch.ones(len(microbatch["y"]))), microbatch)
        return metric

    def perplexity(model, microbatch):
        metric = augend.Perplexity()
        metric.update(scored(model, microbatch), microbatch)
        return metric

    metrics = {"accuracy": accuracy, "wrong": mean, "perplexity": perplexity, "nll": scored}
    for size in (3, 100):
        found = measured(nn.Identity(), rows, size, 100, metrics=metrics)
        assert list(metrics) == list(found)
        assert "0.8000 ± 0.0402" == str(found["accuracy"])
        assert 0.2 == found["wrong"].value
        assert np.exp(found["nll"].value) == found["perplexity"].value


def test_one_metric_for_all_micro_batches_is_refused():
    """A function that updates and returns the same object every time would count earlier rows again."""
    kept = augend.Accuracy()

    def again(model, microbatch):
        kept.update(model(microbatch["x"]), microbatch["y"])
        return kept

    rows = {"x": torch.eye(2), "y": torch.arange(2)}
    with pytest.raises(ContractError, match="'again' .* return a new metric for each micro-batch"):
        measured(nn.Identity(), rows, 1, 2, metrics={"again": again})


def test_one_metric_under_two_names_counts_once_under_each():
    """What a function returns is not changed by merging, so two names may share it."""
    made: dict[int, augend.Accuracy] = {}

    def shared(model, microbatch):
        if microbatch.first_row not in made:
            made[microbatch.first_row] = accuracy(model, microbatch)
        return made[microbatch.first_row]

    rows = {"x": torch.eye(3), "y": torch.tensor([0, 1, 0])}
    found = measured(nn.Identity(), rows, 1, 3, metrics={"one": shared, "two": shared})
    assert [3, 3] == [estimate.count for estimate in found.values()]
    assert [1, 1, 1] == [metric.compute().count for metric in made.values()]


@pytest.mark.parametrize("kind", ["loss", "metric"])
def test_a_tally_of_other_rows_is_refused(kind):
    """One number for a whole micro-batch has no honest error bar; a 0-d tally says so and is allowed."""

    def total(_, microbatch):
        return augend.Tally(microbatch["x"].sum()[None], torch.tensor([2]))

    def loose(_, microbatch):
        return augend.Tally(microbatch["x"].sum(), torch.tensor(2))

    def options(measure):
        return {"loss": measure} if kind == "loss" else {"metrics": {"loss": measure}}

    rows = {"x": torch.arange(4.0)}
    with pytest.raises(TallyError, match="'loss' has 1 rows and the micro-batch 2: error bars need one number a row"):
        measured(nn.Identity(), rows, 2, 4, **options(total))
    found = measured(nn.Identity(), rows, 2, 4, **options(loose))["loss"]
    assert 1.5 == found.value
    assert np.isnan(found.error)


def test_terms_come_by_name_and_before_the_metrics():
    """A loss of several terms gives an estimate for each, in its order, then the metrics."""
    rows = {"total": torch.tensor([3.0, 8.0]), "count": torch.tensor([1, 4])}

    def terms(model, microbatch):
        tally = given_tally(model, microbatch)
        return {"main": tally, "aux": tally + tally}

    found = measured(nn.Identity(), rows, 1, 2, loss=terms, metrics={"again": given_tally})
    assert ["main", "aux", "again"] == list(found)
    assert [2.2, 2.2, 2.2] == [estimate.value for estimate in found.values()]
    assert [5, 10, 5] == [estimate.count for estimate in found.values()]


class Sloppy(nn.Module):
    """Draws from every generator, and has submodules in unusual modes."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout()
        self.frozen = nn.BatchNorm1d(2).eval()
        self.linear = nn.Linear(2, 2)

    def forward(self, x):
        """Draw, and compute something."""
        random.random()  # noqa: S311  the global generator is meant
        np.random.rand()  # noqa: NPY002  the global generator is meant
        torch.rand(3)
        return self.linear(self.frozen(self.dropout(x)))


@pytest.mark.parametrize("fails", [False, True])
def test_no_trace_is_left(fails):
    """Random state, modes, gradients and positions are as before, also when the loss raises in the middle."""
    model = Sloppy()
    data = augend.Batches({"x": torch.rand(6, 2), "y": torch.rand(6, 2)}, batch_size=4, microbatch_size=2)
    next(iter(data))

    def loss(model, microbatch):
        if fails and microbatch.first_row == 2:
            raise ZeroDivisionError
        assert not any(module.training for module in model.modules())
        assert not torch.is_grad_enabled()
        return squares(model, microbatch)

    before = everything(model, data)
    try:
        augend.evaluate(model, data, loss=loss)
    except ZeroDivisionError:
        assert fails
    assert before == everything(model, data)


def everything(model: nn.Module, data: augend.Batches) -> list[object]:
    """Collect what evaluate might have moved."""
    return [
        random.getstate(),
        str(np.random.get_state()),  # noqa: NPY002  the global generator is meant
        torch.get_rng_state().tolist(),
        [(name, module.training) for name, module in model.named_modules()],
        [(name, value.tolist()) for name, value in model.state_dict().items()],
        [parameter.grad for parameter in model.parameters()],
        data.state_dict(),
        torch.is_grad_enabled(),
    ]


def test_the_order_is_the_source_and_the_pass_is_whole():
    """Rows come in the order of the source, each once, however far the data was and however it is shuffled."""
    data = augend.Batches({"x": torch.arange(10)}, batch_size=4, microbatch_size=3, drop_last=True, epochs=2)
    next(iter(data))
    seen: list[int] = []

    def look(_, microbatch):
        seen.extend(microbatch["x"].tolist())
        return augend.Tally.zeros(microbatch.real_rows)

    augend.evaluate(nn.Identity(), data, metrics={"look": look})
    assert list(range(10)) == seen


@pytest.mark.parametrize(
    ("data", "options", "says"),
    [
        ([1, 2], {"loss": scored}, "data must be an augend.Batches; got list"),
        (None, {}, "nothing to measure; give loss=, metrics=, or both"),
        (None, {"loss": scored, "metrics": {"loss": scored}}, "'loss' is a loss term and a metric"),
        (
            None,
            {"metrics": {"m": lambda *_: 0.5}},
            "'m' must return a Tally, Mean, Accuracy or Perplexity .* got float",
        ),
        (None, {"loss": lambda *_: {"main": None}}, "'main' must return a Tally"),
    ],
)
def test_what_cannot_be_measured_is_refused_by_name(data, options, says):
    """Every misuse is a ContractError that names it."""
    rows = {"x": torch.rand(4, 2), "y": torch.tensor([0, 1, 1, 0])}
    data = augend.Batches(rows, batch_size=2, microbatch_size=2) if data is None else data
    with pytest.raises(ContractError, match=says):
        augend.evaluate(nn.Identity(), data, **options)
