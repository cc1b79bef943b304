"""Mean, Accuracy, Perplexity: what is measured over all micro-batches, exactly."""

from __future__ import annotations

import math
from typing import final

import torch
from torch import Tensor

from augend._numerics import on_grid
from augend._tally import Tally
from augend.errors import TallyError
from augend.metrics._estimate import Estimate
from augend.metrics._metric import Metric, Offered


@final
class Mean(Metric):
    """The mean of an item: the sum of all totals over the sum of all counts, with a standard error over rows.

    Example:
        >>> import torch
        >>> mean = augend.Mean()
        >>> mean.update(augend.Tally(torch.ones(8), torch.ones(8)))
        >>> mean.update(augend.Tally(torch.tensor([6.0, 6.0]), torch.ones(2)))
        >>> print(mean.compute())
        2.000 ± 0.667
    """

    def update(self, tally: Tally, microbatch: Offered | None = None, *, groups: Tensor | None = None) -> None:
        """Add the rows of a tally.

        Args:
            tally: Totals and counts, one a row.
            microbatch: Where the rows came from. A filler's are ignored, and a later offer of a batch replaces what
                its earlier offer added. None: the rows are added as they are.
            groups: ``[rows]``, int64: rows that were sampled together have one number, also over several calls, and
                are one unit of the standard error. A row without a group is a unit of its own.

        Raises:
            TallyError: A count is negative or not finite, or the groups do not fit. Nothing was added.
        """
        self._add(tally, microbatch, groups)

    def compute(self) -> Estimate:
        """Return the mean; see ``Estimate.ratio``. Changes nothing; not collective."""
        return Estimate.ratio(self._moments())


@final
class Perplexity(Metric):
    """The exponential of the mean negative log-likelihood of an item.

    Example:
        >>> import torch
        >>> perplexity = augend.Perplexity()
        >>> perplexity.update(augend.Tally(torch.tensor([2.0, 6.0]), torch.tensor([2, 2])))
        >>> print(perplexity.compute())
        7.39 ± 7.39
    """

    def update(self, tally: Tally, microbatch: Offered | None = None, *, groups: Tensor | None = None) -> None:
        """Add the rows of a tally of negative log-likelihoods, in nats.

        Args:
            tally: Totals and counts, one a row.
            microbatch: As in ``Mean.update``.
            groups: As in ``Mean.update``.

        Raises:
            TallyError: As in ``Mean.update``.
        """
        self._add(tally, microbatch, groups)

    def compute(self) -> Estimate:
        """Return exp(mean). Changes nothing; not collective.

        Returns:
            ``error`` is that of the mean times the value (delta method, first order; Oehlert 1992). ``low`` and
            ``high`` are the exponentials of the ends of the mean's interval, hence never negative.

        Numerics:
            One rounding of the mean, a relative error of abs(mean) · 2^-53 after exp, and that of the C library's exp.
        """
        mean = Estimate.ratio(self._moments())
        value = _exp(mean.value)
        return Estimate(value, value * mean.error, mean.count, low=_exp(mean.low), high=_exp(mean.high))


@final
class Accuracy(Metric):
    """The share of items that were predicted right, with an interval that is not empty when all were.

    Example:
        >>> import torch
        >>> accuracy = augend.Accuracy()
        >>> accuracy.update(torch.eye(3), torch.tensor([0, 1, 2]))
        >>> print(accuracy.compute())
        1.000 ± 0.250
    """

    def update(
        self,
        logits: Tensor,
        labels: Tensor,
        *,
        ignore_index: int = -100,
        microbatch: Offered | None = None,
        groups: Tensor | None = None,
    ) -> None:
        """Compare predictions with labels. The prediction is the largest logit, of equal ones the first.

        Args:
            logits: ``[rows, ..., classes]``, floating. A NaN in an item that counts makes the accuracy NaN.
            labels: ``[rows, ...]``, integers.
            ignore_index: The label of items that do not count.
            microbatch: As in ``Mean.update``.
            groups: As in ``Mean.update``.

        Raises:
            TallyError: Shapes or types do not fit, or a label is no class. Nothing was added.
        """
        self._add(_hits(logits.detach(), labels, ignore_index), microbatch, groups)

    def update_tally(self, tally: Tally, microbatch: Offered | None = None, *, groups: Tensor | None = None) -> None:
        """Add hits that were counted elsewhere, as of the five best classes or of exact matches.

        Args:
            tally: Hits and items, one of each a row: ``0 <= total <= count``.
            microbatch: As in ``Mean.update``.
            groups: As in ``Mean.update``.

        Raises:
            TallyError: More hits than items, or as in ``Mean.update``. Nothing was added.
        """
        total, count = tally.total.detach(), tally.count
        if count.is_floating_point():
            total, count = on_grid(total), on_grid(count)  # rounded alike, so that all right stays exactly 1
        wrong = ((total < 0) | (total > count)).reshape(-1)
        if bool(wrong.any()):
            row = int(wrong.nonzero()[0])
            got = f"{total.reshape(-1)[row].item()} hits of {count.reshape(-1)[row].item()}"
            raise TallyError(f"a row's hits must be from 0 to its items; got {got} in row {row}")
        self._add(Tally(total, count), microbatch, groups)

    def compute(self) -> Estimate:
        """Return the share of hits; see ``Estimate.proportion``. Changes nothing; not collective."""
        return Estimate.proportion(self._moments())


def _hits(logits: Tensor, labels: Tensor, ignore_index: int) -> Tally:
    """Count the hits and the items of every row."""
    if labels.dim() == 0 or logits.shape[:-1] != labels.shape or logits.shape[-1] == 0:
        shapes = f"{list(logits.shape)} and {list(labels.shape)}"
        raise TallyError(f"logits must be [rows, ..., classes] and labels [rows, ...]; got {shapes}")
    if not logits.is_floating_point() or labels.dtype.is_floating_point or labels.dtype == torch.bool:
        raise TallyError(f"logits must be floating and labels integers; got {logits.dtype} and {labels.dtype}")
    counted = labels != ignore_index  # [rows, ...]
    unknown = counted & ((labels < 0) | (labels >= logits.shape[-1]))
    if bool(unknown.any()):
        label = int(labels[unknown].reshape(-1)[0])
        raise TallyError(f"labels must be from 0 to {logits.shape[-1] - 1} or {ignore_index}; got {label}")
    largest, predicted = logits.max(dim=-1)  # [rows, ...] both; the first of equal ones
    hits = ((predicted == labels) & counted).to(torch.float64)
    hits = hits.masked_fill(counted & largest.isnan(), math.nan)
    shape = len(labels), math.prod(labels.shape[1:])  # [rows, items]
    return Tally(hits.reshape(shape).sum(dim=1), counted.reshape(shape).sum(dim=1))


def _exp(exponent: float) -> float:
    try:
        return math.exp(exponent)
    except OverflowError:
        return math.inf
