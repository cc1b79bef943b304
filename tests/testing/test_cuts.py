"""check_cuts: what cutting a batch does, by augend and by the usual mean of means."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import augend
from augend.testing import check_cuts

UNIT = 2.0**-24  # unit roundoff of float32


def scored(model: nn.Module, microbatch) -> augend.Tally:
    """Return the cross entropy of each row; label -100 does not count."""
    losses = F.cross_entropy(model(microbatch["x"]), microbatch["y"], reduction="none")  # [rows]
    return augend.Tally(losses, microbatch["y"] != -100)


def rows() -> dict[str, torch.Tensor]:
    """Draw 12 rows of which the first three have nothing to count."""
    labels = torch.randint(0, 3, (12,))
    labels[:3] = -100
    return {"x": torch.randn(12, 5), "y": labels}


def test_the_reference_is_the_whole_batch_in_float64():
    """Loss, norm and count are those of the whole batch at once, computed by hand in float64."""
    model, data = nn.Linear(5, 3), rows()
    report = check_cuts(model, data, loss=scored, batch_size=12, microbatch_sizes=[])
    logits = data["x"].double() @ model.weight.double().T + model.bias.double()
    loss = F.cross_entropy(logits, data["y"])
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    norm = math.sqrt(sum((gradient.double() ** 2).sum().item() for gradient in gradients))
    assert (12, 9, ()) == (report.rows, report.count, report.cuts)
    # both are float64 sums of at most 12 · 5 · 3 terms of about one size, in another order
    assert report.loss == pytest.approx(loss.item(), rel=200 * 2.0**-53)
    assert report.norm == pytest.approx(norm, rel=2.0**-22)  # the gradients here were narrowed to float32


def test_augend_is_off_by_rounding_and_the_usual_way_by_much():
    """Every cut of augend agrees with the whole batch to float32; the mean of means of uneven parts does not."""
    report = check_cuts(nn.Linear(5, 3), rows(), loss=scored, batch_size=12, microbatch_sizes=[12, 8, 5, 1])
    assert [12, 8, 5, 1] == [cut.microbatch_size for cut in report.cuts]
    for cut in report.cuts:
        # Sums of 12 rows and 5 inputs, a softmax of 3: fewer than 64 roundings on any path, of terms that the
        # gradient's norm is not smaller than by more than the number of rows.
        assert cut.gradient <= 64 * 12 * UNIT
        assert cut.loss <= 64 * 12 * UNIT
    whole, eight, five, single = report.cuts
    assert whole.usual_gradient <= 64 * 12 * UNIT
    assert 1e-3 < eight.usual_gradient
    assert 1e-3 < eight.usual_loss
    assert 1e-3 < five.usual_gradient
    assert math.isnan(single.usual_loss)  # a micro-batch of one row that has nothing to count: 0 / 0
    assert abs(single.usual_gradient - 3 / 12) <= 64 * 12 * UNIT  # its zeros weigh as much as any other gradient


def test_equal_parts_need_no_augend():
    """Where every micro-batch counts the same, the mean of means is right too, and the report says so."""
    data = {"x": torch.randn(12, 5), "y": torch.randint(0, 3, (12,))}
    (cut,) = check_cuts(nn.Linear(5, 3), data, loss=scored, batch_size=12, microbatch_sizes=[4]).cuts
    assert cut.usual_gradient <= 64 * 12 * UNIT


def test_the_model_is_left_alone():
    """Weights, dtype, gradients, modes and running statistics are as before; dropout is off in the check."""
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 3))
    before = [(name, value.dtype, value.tolist()) for name, value in model.state_dict().items()]
    (cut,) = check_cuts(model, rows(), loss=scored, batch_size=12, microbatch_sizes=[5]).cuts
    assert before == [(name, value.dtype, value.tolist()) for name, value in model.state_dict().items()]
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(module.training for module in model.modules())
    assert cut.gradient <= 128 * 12 * UNIT  # two layers: twice the roundings; with dropout on it would be off by much


def test_parameters_without_a_gradient_count_as_zeros():
    """A parameter that the loss does not use is no deviation, and neither is a model without any gradient."""
    model = nn.Linear(5, 3)
    model.register_parameter("unused", nn.Parameter(torch.ones(2)))
    (cut,) = check_cuts(model, rows(), loss=scored, batch_size=12, microbatch_sizes=[5]).cuts
    assert cut.gradient <= 64 * 12 * UNIT

    def flat(model, microbatch):
        total = 0 * model(microbatch["x"]).sum(dim=1)
        return augend.Tally(total, torch.ones(len(total)))

    (cut,) = check_cuts(model, rows(), loss=flat, batch_size=12, microbatch_sizes=[5]).cuts
    assert (0.0, 0.0, 0.0, 0.0) == (cut.gradient, cut.loss, cut.usual_gradient, cut.usual_loss)


def test_the_batch_is_the_first_one_of_the_run():
    """Seed and loader arguments decide the batch as they do in Batches."""
    seen = []

    def look(model, microbatch):
        seen.append(sorted(microbatch["id"].tolist()))
        total = model(microbatch["x"]).sum(dim=1)
        return augend.Tally(total, torch.ones(len(total)))

    data = {"id": torch.arange(12), "x": torch.randn(12, 5)}
    check_cuts(nn.Linear(5, 1), data, loss=look, batch_size=6, microbatch_sizes=[6], seed=4)
    first = next(iter(augend.Batches(data, batch_size=6, microbatch_size=6, seed=4)))
    assert [sorted(first.indices.tolist())] * 3 == seen
