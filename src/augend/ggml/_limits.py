"""Limits: how large tensors, data sets and schedules may be, so that a typing error is not an allocation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """The largest sizes that are accepted; what is larger is a ContractError before any memory is spent.

    Args:
        dimension: Of one dimension of a tensor, in elements.
        elements: Of a tensor, in elements.
        name_bytes: Of a name as it is given, in bytes of UTF-8.
        kept_name_bytes: Of a name as it is kept; a longer one is cut, which must not be inside a character. ggml keeps
            63 bytes.
        width: Of a datapoint, in elements.
        label_width: Of a label, in elements.
        rows: Of a data set, in datapoints.
        epochs: Of a fit.
        logical_batch: Of a fit, in datapoints.
        period: Physical batches in a window.
    """

    dimension: int = 2**31 - 1
    elements: int = 2**40
    name_bytes: int = 63
    kept_name_bytes: int = 63
    width: int = 2**31 - 1
    label_width: int = 2**31 - 1
    rows: int = 2**31 - 1
    epochs: int = 2**31 - 1
    logical_batch: int = 2**31 - 1
    period: int = 1_000_000

    @staticmethod
    def prism() -> Limits:
        """Return the bounds of the Rust port."""
        return Limits(
            dimension=65_536,
            elements=262_144,
            name_bytes=128,
            width=64,
            label_width=64,
            rows=4_096,
            epochs=4_096,
            logical_batch=4_096,
        )
