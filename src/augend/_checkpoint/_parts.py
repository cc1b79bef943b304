"""What can be saved: each kind of object as a state tree, checked in full before any of it is taken back."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, Protocol, final, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from augend._accumulator import Accumulator
from augend._checkpoint._chunks import Layout, kept, layout_of, layouts_of, settled
from augend._checkpoint._optimizers import (
    capture_optimizer,
    has_own_state,
    optimizer_layouts,
    prepare_optimizer,
    stepping,
)
from augend._checkpoint._tree import join, split
from augend._group import Group
from augend.data import Batches
from augend.errors import AugendError, ContractError

Commit = Callable[[], None]
_REFUSALS: Final = (
    *(LookupError, TypeError, AttributeError, ValueError, ArithmeticError),
    *(RuntimeError, AssertionError, OSError),
)


@runtime_checkable
class Stateful(Protocol):
    """Anything whose state can be read and loaded."""

    def state_dict(self) -> Any:
        """Return the state."""

    def load_state_dict(self, state_dict: Any, /) -> Any:
        """Take a state back."""


@runtime_checkable
class Preparing(Protocol):
    """A stateful object that can check a state without changing anything."""

    def prepare_load(self, state: Any, /) -> Commit:
        """Check a state; return what swaps it in and cannot fail."""


class Part(ABC):
    """One object under the name that it was given."""

    root = ""  # what stands before the names of its tensors in the tree, and is left out in the files

    def __init__(self, name: str, owner: Any) -> None:
        self.name = name
        self.owner = owner

    @property
    @abstractmethod
    def kind(self) -> str:
        """What sort of object it is; one saved as another is refused."""

    @property
    def parameters(self) -> list[str]:
        """Names of the tensors that are parameters of a module: what a digest is taken over."""
        return []

    @property
    def alone(self) -> bool:
        """Whether the state is read without the other ranks."""
        return True

    @abstractmethod
    def capture(self) -> Any:
        """Return the state as a tree; its tensors may be live. Changes nothing."""

    @abstractmethod
    def prepare(self, tree: Any) -> Commit:
        """Check a saved tree against the live object; return what swaps it in.

        Raises:
            ContractError, StateError: It does not fit; nothing was changed.
        """

    @abstractmethod
    def layouts(self, shapes: Mapping[str, list[int]]) -> Mapping[str, Layout]:
        """Return how saved tensors must be spread over ranks to be loaded; those that are not named are read whole.

        Args:
            shapes: Of all saved tensors, by their names in the tree.
        """

    @property
    def may_refuse(self) -> bool:
        """Whether the commit calls code that may raise."""
        return False

    def undo(self) -> Commit:
        """Return what takes back the state that the object has now."""
        plain, tensors = split(self.capture(), self.name)
        return self.prepare(join(plain, {name: kept(tensor) for name, tensor in tensors.items()}))


@final
class ModulePart(Part):
    """A module: parameters and persistent buffers, in the files under their own names; and its versions."""

    kind = "module"
    root = "state."

    @property
    def parameters(self) -> list[str]:
        """Names of the parameters, tied ones once."""
        return [name for name, _ in settled(self.owner).named_parameters()]

    @property
    def may_refuse(self) -> bool:
        """Modules may load in ways of their own: hooks, extra state."""
        return True

    def capture(self) -> Any:
        """Return the module's state dict, and the versions that its modules write beside it."""
        state: Any = settled(self.owner).state_dict()
        versions = {path: dict(one) for path, one in state._metadata.items()}  # noqa: SLF001  # torch has no other way
        return {"state": dict(state), "versions": versions}

    def layouts(self, shapes: Mapping[str, list[int]]) -> Mapping[str, Layout]:
        """Return those of its own tensors, where the shapes are theirs."""
        live = {f"{self.root}{name}": one for name, one in settled(self.owner).state_dict().items()}
        tensors = {name: one for name, one in live.items() if isinstance(one, Tensor)}
        return layouts_of({name: one for name, one in tensors.items() if shapes.get(name) == list(one.shape)})

    def prepare(self, tree: Any) -> Commit:
        """Compare names, shapes and dtypes; the commit copies into the module's own tensors."""
        module = settled(self.owner)
        live = module.state_dict()
        if tree.keys() != {"state", "versions"}:
            raise KeyError(f"the state of a module, not {list(tree)}")
        check_names(self.name, "tensors", tree["state"], live)
        for name, value in tree["state"].items():
            here = live[name]
            if isinstance(here, Tensor) and here.is_meta:
                raise ContractError(f"{self.name}: {name!r} has no memory yet (meta device); call to_empty() first")
            if isinstance(value, Tensor) and isinstance(here, Tensor) and _kind(value) != _kind(here):
                raise ContractError(f"{self.name}: {name!r} was saved as {_kind(value)}, and is {_kind(here)}")
        state = OrderedDict(tree["state"])
        state._metadata = tree["versions"]  # type: ignore[attr-defined]  # noqa: SLF001  # as torch does

        def commit() -> None:
            module.load_state_dict(state, strict=True)

        return commit


