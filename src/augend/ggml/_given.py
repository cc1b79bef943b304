"""What users give: numbers of any kind as tensors, and whole numbers within their bounds."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from augend.errors import ContractError


def whole_number(what: str, number: object, least: int, most: int | None = None) -> int:
    """Return a whole number.

    Raises:
        ContractError: It is none, or not within its bounds.
    """
    within = type(number) is int and least <= number and (most is None or number <= most)
    if not isinstance(number, int) or not within:
        upper = "on" if most is None else f"to {most:,}"
        raise ContractError(f"{what} must be a whole number from {least:,} {upper}; got {number!r:.80}")
    return number


def mapping(what: str, given: object, keys: Collection[str]) -> Mapping[str, Any]:
    """Return a mapping that has these keys and no other.

    Raises:
        ContractError: It is none, or has not.
    """
    if not isinstance(given, Mapping) or given.keys() != set(keys):
        shown = f"{dict(given)!r:.80}" if isinstance(given, Mapping) else type(given).__name__
        raise ContractError(f"{what} is a mapping with the keys {sorted(keys)}; got {shown}")
    return given


def check_same(what: str, saved: Mapping[str, Any], own: Mapping[str, int | str | bool | None]) -> None:
    """Compare numbers and words of a saved state with those here, by name.

    Raises:
        ContractError: One is another, or of another type.
    """
    for name, value in own.items():
        if type(saved[name]) is not type(value) or saved[name] != value:
            raise ContractError(f"the state of {what} has {name} {saved[name]!r:.80}; here it is {value!r}")


def numbers(what: str, values: object) -> Tensor:
    """Return anything that torch makes real numbers of, on the CPU and dense.

    Raises:
        ContractError: Torch makes nothing of it, or something else.
    """
    try:
        tensor = torch.as_tensor(values).detach()
        if tensor.is_floating_point() and not isinstance(values, Tensor | np.ndarray):
            tensor = torch.as_tensor(values, dtype=torch.float64)  # Python's own, before it is rounded or overflows
        plain = not (tensor.is_meta or tensor.is_quantized or tensor.is_complex()) and tensor.layout == torch.strided
        if plain:
            return tensor.to("cpu")
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise ContractError(f"{what} must be real numbers; got {type(values).__name__}: {error}") from error
    raise ContractError(
        f"{what} must be real numbers that are there, dense; got {tensor.dtype} {tensor.layout} on {tensor.device}"
    )


def floats(what: str, values: object) -> Tensor:
    """Return numbers as a float32 tensor of its own.

    Raises:
        ContractError: They are none, or a finite one is too large for float32.
    """
    given = numbers(what, values)
    converted = given.to(torch.float32, copy=True)
    if given.dtype in {torch.float64, torch.int64} and bool((converted.isinf() & given.isfinite()).any()):
        raise ContractError(f"{what} must be numbers of float32; got one of {given.abs().max().item():.3g}")
    return converted


def integers(what: str, values: object) -> Tensor:
    """Return whole numbers as an int32 tensor of its own.

    Raises:
        ContractError: They are none, or one is beyond int32.
    """
    given = numbers(what, values)
    if given.is_floating_point():
        raise ContractError(f"{what} must be whole numbers of int32; got {given.dtype}")
    converted = given.to(torch.int32, copy=True)
    if not torch.equal(converted.to(torch.int64), given.to(torch.int64)):
        raise ContractError(f"{what} must be whole numbers of int32; got one beyond it")
    return converted
