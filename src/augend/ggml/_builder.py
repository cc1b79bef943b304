"""Builder: one method for each operation of a graph, in ggml's words."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

from augend.errors import ContractError
from augend.ggml._nodes import Node
from augend.ggml._parameters import rounded


class Builder(ABC):
    """What operations a graph has. Each makes one node; shapes and broadcasting are ggml's.

    Shapes are written in ggml's order, the fastest dimension first: ``[ne0, ne1, ne2, ne3]``. Every method raises
    ContractError when a node is of another graph, or the shapes do not fit.
    """

    @abstractmethod
    def _operate(self, operation: str, inputs: Sequence[Node], name: str, settings: Mapping[str, Any]) -> Node:
        """Add one node, after all checks."""

    def add(self, a: Node, b: Node, *, name: str = "") -> Node:
        """Return a + b, ``b`` repeated to the shape of ``a``."""
        return self._operate("add", (a, b), name, {})

    def sub(self, a: Node, b: Node, *, name: str = "") -> Node:
        """Return a - b, ``b`` repeated to the shape of ``a``."""
        return self._operate("sub", (a, b), name, {})

    def mul(self, a: Node, b: Node, *, name: str = "") -> Node:
        """Return a · b, element by element, ``b`` repeated to the shape of ``a``."""
        return self._operate("mul", (a, b), name, {})

    def div(self, a: Node, b: Node, *, name: str = "") -> Node:
        """Return a / b, element by element, ``b`` repeated to the shape of ``a``."""
        return self._operate("div", (a, b), name, {})

    def scale(self, x: Node, factor: float, *, name: str = "") -> Node:
        """Return x · factor.

        Args:
            x: Any.
            factor: Rounded to float32, where it must be finite.
            name: Of the result.
        """
        return self._operate("scale", (x,), name, {"factor": _finite("the factor of scale", factor)})

    def sqr(self, x: Node, *, name: str = "") -> Node:
        """Return x · x."""
        return self._operate("sqr", (x,), name, {})

    def sum(self, x: Node, *, name: str = "") -> Node:
        """Return the sum of all elements, ``[1]``."""
        return self._operate("sum", (x,), name, {})

    def mean(self, x: Node, *, name: str = "") -> Node:
        """Return the mean of each row, ``[1, ne1, ne2, ne3]``."""
        return self._operate("mean", (x,), name, {})

    def repeat(self, x: Node, like: Node, *, name: str = "") -> Node:
        """Return ``x`` repeated to the shape of ``like``, whose values are not used."""
        return self._operate("repeat", (x, like), name, {})

    def mul_mat(self, a: Node, b: Node, *, name: str = "") -> Node:
        """Return the product of the rows of ``b`` with the rows of ``a``.

        In torch: ``b @ a.mT``; with weights ``a`` and datapoints ``b`` what a linear layer does.

        Args:
            a: ``[n, m, ...]``, repeated over the dimensions 2 and 3 of ``b``.
            b: ``[n, rows, ...]``.
            name: Of the result, ``[m, rows, ...]``.
        """
        return self._operate("mul_mat", (a, b), name, {})

    def relu(self, x: Node, *, name: str = "") -> Node:
        """Return max(x, 0)."""
        return self._operate("relu", (x,), name, {})

    def gelu(self, x: Node, *, name: str = "") -> Node:
        """Return the Gaussian error linear unit, in the form with tanh (Hendrycks and Gimpel 2016)."""
        return self._operate("gelu", (x,), name, {})

    def silu(self, x: Node, *, name: str = "") -> Node:
        """Return x · sigmoid(x)."""
        return self._operate("silu", (x,), name, {})

    def soft_max(self, x: Node, *, name: str = "") -> Node:
        """Return the softmax of each row (dimension 0)."""
        return self._operate("soft_max", (x,), name, {})

    def norm(self, x: Node, *, eps: float = 1e-5, name: str = "") -> Node:
        """Return each row less its mean, over its standard deviation: sqrt(variance + eps)."""
        return self._operate("norm", (x,), name, {"eps": _not_negative(eps)})

    def rms_norm(self, x: Node, *, eps: float = 1e-6, name: str = "") -> Node:
        """Return each row over its root mean square: sqrt(mean of squares + eps) (Zhang and Sennrich 2019)."""
        return self._operate("rms_norm", (x,), name, {"eps": _not_negative(eps)})

    def conv_2d(
        self,
        kernel: Node,
        data: Node,
        *,
        stride: tuple[int, int] = (1, 1),
        padding: tuple[int, int] = (0, 0),
        dilation: tuple[int, int] = (1, 1),
        name: str = "",
    ) -> Node:
        """Return the two-dimensional convolution.

        Args:
            kernel: ``[width, height, channels in, channels out]``.
            data: ``[width, height, channels in, images]``.
            stride: Of width and height.
            padding: Zeros on both sides of width and height.
            dilation: Of width and height.
            name: Of the result, ``[width, height, channels out, images]``.
        """
        settings = {
            "stride": _pair("stride", stride, 1),
            "padding": _pair("padding", padding, 0),
            "dilation": _pair("dilation", dilation, 1),
        }
        return self._operate("conv_2d", (kernel, data), name, settings)

    def pool_2d(
        self,
        x: Node,
        *,
        kind: str = "max",
        kernel: tuple[int, int],
        stride: tuple[int, int] | None = None,
        padding: tuple[int, int] = (0, 0),
        name: str = "",
    ) -> Node:
        """Return the largest or the average of each window of width and height.

        Args:
            x: ``[width, height, channels, images]``.
            kind: "max" or "avg".
            kernel: Width and height of the window.
            stride: From one window to the next; that of ``kernel`` if None.
            padding: On both sides of width and height.
            name: Of the result, ``[width, height, channels, images]``.
        """
        if kind not in ("max", "avg"):
            raise ContractError(f'kind must be "max" or "avg"; got {kind!r}')
        window = _pair("kernel", kernel, 1)
        settings = {
            "kind": kind,
            "kernel": window,
            "stride": window if stride is None else _pair("stride", stride, 1),
            "padding": _pair("padding", padding, 0),
        }
        return self._operate("pool_2d", (x,), name, settings)

    def reshape(self, x: Node, shape: Sequence[int], *, name: str = "") -> Node:
        """Return the same elements in another shape.

        Args:
            x: Any.
            shape: One to four dimensions, in ggml's order. Where more or fewer rows run through the graph than were
                declared, the outermost of them takes it up.
            name: Of the result.
        """
        return self._operate("reshape", (x,), name, {"shape": _whole_numbers("the shape of reshape", shape)})

    def permute(self, x: Node, axes: tuple[int, int, int, int], *, name: str = "") -> Node:
        """Return ``x`` with its dimensions elsewhere: dimension i goes to place ``axes[i]``."""
        return self._operate("permute", (x,), name, {"axes": _whole_numbers("the axes of permute", axes)})

    def cont(self, x: Node, *, name: str = "") -> Node:
        """Return ``x`` with its elements in order; in torch they always seem to be."""
        return self._operate("cont", (x,), name, {})

    def get_rows(self, x: Node, ids: Node, *, name: str = "") -> Node:
        """Return the rows of ``x`` that ``ids`` names.

        Args:
            x: ``[n, rows, ...]``.
            ids: ``[m, ...]``, int32, each at least 0 and less than ``rows``.
            name: Of the result, ``[n, m, ...]``.
        """
        return self._operate("get_rows", (x, ids), name, {})

    def opt_step_adamw(
        self, weight: Node, gradient: Node, m: Node, v: Node, parameters: Node, *, name: str = ""
    ) -> Node:
        """Return an alias of ``weight`` whose computing makes one step of AdamW, in place.

        Args:
            weight: A parameter.
            gradient: Of the shape of ``weight``.
            m: The same; the first moment, updated in place.
            v: The same; the second moment, updated in place.
            parameters: ``[7]``: alpha, beta1, beta2, eps, weight decay, 1 / (1 - beta1^i), 1 / (1 - beta2^i).
            name: Of the result.
        """
        return self._operate("opt_step_adamw", (weight, gradient, m, v, parameters), name, {})

    def opt_step_sgd(self, weight: Node, gradient: Node, parameters: Node, *, name: str = "") -> Node:
        """Return an alias of ``weight`` whose computing makes one step of SGD, in place.

        Args:
            weight: A parameter.
            gradient: Of the shape of ``weight``.
            parameters: ``[2]``: alpha, weight decay.
            name: Of the result.
        """
        return self._operate("opt_step_sgd", (weight, gradient, parameters), name, {})


def _pair(what: str, pair: tuple[int, int], least: int) -> tuple[int, int]:
    fits = isinstance(pair, tuple | list) and len(pair) == 2 and all(type(one) is int and one >= least for one in pair)  # noqa: PLR2004  # width and height
    if not fits:
        raise ContractError(f"{what} must be two whole numbers of at least {least}, of width and height; got {pair!r}")
    return pair[0], pair[1]


def _whole_numbers(what: str, given: Sequence[int]) -> tuple[int, ...]:
    if not isinstance(given, Sequence) or not all(type(one) is int for one in given):
        raise ContractError(f"{what} must be whole numbers, one for each dimension; got {given!r:.80}")
    return tuple(given)


def _finite(what: str, given: float) -> float:
    if not isinstance(given, Real) or not math.isfinite(number := rounded(given)):
        raise ContractError(f"{what} must be a number that is finite in float32; got {given!r:.80}")
    return number


def _not_negative(eps: float) -> float:
    if not isinstance(eps, Real) or not 0 <= eps < math.inf:
        raise ContractError(f"eps must be a finite number of at least 0; got {eps!r:.80}")
    return float(eps)
