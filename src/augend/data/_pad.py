"""Collation of rows whose lengths differ."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from augend.errors import SplitError

Row = Mapping[str, Any]


def pad(**fill: float) -> Callable[[Sequence[Row]], dict[str, Any]]:
    """Return a ``collate_fn`` that pads ragged rows on the right.

    Each row is a mapping. What has one shape in all rows is stacked; what differs in its first dimension is filled
    up to the longest row of the micro-batch with the number given for its key. Labels filled with the ignored index
    are not counted, so padding changes no loss, whatever the cut. Text stays a list.

    All rows need one dtype under a key, in the whole data set: nothing is converted. Numbers and lists have the dtype
    that numpy gives them, int64 or float64, so write ``1.0`` where others are ``0.5``. An empty list takes that of the
    other rows; where all are empty, that of the number to fill with.

    Args:
        fill: For each key whose lengths differ, the number to fill with, for example ``tokens=0, labels=-100``.

    Returns:
        A function of a list of rows; it can be pickled, so it works with any kind of worker.

    Raises:
        SplitError: (when called) A row is no mapping, a key is missing in a row or in all of them, or the shapes
            under a key differ and no number was given for it, or differ in more than the first dimension. The dtypes
            under a key differ, or cannot hold the number given for it.

    Example:
        >>> rows = [{"tokens": torch.tensor([5, 6, 7])}, {"tokens": torch.tensor([8])}]
        >>> augend.data.pad(tokens=0)(rows)
        {'tokens': tensor([[5, 6, 7],
                [8, 0, 0]])}
    """
    return functools.partial(_padded, fill)


def _padded(fill: Mapping[str, float], rows: Sequence[Row]) -> dict[str, Any]:
    keys = _keys(rows)
    unknown = [key for key in fill if key not in keys]
    if unknown:
        raise SplitError(f"pad() was given a number for {unknown[0]!r}, but the rows have only {keys}")
    return {key: _joined(key, [row[key] for row in rows], fill) for key in keys}


def _keys(rows: Sequence[Row]) -> list[str]:
    """Return the keys that all rows share, in the first row's order."""
    for index, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise SplitError(
                f"pad() takes rows that are mappings of names to tensors; row {index} of the micro-batch is a "
                f"{type(row).__name__}; let the dataset return a dict, or pass another collate_fn"
            )
        different = sorted(str(key) for key in rows[0].keys() ^ row.keys())
        if different:
            raise SplitError(f"every row needs the same keys; row {index} of the micro-batch differs in {different}")
    return list(rows[0])


def _joined(key: str, values: list[Any], fill: Mapping[str, float]) -> Tensor | list[str]:
    if isinstance(values[0], str):
        return values
    tensors = _tensors(key, values, fill)
    shapes = [list(tensor.shape) for tensor in tensors]
    if all(shape == shapes[0] for shape in shapes):
        return torch.stack(tensors)
    if any(not shape or shape[1:] != shapes[0][1:] for shape in shapes):
        raise SplitError(
            f"only the first dimension can be padded; {key!r} has the shapes {_different(shapes)}; "
            "make the others equal in the dataset"
        )
    if key not in fill:
        raise SplitError(
            f"{key!r} has the shapes {_different(shapes)} and pad() was given no number to fill it with; "
            f"write pad({key}=...)"
        )
    return pad_sequence(tensors, batch_first=True, padding_value=fill[key])  # [rows, longest, ...]


def _different(shapes: list[list[int]]) -> str:
    """Return two shapes that differ, for a message."""
    other = next(shape for shape in shapes if shape != shapes[0])
    return f"{shapes[0]} and {other}"


def _tensors(key: str, values: list[Any], fill: Mapping[str, float]) -> list[Tensor]:
    """Return values as tensors of one dtype, which holds the number to fill with."""
    made = [None if isinstance(value, list | tuple) and not value else _tensor(key, value) for value in values]
    first = next((row for row, tensor in enumerate(made) if tensor is not None), 0)
    given = made[first]
    like = _tensor(key, [fill.get(key, 0.0)]) if given is None else given
    empty = like.new_empty(0, *like.shape[1:])
    tensors = [empty if tensor is None else tensor for tensor in made]
    for row, tensor in enumerate(tensors):
        if tensor.dtype != like.dtype:
            got = f"{_name(like.dtype)} and {_name(tensor.dtype)} in rows {first} and {row}"
            raise SplitError(f"{key!r} has the dtypes {got} of the micro-batch; give all rows the same in the dataset")
    if key in fill and not _holds(like.dtype, fill[key]):
        remedy = f"give a number of this kind, or convert {key!r} in the dataset"
        raise SplitError(f"pad({key}={fill[key]}) does not fit {key!r}, whose rows are {_name(like.dtype)}; {remedy}")
    return tensors


def _holds(dtype: torch.dtype, number: float) -> bool:
    """Return whether a number stays itself, but for the rounding of floating ones."""
    if dtype == torch.bool:
        return number in (0, 1)
    if dtype.is_floating_point or dtype.is_complex:
        return not torch.finfo(dtype).max < abs(number) < math.inf
    limits = torch.iinfo(dtype)
    return limits.min <= number <= limits.max and number == int(number)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _tensor(key: str, value: object) -> Tensor:
    if isinstance(value, Tensor):
        return value
    try:
        # a copy: read-only arrays, such as rows of a memory map, would make torch warn
        return torch.from_numpy(np.array(value))
    except (TypeError, ValueError) as error:
        kind = type(value).__name__
        raise SplitError(f"{key!r} holds a {kind}, which is no tensor, number or text: {error}") from error
