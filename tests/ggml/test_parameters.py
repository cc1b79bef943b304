"""Losses, optimizers and parameters: ggml's float32 numbers, its bounds with compat, and stricter ones without."""

from __future__ import annotations

import itertools
import json
import math
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from augend.errors import ContractError
from augend.ggml._parameters import (
    SGD,
    AdamW,
    Build,
    Kind,
    Loss,
    Moment,
    Parameters,
    adamw_vector,
    check_parameters,
    rounded,
)

GOLDEN = Path(__file__).parents[1] / "golden" / "ggml"
COMPATS = (None, "ggml", "prism")
FLOATS = st.floats(allow_nan=False)


def oracle_steps() -> list[tuple[dict, int, list[float]]]:
    """Return the parameters, the iteration and the vector of every AdamW step that ggml made."""
    steps = []
    for name in ("train_affine", "train_linear", "train_mlp", "lifecycle"):
        oracle = json.loads((GOLDEN / f"{name}.json").read_text())
        runs = [run["evals"] for run in oracle["runs"]] if "runs" in oracle else []
        runs += [run["steps"] for run in oracle.get("scenarios", [])]
        steps += [
            (oracle["hyper"]["adamw"], one["iter_before"], one["step_params"])
            for one in itertools.chain(*runs)
            if len(one.get("step_params", [])) == 7
        ]
    return steps


def test_vectors_of_ggml() -> None:
    """The seven numbers of every step are ggml's float32."""
    steps = oracle_steps()
    assert 100 < len(steps)
    for hyper, iteration, expected in steps:
        assert np.array_equal(np.float32(expected), np.float32(adamw_vector(AdamW(**hyper), iteration)))


@given(beta=st.floats(0, 1, width=32), iteration=st.integers(1, 60))
def test_corrections_are_float32_arithmetic(beta: float, iteration: int) -> None:
    """1/(1 - beta^t) is formed from the rounded power by a rounded difference and a rounded quotient."""
    power = np.float32(float(Fraction(beta) ** iteration))
    with np.errstate(divide="ignore"):
        expected = float(np.float32(1) / (np.float32(1) - power))
    assert expected == adamw_vector(AdamW(beta1=beta), iteration)[5] == adamw_vector(AdamW(beta2=beta), iteration)[6]


def test_a_correction_that_is_gone() -> None:
    """A beta of 1, which ggml accepts, has an infinite correction, and late iterations have none."""
    assert (math.inf, 1.0) == adamw_vector(AdamW(beta1=1.0), 10**9)[5:]
    assert (1.0, 1.0) == adamw_vector(AdamW(beta1=0.0, beta2=0.0), 1)[5:]


@given(value=FLOATS)
def test_rounded_is_float32(value: float) -> None:
    """Rounding is numpy's, to the nearest, and to infinity beyond the largest."""
    with np.errstate(over="ignore"):
        assert float(np.float32(value)) == rounded(value)


def test_huge_integers_round_to_infinity() -> None:
    """An integer of any size is a number."""
    assert (math.inf, -math.inf) == (rounded(10**400), rounded(-(10**400)))
    assert math.isnan(rounded(math.nan))


def test_defaults_are_ggmls() -> None:
    """Both sets are kept, with ggml's defaults in float32."""
    parameters = Parameters()
    assert [rounded(value) for value in (1e-3, 0.9, 0.999, 1e-8, 0.0)] == list(adamw_vector(parameters.adamw, 1)[:5])
    assert (rounded(1e-3), 0.0) == (parameters.sgd.alpha, parameters.sgd.wd)
    assert Parameters(adamw=AdamW(), sgd=SGD()) == parameters
    assert rounded(0.1) == AdamW(alpha=0.1).alpha != 0.1


def test_arrays_of_the_rust_port() -> None:
    """Five and two numbers in the order of the fields are the same parameters."""
    expected = Parameters(adamw=AdamW(0.5, 0.25, 0.125, 1.0, 0.0), sgd=SGD(2.0, 1.0))
    assert expected == Parameters(adamw=[0.5, 0.25, 0.125, 1, 0.0], sgd=(2, np.float32(1)))
    assert hash(expected) == hash(Parameters([0.5, 0.25, 0.125, 1, 0.0], [2, 1]))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"adamw": [1.0] * 4}, "5 numbers alpha, beta1, beta2, eps, wd"),
        ({"sgd": [1.0] * 3}, "2 numbers alpha, wd"),
        ({"sgd": "ab"}, "2 numbers"),
        ({"sgd": AdamW()}, "2 numbers"),
        ({"adamw": None}, "5 numbers"),
        ({"sgd": [1.0, "0"]}, "wd of SGD must be a real number; got '0'"),
        ({"sgd": [None, 0.0]}, "alpha of SGD"),
        ({"adamw": [1.0, 1j, 0.0, 0.0, 0.0]}, "beta1 of AdamW"),
    ],
)
def test_what_are_no_parameters(arguments: dict, message: str) -> None:
    """Other lengths and what is no number are refused, with the field that is meant."""
    with pytest.raises(ContractError, match=message):
        Parameters(**arguments)


