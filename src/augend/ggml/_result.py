"""Result: what the physical batches of a part of an epoch measured."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final, final

import numpy as np
import torch
from torch import Tensor

from augend import Accuracy, Estimate, Mean, Tally
from augend.errors import ContractError
from augend.ggml._given import check_same, mapping, whole_number
from augend.ggml._parameters import Loss
from augend.ggml._rules import Compat, rules_of

_VERSION: Final = 1
_FOLDED_ROWS: Final = 2**16  # are read at once, so that a batch does not wait for a conversion
_NUMBERS: Final = ("period", "batch_rows", "count", "correct")


@final
class Result:
    """Losses, hits and predictions of any number of physical batches.

    By default the error bars are taken over rows and hold for any cut into batches. With ``compat`` they are
    ggml-opt's, over physical batches, which must be of one size and one period.

    Args:
        compat: Whose numbers.
    """

    def __init__(self, *, compat: Compat | None = None) -> None:
        self._by_batches = rules_of(compat).by_batches
        self._compat = compat
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self._kind: Loss | None = None  # of the first batch, as the two that follow
        self._period = 0
        self._batch_rows = 0
        self._count = 0
        self._correct: int | None = 0  # None where a batch came without
        self._losses: list[float] = []  # as stored, with compat
        self._mean = Mean()  # over rows, without
        self._waiting: list[Tally] = []  # for the mean
        self._waiting_rows = 0
        self._accuracy = Accuracy()
        self._judged = 0, 0  # rows and hits that are in the accuracy
        self._predictions: list[Tensor] = []

    def record(
        self,
        *,
        rows: int,
        loss: float,
        period: int,
        loss_kind: Loss,
        tally: Tally | None = None,
        predictions: Tensor | None = None,
        correct: int | None = None,
    ) -> None:
        """Add one physical batch.

        Args:
            rows: Of the batch.
            loss: As it is stored: divided by ``period`` where it is a mean. Used with compat.
            period: Physical batches of the window.
            loss_kind: Which loss it is.
            tally: The loss of each row over what it counts, ``[rows]``, not divided by ``period``. Used without
                compat, and then needed.
            predictions: ``[rows]``; of a cross entropy.
            correct: How many of them are right; where one batch is without, the accuracy is NaN until ``reset``.

        Raises:
            ContractError: The batch does not fit those before it, or its own rows. Nothing was added.
        """
        self.check(rows, period, loss_kind)
        self._check_rows(rows, period, tally, predictions, correct)
        if self._kind is None:
            self._kind, self._period, self._batch_rows = loss_kind, period, rows
        self._count += rows
        self._correct = None if self._correct is None or correct is None else self._correct + correct
        if predictions is not None:
            self._predictions.append(predictions.detach().to(torch.int32, copy=True))
        if self._by_batches or tally is None:
            self._losses.append(loss)
        else:
            self._wait(tally, loss_kind)

    def check(self, rows: int, period: int, kind: Loss) -> None:
        """Refuse a physical batch that does not fit those that are here.

        Args:
            rows: Of the batch.
            period: Physical batches of the window.
            kind: Which loss it is.

        Raises:
            ContractError: It is of another kind of loss, with compat of another size or period.
        """
        if self._kind is None:
            return
        if not self._by_batches:
            if kind is not self._kind:
                raise ContractError(f"a result holds one kind of loss, here {self._kind}; got {kind}: use another one")
            return
        here = self._batch_rows, self._period, self._kind.per_datapoint
        if (rows, period, kind.per_datapoint) != here:
            raise ContractError(
                "with compat all batches of a result have the same rows, period and kind of loss (mean or sum), here "
                f"{here[0]}, {here[1]} and {self._kind}; got {rows}, {period} and {kind}"
            )

    def append(self, other: Result) -> None:
        """Add the batches of another result, behind those that are here.

        Raises:
            ContractError: They are of another loss or compat, with compat also of another size or period, or the
                result is this very one. Nothing was added.
        """
        if other is self or not isinstance(other, Result) or other._compat != self._compat:
            raise ContractError(
                f"a result takes the batches of another one with compat {self._compat!r}; got {other!r:.80}"
            )
        if other._kind is None:
            return
        if self._kind is None:
            self._kind, self._period, self._batch_rows = other._kind, other._period, other._batch_rows
        self.check(other._batch_rows, other._period, other._kind)
        self._count += other._count
        hits = self._correct, other._correct
        self._correct = None if hits[0] is None or hits[1] is None else hits[0] + hits[1]
        self._predictions += other._predictions
        self._losses += other._losses
        other._fold()
        self._mean.merge(other._mean)

    @property
    def count(self) -> int:
        """How many rows were recorded."""
        return self._count

    @property
    def compat(self) -> Compat | None:
        """Whose numbers."""
        return self._compat

    def loss(self) -> Estimate:
        """Return the loss: its mean, or its sum where it is a SUM. 0 ± NaN where nothing was recorded.

        Numerics:
            A mean is that of ``augend.Mean``: the float64 nearest to the exact ratio, with its standard error over
            rows. A sum is nearest to the exact sum, its error √N·s, for the sample deviation s of N rows, within
            three roundings. With compat all is ggml's: squares in float32, sums in float64 one after another, a
            variance that may come out negative and then gives NaN, and for a SUM the deviation of one batch.

        Raises:
            TallyError: A recorded tally has a count that is negative or not finite.
        """
        if self._kind is None:
            return Estimate(0.0, math.nan, 0)
        if self._by_batches:
            return self._loss_by_batches(per_datapoint=self._kind.per_datapoint)
        self._fold()
        mean = self._mean.compute()
        return mean if self._kind.per_datapoint else _sum_of(self._mean, mean, self._count)

    def accuracy(self) -> Estimate:
        """Return the share of rows that were predicted right; NaN where a batch came without.

        With compat the error is √(a·(1-a)/(N-1)), which is 0 when all are right; else that of ``augend.Accuracy``.
        """
        if not self._count or self._correct is None:
            return Estimate(math.nan, math.nan, self._count)
        if self._by_batches:
            share = self._correct / self._count
            error = math.sqrt(share * (1.0 - share) / (self._count - 1)) if self._count > 1 else math.nan
            return Estimate(share, error, self._count)
        rows, hits = self._count - self._judged[0], self._correct - self._judged[1]  # since somebody asked last
        right = torch.arange(rows) < hits  # [rows]; which of them they were is in no bit
        self._accuracy.update_tally(Tally(right.to(torch.float32), torch.ones(rows, dtype=torch.int64)))
        self._judged = self._count, self._correct
        return self._accuracy.compute()

    def predictions(self) -> Tensor:
        """Return all predictions in the order of evaluation, int32 ``[count]``; none where the loss makes none."""
        return torch.cat([torch.zeros(0, dtype=torch.int32), *(part.cpu() for part in self._predictions)])

    def state_dict(self) -> dict[str, Any]:
        """Return version, compat and all that was recorded: plain numbers and text, and two tensors."""
        self._fold()
        return {
            "version": _VERSION,
            "compat": self._compat,
            "kind": None if self._kind is None else self._kind.value,
            "period": self._period,
            "batch_rows": self._batch_rows,
            "count": self._count,
            "correct": self._correct,
            "losses": torch.tensor(self._losses, dtype=torch.float32),  # [batches]
            "mean": self._mean.state_dict(),
            "predictions": self.predictions(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what ``state_dict`` returned, instead of everything recorded.

        Raises:
            ContractError: The state is of another version or compat, or damaged; the result is as it was.
        """
        _check_state(state, self._compat)
        mean = _loaded_mean(state["mean"])
        self.reset()
        self._kind = None if state["kind"] is None else Loss(state["kind"])
        self._period, self._batch_rows = state["period"], state["batch_rows"]
        self._count, self._correct = state["count"], state["correct"]
        self._losses, self._mean = state["losses"].tolist(), mean
        self._predictions = [state["predictions"].clone()] if len(state["predictions"]) else []

    def _check_rows(
        self, rows: int, period: int, tally: Tally | None, predictions: Tensor | None, correct: int | None
    ) -> None:
        if rows < 1 or period < 1:
            raise ContractError(f"a physical batch has at least 1 row and a window 1 batch; got {rows} and {period}")
        if correct is not None and not 0 <= correct <= rows:
            raise ContractError(f"of {rows} rows, from 0 to {rows} can be right; got {correct}")
        if predictions is not None and predictions.shape != (rows,):
            raise ContractError(f"predictions must be [{rows}], one a row; got {list(predictions.shape)}")
        if not self._by_batches and (tally is None or tally.total.shape != (rows,)):
            got = "none" if tally is None else list(tally.total.shape)
            raise ContractError(f"the loss must come with a tally of its {rows} rows; got {got}")

    def _wait(self, tally: Tally, kind: Loss) -> None:
        count = tally.count.clone() if kind.per_datapoint else torch.ones_like(tally.count)  # [rows]
        self._waiting.append(Tally(tally.total.detach().clone(), count))
        self._waiting_rows += len(tally.total)
        if self._waiting_rows >= _FOLDED_ROWS:
            self._fold()

    def _fold(self) -> None:
        if self._waiting:
            total = torch.cat([tally.total for tally in self._waiting])  # [waiting rows], as the count
            self._mean.update(Tally(total, torch.cat([tally.count for tally in self._waiting])))
            self._waiting, self._waiting_rows = [], 0

    def _loss_by_batches(self, *, per_datapoint: bool) -> Estimate:
        batches = len(self._losses)
        with np.errstate(all="ignore"):  # what overflows or is negative is an inf or a NaN, as in ggml
            losses = np.array(self._losses, dtype=np.float32)  # [batches]
            losses = losses * np.float32(self._period if per_datapoint else 1)
            total = np.cumsum(losses, dtype=np.float64)[-1]  # one after another: a sum() would add by pairs
            mean = total / batches
            variance = np.cumsum(losses * losses, dtype=np.float64)[-1] / batches - mean * mean
            spread = variance if per_datapoint else variance * batches
            error = float(np.sqrt(spread / (batches - 1))) if batches > 1 else math.nan
        return Estimate(float(mean if per_datapoint else total), error, self._count)


