"""Optimizer states by parameter names, read and replaced without a step, a cast or a guess.

torch's own ``Optimizer.load_state_dict`` matches by position and casts moments to the parameter's dtype, and its
``get_optimizer_state_dict`` steps an optimizer that has no state yet; so neither is used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn

from augend._checkpoint._chunks import Layout, layouts_of, lies_as
from augend.errors import ContractError
from augend.optim import MasterWeights

Names = Mapping[nn.Parameter, str]
_NO_OPTIONS: Final = frozenset({"params", "param_names"})


def capture_optimizer(optimizer: torch.optim.Optimizer, names: Names) -> dict[str, Any]:
    """Return kinds, groups and state of an optimizer as a tree; its tensors are live, and nothing is changed.

    Args:
        optimizer: Any torch optimizer; `MasterWeights` with its masters.
        names: The name of each of its parameters.
    """
    stepped = stepping(optimizer)
    tree: dict[str, Any] = {
        "kinds": _kinds(optimizer),
        "groups": [_group(one, names) for one in optimizer.param_groups],
    }
    if isinstance(optimizer, MasterWeights):
        tree["masters"] = {names[one]: master for one, master in optimizer.masters.items() if master is not one}
    if has_own_state(stepped):
        return {**tree, "own": stepped.state_dict()}
    keys = _stepped_names(optimizer, names)
    return {
        **tree,
        "state": {keys[one]: dict(slots) for one, slots in stepped.state.items() if one in keys},
        "other": {one: slots for one, slots in stepped.state.items() if not isinstance(one, Tensor)},
    }


def prepare_optimizer(
    part: str, optimizer: torch.optim.Optimizer, names: Names, tree: Mapping[str, Any]
) -> Callable[[], None]:
    """Check a saved tree against a live optimizer; return what replaces its state.

    Raises:
        ContractError: Another kind of optimizer, other groups, or state for parameters that are not here.
    """
    _check(part, optimizer, names, tree)
    stepped = stepping(optimizer)
    masters = _masters(part, optimizer, names, tree.get("masters", {}))
    options = [dict(group["options"]) for group in tree["groups"]]
    own = has_own_state(stepped)
    state = tree["own"] if own else _placed_state(part, optimizer, names, tree)

    def commit() -> None:
        if own:
            stepped.load_state_dict(state)
        else:
            stepped.state.clear()
            stepped.state.update(state)
        for groups in {id(one): one.param_groups for one in (optimizer, stepped)}.values():
            for group, saved in zip(groups, options, strict=True):
                for name, value in saved.items():
                    group[name] = _into(group.get(name), value)
        for master, value in masters:
            master.copy_(value)

    return commit


def optimizer_layouts(
    optimizer: torch.optim.Optimizer, names: Names, shapes: Mapping[str, list[int]]
) -> dict[str, Layout]:
    """Return how saved tensors of an optimizer must be spread, those that belong to a parameter that is.

    As the parameter is, or where they have another shape, all of it on each rank; counters are plain.

    Args:
        optimizer: The live one.
        names: The name of each of its parameters.
        shapes: Of the saved tensors, by their names in the tree.
    """
    stepped = stepping(optimizer)
    ordered = [parameter for group in stepped.param_groups for parameter in group["params"]]
    owners: dict[str, Tensor] = {f"state.{name}": one for one, name in _stepped_names(optimizer, names).items()}
    owners.update({f"own.state.{index}": one for index, one in enumerate(ordered)})
    if isinstance(optimizer, MasterWeights):
        owners.update({f"masters.{names[one]}": master for one, master in optimizer.masters.items()})
    spread = layouts_of(owners)
    found = {}
    for key, shape in shapes.items():
        owner = key
        while owner and owner not in owners:
            owner = owner.rpartition(".")[0]
        if owner not in spread or key.endswith(".step"):
            continue
        if shape == list(owners[owner].shape):
            found[key] = spread[owner]
        elif shape:  # a factor of a moment; torch makes it a tensor that every rank has
            found[key] = spread[owner].replicated()
    return found


def _placed_state(part: str, optimizer: torch.optim.Optimizer, names: Names, tree: Mapping[str, Any]) -> dict[Any, Any]:
    """Return the state as the optimizer has it: by parameters, each tensor where it belongs."""
    owners = {name: parameter for parameter, name in _stepped_names(optimizer, names).items()}
    group_of = {parameter: group for group in stepping(optimizer).param_groups for parameter in group["params"]}
    saved_options = {name: group["options"] for group in tree["groups"] for name in group["params"]}
    if unknown := tree["state"].keys() - owners.keys():
        raise ContractError(f"{part}: the checkpoint has state of {min(unknown)!r}, which this optimizer has not")
    state = dict(tree["other"])
    for name, slots in tree["state"].items():
        options = {**group_of[owners[name]], **saved_options[name]}
        state[owners[name]] = {slot: _placed(value, slot, owners[name], options) for slot, value in slots.items()}
    return state


def stepping(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the optimizer that holds the moments: the inner one of `MasterWeights`, else itself."""
    return optimizer.inner if isinstance(optimizer, MasterWeights) else optimizer