# Of each case: optimizer, field, value, and who accepts it. Bounds are those of ggml's own checks; where the others
# are stricter, section by section: all numbers finite, of both sets; by default no beta of 1.
BOUNDS = [
    ("adamw", "alpha", 0.0, ()),
    ("adamw", "alpha", -1.0, ()),
    ("adamw", "alpha", 1e-60, ()),  # 0 in float32
    ("adamw", "alpha", math.nan, ()),
    ("adamw", "alpha", math.inf, ("ggml",)),
    ("adamw", "alpha", 1e39, ("ggml",)),  # inf in float32
    ("adamw", "alpha", -math.inf, ()),
    ("adamw", "alpha", 1e30, COMPATS),
    ("adamw", "beta1", 0.0, COMPATS),
    ("adamw", "beta1", 1.0, ("ggml", "prism")),
    ("adamw", "beta1", 1 - 1e-9, ("ggml", "prism")),  # 1 in float32
    ("adamw", "beta1", 1.5, ()),
    ("adamw", "beta1", -0.1, ()),
    ("adamw", "beta1", math.nan, ()),
    ("adamw", "beta2", 1.0, ("ggml", "prism")),
    ("adamw", "beta2", 1.5, ()),
    ("adamw", "beta2", -0.1, ()),
    ("adamw", "eps", 0.0, COMPATS),
    ("adamw", "eps", -1e-8, ()),
    ("adamw", "eps", math.inf, ("ggml",)),
    ("adamw", "eps", math.nan, ()),
    ("adamw", "wd", 1.0, COMPATS),
    ("adamw", "wd", 1.5, ()),
    ("adamw", "wd", -0.1, ()),
    ("adamw", "wd", math.nan, ()),
    ("sgd", "alpha", 0.0, ()),
    ("sgd", "alpha", math.inf, ("ggml",)),
    ("sgd", "alpha", math.nan, ()),
    ("sgd", "wd", 1.0, COMPATS),
    ("sgd", "wd", 1.5, ()),
    ("sgd", "wd", -0.1, ()),
    ("sgd", "wd", math.nan, ()),
]


@pytest.mark.parametrize("compat", COMPATS)
@pytest.mark.parametrize(("kind", "field", "value", "accepted"), BOUNDS)
def test_bounds(kind: str, field: str, value: float, accepted: tuple, compat) -> None:
    """The active set must be within ggml's bounds; who accepts nonsense beyond that is in the table."""
    numbers = AdamW(**{field: value}) if kind == "adamw" else SGD(**{field: value})
    parameters = Parameters(**{kind: numbers})
    if compat in accepted:
        check_parameters(parameters, Kind(kind), compat)
    else:
        with pytest.raises(ContractError, match=rf"{kind}\.{field} must be .* in float32; got "):
            check_parameters(parameters, Kind(kind), compat)


@pytest.mark.parametrize("compat", COMPATS)
@pytest.mark.parametrize(
    ("kind", "parameters"),
    [
        (Kind.SGD, Parameters(adamw=AdamW(alpha=-1.0, beta1=7.0, eps=-1.0))),
        (Kind.ADAMW, Parameters(sgd=SGD(alpha=0.0, wd=3.0))),
    ],
)
def test_the_other_set_may_be_anything_finite(kind: Kind, parameters: Parameters, compat) -> None:
    """The set that is not active is not held to its bounds."""
    check_parameters(parameters, kind, compat)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("kind", list(Kind))
def test_ggml_does_not_look_at_the_other_set(kind: Kind, value: float) -> None:
    """A number of the other set that is not finite is an error by default and with "prism", and none with "ggml"."""
    parameters = Parameters(sgd=SGD(wd=value)) if kind is Kind.ADAMW else Parameters(adamw=AdamW(wd=value))
    check_parameters(parameters, kind, "ggml")
    for compat in (None, "prism"):
        with pytest.raises(ContractError, match=r"\.wd must be finite"):
            check_parameters(parameters, kind, compat)


def test_what_a_schedule_returns_is_checked() -> None:
    """What is not Parameters is refused by its type."""
    with pytest.raises(ContractError, match="takes Parameters; .* gave dict"):
        check_parameters({"alpha": 1.0}, Kind.SGD)


def test_what_a_loss_needs() -> None:
    """Two losses compare with labels; all but the sum are means."""
    assert [Loss.CROSS_ENTROPY, Loss.MEAN_SQUARED_ERROR] == [loss for loss in Loss if loss.has_labels]
    assert [Loss.SUM] == [loss for loss in Loss if not loss.per_datapoint]


def test_builds_have_ggmls_numbers() -> None:
    """The values of the build types are those of ggml's header."""
    assert {"FORWARD": 10, "GRADIENT": 20, "UPDATE": 30} == {build.name: build.value for build in Build}


def test_a_moment_is_a_value() -> None:
    """What a schedule is asked with can be compared."""
    assert Moment(epoch=1, iteration=2) == Moment(1, 2)
