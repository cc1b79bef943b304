"""Where ggml-opt, its Rust port and augend differ: one table, read by everything that behaves differently."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, TypeAlias, final

from augend.errors import ContractError

Compat: TypeAlias = Literal["ggml", "prism"]
"""Whose numbers to reproduce: those of ggml-opt (C++), or of its port in prism-inference (Rust)."""


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Rules:
    """What depends on whose numbers are wanted.

    Args:
        one_draw_each: The shuffle draws once for each element; else once for two, as libstdc++ does.
        whole_batches: Only complete shards and complete batches exist; what is left over is never seen.
        forward_moves: An evaluation without gradients uses up a place in the window.
        lazy_gradients: Gradients are scaled by the planned window and added in float32; else they are added undivided
            and divided once, by what was really counted. With it go ggml's own gradient of a cross entropy, which is
            that of labels that sum to 1, and 0 · -inf, which is NaN.
        last_of_ties: Of equal largest logits the last one is predicted, and a NaN starts the search anew.
        by_batches: Error bars are taken over physical batches, in one pass; else over rows, exactly.
        binary32_split: The validation split is cut off in float32; else it is exact.
        holds_gradients: A window of one physical batch shows its gradients too.
        all_finite: All seven parameters must be finite, of both algorithms.
        strict_bounds: A rate must be finite, and betas less than 1.
    """

    one_draw_each: bool = False
    whole_batches: bool = False
    forward_moves: bool = False
    lazy_gradients: bool = False
    last_of_ties: bool = False
    by_batches: bool = False
    binary32_split: bool = False
    holds_gradients: bool = True
    all_finite: bool = True
    strict_bounds: bool = True


_COMMON: Final = {
    "whole_batches": True,
    "forward_moves": True,
    "lazy_gradients": True,
    "by_batches": True,
    "binary32_split": True,
    "holds_gradients": False,
    "strict_bounds": False,
}
_RULES: Final[dict[Compat | None, Rules]] = {
    None: Rules(),
    "ggml": Rules(**_COMMON, last_of_ties=True, all_finite=False),
    "prism": Rules(**_COMMON, one_draw_each=True),
}


def rules_of(compat: Compat | None) -> Rules:
    """Return the rules of one side.

    Raises:
        ContractError: There is no such side.
    """
    if compat is not None and compat not in ("ggml", "prism"):
        raise ContractError(f'compat must be None, "ggml" or "prism"; got {compat!r:.80}')
    return _RULES[compat]