@final
class OptimizerPart(Part):
    """A torch optimizer, its state under the names of the parameters in the attached modules."""

    kind = "optimizer"

    def __init__(self, name: str, owner: torch.optim.Optimizer, modules: Mapping[str, nn.Module]) -> None:
        super().__init__(name, owner)
        self._modules = modules

    def capture(self) -> Any:
        """Return groups by parameter names, and the state of every parameter that has one."""
        return capture_optimizer(self.owner, self._names())

    def prepare(self, tree: Any) -> Commit:
        """Compare kind, groups and names; the commit replaces the state and the options of the groups."""
        return prepare_optimizer(self.name, self.owner, self._names(), tree)

    def layouts(self, shapes: Mapping[str, list[int]]) -> Mapping[str, Layout]:
        """Return those of the parameters, for what belongs to a parameter that is spread."""
        return optimizer_layouts(self.owner, self._names(), shapes)

    @property
    def may_refuse(self) -> bool:
        """Whether the class loads its state in its own way."""
        return has_own_state(stepping(self.owner))

    def _names(self) -> dict[nn.Parameter, str]:
        """Name every parameter of the optimizer: as in its module, with the part's name in front if it has several."""
        held = {parameter for group in self.owner.param_groups for parameter in group["params"]}
        found: dict[nn.Parameter, tuple[str, str]] = {}
        for part, module in self._modules.items():
            for name, parameter in settled(module).named_parameters():
                if parameter in held:
                    found.setdefault(parameter, (part, name))
        for parameter in held - found.keys():
            raise ContractError(
                f"{self.name}: the optimizer holds a parameter of shape {list(parameter.shape)} that no module of the "
                "checkpoint has; add its module, as in Checkpoint(..., model=model)"
            )
        several = len({part for part, _ in found.values()}) > 1
        return {parameter: f"{part}.{name}" if several else name for parameter, (part, name) in found.items()}


@final
class StatefulPart(Part):
    """Anything else with ``state_dict`` and ``load_state_dict``."""

    kind = "state"

    @property
    def alone(self) -> bool:
        """Whether the object is known to read its state without the other ranks."""
        return isinstance(self.owner, Batches)

    def capture(self) -> Any:
        """Return the object's own state."""
        return self.owner.state_dict()

    def layouts(self, shapes: Mapping[str, list[int]]) -> Mapping[str, Layout]:
        """Return those of the sums, or of the tensors that it has now under the same names, in the same shapes."""
        if isinstance(self.owner, Accumulator):
            return _layouts_of_sums(self.owner, shapes)
        if isinstance(self.owner, Batches) or not (dist.is_available() and dist.is_initialized()):
            return {}
        _, live = split(self.capture(), self.name)
        tensors = {name: one for name, one in live.items() if isinstance(one, Tensor)}
        return layouts_of({name: one for name, one in tensors.items() if shapes.get(name) == list(one.shape)})

    def prepare(self, tree: Any) -> Commit:
        """Let the object check the state where it can; else the commit may raise, and is to be undone."""
        if isinstance(self.owner, Preparing):
            try:
                return self.owner.prepare_load(tree)
            except AugendError as error:
                raise type(error)(f"{self.name}: {error}") from error
        return lambda: self.owner.load_state_dict(tree)

    @property
    def may_refuse(self) -> bool:
        """Whether the object checks its state only while it loads it."""
        return not isinstance(self.owner, Preparing)


