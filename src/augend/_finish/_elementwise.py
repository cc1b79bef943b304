"""Whether an optimizer's step depends on where a tensor is cut: tried on this machine, slices against the whole."""

from __future__ import annotations

import copy
import itertools
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any, Final, final

import torch
from torch import Tensor, nn

from augend.errors import ContractError
from augend.optim import MasterWeights

_MIXING: Final = (
    (torch.optim.Adafactor, "it takes means of squares over rows and columns, and the root mean square of a tensor"),
    (torch.optim.Muon, "it makes whole matrices orthogonal"),
    (torch.optim.LBFGS, "it takes dot products over all parameters"),
)
_STEPS: Final = 6  # in the sixth, RAdam starts to divide by the root of its second moment
_ELEMENTS: Final = 768  # in rows of 3, which no processor's registers are
_MANY_ELEMENTS: Final = 3 * 2**15  # for rules that begin with a size, as that of states in 8 bits
_MANY_STEPS: Final = 2
_MANY_LENGTHS: Final = ((4095, 12288, 1000, 65536, 257),)
_ALIGNED: Final = 64  # bytes: a register of AVX-512, two of AVX2, and a line of the cache, where threads part
# Lengths below a register's leave a kernel's vector loop without work, so the remainder loop computes those elements.
_LENGTHS: Final = ((1, 7, 2, 15, 3, 9, 5, 13, 4, 11, 6, 8, 10, 14, 12), (17, 31, 33, 63, 16, 65, 23, 129, 47))
_FAILURES: Final = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
_OWN: Final = frozenset({"params", "param_names"})


def proof_key(optimizer: torch.optim.Optimizer) -> Hashable:
    """Return what a proof by `check_elementwise` holds for: while it is equal, nothing that matters has changed.

    Of a number only whether it is 0, 1 or another: that is what a step decides by, and a schedule changes the rest.
    """
    return type(optimizer), tuple((len(group["params"]), _kind(group)) for group in optimizer.param_groups)


def check_elementwise(optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]) -> None:
    """Try whether the bits of an optimizer's step depend on where a tensor is cut, and refuse it if they do.

    It is evidence and no proof: a rule that applies to other shapes or values than those tried is not seen.

    A copy of the optimizer, with its options, takes a few steps on made tensors, and another copy on slices of them, of
    all lengths that a processor's vector loops treat differently. Parameter and state must be the same bits. A fused
    kernel has its arithmetic written twice, for the vector loop and for what remains; it is let through where no
    rank's part has a remainder. The optimizer, its parameters and the random state are left as they are. What is tried
    is the ``step`` of its class: hooks are not.

    Args:
        optimizer: Any torch optimizer, of which only ``step`` is used; of `MasterWeights`, what it wraps.
        parameters: The trained parameters by name, wherever they lie; others that the optimizer holds do not matter.

    Raises:
        ContractError: It is known to mix elements, cannot be tried, or a slice came out differently.
    """
    names = {id(parameter): name for name, parameter in parameters.items()}
    stepped = optimizer
    if isinstance(optimizer, MasterWeights):
        stepped = optimizer.inner
        names |= {id(optimizer.masters[one]): names[id(one)] for one in optimizer.masters if id(one) in names}
    _refuse(stepped)
    seen = set()
    for given, group in zip(optimizer.param_groups, stepped.param_groups, strict=True):
        options = {name: value for name, value in given.items() if name not in _OWN}
        trained = {names[id(one)]: one for one in group["params"] if id(one) in names}
        for name, parameter in trained.items():
            kind = (_kind(options), parameter.dtype, parameter.device, parameter.ndim)
            if parameter.ndim and kind not in seen:
                seen.add(kind)
                _prove(_Trial(stepped, options, name, parameter), trained)


def _refuse(optimizer: torch.optim.Optimizer) -> None:
    """Refuse what no trial is needed for, or none is possible for."""
    name = type(optimizer).__name__
    for kind, reason in _MIXING:
        if isinstance(optimizer, kind):
            raise ContractError(
                f"exact mode cannot promise the same bits with {name}: {reason}, so its step depends on where ranks "
                "cut a tensor; use an elementwise optimizer such as torch.optim.AdamW or SGD, or dtype='float32'"
            )
    if "_torchdynamo_orig_callable" in getattr(vars(optimizer).get("step"), "__dict__", {}):
        raise ContractError(
            f"exact mode cannot promise the same bits with a compiled step of {name}: each shape of a rank's part may "
            "be compiled to other arithmetic; leave the step as torch has it, or use dtype='float32'"
        )
    for attribute, value in vars(optimizer).items():
        if isinstance(value, torch.optim.Optimizer):
            raise ContractError(
                f"exact mode cannot try {name}, which wraps another optimizer in its {attribute!r}, without stepping "
                "that one too; give the inner optimizer to step(), or use dtype='float32'"
            )


