"""Losses whose every element is an item, and tallies of values that are made elsewhere."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from augend._tally import Tally
from augend.errors import TallyError
from augend.losses._items import UPCAST, guarded, row_sums, spread, tally, working


def mse(prediction: Tensor, target: Tensor, *, item_weights: Tensor | None = None) -> Tally:
    """Return the squared errors of each row, and how many there were.

    Args:
        prediction: ``[rows, ...]``, floating; 16-bit values are scored in float32.
        target: The same shape.
        item_weights: ``[rows, ...]`` or leading dims of it; a weight of 0 (or False: a mask) hides an item. Bool and
            integer weights are counted as int64, others as float64.

    Returns:
        ``total[rows]`` and ``count[rows]``; every element is an item. Hidden items reach neither total nor gradient.

    Raises:
        TallyError: Shapes or dtypes do not fit, or weights require a gradient.

    Numerics:
        On a CPU a row's bits do not depend on the other rows of the micro-batch.

    Example:
        >>> prediction, target = torch.tensor([[1.0, 5.0]]), torch.tensor([[3.0, 5.0]])
        >>> augend.losses.mse(prediction, target)
        Tally(total=tensor([4.]), count=tensor([2]))
        >>> augend.losses.mse(prediction, target, item_weights=torch.tensor([[True, False]]))
        Tally(total=tensor([4.]), count=tensor([1]))
    """
    return _of_differences(torch.square, prediction, target, item_weights)


def l1(prediction: Tensor, target: Tensor, *, item_weights: Tensor | None = None) -> Tally:
    """Return the absolute errors of each row, and how many there were.

    Args:
        prediction: ``[rows, ...]``, floating; 16-bit values are scored in float32.
        target: The same shape.
        item_weights: As for :func:`mse`.

    Returns:
        ``total[rows]`` and ``count[rows]``; every element is an item. Hidden items reach neither total nor gradient.

    Raises:
        TallyError: Shapes or dtypes do not fit, or weights require a gradient.

    Numerics:
        On a CPU a row's bits do not depend on the other rows of the micro-batch.

    Example:
        >>> augend.losses.l1(torch.tensor([[1.0, 5.0]]), torch.tensor([[3.0, 5.0]]))
        Tally(total=tensor([2.]), count=tensor([2]))
    """
    return _of_differences(torch.abs, prediction, target, item_weights)


def mean(values: Tensor, *, item_weights: Tensor | None = None) -> Tally:
    """Tally values that are to be averaged over all their items: the count is the number of elements.

    Args:
        values: ``[rows, ...]``, floating; 16-bit values are added in float32.
        item_weights: As for :func:`mse`.

    Returns:
        ``total[rows]``, the sum of a row's values, and ``count[rows]``, how many there are.

    Raises:
        TallyError: Shapes or dtypes do not fit, or weights require a gradient.

    Example:
        >>> augend.losses.mean(torch.tensor([[1.0, 5.0], [2.0, 2.0]]))
        Tally(total=tensor([6., 4.]), count=tensor([2, 2]))
    """
    shown = working(values, "values")
    weights = None if item_weights is None else spread(item_weights, shown.shape)
    return tally(shown, hidden=None if weights is None else weights == 0, item_weights=weights)


def sum(values: Tensor) -> Tally:  # noqa: A001  beside `mean`; read as losses.sum
    """Tally values that are to be added up within a row and averaged over rows: every row counts as 1.

    Args:
        values: ``[rows, ...]``, floating; 16-bit values are added in float32. For a loss that has no natural number
            of items, as a KL divergence of a latent code or a sequence's log likelihood.

    Returns:
        ``total[rows]``, the sum of a row's values, and ``count[rows]`` of ones.

    Raises:
        TallyError: Not a floating tensor with rows.

    Example:
        >>> augend.losses.sum(torch.tensor([[1.0, 5.0], [2.0, 2.0]]))
        Tally(total=tensor([6., 4.]), count=tensor([1, 1]))
    """
    shown = working(values, "values")
    return Tally(row_sums(shown), torch.ones(shown.shape[:1], dtype=torch.int64, device=shown.device))


def from_reduction_none(fn: Callable[..., Tensor], *, ignore_index: int | None = None) -> Callable[..., Tally]:
    """Turn a torch loss into one that returns a tally.

    Args:
        fn: A function that takes ``reduction="none"`` (``torch.nn.functional.huber_loss``), or a module built with
            ``reduction="none"`` (``torch.nn.HuberLoss(reduction="none")``). It must give one loss an item, with rows in
            the first dim; where classes stand is its own rule (in torch: dim 1).
        ignore_index: Items whose second argument (the target) has this value count as nothing: total and gradient of
            the loss are cut off there (a nan that ``fn`` makes of a zero gradient is not). None: all items count. It is
            not handed to ``fn``.

    Returns:
        A function of the same arguments (16-bit tensors among them go to ``fn`` as float32) that returns
        ``total[rows]`` and ``count[rows]``, the number of items as int64.

    Raises:
        TallyError: By the returned function: the losses have no rows, or the target does not have their shape.

    Example:
        >>> huber = augend.losses.from_reduction_none(torch.nn.functional.huber_loss)
        >>> huber(torch.tensor([[0.0, 3.0]]), torch.tensor([[1.0, 3.0]]), delta=1.0)
        Tally(total=tensor([0.5000]), count=tensor([2]))
    """
    options = {} if isinstance(fn, nn.Module) else {"reduction": "none"}

    def loss(*args: object, **kwargs: object) -> Tally:
        losses = fn(*map(_widened, args), **options, **kwargs)
        if losses.dim() == 0:
            remedy = "build the module with reduction='none'"
            raise TallyError(f"the wrapped loss must return [rows, ...], one loss an item; got a 0-d tensor: {remedy}")
        if ignore_index is None:
            return mean(losses)
        target = args[1] if len(args) > 1 else None
        if not isinstance(target, Tensor) or target.shape != losses.shape:
            got = str(list(target.shape)) if isinstance(target, Tensor) else type(target).__name__
            want = f"a second argument of the losses' shape {list(losses.shape)}"
            raise TallyError(f"ignore_index needs {want}; got {got}")
        return mean(losses, item_weights=target != ignore_index)

    return loss


def _widened(value: object) -> object:
    """Return 16-bit tensors in float32 and everything else as it is."""
    return value.float() if isinstance(value, Tensor) and value.dtype in UPCAST else value


def _of_differences(
    loss: Callable[[Tensor], Tensor], prediction: Tensor, target: Tensor, item_weights: Tensor | None
) -> Tally:
    """Score prediction − target element by element."""
    predicted = working(prediction, "prediction")
    if predicted.shape != target.shape:
        got = f"prediction {list(predicted.shape)} and target {list(target.shape)}"
        raise TallyError(f"prediction and target must have the same shape [rows, ...]; got {got}")
    weights = None if item_weights is None else spread(item_weights, predicted.shape)
    hidden = None if weights is None else weights == 0
    losses = loss(guarded(predicted - target, hidden))
    return tally(losses, hidden=hidden, item_weights=weights)
