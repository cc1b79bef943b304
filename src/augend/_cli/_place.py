"""Lay a model out over ranks."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from augend._cli._ranks import Ranks
from augend._config import RunFile, refuse
from augend.errors import ContractError


def place(run: RunFile, model: nn.Module, ranks: Ranks) -> str:
    """Shard a model over the ranks as the run says, in place, or leave it whole on each.

    Each block of a list of equal blocks is gathered, used and given back on its own, and the rest of the model as a
    whole. Parameters keep their dtype.

    Collective.

    Returns:
        What was done, for people.

    Raises:
        ConfigError: It cannot be sharded.
        ContractError: It is another one on another rank.
    """
    if ranks.world == 1:
        return "alone"
    _check_equal(model, ranks)
    if run.parallel.mode == "replicated":
        return f"{ranks.world}, each with the whole model"
    copies = _copies(run, ranks.world)
    mesh = _mesh(model, ranks.world, copies)
    try:
        for block in blocks(model):
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    except (ValueError, NotImplementedError, AssertionError) as error:
        why = str(error).partition("\n")[0].rstrip(".")
        remedy = f"the model cannot be sharded: {why}; set parallel.mode = 'replicated'"
        raise refuse("parallel.mode", run.parallel.mode, remedy) from error
    if copies > 1:
        return f"{ranks.world}: {copies} copies of the model, each shared by {ranks.world // copies}"
    return f"{ranks.world} share the model"


def _check_equal(model: nn.Module, ranks: Ranks) -> None:
    """Refuse a model that is another one on each rank: once it is sharded, nobody could tell."""
    mine = {name: _digest(tensor) for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    first = json.loads(ranks.from_first(lambda: json.dumps(mine)))

    def check() -> None:
        for name in sorted(mine.keys() | first.keys()):
            if mine.get(name) != first.get(name):
                raise ContractError(
                    f"the model's {name!r} is not that of rank 0: build it from the run's seed alone, which is set "
                    "before, and not from the rank or the time"
                )

    ranks.agreed(check)


def _digest(tensor: Tensor) -> str:
    content = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.sha256(f"{tensor.dtype}{list(tensor.shape)}".encode() + content.tobytes()).hexdigest()


def blocks(model: nn.Module) -> Iterator[nn.Module]:
    """Yield once the modules of every list of equal ones, two or more; inner ones first."""
    modules = list(model.modules())
    lists = [one for one in modules if isinstance(one, nn.ModuleList | nn.Sequential) and len(one) > 1]
    found = {block for one in lists if _are_equal(list(one)) for block in one}
    yield from (module for module in reversed(modules) if module in found)


def _are_equal(modules: Sequence[nn.Module]) -> bool:
    """Tell whether modules are of one type that can be called, and have parameters of the same names and shapes."""
    if isinstance(modules[0], nn.ModuleList | nn.ModuleDict):
        return False
    shapes = [{name: parameter.shape for name, parameter in module.named_parameters()} for module in modules]
    types = [type(module) for module in modules]
    return bool(shapes[0]) and all(a == b for a, b in [*pairwise(shapes), *pairwise(types)])


def _copies(run: RunFile, world: int) -> int:
    """Return how many copies there are: one where so many ranks were lost that the wanted ones share them unevenly."""
    replicas = run.parallel.replicas or 1
    return replicas if world % replicas == 0 else 1


def _mesh(model: nn.Module, world: int, copies: int) -> DeviceMesh:
    device = next((parameter.device.type for parameter in model.parameters()), "cpu")
    if copies == 1:
        return init_device_mesh(device, (world,), mesh_dim_names=("shard",))
    return init_device_mesh(device, (copies, world // copies), mesh_dim_names=("replicate", "shard"))
