"""The parts of one checkpoint together: which they are, and how accumulators and data belong together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final, TypeVar, final

from torch import nn

from augend._accumulator import Accumulator
from augend._checkpoint._parts import Commit, Part, part_of
from augend._checkpoint._position import step_and_rows
from augend.data import Batches
from augend.errors import ContractError, StateError

T = TypeVar("T")

_MOST_ACCUMULATORS: Final = 65_536


@final
class Parts:
    """Parts by name, in the order in which they were given."""

    def __init__(self) -> None:
        self._parts: dict[str, Part] = {}
        self._modules: dict[str, nn.Module] = {}  # shared with the optimizers, which name their parameters by it

    def __iter__(self) -> Iterator[Part]:
        return iter(self._parts.values())

    def __len__(self) -> int:
        return len(self._parts)

    @property
    def names(self) -> list[str]:
        """The names."""
        return list(self._parts)

    def kinds(self) -> dict[str, str]:
        """Return what sort of object each is: the same, in the same order, on all ranks."""
        return {part.name: part.kind for part in self}

    def chosen(self, names: set[str]) -> list[Part]:
        """Return some of the parts.

        Raises:
            ContractError: One is not here.
        """
        if unknown := names - self._parts.keys():
            raise ContractError(f"{min(unknown)!r} is no part of this Checkpoint; it has {', '.join(self._parts)}")
        return [part for part in self if part.name in names]

    def without(self, stateful: Mapping[str, object]) -> dict[str, object]:
        """Return those objects that are no part yet, under whatever name."""
        return {name: owner for name, owner in stateful.items() if not any(part.owner is owner for part in self)}

    def add(self, stateful: Mapping[str, object]) -> None:
        """Add parts; with one `Batches` among all, every accumulator is registered with it, in the order of names.

        Raises:
            ContractError: A name is taken, or an object is no part.
        """
        for name in stateful:
            if name in self._parts:
                raise ContractError(f"this Checkpoint has another {name} already; use one and the same object")
        parts = {name: part_of(name, owner, self._modules) for name, owner in stateful.items()}
        self._parts.update(parts)
        self._modules.update({name: part.owner for name, part in parts.items() if isinstance(part.owner, nn.Module)})
        batches = list(self.owners(Batches).values())
        if len(batches) == 1:  # with several, nobody but the loop knows which goes with which
            for _, accumulator in sorted(self.owners(Accumulator).items()):
                batches[0].register(accumulator)

    def remove(self, names: Mapping[str, object]) -> None:
        """Take parts away."""
        for name in names:
            del self._parts[name]
            self._modules.pop(name, None)

    def owners(self, kind: type[T]) -> dict[str, T]:
        """Return the objects of one kind, by name."""
        return {part.name: part.owner for part in self if isinstance(part.owner, kind)}

    def steps_done(self) -> int:
        """Return how many steps are done; 0 if nothing here counts them."""
        for data in self.owners(Batches).values():
            return step_and_rows(data)[0]
        for accumulator in self.owners(Accumulator).values():
            return accumulator.updates
        return 0

    def check_counted(self) -> None:
        """Refuse parts that cannot tell how many steps are done.

        Raises:
            ContractError: There is nothing that counts them.
        """
        if not self.owners(Batches) and not self.owners(Accumulator):
            raise ContractError("every_steps needs something that counts steps: add data=Batches or an Accumulator")

    def check_whole(self) -> None:
        """Refuse to save where something that belongs to the run is no part.

        Raises:
            StateError: Data without its accumulator, or an accumulator without its data; or a batch of which no
                accumulator tells what is done.
        """
        accumulators = list(self.owners(Accumulator).values())
        for name, data in self.owners(Batches).items():
            if not data.tracked:
                raise StateError(
                    f"{name} has handed out a batch, and no accumulator tells what of it is done, so after a resume it "
                    "would be trained twice: go through it with grads.microbatches(batch), or leave the data out"
                )
            for owner in data.owners:
                if owner is not None and not any(owner is one for one in accumulators):
                    raise StateError(
                        f"an accumulator goes through {name} and is no part of the checkpoint: what it holds would be "
                        "lost. Add it, as in Checkpoint(..., grads=grads), or forget it with unregister(accumulator)"
                    )
        for name, accumulator in self.owners(Accumulator).items():
            if accumulator.uses_batches and not self.owners(Batches):
                raise StateError(
                    f"{name} goes through batches whose position is no part of the checkpoint, so after a resume rows "
                    "would be trained twice: add the data, as in Checkpoint(..., data=data)"
                )

    def ordinals(self) -> dict[str, dict[str, int]]:
        """Return, for each `Batches`, the ordinals of the accumulators that go through it."""
        accumulators = self.owners(Accumulator)
        return {
            name: {
                part: ordinal
                for ordinal, owner in enumerate(data.owners)
                for part, accumulator in accumulators.items()
                if owner is accumulator
            }
            for name, data in self.owners(Batches).items()
        }

    def prepare_ordinals(self, saved: Any) -> Commit:
        """Check the ordinals that accumulators had when the checkpoint was saved: their draws and rows go by them.

        Returns:
            What gives them these again, once the position of the data is loaded.

        Raises:
            ContractError: Somebody else has one of them.
        """
        accumulators = self.owners(Accumulator)
        arranged: list[tuple[Batches, dict[int, object]]] = []
        for name, data in self.owners(Batches).items():
            places: dict[int, object] = {_ordinal(one): accumulators[part] for part, one in saved[name].items()}
            for ordinal, owner in enumerate(data.owners):
                if ordinal in places and owner is not None and not any(owner is one for one in accumulators.values()):
                    raise ContractError(
                        f"an accumulator that is no part of the checkpoint is number {ordinal} of {name}, as one of "
                        "the saved ones was: make the Checkpoint before its first batch, or forget it with unregister()"
                    )
            arranged.append((data, places))

        def commit() -> None:
            for data, places in arranged:
                data.arrange(places)

        return commit


def _ordinal(saved: Any) -> int:
    if type(saved) is not int or not 0 <= saved < _MOST_ACCUMULATORS:
        raise ValueError(f"an ordinal is a whole number from 0; got {saved!r}")
    return saved
