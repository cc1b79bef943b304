"""A multilayer perceptron."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Final, Literal, final

from torch import Tensor, nn
from torch.nn import functional

from augend.errors import ContractError

_ACTIVATIONS: Final[dict[str, Callable[[Tensor], Tensor]]] = {
    "gelu": functional.gelu,
    "relu": functional.relu,
    "silu": functional.silu,
    "tanh": functional.tanh,
}


@final
class MLP(nn.Module):
    """Linear layers with an activation between each two.

    Weights and biases begin as ``nn.Linear`` makes them, uniform within ±1/√(inputs).

    Args:
        sizes: Inputs of the first layer, then the outputs of each; at least two numbers.
        activation: "relu", "gelu", "silu" or "tanh".
        bias: Whether layers have a bias.
        dropout: Probability of zeroing a hidden activation in training.

    Raises:
        ContractError: An argument is out of its range.

    Example:
        >>> augend.models.MLP([64, 32, 10])(torch.zeros(5, 64)).shape
        torch.Size([5, 10])
    """

    def __init__(
        self,
        sizes: Sequence[int],
        *,
        activation: Literal["relu", "gelu", "silu", "tanh"] = "relu",
        bias: bool = True,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if len(sizes) < 2 or min(sizes) < 1:  # noqa: PLR2004  one layer has two sizes
            raise ContractError(f"sizes must be at least two positive numbers, inputs first; got {list(sizes)}")
        if activation not in _ACTIVATIONS:
            raise ContractError(f"activation must be one of {', '.join(_ACTIVATIONS)}; got {activation!r}")
        if not 0 <= dropout < 1:
            raise ContractError(f"dropout must be at least 0 and less than 1; got {dropout}")
        self.layers = nn.ModuleList(nn.Linear(inputs, outputs, bias=bias) for inputs, outputs in pairwise(sizes))
        self.activation = activation
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs.

        Args:
            x: ``[..., sizes[0]]``, in the parameters' dtype.

        Returns:
            ``[..., sizes[-1]]``.
        """
        *hidden, last = self.layers
        for layer in hidden:
            x = self.dropout(_ACTIVATIONS[self.activation](layer(x)))  # [..., outputs]
        out: Tensor = last(x)
        return out
