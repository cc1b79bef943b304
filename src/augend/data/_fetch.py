"""Fetching the rows of a micro-batch: what runs in DataLoader's workers, or in the main process without them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, final

from torch.utils.data import Dataset, default_collate

from augend.data._order import GivenOrder, Indices, ShuffledOrder
from augend.data._plan import Plan
from augend.data._random import seed_host
from augend.data._rows import Source

_Fetched = TypeVar("_Fetched")

Collate = Callable[[list[Any]], Any]


class Request(NamedTuple):
    """Rows of a step's batch, as three numbers: a worker computes their ids by itself."""

    step: int
    first_row: int
    rows: int


class Fetched(NamedTuple):
    """Collated rows, and which ones they are."""

    request: Request
    data: object


@final
class Fetcher(Dataset[Fetched]):
    """Fetches and collates the rows of a request, with random state that depends on the request alone.

    Attributes:
        rows: The map-style dataset that rows come from, or the columns in memory; a ``worker_init_fn`` finds its copy
            at ``torch.utils.data.get_worker_info().dataset.rows``.
    """

    def __init__(self, source: Source, plan: Plan, collate: Collate | None, *, seed_random: bool) -> None:
        self.rows = source.given
        self._source = source
        self._plan = plan
        self._collate = collate
        self._seed_random = seed_random
        self._epoch = -1
        self._order: ShuffledOrder | GivenOrder = GivenOrder()

    def __getitem__(self, request: Request) -> Fetched:
        """Return the collated rows of one micro-batch."""
        indices = self._indices(request)
        if self._collate is None and not self._row_by_row:
            return Fetched(request, self._source.collated(indices))
        rows = self._seeded_rows(indices) if self._row_by_row else self._source.listed(indices)
        collate = default_collate if self._collate is None else self._collate
        if self._seed_random:
            seed_host("collate", self._plan.seed, self._epoch, request.step, request.first_row)
        return Fetched(request, collate(rows))

    @property
    def _row_by_row(self) -> bool:
        return self._seed_random and self._source.draws

    def _indices(self, request: Request) -> Indices:
        epoch = self._plan.epoch_of(request.step)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, self._plan.order(epoch)
        return self._order.rows_at(self._plan.positions(*request))

    def _seeded_rows(self, indices: Indices) -> list[object]:
        rows = []
        for index in indices.tolist():
            seed_host("row", self._plan.seed, self._epoch, index)
            rows.append(self._source.row(index))
        return rows


def as_it_is(fetched: _Fetched) -> _Fetched:
    """Return what was fetched: collation has happened, and torch's default would turn arrays into tensors."""
    return fetched
