"""What a rank is told that waits in a forward for one that is lost."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Any

from torch import nn

from augend._group import Group


def explain_forwards(model: nn.Module, group: Group) -> None:
    """Let errors of collectives inside a model's forward tell which ranks are missing, as long as the group is there.

    Only the caller of a forward can raise there, so it is a note on torch's own error.
    """
    handle = model.register_forward_hook(_explainer(weakref.ref(group)), always_call=True)
    weakref.finalize(group, handle.remove).atexit = False


def _explainer(group: weakref.ref[Group]) -> Callable[..., None]:
    """Return a hook that adds to an error of a collective which ranks are missing, and what the others wait for."""

    def hook(module: nn.Module, arguments: Any, output: Any) -> None:  # noqa: ARG001  # torch's own signature
        error, alive = sys.exc_info()[1], group()
        if output is None and error is not None and alive is not None:  # else a caller handles it, and this went well
            lost = alive.explain("a forward of the sharded model", error)
            if lost is not None:
                error.add_note(str(lost))

    return hook
