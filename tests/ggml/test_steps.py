"""The steps give a real ggml's weights and moments to the last bit, and do not depend on layout or size."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from augend.ggml._parameters import AdamW, adamw_vector, rounded
from augend.ggml._steps import _BLOCK, step_adamw_, step_sgd_

GOLDEN = Path(__file__).parents[1] / "golden" / "ggml"
UNIT = 2.0**-24  # the relative error of one rounding to float32


def numbers(values: list) -> Tensor:
    """Read decimals back as the float32 that they were printed from."""
    return torch.tensor([float(value) for value in values], dtype=torch.float32)


def tensors(values: dict[str, list]) -> dict[str, Tensor]:
    """Read the values of all parameters."""
    return {name: numbers(one) for name, one in values.items()}


def oracle_runs(folder: Path) -> Iterator[tuple[str, list, dict, list]]:
    """Yield optimizer, SGD's numbers, weights and evaluations of every run that ggml made."""
    for name in ("train_affine", "train_linear", "train_mlp"):
        oracle = json.loads((folder / f"{name}.json").read_text())
        for run in oracle["runs"]:
            weights = {one["name"]: one["values"] for one in oracle["model"]["params"]}
            yield run["optimizer"], list(oracle["hyper"]["sgd"].values()), weights, run["evals"]
    oracle = json.loads((folder / "lifecycle.json").read_text())
    for run in oracle["scenarios"]:
        weights = {one["name"]: one["values"] for one in run["model"]["params"]}
        yield run["optimizer"], list(oracle["hyper"]["sgd"].values()), weights, run["steps"]


def adamw_twin(w, g, m, v, vector):
    """Make the step in numpy's float32, operation by operation."""
    alpha, beta1, beta2, eps, wd, correction1, correction2 = np.array(vector, dtype=np.float32)
    one = np.float32(1)
    m = m * beta1 + g * (one - beta1)
    v = v * beta2 + (g * g) * (one - beta2)
    return w * (one - alpha * wd) - (alpha * (m * correction1)) / (np.sqrt(v * correction2) + eps), m, v


def test_every_step_of_ggml() -> None:
    """Given ggml's gradients, all weights and moments of all its runs and scenarios are ggml's bits."""
    weights_seen = 0
    for optimizer, sgd, first, evaluations in oracle_runs(GOLDEN):
        weights = tensors(first)
        m, v = ({name: torch.zeros_like(one) for name, one in weights.items()} for _ in "mv")
        for evaluation in evaluations:
            if evaluation.get("op") == "reset_optimizer":
                m, v = ({name: torch.zeros_like(one) for name, one in weights.items()} for _ in "mv")
            if "weights" not in evaluation:
                continue
            gradients = tensors(evaluation.get("grad") or evaluation["grad_acc"])
            for name, weight in weights.items():
                weights_seen += weight.numel()
                if optimizer == "sgd":
                    step_sgd_(weight, gradients[name], sgd)
                else:
                    step_adamw_(weight, gradients[name], m[name], v[name], numbers(evaluation["step_params"]))
                    assert torch.equal(numbers(evaluation["m"][name]), m[name])
                    assert torch.equal(numbers(evaluation["v"][name]), v[name])
                assert torch.equal(numbers(evaluation["weights"][name]), weight)
    assert 7_168 < weights_seen  # so many are in the training runs alone


def test_steps_of_a_ggml_that_fuses_operations() -> None:
    """Moments and SGD's weights of a native build differ by what a fused operation does not round.

    x = fl(fl(a·b) + c) and y = fl(a·b + c) are each within one rounding of a·b + c, but for that of a·b:
    |x - y| <= u·(|a·b| + |x| + |y|), to first order; a fourth unit of the largest covers the rest.
    """
    fused = 0
    for optimizer, sgd, first, evaluations in oracle_runs(GOLDEN / "native_fma"):
        weights = tensors(first)
        m, v = ({name: torch.zeros_like(one) for name, one in weights.items()} for _ in "mv")
        for evaluation in evaluations:
            if "weights" not in evaluation:
                continue
            if evaluation["iter_before"] == 1:
                m, v = ({name: torch.zeros_like(one) for name, one in weights.items()} for _ in "mv")
            gradients = tensors(evaluation.get("grad") or evaluation["grad_acc"])
            for name, weight in weights.items():
                if optimizer == "sgd":
                    pairs = [(weight.clone(), weight.clone(), numbers(evaluation["weights"][name]))]
                    step_sgd_(pairs[0][1], gradients[name], sgd)
                else:
                    old = m[name].clone(), v[name].clone()
                    step_adamw_(weight, gradients[name], m[name], v[name], numbers(evaluation["step_params"]))
                    new = numbers(evaluation["m"][name]), numbers(evaluation["v"][name])
                    pairs = [(old[0], m[name].clone(), new[0]), (old[1], v[name].clone(), new[1])]
                    m[name], v[name] = new
                for before, ours, native in pairs:
                    largest = torch.stack([before, ours, native]).abs().amax(dim=0)
                    assert bool(((ours - native).abs() <= 4 * UNIT * largest).all())
                    fused += int((ours != native).sum())
                weights[name] = numbers(evaluation["weights"][name])
    assert fused


