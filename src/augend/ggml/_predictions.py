"""Predictions: which class a row of logits names, and how many name that of their labels."""

from __future__ import annotations

import torch
from torch import Tensor

from augend.ggml._rules import Rules

_NONE = -1  # what a row with a NaN predicts


def predict(rows: Tensor, rules: Rules) -> Tensor:
    """Return the class of the largest element of each row.

    Args:
        rows: ``[rows, classes]``.
        rules: Whose numbers are wanted: which of equal ones is the largest, and what a NaN does.

    Returns:
        ``[rows]``, int32; -1 for a row with a NaN, unless the rules say otherwise.
    """
    if rules.last_of_ties:
        return _scan(rows, later_wins=True)
    if rules.lazy_gradients:
        return _scan(rows, later_wins=False)
    first = rows.argmax(dim=-1).to(torch.int32)
    return torch.where(rows.isnan().any(dim=-1), _NONE, first)


def count_correct(predictions: Tensor, labels: Tensor, rules: Rules) -> int:
    """Return how many predictions are the class of their row of labels; -1 is none."""
    return int(((predictions == predict(labels, rules)) & (predictions != _NONE)).sum())


def _scan(rows: Tensor, *, later_wins: bool) -> Tensor:
    """Look through the classes one after another, with comparisons that are false for a NaN, as the ports do."""
    best = rows[:, 0].clone()
    found = torch.zeros(len(rows), dtype=torch.int32, device=rows.device)
    for index in range(1, rows.shape[1]):
        column = rows[:, index]
        if later_wins:
            best = torch.where(best > column, best, column)  # a NaN on either side takes the later one
            found = torch.where(best == column, index, found)
        else:
            larger = column > best
            best, found = torch.where(larger, column, best), torch.where(larger, index, found)
    return found.to(torch.int32)
