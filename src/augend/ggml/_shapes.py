"""The shape that each operation of a graph gives, by ggml's rules; what does not fit is refused by name."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeAlias

import torch

from augend.errors import ContractError
from augend.ggml._nodes import Shape

Settings: TypeAlias = Mapping[str, Any]
"""The numbers of an operation, by name."""

DIMENSIONS: Final = 4


def rank_of(shape: Sequence[int]) -> int:
    """Return how many dimensions a shape has as ggml counts them: up to the last that is not 1, at least one."""
    return max([1, *(dim + 1 for dim, extent in enumerate(shape) if extent != 1)])


def padded(shape: Sequence[int]) -> Shape:
    """Fill a shape up to four dimensions with ones, as ggml does."""
    ne0, ne1, ne2, ne3 = [*shape, *(1,) * (DIMENSIONS - len(shape))]
    return ne0, ne1, ne2, ne3


def check_repeats(what: str, small: Sequence[int], large: Sequence[int]) -> None:
    """Check that one shape fits into another a whole number of times in each dimension, as ggml broadcasts.

    Raises:
        ContractError: It does not.
    """
    if any(whole % part for part, whole in zip(small, large, strict=True)):
        raise ContractError(
            f"{what}: each dimension of {list(small)} must divide that of {list(large)}, into which it is repeated "
            "(dimensions in ggml's order, the fastest first); reshape or permute one of them"
        )


def unchanged(shapes: Sequence[Shape], _settings: Settings) -> Shape:
    """Return the shape of the one input."""
    return shapes[0]


def scaled(shapes: Sequence[Shape], settings: Settings) -> Shape:
    """Return the shape of the one input, for a factor that float32 can hold.

    Raises:
        ContractError: The factor is no finite number of float32.
    """
    _check_number("scale", "factor", settings["factor"], -math.inf)
    return shapes[0]


def normalized(shapes: Sequence[Shape], settings: Settings) -> Shape:
    """Return the shape of the one input, for an eps that is finite and not negative.

    Raises:
        ContractError: It is not.
    """
    _check_number("norm, rms_norm", "eps", settings["eps"], 0.0)
    return shapes[0]


def repeating(shapes: Sequence[Shape], _settings: Settings) -> Shape:
    """Return the shape of the first input, into which the second is repeated.

    Raises:
        ContractError: The second does not fit into the first.
    """
    large, small = shapes
    check_repeats("add, sub, mul, div", small, large)
    return large


def repeated(shapes: Sequence[Shape], _settings: Settings) -> Shape:
    """Return the shape of the second input, into which the first is repeated.

    Raises:
        ContractError: The first does not fit into the second.
    """
    small, large = shapes
    check_repeats("repeat", small, large)
    return large


def multiplied(shapes: Sequence[Shape], _settings: Settings) -> Shape:
    """Return the shape of a product: [ne1 of the first, ne1, ne2, ne3 of the second].

    Raises:
        ContractError: The two differ in ne0, or ne2 or ne3 of the first does not divide that of the second.
    """
    first, second = shapes
    if first[0] != second[0] or second[2] % first[2] or second[3] % first[3]:
        raise ContractError(
            f"mul_mat: {list(first)} and {list(second)} must agree in ne0, over which it sums, and ne2 and ne3 of the "
            "first must divide those of the second; weights are [in, out], and come first"
        )
    return first[1], second[1], second[2], second[3]


def convolved(shapes: Sequence[Shape], settings: Settings) -> Shape:
    """Return the shape of a convolution: [width, height, channels out, pictures].

    Raises:
        ContractError: The channels differ, a stride, padding or dilation is out of bounds, or the kernel is larger than
            the padded picture.
    """
    kernel, data = shapes
    stride = pair("conv_2d", settings, "stride", 1)
    padding = pair("conv_2d", settings, "padding", 0)
    dilation = pair("conv_2d", settings, "dilation", 1)
    if kernel[2] != data[2]:
        raise ContractError(
            f"conv_2d: the kernel has {kernel[2]} channels in, {list(kernel)} as [width, height, channels in, channels "
            f"out]; the data has {data[2]}, {list(data)} as [width, height, channels, pictures]; they must be the same"
        )
    width, height = (
        (data[dim] + 2 * padding[dim] - dilation[dim] * (kernel[dim] - 1) - 1) // stride[dim] + 1 for dim in (0, 1)
    )
    _check_inside("conv_2d", "kernel", (width, height), data)
    return width, height, kernel[3], data[3]


def pooled(shapes: Sequence[Shape], settings: Settings) -> Shape:
    """Return the shape of a pooling: [width, height] shrink, channels and pictures stay.

    Raises:
        ContractError: The kind is unknown, a kernel, stride or padding is out of bounds, or the kernel is larger than
            the padded picture.
    """
    (data,) = shapes
    kernel = pair("pool_2d", settings, "kernel", 1)
    stride = pair("pool_2d", settings, "stride", 1)
    padding = pair("pool_2d", settings, "padding", 0)
    if settings["kind"] not in {"max", "avg"}:
        raise ContractError(f'pool_2d: kind must be "max" or "avg"; got {settings["kind"]!r}')
    if any(around >= extent for around, extent in zip(padding, kernel, strict=True)):
        raise ContractError(
            f"pool_2d: the padding must be less than the kernel, {list(kernel)}, in each direction, else it pools over "
            f"nothing; got {list(padding)}"
        )
    width, height = ((data[dim] + 2 * padding[dim] - kernel[dim]) // stride[dim] + 1 for dim in (0, 1))
    _check_inside("pool_2d", "kernel", (width, height), data)
    return width, height, data[2], data[3]


def reshaped(shapes: Sequence[Shape], settings: Settings) -> Shape:
    """Return the shape asked for.

    Raises:
        ContractError: It has no or more than four dimensions, one that is not positive, or another number of elements.
    """
    (shape,) = shapes
    given = _whole_numbers("reshape", settings, "shape", 1)
    if not 1 <= len(given) <= DIMENSIONS:
        raise ContractError(f"reshape: shape must have 1 to {DIMENSIONS} dimensions; got {list(given)}")
    if math.prod(given) != math.prod(shape):
        raise ContractError(
            f"reshape: {list(given)} has {math.prod(given)} elements; {list(shape)} has {math.prod(shape)}; they must "
            "have the same number"
        )
    return padded(given)


def stretched(given: Sequence[int], elements: int) -> Shape:
    """Return the shape that a reshape gives to more or fewer elements than were declared.

    The outermost of the given dimensions takes up the difference. If the elements do not divide into it and it is 1,
    the next does, and so on up to the outermost that is not 1: rows vary, what is inside a row does not.

    Args:
        given: The declared shape, in ggml's order, as long as it was given.
        elements: How many there are.

    Raises:
        ContractError: They do not divide into rows of the declared size.
    """
    for dim in reversed(range(rank_of(given) - 1, len(given))):
        inner = math.prod(given[:dim])
        if elements % inner == 0:
            return padded([*given[:dim], elements // inner])
    raise ContractError(
        f"reshape: {elements} elements do not divide into rows of {list(given[: rank_of(given) - 1])}; the shape was "
        f"declared as {list(given)}, of which only the outermost dimension may vary"
    )


def permuted(shapes: Sequence[Shape], settings: Settings) -> Shape:
    """Return the shape in which dimension i of the input has become dimension axes[i].

    Raises:
        ContractError: The axes are not the numbers from 0 to 3, each once.
    """
    (shape,) = shapes
    axes = _whole_numbers("permute", settings, "axes", 0)
    if sorted(axes) != list(range(DIMENSIONS)):
        raise ContractError(f"permute: axes must be 0, 1, 2 and 3 in some order, each once; got {list(axes)}")
    return padded([shape[axes.index(dim)] for dim in range(DIMENSIONS)])


def gathered(shapes: Sequence[Shape], _settings: Settings) -> Shape:
    """Return the shape of rows taken by number: [ne0 of the table, ne0, ne1, ne2 of the numbers].

    Raises:
        ContractError: The numbers are not for as many tables as there are.
    """
    table, ids = shapes
    if ids[1:] != (table[2], table[3], 1):
        raise ContractError(
            f"get_rows: for a table {list(table)} the row numbers must be [any, {table[2]}, {table[3]}, 1]; got "
            f"{list(ids)}; reshape them"
        )
    return table[0], ids[0], ids[1], ids[2]


def summed(_shapes: Sequence[Shape], _settings: Settings) -> Shape:
    """Return the shape of one number."""
    return 1, 1, 1, 1


def averaged(shapes: Sequence[Shape], _settings: Settings) -> Shape:
    """Return the shape of the means over ne0."""
    return 1, *shapes[0][1:]


def pair(operation: str, settings: Settings, name: str, least: int) -> tuple[int, int]:
    """Return a setting that is two whole numbers: along the width, along the height.

    Raises:
        ContractError: It is not, or one of them is less than the least.
    """
    values = _whole_numbers(operation, settings, name, least)
    if len(values) != 2:  # noqa: PLR2004  a pair
        raise ContractError(f"{operation}: {name} must be two numbers, (along ne0, along ne1); got {list(values)}")
    return values[0], values[1]


def _whole_numbers(operation: str, settings: Settings, name: str, least: int) -> tuple[int, ...]:
    values = settings[name]
    if not isinstance(values, Sequence) or not all(type(value) is int and value >= least for value in values):
        raise ContractError(f"{operation}: {name} must be whole numbers of at least {least}; got {values!r}")
    return tuple(values)


def _check_number(operation: str, name: str, value: float, least: float) -> None:
    largest = torch.finfo(torch.float32).max
    if not (isinstance(value, int | float) and abs(value) <= largest and value >= least):
        bound = "" if least == -math.inf else f" of at least {least:g}"
        raise ContractError(f"{operation}: {name} must be a finite number{bound} that float32 can hold; got {value!r}")


def _check_inside(operation: str, what: str, extents: tuple[int, int], data: Shape) -> None:
    if min(extents) < 1:
        raise ContractError(
            f"{operation}: the {what} is larger than the padded data, {list(data)} as [width, height, channels, "
            f"pictures]; the result would be {list(extents)}; pad more or take a smaller {what}"
        )