def _layouts_of_sums(accumulator: Accumulator, shapes: Mapping[str, list[int]]) -> dict[str, Layout]:
    """Return how an accumulator's sums are spread; what is none of them it will refuse by itself."""
    found = {}
    for term in accumulator.contract.terms:
        for name, one in accumulator.contract.tensors.items():
            key = f"sums.{term}.{name}"
            if one.trainable and shapes.get(key) == list(one.shape):
                layout = layout_of(accumulator.sum_like(name))
                if layout is not None:
                    found[key] = layout
    return found


def part_of(name: str, owner: object, modules: Mapping[str, nn.Module]) -> Part:
    """Return the part of a checkpoint that an object is.

    Args:
        name: What it is saved as.
        owner: The object.
        modules: The modules of the checkpoint, now and later: they name the parameters of optimizers.

    Raises:
        ContractError: It has no state, or a name that no file can have.
    """
    if not name.isidentifier() or not name.isascii():
        raise ContractError(f"a part of a checkpoint must be named like a variable; got {name!r}")
    if isinstance(owner, nn.Module):
        return ModulePart(name, owner)
    if isinstance(owner, torch.optim.Optimizer):
        return OptimizerPart(name, owner, modules)
    if isinstance(owner, Stateful) and not isinstance(owner, type):
        return StatefulPart(name, owner)
    raise ContractError(
        f"{name} must be an object with state_dict() and load_state_dict(); got {owner!r:.80}. Parts are given one by "
        "one, and the options are called keep, every_steps, every_seconds and background"
    )


def commit_all(prepared: Iterable[tuple[Part, Commit]], group: Group) -> None:
    """Swap in what was prepared: first what may still refuse, all of it undone if one does, then what cannot.

    Raises:
        ContractError: An object refused its state, on any rank; all are as they were. Any other error is of one that
            could not refuse, and leaves a mixture.
    """
    pairs = list(prepared)
    doubtful = [(part, commit) for part, commit in pairs if part.may_refuse]
    what = "every rank to copy what it has"
    undone = group.agreed(what, lambda: [part.undo() for part, _ in doubtful])
    done = False
    try:
        group.agreed("every rank to take what was loaded", functools.partial(_try, doubtful))
        done = True
    finally:
        if not done:
            for undo in undone:
                undo()
    for part, commit in pairs:
        if not part.may_refuse:
            commit()


def _try(doubtful: Iterable[tuple[Part, Commit]]) -> None:
    for part, commit in doubtful:
        try:
            commit()
        except _REFUSALS as error:
            refused = f"{part.name}: {type(part.owner).__name__} refused its saved state: {error!r}"
            raise ContractError(refused) from error


def check_names(part: str, what: str, saved: Iterable[str], live: Iterable[str]) -> None:
    """Refuse names that only one side has.

    Raises:
        ContractError: Names the first one.
    """
    there, here = set(saved), set(live)
    if missing := here - there:
        raise ContractError(f"{part}: the checkpoint lacks {what} {min(missing)!r} ({len(missing)} in all)")
    if extra := there - here:
        raise ContractError(
            f"{part}: the checkpoint has {what} {min(extra)!r} ({len(extra)} in all), which is not here"
        )


def _kind(value: Tensor) -> str:
    return f"{value.dtype} of {list(value.shape)}"
