"""Columns of equal length: tensors, arrays and memory maps, gathered by row ids."""

from __future__ import annotations

import functools
import mmap
import os
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from augend.data._order import Indices
from augend.errors import SplitError

Column = Tensor | NDArray[Any]


class _MappedFile(NamedTuple):
    """How to open a memory map again: what another process is sent instead of the contents."""

    filename: str
    dtype: np.dtype[Any]
    offset: int
    shape: tuple[int, ...]
    order: Literal["C", "F"]


@final
class Columns:
    """Columns of one first dimension, and how they look together: as a mapping, a tuple or a single value.

    Args:
        columns: Tensors or arrays ``[rows, ...]``, with the name of each for messages.
        shaped: Makes of one tensor a column what a user sees: for whole batches and for single rows.

    Raises:
        SplitError: A column is neither tensor nor array, is 0-d, is of a dtype that torch lacks, or is longer or
            shorter than the first.
    """

    __slots__ = ("_columns", "shaped")

    def __init__(self, columns: Mapping[Hashable, object], shaped: Callable[[Sequence[Tensor]], Any]) -> None:
        self._columns = [_checked(name, column) for name, column in columns.items()]
        self.shaped = shaped
        for name, column in zip(columns, self._columns, strict=True):
            if len(column) != self.rows:
                first = next(iter(columns))
                raise SplitError(
                    f"columns must have one number of rows; {first!r} has {self.rows} and {name!r} has {len(column)}; "
                    "cut or complete one of them"
                )

    @staticmethod
    def single(column: Column) -> Columns:
        """Return one column, seen by itself."""
        return Columns({"rows": column}, _alone)

    @staticmethod
    def numbered(columns: Sequence[object]) -> Columns:
        """Return columns seen as a tuple."""
        return Columns(dict(enumerate(columns)), tuple)

    @staticmethod
    def named(columns: Mapping[Any, object]) -> Columns:
        """Return columns seen as a dict."""
        if not columns:
            raise SplitError("rows is a mapping without columns; give it at least one tensor or array")
        return Columns(columns, functools.partial(_as_mapping, list(columns)))

    @property
    def rows(self) -> int:
        """How many rows every column has."""
        return len(self._columns[0])

    def gather(self, indices: Indices) -> list[Tensor]:
        """Return the rows of each column, copied: of a memory map nothing else is read."""
        return [_gathered(column, indices) for column in self._columns]

    def __getstate__(self) -> tuple[list[Column | _MappedFile], Callable[[Sequence[Tensor]], Any]]:
        return [_described(column) for column in self._columns], self.shaped

    def __setstate__(self, state: tuple[list[Column | _MappedFile], Callable[[Sequence[Tensor]], Any]]) -> None:
        described, self.shaped = state
        self._columns = [_opened(column) if isinstance(column, _MappedFile) else column for column in described]


def _alone(columns: Sequence[Tensor]) -> Tensor:
    return columns[0]


def _as_mapping(keys: Sequence[Any], columns: Sequence[Tensor]) -> dict[Any, Tensor]:
    return dict(zip(keys, columns, strict=True))


def _checked(name: Hashable, column: object) -> Column:
    if not isinstance(column, (Tensor, np.ndarray)):
        raise SplitError(
            f"column {name!r} must be a tensor or an array; got {type(column).__name__}; "
            "convert it, or pass one map-style dataset as rows"
        )
    if not column.ndim:
        raise SplitError(f"column {name!r} is a single number; its first dimension must count the rows")
    if isinstance(column, np.ndarray):
        try:
            torch.from_numpy(np.empty(0, dtype=column.dtype))
        except (TypeError, ValueError) as error:
            raise SplitError(
                f"column {name!r} has dtype {column.dtype}, of which torch can make no tensor; "
                "convert it, or pass a map-style dataset with a collate_fn"
            ) from error
    return column


def _gathered(column: Column, indices: Indices) -> Tensor:
    if isinstance(column, Tensor):
        return column[torch.from_numpy(indices).to(column.device)]
    return torch.from_numpy(np.asarray(column[indices]))  # indexing by an array copies: writable, whatever the map is


def _described(column: Column) -> Column | _MappedFile:
    """Return a whole memory map as the way to open it; a view of one has lost its place in the file."""
    if not isinstance(column, np.memmap) or not isinstance(column.base, mmap.mmap) or column.filename is None:
        return column
    order: Literal["C", "F"] = "C" if column.flags.c_contiguous else "F"
    return _MappedFile(os.fspath(column.filename), column.dtype, column.offset, column.shape, order)


def _opened(file: _MappedFile) -> Column:
    return np.memmap(file.filename, mode="r", dtype=file.dtype, offset=file.offset, shape=file.shape, order=file.order)
