"""Losses: what a graph's outputs and labels add up to, row by row, or as one number in ggml's float order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, final

import numpy as np
import torch
from torch import Tensor

from augend import Tally
from augend.errors import ContractError
from augend.ggml._nodes import Node, Shape
from augend.ggml._parameters import Loss, rounded
from augend.ggml._rules import Rules

_OTHERS: Final = (0, 1, 3)  # of [ne3, ne2, ne1, ne0] all but the datapoints


@final
@dataclass(frozen=True, slots=True)
class Measured:
    """The loss of one physical batch.

    Args:
        offered: What the gradients are taken of, and what they are divided by: nothing where the loss is a sum.
        rows: Total and items of each datapoint, without a graph; None where only the whole is known.
        loss: The value that ggml stores: float32, scaled by one over the physical batches of a window unless it is a
            sum.
    """

    offered: Tally
    rows: Tally | None
    loss: float


def measure(outputs: Tensor, labels: Tensor | None, loss: Loss, period: int, rules: Rules) -> Measured:
    """Measure a physical batch.

    Args:
        outputs: ``[ne3, ne2, rows, ne0]``.
        labels: The same shape; None where the loss has none.
        loss: Which.
        period: Physical batches in a window.
        rules: Whose numbers are wanted.
    """
    compared = outputs if labels is None else labels  # a loss without labels reads none
    if rules.lazy_gradients:
        value = _scaled(outputs, compared, loss, period, rules)
        return Measured(Tally(value, torch.ones_like(value, dtype=torch.int64)), None, value.item())
    totals = _TOTALS[loss](outputs, compared)  # [rows]
    items = items_of(loss, (*reversed(outputs.shape),))
    count = torch.full_like(totals, items, dtype=torch.int64, requires_grad=False)
    rows = Tally(totals.detach(), count)
    whole = totals.detach().sum(dtype=torch.float64).item()
    divisor = 0 if loss is Loss.SUM else items * len(totals)
    # As one row: the accumulator's error bars over rows would be measured a second time, and read by nobody.
    offered = Tally(totals.sum().reshape(1), torch.tensor([divisor], device=totals.device))
    return Measured(offered, rows, rounded(whole / (period * divisor) if divisor else whole))


def check_rows(outputs: Tensor, declared: Node, rows: int, all_rows: int) -> None:
    """Refuse outputs of a short batch that did not become fewer with its rows.

    Args:
        outputs: ``[ne3, ne2, rows, ne0]``.
        declared: Their node.
        rows: How many rows went in.
        all_rows: Of a whole batch.

    Raises:
        ContractError: There are others than the rows that went in make.
    """
    if outputs.shape[2] * all_rows != declared.shape[1] * rows:
        raise ContractError(
            f"{rows} of {all_rows} rows went in, and {outputs.shape[2]} of {declared.shape[1]} came out of "
            f"{declared!r}: another tensor of the graph has the declared number of rows, so every batch must have it"
        )


def items_of(loss: Loss, shape: tuple[int, ...] | Shape) -> int:
    """Return what a datapoint's total is divided by: its elements, or one where a row is one classification."""
    return 1 if loss in {Loss.CROSS_ENTROPY, Loss.SUM} else shape[0] * shape[2] * shape[3]


# ------------------------------------------------------------------ totals of rows


def _sums(outputs: Tensor, labels: Tensor) -> Tensor:  # noqa: ARG001  # one signature for all losses
    return outputs.sum(dim=_OTHERS)


def _squares(outputs: Tensor, labels: Tensor) -> Tensor:
    return (outputs - labels).square().sum(dim=_OTHERS)


def _cross_entropies(outputs: Tensor, labels: Tensor) -> Tensor:
    logarithms = outputs.log_softmax(dim=-1)
    return -torch.where(labels == 0, 0.0, labels * logarithms).sum(dim=_OTHERS)  # nothing times -inf is nothing


_TOTALS: Final[dict[Loss, Callable[[Tensor, Tensor], Tensor]]] = {
    Loss.MEAN: _sums,
    Loss.SUM: _sums,
    Loss.CROSS_ENTROPY: _cross_entropies,
    Loss.MEAN_SQUARED_ERROR: _squares,
}


# ------------------------------------------------------------- in ggml's float order


def _scaled(outputs: Tensor, labels: Tensor, loss: Loss, period: int, rules: Rules) -> Tensor:
    if loss is Loss.CROSS_ENTROPY:
        value: Tensor = _CrossEntropy.apply(outputs, labels, period, rules.last_of_ties)  # type: ignore[no-untyped-call]  # torch's
        return value
    terms = outputs if loss in {Loss.MEAN, Loss.SUM} else (outputs - labels) * (outputs - labels)
    whole = terms.sum(dtype=torch.float64).to(torch.float32)
    return whole if loss is Loss.SUM else whole * _inverse(period * outputs.numel())


def _inverse(count: int) -> float:
    return rounded(1.0 / rounded(count))  # one rounding: float64 holds a quotient of float32 with bits to spare


class _CrossEntropy(torch.autograd.Function):
    """ggml's cross entropy, whose gradient is that of labels that sum to 1, whatever they sum to."""

    @staticmethod
    def forward(ctx: Any, outputs: Tensor, labels: Tensor, period: int, by_reciprocal: bool) -> Tensor:  # noqa: FBT001  # autograd takes no keywords
        rows = outputs.numel() // outputs.shape[-1]
        shifted = outputs - outputs.amax(dim=-1, keepdim=True)
        exponentials = shifted.exp()
        sums = exponentials.sum(dim=-1, keepdim=True, dtype=torch.float64).to(torch.float32)
        ctx.save_for_backward(exponentials, sums, labels)
        ctx.rows, ctx.period, ctx.by_reciprocal = rows, period, by_reciprocal
        terms = ((shifted - sums.log()) * labels).sum(dim=-1, dtype=torch.float64).to(torch.float32).reshape(-1)
        running = np.cumsum(terms.numpy(), dtype=np.float32)  # row by row in float32, as one thread of ggml adds
        whole = torch.from_numpy(running[-1:]).reshape(())
        return whole * rounded(-1.0 / rows) * _inverse(period)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        exponentials, sums, labels = ctx.saved_tensors
        if ctx.by_reciprocal:
            softmax, factor = exponentials * sums.reciprocal(), rounded(_inverse(ctx.period) / ctx.rows)
        else:
            softmax, factor = exponentials / sums, _inverse(ctx.period * ctx.rows)
        return gradient * ((softmax - labels) * factor), None, None, None
