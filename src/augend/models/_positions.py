"""Where tokens stand: rotary positions, and which tokens see which."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor


class Places(NamedTuple):
    """What every layer of a forward must know of the positions of its tokens.

    Args:
        cosine: ``[length, head_width]``, or ``[rows, 1, length, head_width]`` where rows differ.
        sine: The same shape.
        mask: ``[rows, 1, length, length]``, 0 where a query (third dim) sees a key (last dim) and else -inf; None
            where it sees all keys up to its own.
    """

    cosine: Tensor
    sine: Tensor
    mask: Tensor | None


def places(length: int, documents: Tensor | None, *, head_width: int, theta: float, like: Tensor) -> Places:
    """Return the places of rows of tokens, in the dtype of ``like`` and where that is.

    Args:
        length: Tokens of a row.
        documents: ``[rows, length]`` int64: what stands side by side with one number is a document, whose positions
            begin at 0 and which sees itself alone. None: every row is one document.
        head_width: Size of a head.
        theta: Base of the rotary frequencies.
        like: Any tensor of the model.
    """
    cosine, sine = rotary(length, head_width, theta, like)
    if documents is None:
        return Places(cosine, sine, None)
    index = torch.arange(length, device=documents.device)
    begins = torch.ones_like(documents, dtype=torch.bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    positions = index - torch.where(begins, index, 0).cummax(dim=1).values  # [rows, length]
    number = begins.cumsum(dim=1)  # a document's, within its row
    seen = (number[:, :, None] == number[:, None, :]) & (index[:, None] >= index)  # [rows, length, length]
    # Added to the scores as it is, and kept once for the backwards of all layers: torch makes a boolean mask one of
    # these in every layer.
    mask = torch.zeros(seen.shape, dtype=like.dtype, device=like.device).masked_fill(~seen, -math.inf)
    return Places(cosine[positions][:, None], sine[positions][:, None], mask[:, None])


def rotary(length: int, head_width: int, theta: float, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return cosine and sine of position · theta^(−2i/head_width), each ``[length, head_width]``, in ``like``'s dtype.

    The frequencies are rounded as ``transformers`` rounds them, so that its logits are the same to the bit.
    Made anew in each forward, which costs little: a buffer would be rounded where the model is cast to 16 bits, and
    lost where it is built on the meta device.
    """
    dtype = torch.promote_types(like.dtype, torch.float32)
    frequencies = 1 / theta ** (torch.arange(0, head_width, 2, dtype=dtype, device=like.device) / head_width)
    angles = torch.outer(torch.arange(length, dtype=dtype, device=like.device), frequencies).repeat(1, 2)
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def rotated(x: Tensor, at: Places) -> Tensor:
    """Turn each pair (i, i + head_width/2) of ``[rows, heads, length, head_width]`` by its angle."""
    first, second = x.chunk(2, dim=-1)
    return x * at.cosine + torch.cat((-second, first), dim=-1) * at.sine
