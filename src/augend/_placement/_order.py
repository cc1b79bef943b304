"""Did every rank go through the same sharded modules in the same order? One small comparison a micro-batch."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, final

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.hooks import RemovableHandle

from augend._group import Group
from augend.errors import UnusedError

_TOLD: Final = 4096  # modules of a path that are kept


@final
class _Path:
    """Which modules were entered: a mark that tells paths apart, however long, and their beginning for messages."""

    def __init__(self) -> None:
        self.mark = 0
        self.first: list[int] = []

    def add(self, index: int) -> None:
        self.mark = hash((self.mark, index)) >> 2  # of integers it is the same in every process
        if len(self.first) < _TOLD:
            self.first.append(index)


@final
class ForwardOrder:
    """Notes which sharded modules run a forward that gradients are wanted of.

    In torch, ranks that skip a whole sharded module gather and reduce other modules' weights in its place: silently,
    where the sizes are equal.

    Args:
        modules: Every FSDP module, by name.
        group: All ranks.
    """

    def __init__(self, modules: Mapping[str, FSDPModule], group: Group) -> None:
        self._group = group
        self._names = list(modules)
        self._entered = _Path()
        self._own = False  # a recomputation inside our backward is none of the user's forwards
        note: weakref.WeakMethod[Callable[[int], None]] = weakref.WeakMethod(self._note)
        handles = [
            module.register_forward_pre_hook(_hook(note, index))
            for index, module in enumerate(modules.values())
            if isinstance(module, nn.Module)
        ]
        weakref.finalize(self, _remove, handles)

    @property
    def entered(self) -> bool:
        """Whether any module was, since the last backward."""
        return bool(self._entered.first)

    @contextmanager
    def compared(self, what: str) -> Iterator[None]:
        """Compare what was entered since the last backward while this one runs; raise where ranks differ.

        Args:
            what: The backward in this block, in words.

        Raises:
            UnusedError: Ranks went through different modules; on all of them.
        """
        entered, self._entered = self._entered, _Path()
        wait = self._group.begin_maximum(what, [entered.mark, -entered.mark])
        self._own = True
        try:
            yield
        finally:
            self._own = False
        largest, smallest = wait()
        if largest != -smallest:
            self._refuse(what, entered.first)

    def _refuse(self, what: str, entered: list[int]) -> None:
        path = [self._names[index] or "the root" for index in entered]
        paths = [one.decode().split("\0") for one in self._group.exchange(what, "\0".join(path).encode())]
        other = next(rank for rank, one in enumerate(paths) if one != paths[0])
        differ = next(
            (place for place, (a, b) in enumerate(zip(paths[0], paths[other], strict=False)) if a != b),
            min(len(paths[0]), len(paths[other])),
        )
        here, there = ((one[differ] if differ < len(one) else "no other") for one in (paths[0], paths[other]))
        raise UnusedError(
            f"before {what}, rank 0 went through the sharded module {here!r} and rank {other} through {there!r}: "
            "torch has mixed up their weights and gradients. Every rank must call the same sharded modules in one "
            "order; where a rank has no rows for a module, it calls it with none: y = torch.cat([y, module(x[:0])])"
        )

    def _note(self, index: int) -> None:
        if torch.is_grad_enabled() and not self._own:
            self._entered.add(index)


def _hook(note: weakref.WeakMethod[Callable[[int], None]], index: int) -> Callable[..., None]:
    """Return a hook that does not keep its owner alive."""

    def hook(module: nn.Module, arguments: Any) -> None:  # noqa: ARG001  # torch's own signature
        alive = note()
        if alive is not None:
            alive(index)

    return hook


def _remove(handles: list[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()