def _prove(trial: _Trial, trained: Mapping[str, nn.Parameter]) -> None:
    """Try cuts at any place; of a fused kernel, at aligned places, if the parameters can be cut nowhere else."""
    if not trial.options.get("fused"):
        if (found := trial.difference(aligned=False)) is not None:
            raise ContractError(f"{trial.words()}: {found}; {trial.remedy()}")
        return
    uneven = next((name for name, one in trained.items() if not _is_aligned(one)), None)
    unit = _unit(trial.parameter if uneven is None else trained[uneven])
    if uneven is not None:
        found = trial.difference(aligned=False) or "its remainder loop rounds by itself, even if no slice showed it"
        raise ContractError(
            f"{trial.words()}: {found}. That cannot be where every rank's part is a multiple of {unit} elements, "
            f"but {uneven!r} of shape {list(trained[uneven].shape)} can be cut elsewhere; use fused=False, or give "
            "such parameters a group of their own with 'fused': False"
        )
    if (found := trial.difference(aligned=True)) is not None:
        raise ContractError(f"{trial.words()}, even at multiples of {unit} elements: {found}; use fused=False")


def _is_aligned(parameter: nn.Parameter) -> bool:
    """Say whether every cut between indices of the first dimension, and of those that are cut now, is aligned."""
    cut = {one.dim for one in getattr(parameter, "placements", ()) if one.is_shard()}
    unit = _unit(parameter)
    return all(parameter.numel() // parameter.shape[dim] % unit == 0 for dim in {0, *cut} if parameter.ndim)


def _unit(parameter: nn.Parameter) -> int:
    """Return how many elements leave no remainder."""
    return _ALIGNED // parameter.element_size()


@final
@dataclass(frozen=True, slots=True)
class _Trial:
    """One optimizer with the options of one group, and one of the group's parameters for what is to be tried."""

    optimizer: torch.optim.Optimizer
    options: Mapping[str, Any]
    name: str
    parameter: nn.Parameter

    def words(self) -> str:
        fused = " with fused=True" if self.options.get("fused") else ""
        what = f"{type(self.optimizer).__name__}{fused} on {self.parameter.dtype} parameters such as {self.name!r}"
        return f"exact mode cannot promise the same bits with {what}"

    def remedy(self) -> str:
        if self.parameter.dtype != torch.float32:
            return "keep float32 masters with augend.optim.MasterWeights"
        return "use an elementwise optimizer such as torch.optim.AdamW or SGD, or dtype='float32'"

    def difference(self, *, aligned: bool) -> str | None:
        """Step tensors and their slices; return in words the first difference between them, None if there is none."""
        unit = _unit(self.parameter) if aligned else 1
        return self._difference(_ELEMENTS, _STEPS, _cuts(unit, _ELEMENTS, _LENGTHS)) or self._difference(
            _MANY_ELEMENTS, _MANY_STEPS, _cuts(unit, _MANY_ELEMENTS, _MANY_LENGTHS)
        )

    def _difference(self, elements: int, steps: int, cuts: Sequence[slice]) -> str | None:
        device, others = self.parameter.device, [1] * (self.parameter.ndim - 1)
        shape = [-1] if self.parameter.ndim == 1 else [-1, 3, *others[1:]]
        draw = torch.Generator().manual_seed(0)
        start = _spread(draw, elements, low=-30, high=2).to(self.parameter)
        whole = [nn.Parameter(start.clone().reshape(shape))]
        slices = [nn.Parameter(start[cut].clone().reshape(-1, *others)) for cut in cuts]
        try:
            with torch.random.fork_rng([] if device.type == "cpu" else [device], device_type=device.type):
                one, many = self._twin(whole, self.options), self._twin(slices, _as_on_ranks(self.options))
                for _ in range(steps):
                    gradient = _spread(draw, elements, low=-20, high=6).to(self.parameter)
                    for part, cut in [(whole[0], slice(None)), *zip(slices, cuts, strict=True)]:
                        part.grad = gradient[cut].clone().reshape(part.shape)
                    _step(one)
                    _step(many)
        except _FAILURES as error:
            remedy = "change the option that it names, or use dtype='float32'"
            raise ContractError(f"{self.words()}: it failed where it was tried: {error}; {remedy}") from error
        if _moves(self.options) and _same_bits(start.reshape(shape), whole[0]):
            raise ContractError(f"{self.words()}: {steps} steps left a parameter of its param_groups as it was")
        pairs = {"the parameter": (whole[0], slices), **_states(one, whole[0], many, slices)}
        return next((text for name, (all_, parts) in pairs.items() if (text := _differ(name, all_, parts, cuts))), None)

    def _twin(self, parameters: list[nn.Parameter], options: Mapping[str, Any]) -> torch.optim.Optimizer:
        """Copy the optimizer without its parameters, hooks and bound methods, and give it these parameters."""
        own = self.optimizer
        twin = type(own).__new__(type(own))
        held: dict[int, object] = {id(one): torch.empty(0) for group in own.param_groups for one in group["params"]}
        held[id(own)] = twin  # whatever the optimizer holds besides, the copy never gets the real parameters
        kept = {
            name: copy.deepcopy(value, dict(held))
            for name, value in vars(own).items()
            if name not in {"state", "param_groups"} and "_hooks" not in name and not _is_method(value, own)
        }
        group = {name: _option(value) for name, value in options.items()}
        state = {one: self._state(one) for one in parameters if self.parameter in own.state}
        groups = [{**group, "params": parameters}]
        torch.optim.Optimizer.__setstate__(twin, {**kept, "state": defaultdict(dict, state), "param_groups": groups})
        return twin

    def _state(self, parameter: nn.Parameter) -> dict[str, Any]:
        """Return the state that the optimizer has by now: its counters, and ones for what has the tensor's shape."""
        return {
            name: torch.ones_like(parameter, dtype=value.dtype, requires_grad=False)
            if isinstance(value, Tensor) and value.shape == self.parameter.shape
            else copy.deepcopy(value)
            for name, value in self.optimizer.state[self.parameter].items()
        }


def _step(optimizer: torch.optim.Optimizer) -> None:
    """Step without the hooks that are registered for all optimizers, which should not see this one."""
    step = type(optimizer).step
    getattr(step, "__wrapped__", step)(optimizer) if getattr(step, "hooked", False) else step(optimizer)


def _as_on_ranks(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options with which a plain tensor is stepped as a DTensor is, for which torch never chooses foreach."""
    return {name: False if name == "foreach" and value is None else value for name, value in options.items()}


def _is_method(value: object, owner: object) -> bool:
    return isinstance(value, MethodType) and value.__self__ is owner


def _option(value: Any) -> Any:
    """Copy an option; a rate of 0 in a tensor, which may be another in the next step, becomes one that moves."""
    if isinstance(value, Tensor):
        return torch.where(value == 0, 2.0**-10, value.detach()).to(value.dtype)
    return copy.deepcopy(value)


def _moves(options: Mapping[str, Any]) -> bool:
    """Say whether a step with these options should change a parameter."""
    rate = options.get("lr", 1.0)
    return isinstance(rate, Tensor) or rate != 0


def _kind(value: Any) -> object:
    if isinstance(value, Mapping):
        return tuple((name, _kind(one)) for name, one in value.items() if name not in _OWN)
    if isinstance(value, list | tuple):
        return tuple(_kind(one) for one in value)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return "number" if value not in {0, 1} else float(value)
    return value if isinstance(value, bool | str) else type(value)


def _cuts(unit: int, elements: int, every: Sequence[Sequence[int]]) -> list[slice]:
    """Cut all elements into consecutive slices of small lengths, and once more of larger ones; lengths in units."""
    cuts = []
    for lengths in every:
        ends = (unit * end for end in itertools.accumulate(itertools.cycle(lengths)))
        places = [0, *itertools.takewhile(lambda end: end < elements, ends), elements]
        cuts += [slice(begin, end) for begin, end in itertools.pairwise(places)]
    return cuts


def _spread(draw: torch.Generator, elements: int, *, low: int, high: int) -> Tensor:
    """Draw numbers of both signs and of all magnitudes between two powers of two; a few are 0."""
    uniform = torch.rand(3, elements, generator=draw, dtype=torch.float64, device="cpu")
    sign = torch.where(uniform[1] < 0.5, -1.0, 1.0)  # noqa: PLR2004  half of them
    return (torch.exp2(low + (high - low) * uniform[0]) * sign).masked_fill_(uniform[2] < 2.0**-6, 0.0)


def _states(
    one: torch.optim.Optimizer, whole: nn.Parameter, many: torch.optim.Optimizer, slices: Sequence[nn.Parameter]
) -> dict[str, tuple[Any, list[Any]]]:
    """Pair what is kept of the whole with what is kept of its slices, by name; None where there is nothing."""
    kept = [many.state.get(part, {}) for part in slices]
    names = dict.fromkeys(itertools.chain(one.state.get(whole, {}), *kept))
    return {f"its {name}": (one.state[whole].get(name), [state.get(name) for state in kept]) for name in names}


def _differ(name: str, whole: Any, parts: Sequence[Any], cuts: Sequence[slice]) -> str | None:
    """Say how the tensor of a whole differs from those of its slices, if it does; what is no tensor decides nothing."""
    if not isinstance(whole, Tensor) or not all(isinstance(part, Tensor) for part in parts):
        return None
    if whole.numel() == 1:  # a counter is of the whole tensor, and the same for each slice
        return None if all(_same_bits(whole, part) for part in parts) else f"{name} depends on the slice"
    expected, actual = [whole.flatten()[cut] for cut in cuts], [part.flatten() for part in parts]
    if [one.numel() for one in expected] != [one.numel() for one in actual]:
        return f"{name} is of shape {list(whole.shape)}, which cannot be cut as the parameter is"
    wrong = sum(not _same_bits(one, other) for one, other in zip(expected, actual, strict=True))
    return f"{name} differs in {wrong} of {len(cuts)} slices" if wrong else None


def _same_bits(expected: Tensor, actual: Tensor) -> bool:
    if expected.dtype != actual.dtype or expected.shape != actual.shape:
        return False
    return torch.equal(*(one.detach().reshape(-1).view(torch.uint8) for one in (expected, actual)))
