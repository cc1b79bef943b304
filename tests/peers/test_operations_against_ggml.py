"""Each operation of a graph against ggml itself: shapes, values, gradients, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from ggml_process import Ggml
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from operation_cases import Case, cases
from operation_references import REFERENCES, SLACK, TINY, U32

from augend.errors import ContractError
from augend.ggml._operations import OPERATIONS

U16 = 2.0**-11
CASES = 8
# Each example is a process: a failure is shown as it was found.
few = settings(max_examples=2, phases=[Phase.explicit, Phase.reuse, Phase.generate])
NO_BACKWARD = {"gelu", "norm"}
SHAPED = ["add", "conv_2d", "div", "get_rows", "mul", "mul_mat", "permute", "pool_2d", "repeat", "reshape", "sub"]
sizes = st.integers(1, 4)


def lists(operation: str) -> st.SearchStrategy[list[Case]]:
    """Draw several cases, which one process answers."""
    return st.lists(cases(operation), min_size=CASES, max_size=CASES)


def tensors(case: Case, *, wide: bool) -> list[torch.Tensor]:
    """Return the case's values, those that are trained with gradients."""
    values = [torch.from_numpy(each) for each in case.inputs()]
    return [(each.double() if wide else each).requires_grad_() if each.is_floating_point() else each for each in values]


def weights(case: Case) -> np.ndarray:
    """Draw the factors of the sum whose gradients are compared."""
    declared = OPERATIONS[case.operation].shape(case.shapes, case.settings)
    return np.random.default_rng(case.seed + 1).uniform(0.25, 4, declared[::-1]).astype(np.float32)


def gradients(case: Case, inputs: list[torch.Tensor], factors: np.ndarray) -> list[np.ndarray]:
    """Differentiate the weighted sum; the second of repeat has no part in it."""
    out = OPERATIONS[case.operation].run(inputs, case.settings)
    trained = [each for each in inputs if each.requires_grad]
    found = torch.autograd.grad(out, trained, torch.from_numpy(factors).to(out), materialize_grads=True)
    return [each.numpy() for each in found]


def wider(case: Case) -> Any:
    """Bound what ggml rounds to float16: the table of gelu, and both factors of a convolution."""
    if case.operation == "gelu":
        value = REFERENCES["gelu"](case.inputs(), {})[0]
        steepest = 1.13  # of gelu's derivative
        return SLACK * U16 * (steepest * np.abs(case.inputs()[0]) + np.abs(value))
    if case.operation == "conv_2d":
        return SLACK * 2 * U16 * REFERENCES["conv_2d"]([np.abs(each) for each in case.inputs()], case.settings)[0]
    return 0.0


def has_backward(case: Case) -> bool:
    """Say whether ggml has a gradient of this operation, for inputs of these shapes."""
    first, last = case.shapes[0], case.shapes[-1]
    match case.operation:
        case "sub" | "div":
            return first == last
        case "mul_mat":
            return first[2:] == last[2:] or last[3] == 1
        case "get_rows":
            return first[2:] == (1, 1)
        case _:
            return case.operation not in NO_BACKWARD


def magnitudes(case: Case) -> list[np.ndarray]:
    """Add up what the gradients are sums of, each term without its sign."""
    inputs, factors = tensors(case, wide=True), weights(case).astype(np.float64)
    x = inputs[0].detach().numpy()
    match case.operation:
        case "silu":
            sigmoid = 1 / (1 + np.exp(-x))
            return [factors * sigmoid * (1 + np.abs(x) * (1 - sigmoid))]
        case "soft_max":
            y = torch.from_numpy(x).softmax(-1).numpy()
            return [y * (factors + (y * factors).sum(-1, keepdims=True))]
        case "rms_norm":
            square = (x * x).mean(-1, keepdims=True) + case.settings["eps"]
            inner = (np.abs(x) * factors).mean(-1, keepdims=True) / square
            return [(factors + np.abs(x) * inner) / np.sqrt(square)]
        case "relu" | "pool_2d":
            return gradients(case, inputs, factors)  # which pick from the factors
        case _:
            positive = [each.detach().abs().requires_grad_(each.requires_grad) for each in inputs]
            return [np.abs(each) for each in gradients(case, positive, factors)]


def roundings(case: Case) -> float:
    """Bound, relative to the terms, the roundings behind an entry of a gradient: of each term, and of their sum."""
    terms = math.prod(OPERATIONS[case.operation].shape(case.shapes, case.settings))
    spread = 2 * 4 * 2 if case.operation == "soft_max" else 0  # of the exponents, twice
    half = 3 * U16 if case.operation == "conv_2d" else 0.0  # the factors of ggml's products are float16
    return SLACK * ((terms + 3 * case.shapes[0][0] + spread + 30) * 2 * U32 + half)


