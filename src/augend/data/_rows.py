"""Where rows come from: every accepted kind of data behind one small interface."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Protocol, final, runtime_checkable

import numpy as np
from torch import Tensor
from torch.utils.data import IterableDataset, TensorDataset, default_collate

from augend.data._columns import Columns
from augend.data._order import Indices
from augend.errors import SplitError


@runtime_checkable
class MapStyle(Protocol):
    """What every map-style dataset has."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> object: ...


@runtime_checkable
class ManyAtOnce(Protocol):
    """What some map-style datasets have besides: torch's convention for fetching a list of rows in one call."""

    def __getitems__(self, indices: list[int], /) -> Sequence[object]: ...


class Source(ABC):
    """Rows by number."""

    @property
    @abstractmethod
    def given(self) -> object:
        """What rows are fetched from."""

    @property
    @abstractmethod
    def split(self) -> str:
        """How these rows were split from others; "" if they were not."""

    @property
    @abstractmethod
    def draws(self) -> bool:
        """Whether fetching a row may draw random numbers, so that each row must be seeded and fetched by itself."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def row(self, index: int) -> object:
        """Return one row."""

    @abstractmethod
    def listed(self, indices: Indices) -> list[object]:
        """Return rows as a list, as a ``collate_fn`` takes them."""

    @abstractmethod
    def collated(self, indices: Indices) -> object:
        """Return rows as one collated value: a mapping, a tuple or a tensor of ``[rows, ...]``."""


@final
class InMemory(Source):
    """Columns of tensors or arrays, memory-mapped ones included: rows are gathered in one call a column."""

    def __init__(self, columns: Columns) -> None:
        self._columns = columns

    @property
    def given(self) -> Columns:
        """The columns."""
        return self._columns

    @property
    def split(self) -> str:
        """Nothing was split."""
        return ""

    @property
    def draws(self) -> bool:
        """Indexing draws nothing."""
        return False

    def __len__(self) -> int:
        return self._columns.rows

    def row(self, index: int) -> object:
        """Return one row, shaped as the columns are: a mapping, a tuple or a tensor."""
        return self.listed(np.array([index]))[0]

    def listed(self, indices: Indices) -> list[object]:
        """Return rows one by one, gathered together."""
        gathered = self._columns.gather(indices)
        return [self._columns.shaped([column[row] for column in gathered]) for row in range(len(indices))]

    def collated(self, indices: Indices) -> object:
        """Return the columns of these rows."""
        return self._columns.shaped(self._columns.gather(indices))


@final
class Foreign(Source):
    """A map-style dataset of somebody else."""

    def __init__(self, rows: MapStyle, *, draws: bool) -> None:
        self._rows = rows
        self._draws = draws

    @property
    def given(self) -> MapStyle:
        """The dataset itself."""
        return self._rows

    @property
    def split(self) -> str:
        """Nothing was split."""
        return ""

    @property
    def draws(self) -> bool:
        """Whatever is not known to draw nothing may draw."""
        return self._draws

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, index: int) -> object:
        """Return the dataset's own row."""
        return self._rows[index]

    def listed(self, indices: Indices) -> list[object]:
        """Return the dataset's own rows, in one call if it can."""
        if isinstance(self._rows, ManyAtOnce):
            return list(self._rows.__getitems__(indices.tolist()))
        return [self._rows[index] for index in indices.tolist()]

    def collated(self, indices: Indices) -> object:
        """Return the rows collated by torch's default rule."""
        return default_collate(self.listed(indices))


def adapt(rows: object) -> Source:
    """Return any accepted kind of data as a `Source`.

    Args:
        rows: A tensor or numpy array ``[rows, ...]``, also memory-mapped; a mapping or a tuple of them with one
            first dimension; a map-style dataset (``len`` and ``[]``), torch's and Hugging Face's included.

    Raises:
        SplitError: It is something else, it has no rows, or its columns do not have the same number of rows.
    """
    source = rows if isinstance(rows, Source) else _source(rows)
    if not len(source):
        raise SplitError(f"rows must hold at least one row; this {type(rows).__name__} is empty")
    return source


def _source(rows: object) -> Source:
    if isinstance(rows, TensorDataset):
        rows = rows.tensors
    if isinstance(rows, (Tensor, np.ndarray)):
        return InMemory(Columns.single(rows))
    if isinstance(rows, Mapping):
        return InMemory(Columns.named(rows))
    if isinstance(rows, tuple) and any(isinstance(column, (Tensor, np.ndarray)) for column in rows):
        return InMemory(Columns.numbered(rows))
    hugging_face = sys.modules.get("datasets")  # whoever passes one of its datasets has imported it
    streams = (IterableDataset, hugging_face.IterableDataset) if hugging_face else (IterableDataset,)
    if isinstance(rows, streams):
        raise SplitError(
            f"rows must be countable and reachable by number, so that a run can stop and resume at any row; "
            f"{type(rows).__name__} is a stream; write it to a file or a list once and pass a map-style dataset"
        )
    if isinstance(rows, (str, bytes)) or not isinstance(rows, MapStyle):
        raise SplitError(
            "rows must be a tensor, an array, a mapping or tuple of them, or a dataset with len() and []; "
            f"got {type(rows).__name__}; give the dataset __len__ and __getitem__"
        )
    if hugging_face and isinstance(rows, hugging_face.Dataset):
        return Foreign(rows, draws=rows.format["type"] == "custom")  # a transform of the user's may draw
    return Foreign(rows, draws=True)
