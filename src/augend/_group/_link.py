"""The connections of one group, and the notes that its ranks leave when something goes wrong."""

from __future__ import annotations

import atexit
import datetime as dt
import functools
import re
import sys
import time
import weakref
from contextlib import suppress
from typing import Any, Final, cast, final

import torch.distributed as dist
from torch import Tensor

_PATIENCE_SECONDS: Final = 3.0  # how long the others are given to say what they wait for, once one is missing
_POLL_SECONDS: Final = 0.05


@final
class Link:
    """A gloo group of our own, which torch keeps in no list: its connections close when nobody holds it any more.

    Args:
        store: Where its ranks find each other, and their notes.
        where: Tells it from other groups in that store.
        rank: Of this process.
        world: How many there are.
        timeout: The limit on every wait.
    """

    def __init__(
        self, store: dist.distributed_c10d.Store, where: str, rank: int, world: int, timeout: dt.timedelta
    ) -> None:
        own = dist.distributed_c10d.PrefixStore(where, store)
        self.notes = Notes(own, rank, world)
        self._gloo: Any = dist.ProcessGroupGloo(own, rank, world, timeout=timeout)  # torch types none of its methods

    def reduce(self, tensor: Tensor, operation: dist.ReduceOp.RedOpType) -> dist.Work:
        """Begin to reduce a tensor in place."""
        options = dist.distributed_c10d.AllreduceOptions()
        options.reduceOp = operation  # type: ignore[assignment]  # as torch's own all_reduce does
        return cast("dist.Work", self._gloo.allreduce([tensor], options))

    def gather(self, every: list[Tensor], mine: Tensor) -> dist.Work:
        """Begin to gather every rank's tensor."""
        return cast("dist.Work", self._gloo.allgather([every], [mine]))

    def broadcast(self, tensor: Tensor) -> dist.Work:
        """Begin to send rank 0's tensor to all."""
        options = dist.distributed_c10d.BroadcastOptions()
        options.rootRank = 0
        return cast("dist.Work", self._gloo.broadcast([tensor], options))


@final
class Notes:
    """What each rank waited for when something went wrong, kept where all can read it: in the store of torch's own.

    Args:
        store: A part of it.
        rank: Of this process.
        world: How many there are.
    """

    def __init__(self, store: dist.distributed_c10d.Store, rank: int, world: int) -> None:
        self._store = store
        self._rank = rank
        self._world = world
        at_exit = functools.partial(_note_end, weakref.ref(self))
        atexit.register(at_exit)
        weakref.finalize(self, atexit.unregister, at_exit).atexit = False

    def write(self, what: str) -> None:
        """Leave this rank's note; nothing happens where the store is gone with the rank that held it."""
        with suppress(RuntimeError):
            self._store.set(f"note/{self._rank}", what)

    def read(self, what: str) -> str:
        """Give the other ranks some time to leave their notes, and tell all of them."""
        others = [rank for rank in range(self._world) if rank != self._rank]
        until = time.monotonic() + _PATIENCE_SECONDS
        found: dict[int, str] = {}
        try:
            while time.monotonic() < until and len(found) < len(others):
                for rank in others:
                    if rank not in found and self._store.check([f"note/{rank}"]):
                        found[rank] = self._store.get(f"note/{rank}").decode(errors="replace")
                time.sleep(_POLL_SECONDS)
        except RuntimeError:
            return f"rank {self._rank} waits for {what}, and the rank that keeps torch's store is gone"
        told = [f"rank {rank} {found.get(rank, 'gives no sign')}" for rank in others]
        told.sort(key=lambda one: "waits for" in one)  # those that are missing first
        return f"rank {self._rank} waits for {what}, and not all ranks come: {'; '.join(told)}"


def _note_end(notes: weakref.ref[Notes]) -> None:
    """Say at the end of a process that it came to its end, and by what."""
    alive = notes()
    if alive is not None:
        error = getattr(sys, "last_value", None)
        alive.write("ended" if error is None else f"ended by {type(error).__name__}: {first_line(error)}")


def first_line(error: BaseException) -> str:
    """Return the first line of what an error says, or its type; of torch's without a place in its source and advice."""
    line = next(iter(str(error).splitlines()), type(error).__name__)
    return re.sub(r"^\[/[^]]*\] ", "", line).partition(". This is typically")[0]