@pytest.mark.parametrize("operation", sorted(OPERATIONS))
@given(data=st.data())
@few
def test_values_are_those_of_ggml(ggml: Ggml, operation: str, data: st.DataObject) -> None:
    """The shape is ggml's, and the values differ by at most the bounds of both."""
    drawn = data.draw(lists(operation))
    requests = [
        {"operation": operation, "inputs": case.inputs(), "settings": case.settings, "weights": None} for case in drawn
    ]
    for case, answer in zip(drawn, ggml.ask("operate", requests), strict=True):
        inputs = [each.detach() for each in tensors(case, wide=False)]
        actual = OPERATIONS[operation].run(inputs, case.settings).numpy()
        bound = REFERENCES[operation](case.inputs(), case.settings)[1]
        assert answer["value"].shape == actual.shape
        assert (np.abs(answer["value"] - actual) <= 2 * bound + wider(case)).all()


@pytest.mark.parametrize("operation", sorted(OPERATIONS))
@given(data=st.data())
@few
def test_gradients_are_those_of_ggml(ggml: Ggml, operation: str, data: st.DataObject) -> None:
    """Where ggml has a gradient, ours is within rounding of it; where it ends the process, ours is there, too."""
    drawn = data.draw(lists(operation))
    requests = [
        {"operation": operation, "inputs": case.inputs(), "settings": case.settings, "weights": weights(case)}
        for case in drawn
    ]
    for case, answer in zip(drawn, ggml.ask("operate", requests), strict=True):
        actual = gradients(case, tensors(case, wide=False), weights(case))
        assert has_backward(case) == ("ended" not in answer)
        for mine, theirs, terms in zip(actual, answer.get("gradients", []), magnitudes(case), strict=False):
            expected = np.zeros_like(mine) if theirs is None else theirs  # none flows to it
            assert (np.abs(expected - mine) <= roundings(case) * terms + TINY).all()


def misfits(operation: str) -> st.SearchStrategy[tuple[list[tuple[int, ...]], dict[str, Any]]]:
    """Draw shapes and settings that may or may not fit."""
    shape = st.tuples(sizes, sizes, st.integers(1, 2), st.integers(1, 2))
    twos = st.tuples(st.integers(1, 3), st.integers(1, 3))
    padding = st.tuples(st.integers(0, 2), st.integers(0, 2))
    fields: dict[str, dict[str, st.SearchStrategy[Any]]] = {
        "conv_2d": {"stride": twos, "padding": padding, "dilation": twos},
        # One that is not less than the kernel is refused; ggml takes it, and gives -3.4e38 for the maximum of nothing.
        "pool_2d": {
            "kind": st.sampled_from(["max", "avg"]),
            "kernel": twos,
            "stride": twos,
            "padding": st.just((0, 0)),
        },
        "permute": {"axes": st.permutations(range(4)) | st.lists(st.integers(0, 3), min_size=4, max_size=4)},
        "reshape": {"shape": st.lists(sizes, min_size=1, max_size=4)},
    }
    count = OPERATIONS[operation].arity
    return st.tuples(st.lists(shape, min_size=count, max_size=count), st.fixed_dictionaries(fields.get(operation, {})))


def hangs_over(operation: str, shapes: list[tuple[int, ...]], given_: dict[str, Any]) -> bool:
    """Say whether a kernel is larger than the padded picture; ggml takes it if that is by less than a stride."""
    return operation == "conv_2d" and any(
        given_["dilation"][dim] * (shapes[0][dim] - 1) + 1 > shapes[1][dim] + 2 * given_["padding"][dim]
        for dim in (0, 1)
    )


@pytest.mark.parametrize("operation", SHAPED)
@given(data=st.data())
@few
def test_shapes_fit_where_they_fit_in_ggml(ggml: Ggml, operation: str, data: st.DataObject) -> None:
    """What ggml gives a shape, has that shape; where it ends the process, there is an exception, and nowhere else."""
    drawn = data.draw(st.lists(misfits(operation), min_size=30, max_size=30))
    requests = [{"operation": operation, "shapes": shapes, "settings": given_} for shapes, given_ in drawn]
    for (shapes, given_), answer in zip(drawn, ggml.ask("shape", requests), strict=True):
        if "ended" in answer or hangs_over(operation, shapes, given_):
            with pytest.raises(ContractError, match=operation):
                OPERATIONS[operation].shape(shapes, given_)
        else:
            assert tuple(answer["shape"]) == OPERATIONS[operation].shape(shapes, given_)


@pytest.mark.parametrize(("operation", "options", "message"), [
    ("pool_2d", {"kind": "max", "kernel": (2, 2), "stride": (0, 1), "padding": (0, 0)}, "stride must be"),
    ("conv_2d", {"stride": (0, 1), "padding": (0, 0), "dilation": (1, 1)}, "stride must be"),
    ("permute", {"axes": (0, 1, 2, 4)}, "axes must be"),
])  # fmt: skip
def test_settings_that_end_the_process_of_ggml_raise(
    ggml: Ggml, operation: str, options: dict[str, Any], message: str
) -> None:
    """A stride of zero divides by zero in ggml, and axes out of range abort; here both are typed errors."""
    shapes = [(4, 4, 1, 1)] * OPERATIONS[operation].arity
    (answer,) = ggml.ask("shape", [{"operation": operation, "shapes": shapes, "settings": options}])
    assert ["ended"] == list(answer)
    with pytest.raises(ContractError, match=message):
        OPERATIONS[operation].shape(shapes, options)