def has_own_state(optimizer: torch.optim.Optimizer) -> bool:
    """Tell whether class or hooks keep the state in a way of their own; it is then matched by order, as written."""
    base = torch.optim.Optimizer
    kind = type(optimizer)
    if kind.state_dict is not base.state_dict or kind.load_state_dict is not base.load_state_dict:
        return True
    hooks = (
        optimizer._optimizer_state_dict_pre_hooks,  # noqa: SLF001  # torch has no other way to ask
        optimizer._optimizer_state_dict_post_hooks,  # noqa: SLF001  # the same
        optimizer._optimizer_load_state_dict_pre_hooks,  # noqa: SLF001  # the same
        optimizer._optimizer_load_state_dict_post_hooks,  # noqa: SLF001  # the same
    )
    return any(hooks)


def _kinds(optimizer: torch.optim.Optimizer) -> list[str]:
    inner = [optimizer.inner] if isinstance(optimizer, MasterWeights) else []
    return [f"{type(one).__module__}.{type(one).__qualname__}" for one in (optimizer, *inner)]


def _group(group: Mapping[str, Any], names: Names) -> dict[str, Any]:
    options = {name: value for name, value in group.items() if name not in _NO_OPTIONS}
    return {"params": [names[parameter] for parameter in group["params"]], "options": options}


def _stepped_names(optimizer: torch.optim.Optimizer, names: Names) -> dict[Tensor, str]:
    if not isinstance(optimizer, MasterWeights):
        return {parameter: name for parameter, name in names.items()}  # noqa: C416  # dict() keeps too narrow a type
    return {optimizer.masters[parameter]: name for parameter, name in names.items()}


def _check(part: str, optimizer: torch.optim.Optimizer, names: Names, tree: Mapping[str, Any]) -> None:
    kinds = _kinds(optimizer)
    if tree["kinds"] != kinds:
        raise ContractError(f"{part}: {tree['kinds'][-1]} was saved, and this is {kinds[-1]}: build the same optimizer")
    live = [[names[parameter] for parameter in group["params"]] for group in optimizer.param_groups]
    saved = [group["params"] for group in tree["groups"]]
    if len(saved) != len(live):
        raise ContractError(f"{part}: {len(saved)} groups of parameters were saved, and there are {len(live)}")
    in_order = has_own_state(stepping(optimizer))
    for index, (there, here) in enumerate(zip(saved, live, strict=True)):
        if there != here if in_order else set(there) != set(here):
            other = min(set(there) ^ set(here), default="the order")
            raise ContractError(f"{part}: group {index} was saved with other parameters; it differs in {other!r}")


def _masters(
    part: str, optimizer: torch.optim.Optimizer, names: Names, saved: Mapping[str, Tensor]
) -> list[tuple[nn.Parameter, Tensor]]:
    if not isinstance(optimizer, MasterWeights):
        return []
    live = {names[one]: master for one, master in optimizer.masters.items() if master is not one}
    if different := saved.keys() ^ live.keys():
        raise ContractError(f"{part}: only one side has a master of {min(different)!r}; store it in the same dtype")
    for name, value in saved.items():
        if (value.dtype, value.shape) != (live[name].dtype, live[name].shape):
            got = f"{value.dtype} of {list(value.shape)}"
            raise ContractError(f"{part}: the master of {name!r} was saved as {got}, and is {list(live[name].shape)}")
    return [(live[name], value) for name, value in saved.items()]


def _placed(value: Any, slot: str, parameter: Tensor, options: Mapping[str, Any]) -> Any:
    """Put a slot where torch's optimizers have it: with its parameter, but counters of plain loops on the CPU.

    Torch's fused optimizers are silently wrong where strides of moment and parameter differ, hence the layout.
    """
    if isinstance(value, list | tuple):
        return type(value)(_placed(one, slot, parameter, options) for one in value)
    if isinstance(value, dict):
        return {key: _placed(one, slot, parameter, options) for key, one in value.items()}
    if not isinstance(value, Tensor) or lies_as(value, parameter):
        return value  # a part of a tensor was read for its place alone: a copy more may be more than a device has
    if slot == "step" and not (options.get("fused") or options.get("capturable")):
        return value.clone()
    if value.shape == parameter.shape:
        return torch.empty_like(parameter, dtype=value.dtype, requires_grad=False).copy_(value)
    return value.to(parameter.device, copy=True)


def _into(live: Any, value: Any) -> Any:
    """Return the option: a tensor that is there keeps its identity, because the program may hold it too."""
    if isinstance(live, Tensor) and isinstance(value, Tensor) and live.shape == value.shape:
        return live.copy_(value)
    return value
