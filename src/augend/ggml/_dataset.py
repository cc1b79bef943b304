"""Dataset: datapoints and labels in shards, which are shuffled, batched and divided."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final, final

import torch
from torch import Tensor

from augend.errors import ContractError, SplitError
from augend.ggml._given import check_same, floats, mapping, numbers, whole_number
from augend.ggml._limits import Limits
from augend.ggml._random import Random
from augend.ggml._rules import Compat, rules_of

_VERSION: Final = 1
_SAVED: Final = ("permutation", "divided_rows", "divided")
_DEFAULT_LIMITS: Final = Limits()


@final
class Dataset:
    """Datapoints with or without labels, in shards of consecutive ones that stay together.

    The permutation of the shards is kept from call to call. By default a short last shard is a shard of its own and
    a short last batch is a batch; with ``compat`` only complete ones exist, and what is left over is never seen.

    Args:
        data: ``[count, ...]``, anything that torch turns into numbers; copied as float32 ``[count, width]``.
        labels: ``[count, ...]`` the same, as float32 ``[count, label_width]``; None for none.
        shard: Consecutive datapoints that are shuffled as one.
        limits: The largest sizes.
        compat: Whose rules hold: by ``"ggml"`` a shard may be larger than the data set, which then has none; by
            ``"prism"`` a shuffle draws once for each shard.

    Raises:
        ContractError: Data or labels are no numbers, empty, of different lengths or too large, or the shard does not
            fit.

    Example:
        >>> from augend.ggml import Dataset, Random
        >>> dataset = Dataset([[0.0, 0.5], [1.0, 1.5], [2.0, 2.5]], labels=[100, 101, 102])
        >>> dataset.shuffle(Random())
        >>> dataset.permutation
        (0, 2, 1)
        >>> dataset.batch(2, 1)
        (tensor([[1.0000, 1.5000]]), tensor([[101.]]))
    """

    def __init__(
        self,
        data: Any,
        labels: Any = None,
        *,
        shard: int = 1,
        limits: Limits = _DEFAULT_LIMITS,
        compat: Compat | None = None,
    ) -> None:
        self._rules = rules_of(compat)
        self._compat = compat
        self._data = _table("data", data, limits.width, limits.rows)
        self._labels = None if labels is None else _table("labels", labels, limits.label_width, limits.rows)
        if self._labels is not None and len(self._labels) != self.count:
            raise ContractError(f"data and labels must have as many rows; got {self.count} and {len(self._labels)}")
        if self.width == 0:
            raise ContractError(f"a datapoint must have at least one element; got data {list(self._data.shape)}")
        self._shard = whole_number("shard", shard, 1, None if compat == "ggml" else self.count)
        whole, rest = divmod(self.count, self._shard)
        self._shards = whole if self._rules.whole_batches else whole + (rest > 0)
        self._permutation = list(range(self._shards))
        self._order: Tensor | None = None  # of all rows; made anew when the permutation changed
        self._division: tuple[int, list[int]] | None = None  # rows trained on, and the permutation that chose them

    @property
    def data(self) -> Tensor:
        """The datapoints themselves, float32 ``[count, width]``, not permuted; writing to them changes the data set."""
        return self._data

    @property
    def labels(self) -> Tensor | None:
        """The labels themselves, float32 ``[count, label_width]``, or None; as ``data``."""
        return self._labels if self.label_width else None

    @property
    def count(self) -> int:
        """How many datapoints there are, including those of a shard that is not complete."""
        return len(self._data)

    @property
    def width(self) -> int:
        """Elements of a datapoint."""
        return self._data.shape[1]

    @property
    def label_width(self) -> int:
        """Elements of a label; 0 without labels."""
        return 0 if self._labels is None else self._labels.shape[1]

    @property
    def shard(self) -> int:
        """How many consecutive datapoints are shuffled as one."""
        return self._shard

    @property
    def shards(self) -> int:
        """How many shards there are."""
        return self._shards

    @property
    def permutation(self) -> tuple[int, ...]:
        """Which shard is where."""
        return tuple(self._permutation)

    @property
    def compat(self) -> Compat | None:
        """Whose rules hold."""
        return self._compat

    def batches(self, rows: int) -> int:
        """Return how many batches of so many rows there are, a short last one included; with compat, without it.

        Raises:
            ContractError: The rows are not whole shards.
        """
        rows = self._whole_shards(rows)
        seen = len(self._rows())
        return seen // rows if self._rules.whole_batches else math.ceil(seen / rows)

    def batch(self, rows: int, index: int) -> tuple[Tensor, Tensor | None]:
        """Copy one batch in the order of the permutation.

        Args:
            rows: Of a batch; whole shards.
            index: Which batch, from 0.

        Returns:
            Data ``[rows, width]`` and labels ``[rows, label_width]`` or None; fewer rows in a short last batch.

        Raises:
            ContractError: There is no such batch, or the rows are not whole shards.
        """
        chosen = self._chosen(rows, index)
        labels = self.labels
        return self._data.index_select(0, chosen), None if labels is None else labels.index_select(0, chosen)

    def read(self, rows: int, index: int, data: Tensor, labels: Tensor | None) -> int:
        """Write one batch into tensors that are there, without a copy between.

        Args:
            rows: As in ``batch``.
            index: As in ``batch``.
            data: ``[at least rows, width]``, contiguous, float32 or int32; takes the datapoints from its first row on.
            labels: float32 ``[at least rows, label_width]`` the same, or None to leave them out.

        Returns:
            How many rows were written; fewer in a short last batch.

        Raises:
            ContractError: As in ``batch``.
        """
        chosen = self._chosen(rows, index)
        if data.dtype == self._data.dtype:
            torch.index_select(self._data, 0, chosen, out=data[: len(chosen)])
        else:  # row numbers, for get_rows
            data[: len(chosen)] = self._data.index_select(0, chosen)
        if labels is not None and self.labels is not None:
            torch.index_select(self.labels, 0, chosen, out=labels[: len(chosen)])
        return len(chosen)

    def _chosen(self, rows: int, index: int) -> Tensor:
        """Return the rows of a batch, int64."""
        batches = self.batches(rows)
        if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < batches:
            raise ContractError(f"there are {batches} batches of {rows} rows, numbered from 0 on; got {index!r:.80}")
        return self._rows()[index * rows : (index + 1) * rows]

    def shuffle(self, random: Random, rows: int | None = None) -> None:
        """Permute shards in place, from the present permutation on.

        Args:
            random: What the permutation is drawn from.
            rows: How many rows from the first on take part, in whole shards; all if None or ``count``, those that a
                division held out, too.

        Raises:
            ContractError: There are not so many rows, or they are not whole shards; nothing was drawn.
        """
        shards = self._prefix("the rows that are shuffled", rows)
        if self._rules.one_draw_each:
            random.shuffle_one_by_one(self._permutation, shards)
        else:
            random.shuffle(self._permutation, shards)
        self._order = None

    def divide(self, random: Random, rows: int) -> None:
        """Choose which rows are trained on: shuffle all, so that the first ``rows`` are those.

        The choice is made once. Whoever divides again gets the first choice back, so that what one fit held out is
        not trained on by the next. With compat there is no such memory: it is ``shuffle`` of all rows.

        Args:
            random: What the permutation is drawn from; as much is drawn when the choice was made before.
            rows: How many rows are trained on, in whole shards or all. A shard that is short is held out, or last.

        Raises:
            ContractError: There are not so many rows, or they are not whole shards.
            SplitError: It was divided at another number of rows before; see ``forget_division``.
        """
        if self._rules.whole_batches:
            self.shuffle(random)
            return
        shards = self._prefix("the rows that are trained on", rows)
        self.check_division(rows)
        self._permutation = list(range(self._shards))
        self.shuffle(random)
        if self._division is None:
            _hold_out_short(self._permutation, shards, self.count % self._shard)
            self._division = rows, list(self._permutation)
        self._permutation = list(self._division[1])

    def check_division(self, rows: int) -> None:
        """Refuse to train on rows that were held out.

        Raises:
            SplitError: The data set was divided at another number of rows before; see ``forget_division``.
        """
        if self._division is not None and self._division[0] != rows:
            raise SplitError(
                f"of this data set {self._division[0]} rows were chosen for training before, and now {rows} are asked "
                "for: rows that were held out would be trained on, or the other way round. Ask for as many, or call "
                "forget_division() first"
            )

    def forget_division(self) -> None:
        """Allow another division: rows that were held out may be trained on, and the other way round."""
        self._division = None

    def state_dict(self) -> dict[str, Any]:
        """Return version, sizes, permutation and division; the data are the caller's to keep.

        ``permutation`` and ``divided`` are int64 tensors, the latter empty where nothing was divided.
        """
        rows, divided = self._division or (0, [])
        return {
            "version": _VERSION,
            "compat": self._compat,
            **self._sizes(),
            "permutation": torch.tensor(self._permutation, dtype=torch.int64),
            "divided_rows": rows,
            "divided": torch.tensor(divided, dtype=torch.int64),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take permutation and division back.

        Raises:
            ContractError: The state is of another data set, or damaged; nothing changed.
        """
        own = {"version": _VERSION, "compat": self._compat, **self._sizes()}
        mapping("the state of a data set", state, [*own, *_SAVED])
        check_same("a data set", state, own)
        permutation = self._loaded(state["permutation"])
        rows = whole_number("the rows that were chosen for training", state["divided_rows"], 0, self.count)
        self._prefix("the rows that were chosen for training", rows)
        divided = state["divided"]
        whole = isinstance(divided, Tensor) and not divided.numel() and not rows
        division = None if whole else (rows, self._loaded(divided))
        self._permutation, self._order, self._division = permutation, None, division

    def _loaded(self, saved: object) -> list[int]:
        if not isinstance(saved, Tensor) or saved.dtype != torch.int64 or saved.dim() != 1 or saved.is_meta:
            raise ContractError(f"a saved permutation is int64 [shards]; got {saved!r:.80}")
        shards: list[int] = saved.tolist()
        if sorted(shards) != list(range(self._shards)):
            raise ContractError(f"a permutation must have {self._shards} shards, each once; got {shards!r:.80}")
        return shards

    def _sizes(self) -> dict[str, int]:
        return {"count": self.count, "width": self.width, "label_width": self.label_width, "shard": self._shard}

    def _whole_shards(self, rows: int) -> int:
        whole_number("rows", rows, 1, None)
        if rows % self._shard:
            raise ContractError(f"a batch must be whole shards of {self._shard} rows; got {rows} rows")
        return rows

    def _prefix(self, what: str, rows: int | None) -> int:
        """Return how many shards so many rows are."""
        if rows is None:
            return self._shards
        whole_number(what, rows, 0, self.count)
        if rows == self.count and not self._rules.whole_batches:
            return self._shards
        if rows % self._shard:
            raise ContractError(f"{what} must be whole shards of {self._shard} rows; got {rows} of {self.count}")
        return rows // self._shard

    def _rows(self) -> Tensor:
        """Return all rows that can be seen, in the order of the permutation: int64 ``[seen]``."""
        if self._order is None:
            first = torch.tensor(self._permutation, dtype=torch.int64) * self._shard  # [shards]
            rows = (first[:, None] + torch.arange(self._shard)).reshape(-1)  # [shards * shard]
            self._order = rows[rows < self.count]
        return self._order


def _table(what: str, values: Any, widest: int, longest: int) -> Tensor:
    """Return a copy as float32 ``[count, width]``, after a look at the sizes."""
    tensor = numbers(what, values)
    if tensor.dim() == 0 or len(tensor) == 0:
        raise ContractError(
            f"{what} must be real numbers [count, ...] with at least one row; got {tensor.dtype} {list(tensor.shape)}"
        )
    count, width = len(tensor), math.prod(tensor.shape[1:])
    if count > longest or width > widest:
        raise ContractError(f"{what} may be [{longest}, {widest}] at most; got [{count}, {width}]: see Limits")
    return floats(what, tensor).reshape(count, width)


def _hold_out_short(permutation: list[int], shards: int, short: int) -> None:
    """Move a short last shard to the end, if it is among those that are trained on.

    Those are whole shards, so with a short one among them the next shard would be cut, and its rows held out in part.
    """
    if short and shards < len(permutation):
        place = permutation.index(len(permutation) - 1)
        if place < shards:
            permutation[place], permutation[-1] = permutation[-1], permutation[place]
