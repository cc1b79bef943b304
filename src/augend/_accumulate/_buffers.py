"""The buffers of a model, which no forward may change where sums are exact: who comes first would show in them."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor, nn

from augend._placement import local_of
from augend.errors import StateError


@final
class Buffers:
    """Watches the buffers of a model through a window.

    Args:
        model: The module; its buffers may change between batches.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._seen: dict[str, tuple[Tensor, int]] = {}  # each buffer, and how often it was written to
        self._contents: dict[str, tuple[Tensor, Tensor]] | None = None

    def begin(self) -> None:
        """Take note of what they hold, unless that was done: a window begins, or goes on."""
        if self._contents is None:
            self._contents = {
                name: (one, local_of(one).clone()) for name, one in self._model.named_buffers() if _comparable(one)
            }

    def forget(self) -> None:
        """Begin anew with the next window."""
        self._contents = None

    def see(self) -> None:
        """Take note of which there are, and of how often each was written to: a micro-batch begins."""
        self._seen = self._now()

    def check(self) -> None:
        """Raise StateError if one was set or written to in this micro-batch; reads no values."""
        now = self._now()
        for name in sorted(now.keys() | self._seen.keys()):
            before, after = self._seen.get(name), now.get(name)
            if before is None or after is None or before[0] is not after[0] or before[1] != after[1]:
                _refuse(name)

    def check_contents(self) -> None:
        """Raise StateError if one holds other values than when the window began: some operations write unseen."""
        found: dict[str, Tensor] = {}
        for name, (one, before) in (self._contents or {}).items():
            now = local_of(one)
            if now.shape != before.shape or now.dtype != before.dtype:
                _refuse(name)
            found[name] = (_bytes(now) != _bytes(before)).any()
        if found:
            device = next(iter(found.values())).device
            together = torch.stack([one.to(device) for one in found.values()]).tolist()  # waits once
            for name, changed in zip(found, together, strict=True):
                if changed:
                    _refuse(name)

    def _now(self) -> dict[str, tuple[Tensor, int]]:
        return {
            name: (one, 0 if one.is_inference() else one._version)  # noqa: SLF001  # torch's documented name for it
            for name, one in self._model.named_buffers()
        }


def _comparable(tensor: Tensor) -> bool:
    """Tell whether there are values to compare; of others, as sparse ones, it must do to see when they are set."""
    here = local_of(tensor)
    return here.layout == torch.strided and not here.is_meta and not here.is_quantized


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def _refuse(name: str) -> None:
    raise StateError(
        f"buffer {name!r} was changed while a batch was worked through, as batch normalisation does in its forward: "
        'what later micro-batches compute then depends on which came before, and dtype="exact" cannot promise the same '
        'bits. Put such modules into eval mode, use others (layer or group normalisation), or dtype="float32"'
    )
