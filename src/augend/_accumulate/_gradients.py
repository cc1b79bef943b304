"""Gradients on their way from autograd, or from the user, into the sums."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Literal, final

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from augend._accumulate._slots import Slots
from augend._accumulate._window import Window
from augend._numerics import largest, write_fixed
from augend.errors import GradientError


@final
class Taker:
    """Moves each gradient into the window as autograd produces it, but only inside the owner's own backward.

    Args:
        slots: The parameters.
        foreign: What to do with a gradient that somebody else left in ``.grad``.
    """

    def __init__(self, slots: Slots, foreign: Literal["error", "drop"]) -> None:
        self.written: dict[str, Tensor] = {}  # what the last finish put into .grad: never foreign
        self._slots = slots
        self._foreign = foreign
        self._window: Window | None = None
        self._term = ""
        self._real = True
        self._taken: set[str] = set()
        self._whole: dict[str, Tensor] = {}  # gradients that ranks will share
        handles = [
            parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]  # torch leaves it untyped
                _hook(weakref.WeakMethod(self._receive), name)
            )
            for name, parameter in slots.parameters.items()
        ]
        weakref.finalize(self, _remove, handles)

    def run(self, loss: Tensor | None, window: Window, term: str, what: str, *, retain_graph: bool, real: bool) -> int:
        """Run backward and take what it produces; returns how many parameters got a gradient.

        Args:
            loss: The loss sum; None where it has no graph.
            window: Where gradients go.
            term: The loss term.
            what: The backward, in words.
            retain_graph: Keep the graph.
            real: Whether the rows count; the gradients of others are zeroed before ranks are added up.
        """
        placement = self._slots.placement
        self._window, self._term, self._real = window, term, real
        self._taken, self._whole = set(), {}
        try:
            with placement.group.explained(what):
                if loss is not None:
                    with placement.taking(self, what):
                        torch.autograd.backward(loss, retain_graph=retain_graph)
                placement.deal(self._whole, self)
        finally:
            self._window = None
            self._whole = {}
        window.used[term].update(self._taken)
        return len(self._taken)

    def use(self, name: str, gradient: Tensor) -> None:
        """See a gradient before ranks are added up."""
        self._taken.add(name)
        if not self._real:
            gradient.zero_()

    def write(self, name: str, gradient: Tensor, whole: Tensor) -> None:
        """Write a gradient of this rank in the dtype of the sums: for exact ones over zeros, on their grids."""
        scales = None if self._window is None else self._window.scales
        if scales is None:
            whole.copy_(gradient)
            return
        self._measure(name, gradient)
        scale = scales.of(self._term, name)
        if scale is not None:
            write_fixed(whole, gradient, scale)

    def take(self, name: str, local: Tensor) -> None:
        """Take this rank's part of a gradient that was added up over ranks."""
        if self._window is not None:
            if local.is_floating_point() and local.numel():
                self._measure(name, local)
            self._window.add_gradient(self._term, name, local, self._slots.placement.like(name))

    def check_foreign(self) -> None:
        """Raise GradientError if a parameter holds a gradient that no finish of ours wrote; changes nothing."""
        if self._foreign == "drop":
            return
        for name, parameter in self._slots.parameters.items():
            if parameter.grad is not None and parameter.grad is not self.written.get(name):
                raise GradientError(
                    f"parameter {name!r} has a .grad that this accumulator did not make; it would be lost or counted "
                    'twice. Clear it (optimizer.zero_grad()), or pass foreign="drop" if another model\'s loss '
                    "leaves it there"
                )
        self._slots.placement.check_foreign()

    def holds_written(self) -> bool:
        """Tell whether a parameter still has the gradient that the last finish wrote."""
        parameters = self._slots.parameters
        return any(name in parameters and parameters[name].grad is one for name, one in self.written.items())

    def drop_written(self) -> None:
        """Clear what the last finish wrote, where it is still there."""
        for name, one in self.written.items():
            parameter = self._slots.parameters.get(name)
            if parameter is not None and parameter.grad is one:
                parameter.grad = None
        self.written = {}

    def drop(self) -> None:
        """Clear ``.grad`` of every trained parameter."""
        for parameter in self._slots.parameters.values():
            parameter.grad = None
        self._slots.placement.drop()
        self.written = {}

    def _receive(self, name: str, parameter: nn.Parameter) -> None:
        gradient = parameter.grad
        if self._window is None or gradient is None:
            return
        if gradient.layout != torch.strided:
            raise GradientError(f"the gradient of {name!r} is sparse; only dense gradients can be summed")
        parameter.grad = None
        placement = self._slots.placement
        if not placement.takes_whole(name):
            return  # what FSDP2 made of it came another way, unrounded
        local = placement.local(name, gradient)
        if self._window.scales is not None and name in self._taken:
            raise GradientError(
                f"the gradient of {name!r} comes in several pieces, as with reentrant activation checkpointing, and "
                "where they are added depends on where the parameter lies: exact sums would too. Pass "
                "use_reentrant=False"
            )
        self._taken.add(name)
        if self._real and placement.dealt(name):
            self._whole[name] = local if name not in self._whole else self._whole[name].to(self._window.work) + local
        elif self._real:
            self.take(name, local)

    def _measure(self, name: str, gradient: Tensor) -> None:
        """See how large a gradient is, where scales are made of it."""
        if self._window is not None and self._window.scales is not None:
            self._window.see(self._term, name, largest(gradient))


def _hook(receive: weakref.WeakMethod[Callable[[str, nn.Parameter], None]], name: str) -> Callable[[Tensor], None]:
    """Return a hook that does not keep its accumulator alive."""

    def hook(parameter: Tensor) -> None:
        alive = receive()
        if alive is not None:
            alive(name, parameter)  # type: ignore[arg-type]  # torch types a leaf's hook as taking any tensor

    return hook


def _remove(handles: list[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()
