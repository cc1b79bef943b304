"""The saved state of an optimizer: read and checked whole, before anything changes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, final

import torch
from torch import Tensor

from augend.errors import ContractError
from augend.ggml._given import check_same, mapping, whole_number
from augend.ggml._parameters import Build

VERSION: Final = 1
_NUMBERS: Final = ("epoch", "iteration", "index")
_KEYS: Final = (*_NUMBERS, "mode", "random", "gradients", "moments")

Moments = dict[str, tuple[Tensor, Tensor]]


@final
@dataclass(frozen=True, slots=True)
class Saved:
    """What a state says, each part in its own type."""

    epoch: int
    iteration: int
    index: int
    mode: Build
    random: Mapping[str, Any]
    gradients: Mapping[str, object]
    moments: Moments


def read_state(state: Mapping[str, Any], identity: Mapping[str, int | str], moments: Moments, period: int) -> Saved:
    """Read the state of an optimizer.

    Args:
        state: What was saved.
        identity: What must be as it is here.
        moments: Those that there are here.
        period: Physical batches in a window.

    Raises:
        ContractError: It is that of another optimizer, or damaged.
    """
    mapping("the state of an optimizer", state, ["version", *identity, *_KEYS])
    check_same("an optimizer", state, {"version": VERSION, **identity})
    if not isinstance(state["mode"], str) or state["mode"] not in Build.__members__:
        raise ContractError(
            f"the mode of a saved optimizer is one of {[*Build.__members__]}; got {state['mode']!r:.80}"
        )
    for name in ("random", "gradients", "moments"):
        if not isinstance(state[name], Mapping):
            raise ContractError(f"{name} of a saved optimizer must be a mapping; got {state[name]!r:.80}")
    return Saved(
        epoch=whole_number("the epoch of a saved optimizer", state["epoch"], 0),
        iteration=whole_number("the iteration of a saved optimizer", state["iteration"], 1),
        index=whole_number("the index of a saved optimizer", state["index"], 0, period - 1),
        mode=Build[state["mode"]],
        random=state["random"],
        gradients=state["gradients"],
        moments=_moments(state["moments"], moments),
    )


def _moments(saved: Mapping[str, Any], own: Moments) -> Moments:
    if saved.keys() != own.keys():
        raise ContractError(f"the saved moments are of {sorted(saved)}; here they are of {sorted(own)}")
    found: Moments = {}
    for name, (m, v) in own.items():
        pair = saved[name]
        if not isinstance(pair, Mapping) or pair.keys() != {"m", "v"}:
            raise ContractError(f"the saved moments of {name!r} must be m and v; got {pair!r:.80}")
        found[name] = _moment(f"m of {name!r}", pair["m"], m), _moment(f"v of {name!r}", pair["v"], v)
        if bool((pair["v"] < 0).any()):
            raise ContractError(f"v of {name!r} is a mean of squares; the saved one has an element below 0")
    return found


def _moment(what: str, saved: object, own: Tensor) -> Tensor:
    fits = isinstance(saved, Tensor) and saved.dtype == torch.float32 and saved.layout == torch.strided
    if not isinstance(saved, Tensor) or not fits or saved.is_meta or saved.shape != own.shape:
        shown = f"{saved.dtype} {list(saved.shape)}" if isinstance(saved, Tensor) else repr(saved)[:80]
        raise ContractError(f"the saved {what} must be torch.float32 {list(own.shape)}; got {shown}")
    return saved
