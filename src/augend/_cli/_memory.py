"""What the training of a run takes in memory, from one micro-batch of it."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any, final

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from augend import Batches
from augend._cli._build import Rows, Training
from augend._cli._console import in_units
from augend._config import RunFile


def memory_of(run: RunFile, rows: Rows, training: Training) -> str:
    """Take one step with one micro-batch, and return for people what that took at most.

    The model and its optimizer are other ones afterwards. Counted are the elements of tensors, not what torch, Python
    and the rows of the data take besides.
    """
    size = run.microbatch_size or run.batch_size
    data = Batches(rows.train, batch_size=size, microbatch_size=size, seed=run.seed, collate_fn=rows.source.collate)
    held = _bytes_of([*training.model.parameters(), *training.model.buffers()])
    batch = next(iter(data))
    with Live() as of_microbatch:
        for microbatch in training.accumulator.microbatches(batch):
            training.accumulator.backward(rows.source.loss(training.model, microbatch))
    with Live() as of_step:
        training.accumulator.step(training.optimizer, empty="zero", nonfinite="allow")
    state = _bytes_of(tree_leaves([dict(each) for each in training.optimizer.state.values()]))
    rest = max(of_microbatch.most, of_microbatch.now + of_step.most - state)
    total = held + state + rest
    parts = f"model {in_units(held)}, optimizer {in_units(state)}, sums and a micro-batch {in_units(rest)}"
    return f"{in_units(total)} in tensors: {parts}"


@final
class Live(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch left out annotations
    """Counts the bytes of the tensors that are made within it, as long as they are there.

    Attributes:
        now: Bytes at the moment.
        most: Bytes at the worst moment.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # the same
        self.now = self.most = 0
        self._sizes: dict[int, int] = {}  # of storages, by their addresses

    def __torch_dispatch__(
        self, function: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        given = {tensor.untyped_storage().data_ptr() for tensor in _tensors((args, named))}
        made = function(*args, **named)
        for tensor in _tensors(made):
            storage = tensor.untyped_storage()
            address = storage.data_ptr()
            if address and address not in given and address not in self._sizes:
                self._sizes[address] = storage.nbytes()
                self.now += storage.nbytes()
                self.most = max(self.most, self.now)
                weakref.finalize(storage, self._drop, address).atexit = False
        return made

    def _drop(self, address: int) -> None:
        self.now -= self._sizes.pop(address)


def _tensors(values: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def _bytes_of(values: object) -> int:
    """Return the bytes of tensors, each memory once."""
    storages = [tensor.untyped_storage() for tensor in _tensors(values)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
