"""What a model's parameters are spread over, told from the parameters themselves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor.placement_types import Shard
from torch.nn.parallel import DistributedDataParallel

from augend._group import Mesh, open_group, rank_and_world
from augend._placement._axes import Axes, axis_names
from augend._placement._chunks import Chunks
from augend._placement._fsdp import FullySharded, give_back, meshes_of
from augend._placement._place import Dtypes, Place
from augend._placement._placement import Placement
from augend._placement._probe import prove_sums
from augend._placement._tensors import placed
from augend.errors import PlacementError

Sync = Literal["every", "last"]
_DATA: Final = "data"


def place(model: nn.Module, *, mesh: Mesh | None, sync: Sync, dtypes: Callable[[], Dtypes]) -> Placement:
    """Find out where the parameters of a model lie, and where their sums are to lie.

    Collective over the full mesh, if there are several ranks.

    Args:
        model: Plain, replicated (a DistributedDataParallel is looked into), sharded by ``fully_shard`` over one or two
            axes, split by tensor parallelism, or both.
        mesh: The full mesh, where the parameters do not tell it.
        sync: Whether the sums of replicated parameters are shared out and added up in every micro-batch, or kept
            whole and added up last.
        dtypes: Returns those of gradients and sums, or refuses what was asked for besides.

    Raises:
        PlacementError: The parameters lie as nothing here can serve, or a mesh is needed, or does not fit.
    """
    group = open_group(mesh, purpose="augend accumulator")
    work, held = group.agreed("the look at the arguments", dtypes)
    inner, sharded, full = group.agreed("the look at the model", lambda: _looked_at(model, mesh, sync))
    if full is None and group.world > 1:
        device = next((one.device.type for one in inner.parameters()), "cpu")
        full = init_device_mesh(device, (group.world,), mesh_dim_names=(_DATA,))
    parameters = dict(inner.named_parameters())
    group.agreed("the look at the mesh", lambda: _refuse_permuted(full))
    axes = Axes(full, _data_axes(parameters, sharded, full))
    if not held.is_floating_point:
        group.agreed("the look at the axes", lambda: _refuse_tensor_axes(axes))
    trained = {name: one for name, one in parameters.items() if one.requires_grad}
    fsdp = None
    if sharded:
        names = {id(one): name for name, one in trained.items()}
        fsdp = group.agreed("the look at the sharded modules", lambda: FullySharded(sharded, names, work, held))
        proof = "the proof that gradients are added up"
        with group.explained(proof):
            group.agreed(proof, lambda: prove_sums(sharded.values(), work, held))
    chunks, over = None, None
    if full is not None and not sharded and sync == "every" and axes.share()[1] > 1 and not axes.tensor:
        chunks, over = _chunked(trained, full, held)
    places = group.agreed(
        "the look at the parameters",
        lambda: {name: _place(name, one, axes, fsdp, over) for name, one in trained.items()},
    )
    return Placement(inner, places, axes, group, fsdp=fsdp, chunks=chunks)


def _looked_at(model: nn.Module, mesh: Mesh | None, sync: Sync) -> tuple[nn.Module, dict[str, FSDPModule], Mesh | None]:
    """Return the model without its wrapper, its sharded modules, and the full mesh as far as parameters tell it."""
    inner = _unwrapped(model)
    give_back(inner)
    parameters = dict(inner.named_parameters())
    for name, parameter in parameters.items():
        _refuse_kind(name, parameter)
    sharded = {name: one for name, one in inner.named_modules() if isinstance(one, FSDPModule)}
    if sync == "last" and sharded:
        raise PlacementError(
            'sync="last" keeps whole sums on every rank, and module '
            f"{next(iter(sharded)) or type(inner).__name__!r} is sharded by fully_shard(): what FSDP2 keeps without "
            'syncing lies outside .grad. Use sync="every"'
        )
    return inner, sharded, _full_mesh(parameters, mesh)


def _unwrapped(model: nn.Module) -> nn.Module:
    """Look into a DistributedDataParallel, whose averaging is switched off; refuse what cannot be looked into."""
    if isinstance(model, DistributedDataParallel):
        if model.static_graph:
            raise PlacementError(
                "a DistributedDataParallel with static_graph=True cannot be kept from averaging; give the plain "
                "module, or wrap it without static_graph"
            )
        model.require_backward_grad_sync = False
        model = model.module
    for name, module in model.named_modules():
        if isinstance(module, DistributedDataParallel | FullyShardedDataParallel):
            kind = type(module).__name__
            raise PlacementError(
                f"module {name!r} is a {kind}, which averages gradients by itself; use fully_shard() of "
                "torch.distributed.fsdp, or give the plain module"
            )
    return model


def _refuse_kind(name: str, parameter: nn.Parameter) -> None:
    lies = placed(parameter)
    if lies is None and type(parameter.data) is not Tensor:
        kind = type(parameter.data).__name__
        raise PlacementError(f"parameter {name!r} is a {kind}; only plain tensors and DTensors can be summed")
    if lies is not None and any(one.is_partial() for one in lies[1]):
        raise PlacementError(f"parameter {name!r} is spread as {lies[1]}: a parameter cannot be partial")


def _full_mesh(parameters: Mapping[str, nn.Parameter], given: Mesh | None) -> Mesh | None:
    meshes: list[Mesh] = []
    for parameter in parameters.values():
        lies = placed(parameter)
        if lies is not None and lies[0] not in meshes:
            meshes.append(lies[0])
    _, world = rank_and_world()
    if given is None and not meshes:
        return None
    full = given if given is not None else max(meshes, key=lambda one: one.ndim)
    if given is None and full.size() != world:
        raise PlacementError(
            f"the parameters lie on {full}, and there are {world} ranks: pass the mesh of all of them, mesh=, so that "
            "it is known which ranks share a batch"
        )
    for one in meshes:
        if one != full and not _is_part(one, full):
            raise PlacementError(
                f"the parameters lie on {one}, which is no part of {full}: make one mesh with mesh_dim_names=, shard "
                'over its axes, as in mesh["shard"], and pass it as mesh='
            )
    return full


def _is_part(one: Mesh, full: Mesh) -> bool:
    """Tell whether a mesh is some axes of another."""
    names = one.mesh_dim_names
    return names is not None and set(names) <= set(full.mesh_dim_names or ()) and full[tuple(names)] == one


def _refuse_permuted(full: Mesh | None) -> None:
    """torch counts the ranks of a group in their own order, and those of a mesh in the mesh's."""
    if full is not None:
        if full.ndim > 1 and full.mesh_dim_names is None:
            raise PlacementError(f"the axes of {full} have no names; make it with mesh_dim_names=")
        for dim, name in enumerate(axis_names(full)):
            ranks = dist.get_process_group_ranks(full.get_group(dim))
            place = full.get_coordinate()
            if place is not None and ranks.index(dist.get_rank()) != place[dim]:
                raise PlacementError(
                    f"along axis {name!r} of the mesh ranks stand in another order than their numbers; make it with "
                    "init_device_mesh(), or with the ranks of every axis ascending"
                )