def _sum_of(rows: Mean, mean: Estimate, count: int) -> Estimate:
    """Return the sum of all rows.

    It is read from a mean over a power of two: one more row, of total 0, makes it so, and scaling back is exact.
    """
    size = 1 << count.bit_length()
    padded = Mean().merge(rows)
    padded.update(Tally(torch.zeros(1), torch.tensor([size - count])))
    return Estimate(padded.compute().value * size, mean.error * count, count)


def _check_state(state: Mapping[str, Any], compat: Compat | None) -> None:
    mapping("the state of a result", state, ["version", "compat", "kind", *_NUMBERS, "losses", "mean", "predictions"])
    check_same("a result", state, {"version": _VERSION, "compat": compat})
    kind = state["kind"]
    if kind is not None and not (isinstance(kind, str) and kind in {one.value for one in Loss}):
        raise ContractError(f"the state is of an unknown loss, {kind!r:.80}")
    for name in _NUMBERS:
        if name != "correct" or state[name] is not None:
            whole_number(f"{name} of a saved result", state[name], 0)
    for name, dtype in (("losses", torch.float32), ("predictions", torch.int32)):
        value = state[name]
        if not isinstance(value, Tensor) or value.dtype != dtype or value.dim() != 1 or value.is_meta:
            raise ContractError(f"{name} of a saved result must be {dtype}, one-dimensional; got {value!r:.80}")
    count, rows, batches, period = state["count"], state["batch_rows"], len(state["losses"]), state["period"]
    by_batches, empty = rules_of(compat).by_batches, kind is None
    told = (by_batches and batches * rows != count) or (not by_batches and batches > 0)
    if told or len(state["predictions"]) not in {0, count} or (state["correct"] or 0) > count:
        raise ContractError(f"the rows, batches and hits of a saved result do not fit each other: {dict(state)!r:.200}")
    if empty != (count == 0) or empty != (period == 0) or empty != (rows == 0):
        raise ContractError(f"a saved result is empty in one part and not in another: {dict(state)!r:.200}")


def _loaded_mean(saved: object) -> Mean:
    """Return the mean over rows that was saved."""
    if not isinstance(saved, Mapping):
        raise ContractError(f"the mean of a saved result must be a mapping; got {saved!r:.80}")
    mean = Mean()
    mean.load_state_dict(saved)
    return mean
