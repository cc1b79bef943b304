"""Batches: where a run is in its data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, final

from augend._group import Mesh
from augend.data import _state
from augend.data._batch import Batch
from augend.data._check import positive, whole_number, yes_or_no
from augend.data._feed import Feed
from augend.data._fetch import Fetcher
from augend.data._plan import Plan
from augend.data._position import Position
from augend.data._rows import adapt
from augend.errors import StateError


@final
class Batches:
    """Rows in batches: one batch an optimizer step, over all ranks, in an order that follows from a seed.

    Iterating yields a `Batch` for each step of all epochs. Each ``next`` reads the position, which counts finished
    backwards and not what was fetched, so a state may be loaded at any time: the loaded position comes next. A new
    iterator begins at the position and ends the older ones. A batch left untouched is skipped.

    The order of an epoch is a permutation of shards computed from (seed, epoch), in constant memory. A batch is cut
    into micro-batches before they are dealt to ranks, so the cut does not depend on the number of ranks. Rows are
    fetched by torch's `DataLoader`. Random state belongs to what is computed: each row of a map-style dataset is
    fetched with generators seeded by (seed, epoch, row), each micro-batch is handed out with generators seeded by
    (seed, epoch, step, first row, accumulator), on any rank and in any worker.

    Args:
        rows: A tensor or array ``[rows, ...]``, memory-mapped ones included; a mapping or tuple of them with one
            first dimension (or a ``TensorDataset``); a map-style dataset, Hugging Face's included; a part of
            `augend.split`. The first three are gathered without a Python loop over rows.
        batch_size: Rows of one optimizer step, over all ranks. The last batch of an epoch may have fewer.
        microbatch_size: Rows that go through the model at once.
        shard_size: How many consecutive rows are shuffled as one: more than 1 makes reads of files longer.
        seed: Any integer.
        shuffle: Whether each epoch has an order of its own; the order of the rows if not.
        epochs: How many; None for ever.
        drop_last: Whether rows that do not fill a batch are left out of an epoch (others in each epoch).
        mesh: The axes whose ranks share a batch, not those of tensor parallelism; None for the default process group,
            or one process alone.
        seed_random: Whether random state is seeded as said above. If not, a map-style dataset with
            ``__getitems__`` is asked for all rows of a micro-batch at once, and nothing is seeded.
        loader: ``collate_fn``, ``num_workers``, ``pin_memory``, ``prefetch_factor``, ``worker_init_fn`` and so on, as
            torch's `DataLoader` takes them. A ``collate_fn`` gets a list of rows.

    Raises:
        SplitError: A size, the rows or an option cannot be used; the message names it and says what to do.
        PlacementError: The mesh cannot be served.

    Example:
        >>> data = augend.Batches({"x": torch.arange(10)}, batch_size=4, microbatch_size=3, shuffle=False, epochs=1)
        >>> for batch in data:
        ...     print(batch.step, [microbatch["x"].tolist() for microbatch in batch])
        0 [[0, 1, 2], [3]]
        1 [[4, 5, 6], [7]]
        2 [[8, 9]]
    """

    def __init__(
        self,
        rows: object,
        *,
        batch_size: int,
        microbatch_size: int,
        shard_size: int = 1,
        seed: int = 0,
        shuffle: bool = True,
        epochs: int | None = None,
        drop_last: bool = False,
        mesh: Mesh | None = None,
        seed_random: bool = True,
        **loader: Any,
    ) -> None:
        source = adapt(rows)
        self._plan = Plan(
            rows=len(source),
            batch_size=positive("batch_size", batch_size, remedy="it is the rows of one optimizer step"),
            microbatch_size=positive("microbatch_size", microbatch_size, remedy="it is the rows of one forward"),
            shard_size=positive("shard_size", shard_size, remedy="1 shuffles row by row"),
            seed=whole_number("seed", seed, remedy="any integer will do, for example seed=0"),
            shuffle=yes_or_no("shuffle", shuffle),
            drop_last=yes_or_no("drop_last", drop_last),
            epochs=None if epochs is None else positive("epochs", epochs, remedy="None goes on for ever"),
            split=source.split,
        )
        self._source = source
        self._mesh = mesh
        self._seed_random = yes_or_no("seed_random", seed_random)
        self._loader = loader
        options = {name: value for name, value in loader.items() if name != "collate_fn"}
        fetcher = Fetcher(source, self._plan, loader.get("collate_fn"), seed_random=seed_random)
        self._feed = Feed(self._plan, fetcher, mesh, options)
        self._position = Position()
        self._turn: _Turn | None = None

    @property
    def steps_per_epoch(self) -> int:
        """Batches in one epoch."""
        return self._plan.steps_per_epoch

    @property
    def rows_per_epoch(self) -> int:
        """Rows that one epoch visits: all of them, unless the last ones are dropped."""
        return self._plan.rows_per_epoch

    @property
    def epochs(self) -> int | None:
        """Epochs after which iteration ends; None where it goes on for ever."""
        return self._plan.epochs

    def __iter__(self) -> Iterator[Batch]:
        """Return an iterator from the position on over all epochs; older ones end."""
        return self._begin(self._plan.end)

    def epoch(self) -> Iterator[Batch]:
        """Return an iterator from the position on over the rest of its epoch; older ones end.

        It yields nothing where the last batch of the epoch is closed and the next epoch has not begun: the place
        where a resumed run does what it does between epochs.
        """
        return self._begin(self._plan.end_of_epoch)

    @property
    def current_epoch(self) -> int:
        """The epoch that ``epoch()`` goes through next, from 0: that of the batch at the position.

        Right after the last step of an epoch it is still that one, and ``epoch()`` is empty: so
        ``for epoch in range(data.current_epoch, epochs)`` does after a resume what was still to do behind its end.
        """
        return self._plan.epoch_of(self._position.step)

    @property
    def mesh(self) -> Mesh | None:
        """The axes whose ranks share each batch; None for the default process group."""
        return self._mesh

    @property
    def owners(self) -> tuple[object | None, ...]:
        """The accumulators by their ordinals; None for one that is gone."""
        return tuple(owner() for owner in self._position.owners)

    @property
    def tracked(self) -> bool:
        """Whether an accumulator tells what is done of the batch at hand; True while there is none at hand."""
        return self._position.place is None or any(owner is not None for owner in self.owners)

    def register(self, owner: object) -> int:
        """Enrol an accumulator and return its ordinal; a known one keeps the one it has.

        Not collective, but every rank must enrol its accumulators in one order.
        """
        return self._position.enrol(owner)

    def arrange(self, places: Mapping[int, object]) -> None:
        """Give accumulators these ordinals, and with them what the loaded position says is done there.

        For a position that was loaded into another program than the one that saved it. Whoever had one of these
        ordinals before is forgotten.

        Not collective, but every rank must arrange its accumulators in one order.
        """
        self._position.arrange(places)

    def unregister(self, owner: object) -> None:
        """Forget an accumulator that will not come back, with what it had pending; one that is unknown is no error.

        Its ordinal goes to the next new one, which therefore draws as it did.

        Not collective, but every rank must forget its accumulators in one order.
        """
        self._position.leave(owner)

    def fresh(self, *, epochs: int | None = 1, shuffle: bool = False) -> Batches:
        """Return an independent pass over all of the same rows: from step 0, with nothing shared but the rows."""
        plan = self._plan
        return Batches(
            self._source,
            batch_size=plan.batch_size,
            microbatch_size=plan.microbatch_size,
            shard_size=plan.shard_size,
            seed=plan.seed,
            shuffle=shuffle,
            epochs=epochs,
            mesh=self._mesh,
            seed_random=self._seed_random,
            **self._loader,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the position in plain numbers and text, valid for any number of ranks and any cut.

        ``version``; ``contract`` (what the rows, their order and the batches follow from); ``step``; ``ledger``, for
        each accumulator the rows done and whether it closed the batch; ``microbatch_size``, for information.
        """
        return _state.saved(self._plan, self._position)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a saved position; batches at hand are over, the running iterator goes on from there.

        Raises:
            ContractError: The state is damaged, or was saved over other rows or with other arguments; the position
                is as it was.
        """
        self.prepare_load(state)()

    def prepare_load(self, state: Mapping[str, Any]) -> Callable[[], None]:
        """Check a saved position as ``load_state_dict`` does, and stay where the data is.

        Returns:
            What goes there, and cannot fail.

        Raises:
            ContractError: As ``load_state_dict``.
        """
        step, ledger = _state.checked(state, self._plan)

        def commit() -> None:
            self._position.go_to(step, ledger)
            if self._turn is not None:
                self._turn.end = None

        return commit

    def _begin(self, find_end: Callable[[int], float]) -> Iterator[Batch]:
        self._position.place = None
        self._turn = _Turn(find_end)
        return _Pass(self, self._turn)

    def _next(self, turn: _Turn) -> Batch:
        if turn is not self._turn:
            raise StateError("this iterator ended when a newer one over the same Batches began; use the newer one")
        position = self._position
        if turn.end is None:
            turn.end = turn.find_end(position.step)
        position.move_on()
        if position.step >= self._plan.steps:
            self._feed.close()
        if position.step >= turn.end:
            raise StopIteration
        return Batch(self._feed, position, seed_random=self._seed_random)


@final
@dataclass(slots=True, eq=False)
class _Turn:
    """Which iterator may go on, and where it ends: found at its first batch, and again after a load."""

    find_end: Callable[[int], float]
    end: float | None = None


@final
class _Pass(Iterator[Batch]):
    """An iterator that reads the position each time."""

    __slots__ = ("_data", "_turn")

    def __init__(self, data: Batches, turn: _Turn) -> None:
        self._data = data
        self._turn = turn

    def __next__(self) -> Batch:
        return self._data._next(self._turn)  # noqa: SLF001 - one thing in two classes: the data and its iterator
