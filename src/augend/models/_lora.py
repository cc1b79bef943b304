"""Adapters of low rank, beside the linear layers of any model: LoRA of Hu et al. 2021."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Final, final

import torch
from torch import Tensor, nn
from torch.nn import functional

from augend.errors import ContractError

LLAMA_TARGETS: Final = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def lora(
    model: nn.Module,
    *,
    rank: int,
    alpha: float | None = None,
    targets: Sequence[str] = LLAMA_TARGETS,
    dropout: float = 0.0,
) -> None:
    """Freeze a model and put a trainable adapter beside its linear layers, in place.

    A layer then computes ``W x + (alpha / rank) · B A dropout(x)`` with A ``[rank, inputs]`` and B ``[outputs, rank]``
    (Hu et al., "LoRA", 2021, section 4.1). A is drawn as ``nn.Linear`` draws its weight, from torch's global
    generator, and B is zero, so that the model computes what it did. All parameters that it had are frozen, and keep
    their names; ``q_proj`` has ``q_proj.lora_a.weight`` and ``q_proj.lora_b.weight`` beside ``q_proj.weight``. Make
    the optimizer and the `augend.Accumulator` afterwards, and shard the model afterwards too.

    Args:
        model: Any module. Its adapters have the dtype and the device of the layers that they stand beside.
        rank: Inner size of the adapters.
        alpha: Strength; ``alpha / rank`` multiplies what an adapter adds. None: the rank, which multiplies by 1.
        targets: Last names of the layers, full names, or patterns of either (``*_proj``), each of which must fit at
            least one ``nn.Linear``. The default is all layers of a `Llama` but its output.
        dropout: Probability of zeroing an adapter's input in training.

    Raises:
        ContractError: An argument is out of its range, a target fits no linear layer, or there are adapters already.
            The model is as it was.

    Numerics:
        Before the first update the model's outputs are what they were: an adapter adds an exact 0.

    Example:
        >>> model = augend.models.Llama(width=32, layers=1, heads=2)
        >>> augend.models.lora(model, rank=4, targets=["q_proj", "v_proj"])
        >>> sorted(name for name, parameter in model.named_parameters() if parameter.requires_grad)[0]
        'model.layers.0.self_attn.q_proj.lora_a.weight'
    """
    strength = float(rank if alpha is None else alpha)
    if rank < 1:
        raise ContractError(f"rank must be at least 1; got {rank}")
    if not 0 < strength < math.inf:
        raise ContractError(f"alpha must be positive and finite; got {strength}")
    if not 0 <= dropout < 1:
        raise ContractError(f"dropout must be at least 0 and less than 1; got {dropout}")
    if (name := next((name for name, _ in _adapted(model)), None)) is not None:
        raise ContractError(f"{name} has an adapter already; call merge_lora() before new ones are added")
    chosen = _chosen(model, targets)
    for parameter in model.parameters():
        parameter.requires_grad_(False)  # noqa: FBT003  torch names it otherwise in its stub
    made: dict[nn.Module, Adapted] = {}
    for name, layer in chosen.items():
        if layer not in made:  # a layer that stands at two places has one adapter
            made[layer] = Adapted(layer, rank=rank, scale=strength / rank, dropout=dropout)
        model.set_submodule(name, made[layer])


@torch.no_grad()
def merge_lora(model: nn.Module) -> None:
    """Add every adapter to the weight that it stands beside, and take it away, in place.

    The layers are plain ``nn.Linear`` again. What `lora` froze stays frozen; call ``requires_grad_()`` to train it.

    Args:
        model: A module with adapters, in plain tensors: one that is not sharded.

    Raises:
        ContractError: There are no adapters.

    Numerics:
        ``W + (alpha / rank) · B A`` is computed in float64 and rounded once to the weight's dtype.

    Example:
        >>> model = augend.models.Llama(width=32, layers=1, heads=2)
        >>> augend.models.lora(model, rank=4)
        >>> augend.models.merge_lora(model)
        >>> augend.models.export(model, "merged")
    """
    found = list(_adapted(model))
    if not found:
        raise ContractError("the model has no adapters to merge; call lora() to add some")
    plain: dict[nn.Module, nn.Linear] = {}
    for name, layer in found:
        if layer not in plain:
            plain[layer] = layer.merged()
        model.set_submodule(name, plain[layer])


def lora_state(model: nn.Module) -> dict[str, Tensor]:
    """Return the adapters' weights alone, by the names that they have in ``state_dict()``; not copied.

    Args:
        model: A module with adapters.

    Returns:
        For each layer ``NAME.lora_a.weight`` ``[rank, inputs]`` and ``NAME.lora_b.weight`` ``[outputs, rank]``, next
        to each other, detached. ``model.load_state_dict(state, strict=False)`` takes them back.

    Raises:
        ContractError: There are no adapters.
    """
    state = {
        f"{name}.{part}.weight": projection.weight.detach()
        for name, layer in _adapted(model)
        for part, projection in (("lora_a", layer.lora_a), ("lora_b", layer.lora_b))
    }
    if not state:
        raise ContractError("the model has no adapters; call lora() to add some")
    return state


@final
class Adapted(nn.Module):
    """A linear layer, frozen, and what its adapter adds.

    Args:
        base: The layer; its parameters are taken over under their names.
        rank: Inner size.
        scale: What the adapter's output is multiplied by.
        dropout: Probability of zeroing the adapter's input in training.
    """

    bias: nn.Parameter | None

    def __init__(self, base: nn.Linear, *, rank: int, scale: float, dropout: float) -> None:
        super().__init__()
        device, dtype = base.weight.device, base.weight.dtype
        self.weight = base.weight
        self.register_parameter("bias", base.bias)
        self.lora_a = nn.Linear(base.in_features, rank, bias=False, device=device, dtype=dtype)
        self.lora_b = nn.Linear(rank, base.out_features, bias=False, device=device, dtype=dtype)
        nn.init.zeros_(self.lora_b.weight)
        self.scale, self.dropout = scale, dropout
        self._base = (base,)  # in a tuple, as it is no module of its own
        base.register_parameter("weight", None)  # else it would keep the whole one alive where this one is sharded
        self.train(base.training)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[..., outputs]`` for ``[..., inputs]``."""
        lowered = self.lora_a(functional.dropout(x, self.dropout, self.training))  # [..., rank]
        out: Tensor = functional.linear(x, self.weight, self.bias) + self.scale * self.lora_b(lowered)
        return out

    def merged(self) -> nn.Linear:
        """Add the adapter to the weight, and return the layer as it was built."""
        (base,) = self._base
        added = self.lora_b.weight.double() @ self.lora_a.weight.double()  # [outputs, inputs]
        self.weight.copy_(self.weight.double() + self.scale * added)
        base.weight = self.weight
        base.register_parameter("bias", self.bias)
        return base.train(self.training)


