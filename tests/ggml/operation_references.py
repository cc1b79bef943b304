"""Every operation of a ggml graph as plain loops in float64, each with a bound on the error of a float32 kernel of it.

Arrays are in torch's order, [ne3, ne2, ne1, ne0]. A bound holds for one kernel that rounds each of its operations once
to float32, sums in any order, and has ``exp`` and ``tanh`` within two units in the last place; two such kernels differ
by at most twice that. First-order bounds are widened by SLACK for the products of rounding errors.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

U32 = 2.0**-24
U64 = 2.0**-53
SLACK = 1.01
TINY = 2.0**-149

Array = np.ndarray
Bounded = tuple[Array, Array]


def looped(shape: Sequence[int], entry: Callable[..., tuple[float, float]]) -> Bounded:
    """Fill a value and its bound entry by entry."""
    value, bound = np.zeros(shape), np.zeros(shape)
    for index in itertools.product(*map(range, shape)):
        value[index], bound[index] = entry(*index)
    return value, bound * SLACK


def roundings(steps: int, magnitude: float) -> float:
    """Bound a chain of roundings, each relative to the magnitude or to the smallest float32."""
    return steps * (U32 * abs(magnitude) + TINY)


def tiled(small: Array, index: Sequence[int]) -> float:
    """Read an entry of an array that is repeated end to end."""
    return float(small[tuple(at % extent for at, extent in zip(index, small.shape, strict=True))])


def binary(function: Callable[[float, float], float]) -> Callable[..., Bounded]:
    """Make the reference of an operation of two numbers that is rounded once."""

    def reference(inputs: Sequence[Array], _settings: Mapping[str, object]) -> Bounded:
        def entry(*index: int) -> tuple[float, float]:
            value = function(float(inputs[0][index]), tiled(inputs[1], index))
            return value, roundings(1, value)

        return looped(inputs[0].shape, entry)

    return reference


def unary(function: Callable[[float], tuple[float, float]]) -> Callable[..., Bounded]:
    """Make the reference of an operation of one number, which gives a value and its bound."""

    def reference(inputs: Sequence[Array], _settings: Mapping[str, object]) -> Bounded:
        return looped(inputs[0].shape, lambda *index: function(float(inputs[0][index])))

    return reference


def relu(x: float) -> tuple[float, float]:
    """Nothing is rounded."""
    return max(x, 0.0), 0.0


def gelu(x: float) -> tuple[float, float]:
    """The argument has 6 roundings, and |z|·(1 - tanh²z) < 0.45; tanh has 4, the rest 4, relative to |x| at most."""
    inner = math.sqrt(2 / math.pi) * x * (1 + 0.044715 * x * x)
    return 0.5 * x * (1 + math.tanh(inner)), roundings(11, x)


def silu(x: float) -> tuple[float, float]:
    """The exponential has 4 roundings, the sum and the quotient one each; there is no cancellation."""
    value = x / (1 + math.exp(-x))
    return value, roundings(8, value)


def square(x: float) -> tuple[float, float]:
    """One product."""
    return x * x, roundings(1, x * x)


def scale(inputs: Sequence[Array], settings: Mapping[str, float]) -> Bounded:
    """The factor is rounded, and the product."""
    return unary(lambda x: (x * settings["factor"], roundings(2, x * settings["factor"])))(inputs, settings)


def mul_mat(inputs: Sequence[Array], _settings: Mapping[str, object]) -> Bounded:
    """Dot products of rows; a matrix of the first serves as many neighbours of the second as it must."""
    first, second = inputs
    shape = (*second.shape[:3], first.shape[2])

    def entry(i3: int, i2: int, row: int, out: int) -> tuple[float, float]:
        matrix = first[i3 * first.shape[0] // second.shape[0], i2 * first.shape[1] // second.shape[1]]
        terms = [float(matrix[out, k]) * float(second[i3, i2, row, k]) for k in range(first.shape[3])]
        return math.fsum(terms), roundings(len(terms), math.fsum(map(abs, terms)))

    return looped(shape, entry)


def over_rows(function: Callable[..., tuple[list[float], list[float]]]) -> Callable[..., Bounded]:
    """Make the reference of an operation on whole rows, the values along ne0."""

    def reference(inputs: Sequence[Array], settings: Mapping[str, float]) -> Bounded:
        value, bound = np.zeros(inputs[0].shape), np.zeros(inputs[0].shape)
        for index in itertools.product(*map(range, inputs[0].shape[:3])):
            value[index], bound[index] = function([float(x) for x in inputs[0][index]], **settings)
        return value, bound * SLACK

    return reference


def soft_max(row: list[float]) -> tuple[list[float], list[float]]:
    """A rounded difference d moves the exponential by u·|d|; above and below the line, with 4 roundings of exp each."""
    powers = [math.exp(x - max(row)) for x in row]
    steps = len(row) + 2 * math.ceil(max(row) - min(row)) + 10
    values = [power / math.fsum(powers) for power in powers]
    return values, [roundings(steps, value) for value in values]


def rms_norm(row: list[float], eps: float) -> tuple[list[float], list[float]]:
    """All terms below the root are positive: it halves their n + 3 roundings, and three follow."""
    inverse = 1 / math.sqrt(math.fsum(x * x for x in row) / len(row) + eps)
    return [x * inverse for x in row], [roundings(len(row) + 5, x * inverse) for x in row]


def norm(row: list[float], eps: float) -> tuple[list[float], list[float]]:
    """The mean is off by n roundings of mean |x|, the variance by n + 4 of mean x² if not centred first."""
    count = len(row)
    mean = math.fsum(row) / count
    squares = math.fsum(x * x for x in row) / count
    variance = math.fsum((x - mean) ** 2 for x in row) / count
    inverse = 1 / math.sqrt(variance + eps)
    values = [(x - mean) * inverse for x in row]
    shift = math.fsum(map(abs, row)) / count * inverse
    return values, [
        roundings(2 * count + 8, abs(value) * (1 + squares / (variance + eps)) + shift + abs(value)) for value in values
    ]


def conv_2d(inputs: Sequence[Array], settings: Mapping[str, Sequence[int]]) -> Bounded:
    """Dot products of the kernel with windows; outside the picture is zero."""
    kernel, data = inputs
    (s0, s1), (p0, p1), (d0, d1) = settings["stride"], settings["padding"], settings["dilation"]
    width = (data.shape[3] + 2 * p0 - d0 * (kernel.shape[3] - 1) - 1) // s0 + 1
    height = (data.shape[2] + 2 * p1 - d1 * (kernel.shape[2] - 1) - 1) // s1 + 1

    def entry(picture: int, out: int, row: int, column: int) -> tuple[float, float]:
        terms = []
        for channel, k1, k0 in itertools.product(*map(range, kernel.shape[1:])):
            y, x = row * s1 - p1 + k1 * d1, column * s0 - p0 + k0 * d0
            if 0 <= y < data.shape[2] and 0 <= x < data.shape[3]:
                terms.append(float(kernel[out, channel, k1, k0]) * float(data[picture, channel, y, x]))
        return math.fsum(terms), roundings(len(terms), math.fsum(map(abs, terms)))

    return looped((data.shape[0], kernel.shape[0], height, width), entry)


def pool_2d(inputs: Sequence[Array], settings: Mapping[str, Sequence[int]]) -> Bounded:
    """The largest of a window, or its sum by its full size, also where it lies partly outside."""
    (data,) = inputs
    (k0, k1), (s0, s1), (p0, p1) = settings["kernel"], settings["stride"], settings["padding"]
    width = (data.shape[3] + 2 * p0 - k0) // s0 + 1
    height = (data.shape[2] + 2 * p1 - k1) // s1 + 1

    def entry(picture: int, channel: int, row: int, column: int) -> tuple[float, float]:
        rows = [y for y in range(row * s1 - p1, row * s1 - p1 + k1) if 0 <= y < data.shape[2]]
        columns = [x for x in range(column * s0 - p0, column * s0 - p0 + k0) if 0 <= x < data.shape[3]]
        values = [float(data[picture, channel, y, x]) for y in rows for x in columns]
        if settings["kind"] == "max":
            return max(values), 0.0
        return math.fsum(values) / (k0 * k1), roundings(k0 * k1 + 1, math.fsum(map(abs, values)) / (k0 * k1))

    return looped((*data.shape[:2], height, width), entry)


def reshape(inputs: Sequence[Array], settings: Mapping[str, Sequence[int]]) -> Bounded:
    """The same numbers in the same order."""
    shape = [*settings["shape"], *[1] * (4 - len(settings["shape"]))][::-1]
    flat = [float(x) for x in inputs[0].flat]
    return looped(shape, lambda *index: (flat[np.ravel_multi_index(index, shape)], 0.0))


def permute(inputs: Sequence[Array], settings: Mapping[str, Sequence[int]]) -> Bounded:
    """Where i was counted along dimension d, it is counted along dimension axes[d]."""
    (data,) = inputs
    extents = [0] * 4
    for dim, axis in enumerate(settings["axes"]):
        extents[axis] = data.shape[3 - dim]

    def entry(*index: int) -> tuple[float, float]:
        source = [index[3 - settings["axes"][dim]] for dim in range(4)]
        return float(data[tuple(source[::-1])]), 0.0

    return looped(extents[::-1], entry)


def copy(inputs: Sequence[Array], _settings: Mapping[str, object]) -> Bounded:
    """The same."""
    return looped(inputs[0].shape, lambda *index: (float(inputs[0][index]), 0.0))


def get_rows(inputs: Sequence[Array], _settings: Mapping[str, object]) -> Bounded:
    """Rows of tables, by number."""
    table, ids = inputs
    shape = (*ids.shape[1:], table.shape[3])
    return looped(shape, lambda i2, i1, i0, k: (float(table[i2, i1, int(ids[0, i2, i1, i0]), k]), 0.0))


def total(inputs: Sequence[Array], _settings: Mapping[str, object]) -> Bounded:
    """Summed in float64 in any order, then rounded once."""
    values = [float(x) for x in inputs[0].flat]
    bound = len(values) * U64 * math.fsum(map(abs, values)) + roundings(1, math.fsum(values))
    return looped((1, 1, 1, 1), lambda *_: (math.fsum(values), bound))


def mean(inputs: Sequence[Array], _settings: Mapping[str, object]) -> Bounded:
    """Summed in float64, rounded, divided and rounded."""
    count = inputs[0].shape[3]

    def entry(i3: int, i2: int, i1: int, _: int) -> tuple[float, float]:
        values = [float(x) for x in inputs[0][i3, i2, i1]]
        value = math.fsum(values) / count
        return value, U64 * math.fsum(map(abs, values)) + roundings(2, value)

    return looped((*inputs[0].shape[:3], 1), entry)


def repeat(inputs: Sequence[Array], _settings: Mapping[str, object]) -> Bounded:
    """The first, end to end, in the shape of the second."""
    return looped(inputs[1].shape, lambda *index: (tiled(inputs[0], index), 0.0))


REFERENCES: dict[str, Callable[..., Bounded]] = {
    "add": binary(lambda a, b: a + b),
    "cont": copy,
    "conv_2d": conv_2d,
    "div": binary(lambda a, b: a / b),
    "gelu": unary(gelu),
    "get_rows": get_rows,
    "mean": mean,
    "mul": binary(lambda a, b: a * b),
    "mul_mat": mul_mat,
    "norm": over_rows(norm),
    "permute": permute,
    "pool_2d": pool_2d,
    "relu": unary(relu),
    "repeat": repeat,
    "reshape": reshape,
    "rms_norm": over_rows(rms_norm),
    "scale": scale,
    "silu": unary(silu),
    "soft_max": over_rows(soft_max),
    "sqr": unary(square),
    "sub": binary(lambda a, b: a - b),
    "sum": total,
}
