"""The verdict on an optimizer is what happens on ranks: shards are stepped as a whole tensor is, or it was refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import Ranks
from torch import nn, optim
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from augend._finish._elementwise import check_elementwise
from augend.errors import ContractError

STEPS = 7
PASS: dict[str, tuple[type[optim.Optimizer], torch.dtype, dict[str, Any]]] = {
    "AdamW": (optim.AdamW, torch.float32, {}),
    "AdamW foreach": (optim.AdamW, torch.float32, {"foreach": True}),
    "AdamW amsgrad maximize": (optim.AdamW, torch.float32, {"amsgrad": True, "maximize": True}),
    "Adam decay": (optim.Adam, torch.float32, {"weight_decay": 0.1}),
    "SGD nesterov decay": (optim.SGD, torch.float32, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    "RMSprop momentum": (optim.RMSprop, torch.float32, {"momentum": 0.9, "centered": True}),
    "AdamW bfloat16": (optim.AdamW, torch.bfloat16, {}),
}
REFUSED: dict[str, tuple[type[optim.Optimizer], torch.dtype, dict[str, Any]]] = {
    "AdamW fused": (optim.AdamW, torch.float32, {"fused": True}),
    "SGD nesterov bfloat16": (optim.SGD, torch.bfloat16, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
}


def stepped(make: type[optim.Optimizer], dtype: torch.dtype, options: dict[str, Any]) -> tuple[bool, str]:
    """Step a whole model and its shards with the same gradients; say whether all bits are equal, and the verdict."""
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(nn.Sequential(nn.Linear(37, 53), nn.Linear(53, 101)).to(dtype))
    whole, shards = models[0], fully_shard(models[1])
    pairs = list(zip(whole.parameters(), shards.parameters(), strict=True))
    optimizers = [make(model.parameters(), **options) for model in (whole, shards)]
    for _ in range(STEPS):
        for one, other in pairs:
            one.grad = (torch.randn(one.shape) * torch.exp2(20 * torch.rand(one.shape) - 15)).to(dtype)
            other.grad = distribute_tensor(one.grad, other.device_mesh, other.placements)
        for optimizer in optimizers:
            optimizer.step()
    equal = all(torch.equal(one, other.full_tensor()) for one, other in pairs)
    for one, other in pairs:
        for name, value in optimizers[0].state[one].items():
            part = optimizers[1].state[other][name]
            equal &= torch.equal(value, part.full_tensor() if isinstance(part, DTensor) else part)
    try:
        check_elementwise(optimizers[1], dict(shards.named_parameters()))
    except ContractError as error:
        return equal, str(error)
    return equal, ""


@pytest.mark.parametrize("name", PASS)
def test_what_passes_steps_shards_as_a_whole(ranks3: Ranks, name: str) -> None:
    """On three ranks, with rows that three does not divide: parameters and state are the same bits."""
    assert [(True, "")] * 3 == ranks3.run(stepped, *PASS[name])


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_would_have_stepped_them_otherwise(ranks3: Ranks, name: str) -> None:
    """The refusal is no false alarm: on these shards the bits differ."""
    for equal, verdict in ranks3.run(stepped, *REFUSED[name]):
        assert not equal
        assert "differs in" in verdict
