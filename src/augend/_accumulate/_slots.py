"""The live parameters of a model, and the proof that they are still the ones that were agreed."""

from __future__ import annotations

from itertools import pairwise
from typing import final

import torch
from torch import Tensor, nn

from augend._accumulate._contract import TensorContract, compare_tensors, tensors_of
from augend._placement import Placement
from augend.errors import ContractError, GradientError

_Seen = tuple[str, nn.Parameter, torch.dtype, torch.Size, bool, torch.device]


@final
class Slots:
    """The trainable parameters of a model, tied ones once, as they were when the accumulator was made.

    Args:
        placement: The module whose parameters are trained, and where they lie.
        work: The work dtype.

    Raises:
        ContractError: There is nothing to train, or a trainable parameter is empty, complex, wider than the work
            dtype, or shares memory with another parameter object.
        GradientError: An embedding would make sparse gradients.
    """

    def __init__(self, placement: Placement, work: torch.dtype) -> None:
        self.placement = placement
        model = placement.model
        self._seen = _walk(placement)
        self.tensors: dict[str, TensorContract] = _described(self._seen)
        self.parameters: dict[str, nn.Parameter] = {
            name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad
        }
        if not self.parameters:
            raise ContractError("the model has no parameter that requires a gradient: there is nothing to train")
        for name, parameter in self.parameters.items():
            _refuse_kind(name, parameter, placement.memory(parameter), work)
        self._places = self._where()
        _refuse_shared_memory(self._places, self.parameters)
        _refuse_sparse(model)

    def check(self) -> None:
        """Check that the model still has the very parameters it had; reads no values.

        Raises:
            ContractError: A parameter was added, removed, replaced, frozen, thawed, moved, untied, or changed its
                shape or dtype; names it.
        """
        now = _walk(self.placement)
        if len(now) == len(self._seen) and all(map(_same, self._seen, now)):
            places = self._where()
            if places != self._places:  # .data was set anew: fine, unless two now stand in one place
                _refuse_shared_memory(places, self.parameters)
                self._places = places
            return
        compare_tensors(self.tensors, _described(now), "the model now")
        changed = next(new[0] for old, new in zip(self._seen, now, strict=True) if not _same(old, new))
        raise ContractError(
            f"parameter {changed!r} was replaced by another object, or moved, since the accumulator was made; "
            "its gradients would be lost: make a new Accumulator after changing the model"
        )

    def _where(self) -> list[tuple[int, int, str]]:
        """Return from where to where in memory each parameter stands; those of which nothing is here stand nowhere."""
        once = {id(parameter): (name, parameter) for name, parameter, *_ in reversed(self._seen)}  # by its first name
        return sorted(
            (memory.data_ptr(), memory.data_ptr() + memory.numel() * memory.element_size(), name)
            for name, parameter in once.values()
            if (memory := self.placement.memory(parameter)) is not None
        )


def _walk(placement: Placement) -> list[_Seen]:
    """Return the parameters as optimizers hold them, also while a sharded module has gathered its own."""
    sharded = placement.canonical()
    found = [
        (name, sharded.get(id(parameter), parameter))
        for name, parameter in placement.model.named_parameters(remove_duplicate=False)
    ]
    return [(name, one, one.dtype, one.shape, one.requires_grad, one.device) for name, one in found]


def _described(seen: list[_Seen]) -> dict[str, TensorContract]:
    return tensors_of((name, parameter) for name, parameter, *_ in seen)


def _same(old: _Seen, new: _Seen) -> bool:
    return old[1] is new[1] and old[0] == new[0] and old[2:] == new[2:]


def _refuse_kind(name: str, parameter: nn.Parameter, memory: Tensor | None, work: torch.dtype) -> None:
    if parameter.numel() == 0:
        raise ContractError(
            f"parameter {name!r} has shape {list(parameter.shape)} and no elements; remove or freeze it"
        )
    if parameter.dtype not in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        raise ContractError(f"parameter {name!r} is {parameter.dtype}; only real floating parameters can be trained")
    if memory is not None and not _dense(memory):
        raise ContractError(
            f"parameter {name!r} of strides {list(memory.stride())} has gaps in memory, which torch's fused "
            "optimizers write over; use .clone()"
        )
    if parameter.dtype == torch.float64 and work != torch.float64:
        raise ContractError(f'parameter {name!r} is float64: its sums need dtype="float64"')


def _dense(memory: Tensor) -> bool:
    """Tell whether the elements fill their memory without gaps or overlaps, in whatever order of dims."""
    expected = 1
    for stride, size in sorted(zip(memory.stride(), memory.shape, strict=True)):
        if size > 1:
            if stride != expected:
                return False
            expected *= size
    return True


def _refuse_shared_memory(places: list[tuple[int, int, str]], trained: dict[str, nn.Parameter]) -> None:
    for (_, end, first), (start, _, second) in pairwise(places):
        if start < end and (first in trained or second in trained):
            raise ContractError(
                f"parameters {first!r} and {second!r} are two objects over the same memory; "
                "tie them by assigning one nn.Parameter to both places"
            )


def _refuse_sparse(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse and module.weight.requires_grad:
            raise GradientError(f"module {name!r} makes sparse gradients, which have no sum here; use sparse=False")
