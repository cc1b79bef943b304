"""The multilayer perceptron."""

from __future__ import annotations

import pytest
import torch

from augend.errors import ContractError
from augend.models import MLP


@pytest.mark.parametrize("activation", ["relu", "gelu", "silu", "tanh"])
@pytest.mark.parametrize("bias", [True, False])
def test_layers_with_an_activation_between(activation, bias):
    """The output is what torch's own Sequential of the same layers gives, bit for bit; none after the last layer."""
    model = MLP([5, 4, 3, 2], activation=activation, bias=bias)
    between = {"relu": torch.nn.ReLU(), "gelu": torch.nn.GELU(), "silu": torch.nn.SiLU(), "tanh": torch.nn.Tanh()}
    first, second, last = model.layers
    plain = torch.nn.Sequential(first, between[activation], second, between[activation], last)
    x = torch.randn(7, 3, 5)
    assert torch.equal(plain(x), model(x))
    assert bias == (last.bias is not None)
    assert [7, 3, 2] == list(model(x).shape)


def test_dropout_is_for_hidden_activations_in_training():
    """With all hidden activations alike, dropout zeroes or doubles each; evaluation is plain."""
    model = MLP([1, 1000, 1000], dropout=0.5, bias=False)
    torch.nn.init.ones_(model.layers[0].weight)
    torch.nn.init.eye_(model.layers[1].weight)
    torch.manual_seed(0)
    assert {0.0, 2.0} == set(model(torch.ones(1, 1)).unique().tolist())
    assert {1.0} == set(model.eval()(torch.ones(1, 1)).unique().tolist())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sizes": [3]}, r"sizes.*\[3\]"),
        ({"sizes": [3, 0]}, r"sizes.*\[3, 0\]"),
        ({"sizes": [3, 2], "activation": "step"}, "gelu, relu, silu, tanh.*'step'"),
        ({"sizes": [3, 2], "dropout": 1.0}, r"dropout.*1\.0"),
    ],
)
def test_what_does_not_fit_is_refused(arguments, message):
    """Every argument out of its range is a ContractError that names it and its value."""
    with pytest.raises(ContractError, match=message):
        MLP(**arguments)