def _data_axes(
    parameters: Mapping[str, nn.Parameter], sharded: Mapping[str, FSDPModule], full: Mesh | None
) -> tuple[str, ...]:
    """Return the axes whose ranks share a batch: FSDP2's, and those that no parameter knows of."""
    if full is None:
        return ()
    data = {name for module in sharded.values() for one in meshes_of(module) for name in _known(one, full)}
    known = {name for one in parameters.values() if (lies := placed(one)) is not None for name in _known(lies[0], full)}
    return tuple(name for name in axis_names(full) if name in data or name not in known)


def _known(mesh: Mesh, full: Mesh) -> tuple[str, ...]:
    return axis_names(full) if mesh == full else axis_names(mesh)


def _refuse_tensor_axes(axes: Axes) -> None:
    """Sums in whole numbers are for the same bits on any cut, and this cut changes what is summed."""
    if axes.tensor:
        raise PlacementError(
            f"the ranks along axis {axes.tensor[0]!r} run the same rows, as of tensor parallelism, which changes the "
            'arithmetic inside of each micro-batch: dtype="exact" cannot promise the same bits there. Use "float32" or '
            '"float64", or shard with fully_shard() alone'
        )


def _chunked(trained: Mapping[str, nn.Parameter], full: Mesh, held: torch.dtype) -> tuple[Chunks, Mesh]:
    """Return who deals the sums of replicated parameters, and the one axis that they are dealt along."""
    over = full if full.ndim == 1 else full._flatten()  # noqa: SLF001  # torch's documented name for it
    shapes = {name: one.shape for name, one in trained.items() if one.dim()}
    device = next(iter(trained.values())).device if trained else torch.device("cpu")
    return Chunks(shapes, over.get_group(), held, device), over


def _place(name: str, parameter: nn.Parameter, axes: Axes, fsdp: FullySharded | None, over: Mesh | None) -> Place:
    lies = placed(parameter)
    if lies is None:
        if over is not None and parameter.dim():
            return Place(parameter, (over, (Shard(0),)), (), axes.names)
        return Place(parameter, None, axes.data, ())
    split = axes.split(lies)
    added: tuple[str, ...] = ()
    if fsdp is not None and name in fsdp.owned and axes.mesh is not None:
        over_mesh, dim = fsdp.owned[name]
        added = (_known(over_mesh, axes.mesh)[dim],)
    if wrong := [axis for axis in split if axis in axes.data and axis not in added]:
        raise PlacementError(
            f"parameter {name!r} is split over axis {wrong[0]!r}, whose ranks share a batch, and not by fully_shard(): "
            "its gradients are not whole there; use fully_shard(), or give that axis to tensor parallelism alone"
        )
    return Place(parameter, lies, tuple(axis for axis in axes.data if axis not in added), split)
