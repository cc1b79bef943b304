"""Rows of tokens, packed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

UNSUPERVISED: Final = -100


@final
class TokenRows:
    """Rows of different lengths in one array, 2 bytes a token where the vocabulary allows, else 4.

    Args:
        rows: Tokens of each row, and the places where supervision begins and ends by turns: ``[0]`` for all of a row,
            ``[prompt]`` for what follows so many tokens.
        vocab_size: All tokens are below it.
    """

    def __init__(self, rows: Iterable[tuple[list[int], Sequence[int]]], vocab_size: int) -> None:
        kind = np.uint16 if vocab_size <= 2**16 else np.uint32
        parts, ends, turns, turn_ends = [np.empty(0, kind)], [0], list[int](), [0]
        for tokens, places in rows:
            parts.append(np.array(tokens, kind))
            ends.append(ends[-1] + len(tokens))
            turns += places
            turn_ends.append(len(turns))
        self._tokens: NDArray[np.unsignedinteger] = np.concatenate(parts)
        self._ends, self._turns, self._turn_ends = np.array(ends), np.array(turns), np.array(turn_ends)

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return ``{"tokens": [length], "labels": [length]}``, both int64."""
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        tokens = self._tokens[self._ends[index] : self._ends[index + 1]]
        return labelled(tokens, self._turns[self._turn_ends[index] : self._turn_ends[index + 1]].tolist())


def labelled(tokens: NDArray[np.unsignedinteger], turns: Sequence[int]) -> dict[str, Tensor]:
    """Return a row whose labels are its tokens where they are supervised: from each turn of even place to the next."""
    row = torch.from_numpy(tokens.astype(np.int64))  # [length]
    labels = row.clone()
    for begin, end in zip([0, *turns[1::2]], [*turns[::2], len(row)], strict=False):
        labels[begin:end] = UNSUPERVISED
    return {"tokens": row, "labels": labels}
