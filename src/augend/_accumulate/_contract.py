"""What a window's sums belong to: the parameters of a model, the work dtype, the loss scale and the terms."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, final

import torch
from torch import nn

from augend._placement import Dtypes, give_back
from augend.errors import ContractError

EXACT: Final = "exact"
DTYPES: Final = {  # of gradients and means, and of sums
    "float32": Dtypes(torch.float32, torch.float32),
    "float64": Dtypes(torch.float64, torch.float64),
    EXACT: Dtypes(torch.float32, torch.int64),
}


@final
@dataclass(frozen=True, slots=True)
class TensorContract:
    """One parameter: its logical shape, storage dtype, whether it is trained, and its other names."""

    shape: tuple[int, ...]
    dtype: str
    trainable: bool
    tied: tuple[str, ...] = ()


@final
@dataclass(frozen=True, slots=True)
class Contract:
    """All that must be equal for pending sums to go on: nothing in it depends on ranks or on how rows were cut.

    Args:
        dtype: Of the sums: ``"float32"``, ``"float64"`` or ``"exact"``.
        loss_scale: What every loss sum was multiplied by.
        terms: Names of the loss terms, in order.
        tensors: Every parameter of the model, frozen ones too, under its first name.
        max_microbatches: Of exact sums, what their head-room is for; None of others.
    """

    dtype: str
    loss_scale: float
    terms: tuple[str, ...]
    tensors: Mapping[str, TensorContract]
    max_microbatches: int | None = None

    @property
    def exact(self) -> bool:
        """Whether the sums are whole numbers of grid steps."""
        return self.dtype == EXACT

    @property
    def dtypes(self) -> Dtypes:
        """Of gradients and of sums."""
        return DTYPES[self.dtype]

    def validate(self, model: nn.Module) -> None:
        """Check that a model has exactly these parameters; reads no values.

        Raises:
            ContractError: A parameter is missing, extra, or differs; names it and says in what.
        """
        give_back(model)
        compare_tensors(self.tensors, tensors_of(model.named_parameters(remove_duplicate=False)), "the model")

    def to_plain(self) -> dict[str, object]:
        """Return the contract as plain numbers, strings, lists and dictionaries."""
        return {
            "dtype": self.dtype,
            "loss_scale": {"kind": "fixed", "value": self.loss_scale},
            "terms": list(self.terms),
            "tensors": {
                name: {"shape": list(one.shape), "dtype": one.dtype, "trainable": one.trainable, "tied": list(one.tied)}
                for name, one in self.tensors.items()
            },
            **({"max_microbatches": self.max_microbatches} if self.exact else {}),
        }


def tensors_of(parameters: Iterable[tuple[str, nn.Parameter]]) -> dict[str, TensorContract]:
    """Describe parameters once, under their first names; given are all names of each, in the model's order."""
    names: dict[int, list[str]] = {}
    held: dict[int, nn.Parameter] = {}
    for name, parameter in parameters:
        names.setdefault(id(parameter), []).append(name)
        held[id(parameter)] = parameter
    return {
        first: TensorContract(
            shape=tuple(held[key].shape),
            dtype=str(held[key].dtype).removeprefix("torch."),
            trainable=held[key].requires_grad,
            tied=tuple(others),
        )
        for key, (first, *others) in names.items()
    }


def compare_tensors(expected: Mapping[str, TensorContract], got: Mapping[str, TensorContract], where: str) -> None:
    """Check that two descriptions of parameters are equal.

    Raises:
        ContractError: Names the first parameter that differs, and how.
    """
    if missing := expected.keys() - got.keys():
        raise ContractError(f"parameter {min(missing)!r} is in the contract but not in {where}")
    if extra := got.keys() - expected.keys():
        raise ContractError(f"parameter {min(extra)!r} is in {where} but not in the contract")
    for name, want in expected.items():
        for field in ("shape", "dtype", "trainable", "tied"):
            before, now = getattr(want, field), getattr(got[name], field)
            if before != now:
                raise ContractError(f"parameter {name!r}: {field} {before} was expected, and {where} has {now}")
