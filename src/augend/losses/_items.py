"""What all losses share: the working dtype, which items are scored, and sums over the items of a row.

A row of shape ``[...]`` holds items. ``hidden`` marks the items that are not scored; whatever stands there
(also inf and nan) reaches neither the total nor a gradient.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from augend._tally import Tally
from augend.errors import TallyError

UPCAST: Final = (torch.float16, torch.bfloat16)
_KEPT: Final = (torch.float32, torch.float64)


def working(values: Tensor, name: str) -> Tensor:
    """Return floating values in the dtype losses are computed in: float32 for 16 bits, else their own."""
    if values.dim() < 1:
        raise TallyError(f"{name} must have rows in its first dim; got a 0-d tensor: losses are never averaged here")
    if values.dtype in UPCAST:
        return values.float()
    if values.dtype not in _KEPT:
        raise TallyError(f"{name} must be float32, float64, bfloat16 or float16; got {values.dtype}")
    return values


def without_graph(weights: Tensor, name: str) -> Tensor:
    """Return the weights, which must not require a gradient: the mean divides by their sum."""
    if weights.requires_grad:
        raise TallyError(f"{name} must not require a gradient, because the mean divides by their sum; use detach()")
    return weights


def spread(item_weights: Tensor, shape: torch.Size) -> Tensor:
    """Expand weights over the leading dims of ``shape`` (``[rows]`` or more) to one weight an item."""
    weights = without_graph(item_weights, "item_weights")
    if weights.dim() < 1 or weights.shape != shape[: weights.dim()]:
        got = f"item_weights {list(weights.shape)} for items {list(shape)}"
        raise TallyError(f"item_weights must have the items' shape or that of their leading dims, as [rows]; got {got}")
    return weights.reshape(weights.shape + (1,) * (len(shape) - weights.dim())).expand(shape)


class _Guard(torch.autograd.Function):
    """The identity, whose gradient is exactly zero where ``hidden``: zero times inf is nan further up."""

    @staticmethod
    def forward(values: Tensor, hidden: Tensor) -> Tensor:  # noqa: ARG004  backward needs it
        return values.view_as(values)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:  # noqa: ARG004  torch's
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (hidden,) = ctx.saved_tensors
        if torch.is_grad_enabled():
            return gradient.masked_fill(hidden, 0.0), None
        # In place: at 32,000 classes a copy costs as much as the loss, and nobody else holds this gradient.
        if hidden.shape != gradient.shape and hidden.device.type == "cpu":
            # Cheaper where few items are hidden; on a GPU looking for them would make the host wait.
            return gradient.index_put_((hidden.squeeze(-1),), gradient.new_zeros(())), None
        return gradient.masked_fill_(hidden, 0.0), None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, int | None], values: Tensor, hidden: Tensor) -> tuple[Tensor, int]:
        batched = [
            tensor.expand(info.batch_size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
            for tensor, dim in zip((values, hidden), in_dims, strict=True)
        ]
        return _Guard.apply(*batched), 0  # type: ignore[no-untyped-call]  # torch does not type it


def guarded(values: Tensor, hidden: Tensor | None) -> Tensor:
    """Return values that send no gradient back from hidden items.

    Args:
        values: ``[rows, ...]`` like ``hidden``, or with one more dim of classes. Whoever uses the result must
            send back a gradient that is a tensor of its own.
        hidden: ``[rows, ...]`` bool, or None for "nothing is hidden".
    """
    if hidden is None:
        return values
    mask = hidden if hidden.dim() == values.dim() else hidden.unsqueeze(-1)
    shown: Tensor = _Guard.apply(values, mask)  # type: ignore[no-untyped-call]  # torch does not type it
    return shown


def row_sums(values: Tensor) -> Tensor:
    """Add all items of each row, ``[rows, ...]`` to ``[rows]``, in an order that depends on the items alone.

    torch adds an inner contiguous dim row by row, whatever the other rows are; only the sum of a single row is shared
    out among threads. So a single row is added as one of two.
    """
    if values.dim() == 1:
        return values
    flat = values.flatten(1).contiguous()
    if flat.shape[0] == 1:
        return flat.expand(2, -1).sum(dim=1)[:1]
    return flat.sum(dim=1)


def tally(losses: Tensor, *, hidden: Tensor | None = None, item_weights: Tensor | None = None) -> Tally:
    """Add up losses and counts row by row.

    Args:
        losses: ``[rows, ...]``, one loss an item.
        hidden: The same shape, bool: items that count as nothing. None: all count.
        item_weights: The same shape; multiplies losses, and is summed as the count. None: every item weighs 1.
    """
    shown = losses if hidden is None else losses.masked_fill(hidden, 0.0)
    if item_weights is not None and item_weights.dtype != torch.bool:
        weights = item_weights if hidden is None else item_weights.masked_fill(hidden, 0)
        total = row_sums(shown * weights.to(shown.dtype))
        return Tally(total, row_sums(weights.double() if weights.is_floating_point() else weights.long()))
    if hidden is None:
        count = torch.full(losses.shape[:1], losses.shape[1:].numel(), dtype=torch.int64, device=losses.device)
        return Tally(row_sums(shown), count)
    return Tally(row_sums(shown), row_sums((~hidden).long()))
