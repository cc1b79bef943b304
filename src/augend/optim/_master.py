"""Float32 master weights for parameters that are stored in 16 bits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, final

import torch
from torch import Tensor, nn

from augend.errors import ContractError

_VERSION: Final = 1
_NARROW: Final = (torch.bfloat16, torch.float16)


@final
class MasterWeights(torch.optim.Optimizer):
    """Keep a float32 master of every 16-bit parameter, let any torch optimizer step the masters, and cast back.

    The master wins: after each step the parameter is the cast of its master, and what else was written to the
    parameter is lost. ``Accumulator.step`` hands the mean gradient to the master in float32, so it is never rounded
    to 16 bits; called by itself, ``step()`` takes the parameter's ``.grad``. Parameters of other dtypes are stepped
    directly.

    Args:
        params: Parameters, pairs of name and parameter, or parameter groups, as ``torch.optim`` takes them. With
            names, a saved state is matched by name; without, only by order and shape.
        make: Builds the optimizer from the groups of masters, e.g.
            ``functools.partial(torch.optim.AdamW, lr=3e-4)``.

    Raises:
        ContractError: ``make`` did not keep the groups it was given.

    Numerics:
        The masters are stepped bitwise as float32 parameters with the same gradients would be.

    Example:
        >>> import functools, torch
        >>> model = torch.nn.Linear(2, 1, bias=False, dtype=torch.bfloat16)
        >>> optimizer = augend.optim.MasterWeights(model.parameters(), functools.partial(torch.optim.SGD, lr=2.0**-12))
        >>> optimizer.masters[model.weight].dtype
        torch.float32
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter] | Iterable[tuple[str, nn.Parameter]] | Iterable[dict[str, Any]],
        make: Callable[[list[dict[str, Any]]], torch.optim.Optimizer],
    ) -> None:
        super().__init__(params, {})
        self.masters: dict[nn.Parameter, nn.Parameter] = {
            parameter: _master_of(parameter) for group in self.param_groups for parameter in group["params"]
        }
        groups = [
            {**group, "params": [self.masters[parameter] for parameter in group["params"]]}
            for group in self.param_groups
        ]
        self.inner = make(groups)
        if len(self.inner.param_groups) != len(groups):
            raise ContractError(f"make must keep the {len(groups)} groups it is given; it made {self.inner!r}")
        self.defaults = self.inner.defaults  # torch's cyclic schedulers look for momentum or betas here
        _copy_options(self.inner, self)

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]  # no loss is returned
        """Step the masters and cast them into the parameters.

        A master without a gradient takes its parameter's; a parameter without either is left alone.

        Raises:
            ContractError: A closure was given; the masters cannot be re-evaluated.
        """
        if closure is not None:
            raise ContractError("MasterWeights.step takes no closure: the model would not see the masters change")
        _copy_options(self, self.inner)
        for parameter, master in self.masters.items():
            if master.grad is None and parameter.grad is not None:
                master.grad = parameter.grad.to(master.dtype)
        self.inner.step()
        _copy_options(self.inner, self)  # some optimizers count in their groups
        with torch.no_grad():
            for parameter, master in self.masters.items():
                if master is not parameter and master.grad is not None:
                    parameter.copy_(master)
                    master.grad = None

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: FBT001, FBT002  # torch's own signature
        """Drop the gradients of parameters and masters."""
        super().zero_grad(set_to_none)
        self.inner.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return the masters, in the order of the parameters, and the inner optimizer's state; tensors are live."""
        narrow = [master.detach() for parameter, master in self.masters.items() if master is not parameter]
        _copy_options(self, self.inner)  # a scheduler may have set a rate since the last step
        names = [group.get("param_names") for group in self.param_groups]
        return {"version": _VERSION, "names": names, "masters": narrow, "inner": self.inner.state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take back what ``state_dict`` returned; the parameters become the casts of their masters.

        Raises:
            ContractError: Another version, or masters that do not fit; nothing was changed.
        """
        if state_dict.get("version") != _VERSION or state_dict.keys() != {"version", "names", "masters", "inner"}:
            got = f"{state_dict.get('version')!r} with {sorted(map(str, state_dict))}"
            raise ContractError(f"MasterWeights state must be version {_VERSION}; got {got}")
        names = [group.get("param_names") for group in self.param_groups]
        if state_dict["names"] != names:
            raise ContractError(f"the saved masters are of the parameters {state_dict['names']}, and these are {names}")
        pairs = [(parameter, master) for parameter, master in self.masters.items() if master is not parameter]
        saved: list[Tensor] = state_dict["masters"]
        shapes = [list(master.shape) for _, master in pairs]
        if [list(one.shape) for one in saved] != shapes or any(one.dtype != torch.float32 for one in saved):
            raise ContractError(f"the saved masters must be float32 of shapes {shapes}")
        self.inner.load_state_dict(state_dict["inner"])
        with torch.no_grad():
            for (parameter, master), one in zip(pairs, saved, strict=True):
                parameter.copy_(master.copy_(one))
        _copy_options(self.inner, self)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse groups after construction, which would have no masters.

        Raises:
            ContractError: Once the optimizer is made.
        """
        if "inner" in self.__dict__:
            raise ContractError("MasterWeights takes all its groups when it is made; make another one")
        super().add_param_group(param_group)

    def __getstate__(self) -> dict[str, Any]:
        """Return what copies and pickles keep; masters as pairs, since a copy's parameters are other keys."""
        return {**super().__getstate__(), "masters": list(self.masters.items()), "inner": self.inner}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copy."""
        super().__setstate__({**state, "masters": dict(state["masters"])})


def _copy_options(source: torch.optim.Optimizer, target: torch.optim.Optimizer) -> None:
    """Give the groups of one optimizer the options of another's, all but the parameters."""
    for group, other in zip(target.param_groups, source.param_groups, strict=True):
        group.update({name: value for name, value in other.items() if name != "params"})


def _master_of(parameter: nn.Parameter) -> nn.Parameter:
    if parameter.dtype not in _NARROW:
        return parameter
    return nn.Parameter(parameter.detach().to(torch.float32, copy=True))
