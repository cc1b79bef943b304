"""Losses over classes, which stand in the last dim."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from augend._tally import Tally
from augend.errors import TallyError
from augend.losses._items import guarded, row_sums, spread, tally, without_graph, working


def cross_entropy(
    logits: Tensor,
    labels: Tensor,
    *,
    ignore_index: int = -100,
    class_weights: Tensor | None = None,
    item_weights: Tensor | None = None,
    label_smoothing: float = 0.0,
) -> Tally:
    """Return the cross entropy of each row's labels in nats, and how many labels were scored.

    Args:
        logits: ``[rows, ..., classes]``, floating; 16-bit logits are scored in float32.
        labels: ``[rows, ...]``, integers: a class, or ``ignore_index`` for an item that is not scored.
        ignore_index: The label of items that count as nothing.
        class_weights: ``[classes]``; an item weighs as much as its label.
        item_weights: ``[rows, ...]`` as the labels or their leading dims. An item with weight 0 (or False) is not
            scored. Bool and integer weights are counted as int64, others as float64.
        label_smoothing: How much of each target, 0 to 1, is spread evenly over all classes
            (Szegedy et al., "Rethinking the Inception architecture", 2016, section 7).

    Returns:
        ``total[rows]`` and ``count[rows]``: the number of scored items as int64, or the sum of their weights as
        float64; then total over count is torch's ``reduction="mean"``. What stands at unscored items, also inf and
        nan, reaches neither the total nor a gradient; a row without scored items is an exact 0 over 0.

    Raises:
        TallyError: Shapes or dtypes do not fit, weights require a gradient, or the smoothing is not within 0 and 1.
        IndexError: A label is no class (on the CPU; a GPU reports it later).

    Numerics:
        On a CPU a row's bits do not depend on the other rows of the micro-batch.

    Example:
        >>> logits = torch.zeros(2, 3, 4)
        >>> augend.losses.cross_entropy(logits, torch.tensor([[0, 1, -100], [-100, -100, -100]]))
        Tally(total=tensor([2.7726, 0.0000]), count=tensor([2, 0]))
    """
    scores, classes = _scores_and_labels(logits, labels)
    if not 0.0 <= label_smoothing <= 1.0:
        raise TallyError(f"label_smoothing must be within 0 and 1; got {label_smoothing}")
    hidden = classes == ignore_index
    weights = None
    if item_weights is not None:
        weights = spread(item_weights, classes.shape)
        hidden = hidden | (weights == 0)
        classes = classes.masked_fill(hidden, ignore_index)
    per_class = None if class_weights is None else _per_class(class_weights, scores)
    losses = functional.cross_entropy(
        guarded(scores, hidden).reshape(-1, scores.shape[-1]),
        classes.reshape(-1),
        None if per_class is None else per_class.to(scores.dtype),
        reduction="none",
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
    ).reshape(classes.shape)  # [rows, ...]
    if per_class is None:
        return tally(losses, hidden=hidden, item_weights=weights)
    counted = per_class.double()[classes.masked_fill(hidden, 0)]  # [rows, ...]
    if weights is not None:
        counted, losses = counted * weights.double(), losses * weights.masked_fill(hidden, 0).to(losses.dtype)
    return Tally(row_sums(losses), row_sums(counted.masked_fill(hidden, 0.0)))


def causal_lm(logits: Tensor, labels: Tensor, *, ignore_index: int = -100) -> Tally:
    """Return the cross entropy of each next token in nats, and how many tokens were scored.

    The shift happens here: ``logits[:, i]`` are scored against ``labels[:, i + 1]``, so the count is exactly what was
    scored, and a row of length 1 counts nothing. Labels are the tokens themselves, ``ignore_index`` where a token is
    not to be learned (a prompt, padding).

    Args:
        logits: ``[rows, length, vocabulary]``, floating; 16-bit logits are scored in float32.
        labels: ``[rows, length]``, integers, not shifted.
        ignore_index: The label of tokens that count as nothing.

    Returns:
        ``total[rows]`` and ``count[rows]`` as int64; see :func:`cross_entropy` for what is promised.

    Raises:
        TallyError: Shapes or dtypes do not fit.
        IndexError: A label is no token of the vocabulary (on the CPU; a GPU reports it later).

    Numerics:
        On a CPU a row's bits do not depend on the other rows of the micro-batch.

    Example:
        >>> augend.losses.causal_lm(torch.zeros(2, 5, 4), torch.tensor([[0, 1, 2, 3, 0], [0, 1, 2, -100, -100]]))
        Tally(total=tensor([5.5452, 2.7726]), count=tensor([4, 2]))
    """
    if logits.dim() != 3:  # noqa: PLR2004  rows, length, vocabulary
        raise TallyError(f"logits must be [rows, length, vocabulary]; got {list(logits.shape)}")
    _, tokens = _scores_and_labels(logits, labels)
    # Shifting the labels, and not slicing the logits, saves a copy of the largest tensor of the model.
    following = torch.cat([tokens[:, 1:], torch.full_like(tokens[:, :1], ignore_index)], dim=1)  # [rows, length]
    return cross_entropy(logits, following, ignore_index=ignore_index)


def binary_cross_entropy(logits: Tensor, targets: Tensor, *, item_weights: Tensor | None = None) -> Tally:
    """Return the cross entropy of each row's yes-or-no items in nats, from logits, and how many there were.

    Args:
        logits: ``[rows, ...]``, floating; 16-bit logits are scored in float32.
        targets: The same shape; the probability of "yes", 0 to 1 (bool and integers too).
        item_weights: ``[rows, ...]`` or leading dims of it; a weight of 0 (or False) hides an item. Bool and integer
            weights are counted as int64, others as float64.

    Returns:
        ``total[rows]`` and ``count[rows]``; every element is an item. Hidden items reach neither total nor gradient.

    Raises:
        TallyError: Shapes or dtypes do not fit, or weights require a gradient.

    Numerics:
        On a CPU a row's bits do not depend on the other rows of the micro-batch. Without cancellation at both ends:
        the loss of a sure and right item keeps its relative accuracy, and so does its gradient.

    Example:
        >>> augend.losses.binary_cross_entropy(torch.zeros(1, 3), torch.tensor([[1, 0, 1]]))
        Tally(total=tensor([2.0794]), count=tensor([3]))
    """
    scores = working(logits, "logits")
    if scores.shape != targets.shape:
        got = f"logits {list(scores.shape)} and targets {list(targets.shape)}"
        raise TallyError(f"logits and targets must have the same shape [rows, ...]; got {got}")
    weights = None if item_weights is None else spread(item_weights, scores.shape)
    hidden = None if weights is None else weights == 0
    wanted, shown = targets.to(scores.dtype), guarded(scores, hidden)
    # torch's own backward takes a sigmoid, whose bits depend on where in memory an element stands.
    losses = -wanted * functional.logsigmoid(shown) - (1.0 - wanted) * functional.logsigmoid(-shown)
    return tally(losses, hidden=hidden, item_weights=weights)


def kl_div(logits: Tensor, target: Tensor, *, item_weights: Tensor | None = None) -> Tally:
    """Return the Kullback-Leibler divergence of each row's predictions from their targets, in nats.

    The direction is KL(target ‖ prediction) = Σ target · (log target − log softmax(logits)) over the classes of an
    item (Kullback & Leibler 1951, eq. 2.4), as in distillation: ``target = teacher_logits.softmax(dim=-1)``.

    Args:
        logits: ``[rows, ..., classes]``, floating; 16-bit logits are scored in float32.
        target: The same shape; probabilities, summing to 1 over the last dim. Where one is 0 its class adds 0, also if
            its logit is -inf.
        item_weights: ``[rows, ...]`` (without the classes) or leading dims of it; a weight of 0 (or False) hides an
            item. Bool and integer weights are counted as int64, others as float64.

    Returns:
        ``total[rows]`` and ``count[rows]``: the number of items, not of classes. For ``[rows, classes]`` total over
        count is torch's ``reduction="batchmean"``. Hidden items reach neither total nor gradient.

    Raises:
        TallyError: Shapes or dtypes do not fit, or weights require a gradient.

    Numerics:
        On a CPU a row's bits do not depend on the other rows of the micro-batch.

    Example:
        >>> augend.losses.kl_div(torch.zeros(1, 2), torch.tensor([[1.0, 0.0]]))
        Tally(total=tensor([0.6931]), count=tensor([1]))
    """
    scores, wanted = working(logits, "logits"), working(target, "target")
    if scores.dim() < 2 or scores.shape != wanted.shape:  # noqa: PLR2004  rows and classes
        got = f"logits {list(scores.shape)} and target {list(wanted.shape)}"
        raise TallyError(f"logits and target must both be [rows, ..., classes]; got {got}")
    weights = None if item_weights is None else spread(item_weights, scores.shape[:-1])
    hidden = None if weights is None else weights == 0
    if hidden is not None:
        wanted = wanted.masked_fill(hidden.unsqueeze(-1), 0.0)
    predicted = functional.log_softmax(guarded(scores, hidden), dim=-1)
    by_class = torch.xlogy(wanted, wanted) - wanted * predicted.masked_fill(wanted == 0, 0.0)  # [rows, ..., classes]
    items = row_sums(by_class.reshape(-1, by_class.shape[-1])).reshape(scores.shape[:-1])  # [rows, ...]
    return tally(items, hidden=hidden, item_weights=weights)


def _scores_and_labels(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return logits in the working dtype and labels as int64, or say why they do not fit."""
    scores = working(logits, "logits")
    if scores.dim() < 2 or labels.shape != scores.shape[:-1]:  # noqa: PLR2004  rows and classes
        got = f"logits {list(scores.shape)} and labels {list(labels.shape)}"
        hint = "classes stand in the last dim: use logits.movedim(1, -1) for [rows, classes, ...]"
        raise TallyError(f"logits must be [rows, ..., classes] and labels [rows, ...]; got {got} ({hint})")
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise TallyError(f"labels must be integers, one class an item; got {labels.dtype}")
    return scores, labels.long()


def _per_class(class_weights: Tensor, scores: Tensor) -> Tensor:
    """Return the class weights, checked against the logits."""
    if class_weights.shape != scores.shape[-1:]:
        got = f"class_weights {list(class_weights.shape)} and logits {list(scores.shape)}"
        raise TallyError(f"class_weights must be [classes]; got {got}")
    return without_graph(class_weights, "class_weights")
