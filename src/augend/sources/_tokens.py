"""Rows of tokens, packed."""

from __future__ import annotations

from collections.abc import Iterable
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
        rows: Tokens of each row, and how many of them at its beginning (the prompt) are not supervised.
        vocab_size: All tokens are below it.
    """

    def __init__(self, rows: Iterable[tuple[list[int], int]], vocab_size: int) -> None:
        kind = np.uint16 if vocab_size <= 2**16 else np.uint32
        parts, ends, prompts = [np.empty(0, kind)], [0], []
        for tokens, prompt in rows:
            parts.append(np.array(tokens, kind))
            ends.append(ends[-1] + len(tokens))
            prompts.append(prompt)
        self._tokens: NDArray[np.unsignedinteger] = np.concatenate(parts)
        self._ends, self._prompts = np.array(ends), np.array(prompts)

    def __len__(self) -> int:
        return len(self._prompts)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return ``{"tokens": [length], "labels": [length]}``, both int64."""
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        tokens = self._tokens[self._ends[index] : self._ends[index + 1]]
        return labelled(tokens, int(self._prompts[index]))


def labelled(tokens: NDArray[np.unsignedinteger], prompt: int) -> dict[str, Tensor]:
    """Return a row whose labels are its tokens, but for those of the prompt."""
    row = torch.from_numpy(tokens.astype(np.int64))  # [length]
    labels = row.clone()
    labels[:prompt] = UNSUPERVISED
    return {"tokens": row, "labels": labels}