@given(
    seed=st.integers(0, 1000),
    size=st.sampled_from([1, 7, 8, 100, 1001]),
    iteration=st.integers(1, 1000),
    alpha=st.floats(0.125, 1.0, width=32),
    wd=st.floats(0, 1, width=32),
)
@example(seed=0, size=100, iteration=1, alpha=rounded(0.51), wd=rounded(0.42))
def test_each_operation_rounds_once(seed: int, size: int, iteration: int, alpha: float, wd: float) -> None:
    """The steps are numpy's float32 arithmetic, bit for bit, also where a tensor's end fills no vector register.

    The example is one where the weight that is kept depends on α·wd being rounded before it is subtracted.
    """
    generator = torch.Generator().manual_seed(seed)
    w, g, m, v = (torch.randn(size, generator=generator) * 10.0 ** (seed % 7 - 3) for _ in range(4))
    v = v.abs()
    vector = adamw_vector(AdamW(alpha=alpha, wd=wd), iteration)
    expected = adamw_twin(*(one.numpy().copy() for one in (w, g, m, v)), vector)
    gradient = g.clone()
    step_adamw_(w, g, m, v, vector)
    for twin, ours in zip(expected, (w, m, v), strict=True):
        assert np.array_equal(twin, ours.numpy())
    assert torch.equal(gradient, g)
    keep = np.float32(1) - np.float32(vector[0]) * np.float32(vector[4])
    twin = w.numpy() * keep - np.float32(vector[0]) * g.numpy()
    step_sgd_(w, g, (vector[0], vector[4]))
    assert np.array_equal(twin, w.numpy())
    assert torch.equal(gradient, g)


@pytest.mark.parametrize("size", [_BLOCK, _BLOCK + 1, 2 * _BLOCK + 5])
def test_large_tensors_are_cut_without_a_trace(size: int) -> None:
    """A tensor of several blocks has the bits of one whose layout forbids to cut it, and of its parts."""
    parts = [torch.randn(size, generator=torch.Generator().manual_seed(seed)).abs() for seed in range(4)]
    vector = adamw_vector(AdamW(wd=0.1), 3)
    strided = [torch.stack([part, part], dim=1)[:, 0] for part in parts]  # [size], every other element of a tensor
    apart = [part.clone() for part in parts]
    step_adamw_(*strided, vector)
    for start in range(0, size, 1000):
        step_adamw_(*(part[start : start + 1000] for part in apart), vector)
    step_adamw_(*parts, vector)
    for whole, other, pieces in zip(parts, strided, apart, strict=True):
        assert torch.equal(other, whole)
        assert torch.equal(pieces, whole)
    step_sgd_(parts[0], parts[1], [0.5, 0.5])
    step_sgd_(strided[0], strided[1], [0.5, 0.5])
    assert torch.equal(strided[0], parts[0])


def test_a_shape_is_kept_and_a_parameter_can_be_stepped() -> None:
    """Any shape is stepped in place, also that of a module's parameter, with autograd off."""
    weight = torch.nn.Parameter(torch.ones(2, 3))
    with torch.no_grad():
        step_sgd_(weight, torch.ones(2, 3), torch.tensor([0.5, 0.0]))
        assert torch.equal(torch.full((2, 3), 0.5), weight)
        m, v = torch.zeros(2, 3), torch.zeros(2, 3)
        step_adamw_(weight, torch.ones(2, 3), m, v, adamw_vector(AdamW(alpha=0.25, beta1=0.5, beta2=0.5, eps=0.0), 1))
    assert torch.equal(torch.full((2, 3), 0.25), weight)  # 0.5 - 0.25 · 1 / √1
    assert torch.equal(torch.full((2, 3), 0.5), m)
    assert torch.equal(m, v)


def test_what_is_not_finite_goes_through() -> None:
    """A negative second moment or a zero over zero gives NaN without a warning, as in C."""
    zero = torch.zeros(1)
    weight, m, v = torch.ones(3), torch.zeros(3), torch.tensor([-1.0, 0.0, 1.0])
    step_adamw_(weight, torch.zeros(3), m, v, (1.0, 0.5, 0.5, 0.0, 0.0, 1.0, 1.0))
    assert [True, True, False] == weight.isnan().tolist()
    assert 1 == weight[2].item()
    step_sgd_(zero, torch.tensor([torch.inf]), (1.0, 0.0))
    assert -torch.inf == zero.item()


def test_steps_go_where_the_tensors_are() -> None:
    """A device without numpy takes the same steps; that of shapes alone stands in for it."""
    tensors_there = [torch.zeros(2, 3, device="meta") for _ in range(4)]
    step_adamw_(*tensors_there, adamw_vector(AdamW(), 1))
    step_sgd_(*tensors_there[:2], (1.0, 0.0))
    assert all((2, 3) == tuple(one.shape) and one.is_meta for one in tensors_there)
