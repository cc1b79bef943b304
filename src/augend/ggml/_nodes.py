"""Node: one tensor of a graph, a leaf or the result of an operation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, final

import torch

Shape: TypeAlias = tuple[int, int, int, int]
"""Dimensions in ggml's order, the fastest first; the torch tensor has them reversed."""


@final
@dataclass(frozen=True, eq=False, repr=False, slots=True, weakref_slot=True)
class Node:
    """One tensor of a ``Graph``; made by the graph, and known to no other.

    Args:
        index: Its number in the graph, from 0.
        shape: Four dimensions in ggml's order, the fastest first.
        rank: How many of them its values have in torch.
        name: For people, for state dicts and for files; may be empty.
        operation: Which made it; empty for a leaf.
        inputs: What it was made of.
        settings: The operation's numbers, such as a factor.
        parameter: Whether it is trained.
        dtype: torch.float32 or torch.int32.
    """

    index: int
    shape: Shape
    rank: int
    name: str
    operation: str
    inputs: tuple[Node, ...]
    settings: Mapping[str, Any]
    parameter: bool
    dtype: torch.dtype

    def __repr__(self) -> str:
        kind = self.operation or ("parameter" if self.parameter else "tensor")
        return f"<{kind} {self.name or self.index} {list(self.shape)}>"

    @property
    def torch_shape(self) -> tuple[int, ...]:
        """The shape of its values in torch: the declared dimensions, reversed."""
        return tuple(reversed(self.shape[: self.rank]))
