"""Random cases of every operation: shapes that fit, settings, and values."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st

UNARY = ["cont", "gelu", "relu", "silu", "soft_max", "sqr", "sum", "mean"]
BINARY = ["add", "sub", "mul", "div"]
sizes = st.integers(1, 4)
shapes = st.tuples(sizes, sizes, st.integers(1, 3), st.integers(1, 2))
seeds = st.integers(0, 2**32 - 1)


@dataclass(frozen=True)
class Case:
    """One call of an operation: shapes in ggml's order, and a seed for the values."""

    operation: str
    shapes: tuple[tuple[int, int, int, int], ...]
    settings: dict[str, Any]
    seed: int

    def inputs(self) -> list[np.ndarray]:
        """Draw float32 values of both signs whose size is between 1/4 and 4, so that nothing is near underflow."""
        random = np.random.default_rng(self.seed)
        values = [random.uniform(0.25, 4, shape[::-1]) * random.choice([-1, 1], shape[::-1]) for shape in self.shapes]
        arrays = [value.astype(np.float32) for value in values]
        if self.operation == "get_rows":
            arrays[1] = random.integers(0, self.shapes[0][1], self.shapes[1][::-1]).astype(np.int32)
        return arrays


def times(shape: tuple[int, ...], factors: tuple[int, ...]) -> tuple[int, ...]:
    """Multiply each dimension."""
    return tuple(extent * factor for extent, factor in zip(shape, factors, strict=True))


@st.composite
def of_two(draw: st.DrawFn, operation: str) -> Case:
    """Draw a case in which the second repeats into the first."""
    small = draw(shapes)
    large = times(small, draw(st.tuples(*[st.integers(1, 2)] * 4)))
    return Case(operation, (small, large) if operation == "repeat" else (large, small), {}, draw(seeds))


@st.composite
def products(draw: st.DrawFn) -> Case:
    """Draw a case of mul_mat, also with many matrices that serve more."""
    inner, out, rows, outer2, outer3 = (draw(sizes) for _ in range(5))
    first = (inner, out, outer2, outer3)
    second = (inner, rows, outer2 * draw(st.integers(1, 3)), outer3 * draw(st.integers(1, 2)))
    return Case("mul_mat", (first, second), {}, draw(seeds))


@st.composite
def convolutions(draw: st.DrawFn) -> Case:
    """Draw a case of conv_2d whose kernel is inside the padded picture."""
    twos = st.tuples(st.integers(1, 3), st.integers(1, 3))
    kernel, stride, dilation = draw(twos), draw(twos), draw(st.tuples(st.integers(1, 2), st.integers(1, 2)))
    padding = draw(st.tuples(st.integers(0, 2), st.integers(0, 2)))
    least = [max(1, dilation[dim] * (kernel[dim] - 1) + 1 - 2 * padding[dim]) for dim in (0, 1)]
    picture = [extent + draw(st.integers(0, 3)) for extent in least]
    channels, out, pictures = draw(st.integers(1, 2)), draw(st.integers(1, 3)), draw(st.integers(1, 2))
    settings = {"stride": stride, "padding": padding, "dilation": dilation}
    return Case("conv_2d", ((*kernel, channels, out), (*picture, channels, pictures)), settings, draw(seeds))


@st.composite
def poolings(draw: st.DrawFn) -> Case:
    """Draw a case of pool_2d whose windows all see the picture."""
    twos = st.tuples(st.integers(1, 3), st.integers(1, 3))
    kernel, stride = draw(twos), draw(twos)
    padding = tuple(draw(st.integers(0, extent - 1)) for extent in kernel)
    picture = [max(1, kernel[dim] - 2 * padding[dim]) + draw(st.integers(0, 4)) for dim in (0, 1)]
    settings = {"kind": draw(st.sampled_from(["max", "avg"])), "kernel": kernel, "stride": stride, "padding": padding}
    shape = (*picture, draw(st.integers(1, 2)), draw(st.integers(1, 2)))
    return Case("pool_2d", (shape,), settings, draw(seeds))


@st.composite
def reshapings(draw: st.DrawFn) -> Case:
    """Draw a case of reshape: the same factors, merged elsewhere."""
    shape = draw(shapes)
    order = draw(st.permutations(shape))
    rank = draw(st.integers(1, 4))
    asked = (*order[: rank - 1], math.prod(order[rank - 1 :]))
    return Case("reshape", (shape,), {"shape": asked}, draw(seeds))


@st.composite
def gatherings(draw: st.DrawFn) -> Case:
    """Draw a case of get_rows, also of many tables."""
    table = draw(shapes)
    return Case("get_rows", (table, (draw(sizes), table[2], table[3], 1)), {}, draw(seeds))


def cases(operation: str) -> st.SearchStrategy[Case]:
    """Return random cases of one operation."""
    special = {"mul_mat": products(), "conv_2d": convolutions(), "pool_2d": poolings(), "reshape": reshapings()}
    special |= {"get_rows": gatherings(), **{name: of_two(name) for name in [*BINARY, "repeat"]}}
    if operation in special:
        return special[operation]
    settings = {
        "scale": st.fixed_dictionaries({"factor": st.floats(0.125, 8, width=32)}),
        "rms_norm": st.fixed_dictionaries({"eps": st.sampled_from([0.0, 1e-5, 0.5])}),
        "norm": st.fixed_dictionaries({"eps": st.sampled_from([1e-5, 0.5])}),
        "permute": st.fixed_dictionaries({"axes": st.permutations(range(4)).map(tuple)}),
    }
    return st.builds(Case, st.just(operation), st.tuples(shapes), settings.get(operation, st.just({})), seeds)