def _adapted(model: nn.Module) -> Iterator[tuple[str, Adapted]]:
    """Yield the layers with adapters by all of their names."""
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, Adapted):
            yield name, module


def _chosen(model: nn.Module, targets: Sequence[str]) -> dict[str, nn.Linear]:
    """Return the linear layers that targets name, in the model's order.

    A kind of layer that is derived from ``nn.Linear`` is none: its parent may take its weight and pass it by.

    Raises:
        ContractError: There are no targets, or one fits none.
    """
    linear = {
        name: module
        for name, module in model.named_modules(remove_duplicate=False)
        if type(module) is nn.Linear and name
    }
    if not targets or isinstance(targets, str):
        raise ContractError(f"targets must be names of linear layers, such as ['q_proj', 'v_proj']; got {targets!r}")
    for target in targets:
        if not any(_fits(name, target) for name in linear):
            names = sorted({name.rpartition(".")[2] for name in linear})
            near = get_close_matches(target, names, n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            known = ", ".join(names) or "none"
            raise ContractError(f"targets: {target!r} fits no linear layer; {hint}the model's are called: {known}")
    return {name: module for name, module in linear.items() if any(_fits(name, target) for target in targets)}


def _fits(name: str, target: str) -> bool:
    return fnmatchcase(name, target) or fnmatchcase(name, f"*.{target}")
