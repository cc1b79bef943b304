"""What the saved form of a window has besides where its sums are exact."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final, cast

import torch

from augend._accumulate._bits import Bits, read_bits
from augend._accumulate._contract import Contract
from augend._accumulate._reduce import Reduced
from augend._accumulate._scales import Scales
from augend._accumulate._window import Window
from augend._placement import local_of
from augend.errors import StateError

EXACT_KEYS: Final = frozenset({"scales", "before", "largest", "offer", "bits"})
_LOWEST, _HIGHEST = -200, 300  # of the scales that float32 gradients can have


def write_exact(scales: Scales, before: Scales | None, reduced: Reduced, bits: Bits) -> dict[str, object]:
    """Return scales, largest gradients and fingerprint as plain numbers, strings and dictionaries."""
    return {
        "scales": {term: dict(known) for term, known in scales.known.items()},
        "before": {term: {} if before is None else dict(before.known[term]) for term in scales.known},
        "largest": {
            term: {name: _write(size) for name, size in sizes.items()} for term, sizes in reduced.largest.items()
        },
        "bits": dict(bits),
    }


def read_exact(state: Mapping[str, object], contract: Contract, window: Window) -> None:
    """Give a window the scales and maxima that were saved, after checking them.

    Raises:
        StateError: A field is of another type or out of its domain, or names a parameter that is not trained.
    """
    window.scales = _scales(state, "scales", contract)
    window.before = _scales(state, "before", contract) if window.offer else None
    for term in contract.terms:
        for name, size in _numbers(state, "largest", term, contract).items():
            window.scales.see(
                term, name, torch.tensor(_read(f"largest[{term!r}][{name!r}]", size), dtype=torch.float64, device="cpu")
            )
    _check_measured(window, window.scales)
    read_bits(state["bits"])


def _scales(state: Mapping[str, object], field: str, contract: Contract) -> Scales:
    known = {term: _numbers(state, field, term, contract) for term in contract.terms}
    for term, scales in known.items():
        for name, scale in scales.items():
            _whole(f"{field}[{term!r}][{name!r}]", scale, _LOWEST, _HIGHEST)
    return Scales(cast("Mapping[str, Mapping[str, int]]", known), contract.max_microbatches or 1)


def _check_measured(window: Window, scales: Scales) -> None:
    """Refuse sums that have no grid, and yet are something."""
    for term, sums in window.sums.items():
        for name, total in sums.items():
            if scales.of(term, name) is None and bool(local_of(total).any()):
                raise StateError(f"sums[{term!r}][{name!r}] is not zero, and no scale of term {term!r} is known")


def _numbers(state: Mapping[str, object], field: str, term: str, contract: Contract) -> Mapping[str, object]:
    table = state[field]
    if not isinstance(table, Mapping) or set(table) != set(contract.terms):
        raise StateError(f"{field} must be a dictionary with the terms {', '.join(contract.terms)}; got {table!r:.80}")
    numbers = table[term]
    if not isinstance(numbers, Mapping):
        raise StateError(f"{field}[{term!r}] must be a dictionary; got {type(numbers).__name__}")
    for name in numbers:
        agreed = contract.tensors.get(name)
        if agreed is None or not agreed.trainable:
            raise StateError(f"{field}[{term!r}] names {name!r}, which is no trained parameter")
    return numbers


def _whole(name: str, value: object, lowest: int, highest: int) -> int:
    if type(value) is not int or not lowest <= value <= highest:
        raise StateError(f"{name} must be a whole number from {lowest} to {highest}; got {value!r}")
    return value


def _write(size: float) -> float | str:
    return size if math.isfinite(size) else str(size)  # JSON has neither inf nor nan


def _read(name: str, size: object) -> float:
    if isinstance(size, str) and size in ("inf", "nan"):
        return float(size)
    if type(size) is not float or not 0 < size < math.inf:
        raise StateError(f"{name} must be a positive number, 'inf' or 'nan'; got {size!r}")
    return size
