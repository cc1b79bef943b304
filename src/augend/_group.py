"""The door to torch.distributed: which rank this is, and what ranks tell each other about their work.

Everything here goes over gloo groups of our own, with tensors on the CPU: so a GPU never waits, and what is said here
cannot be mixed up with the collectives of a model.
"""

from __future__ import annotations

import atexit
import datetime as dt
import sys
import time
import traceback
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Final, TypeVar, cast, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh as Mesh

from augend.errors import AugendError, LostRankError, PlacementError, StateError

__all__ = ["Group", "Mesh", "open_group", "rank_and_world"]

T = TypeVar("T")
_PATIENCE_SECONDS: Final = 3.0  # how long the others are given to say what they wait for, once one is missing
_POLL_SECONDS: Final = 0.05
_OF_A_COLLECTIVE: Final = (
    "gloo",
    "nccl",
    "peer",
    "collective",
    "process group",
    "processgroup",
    "timed out",
    "tcpstore",
)


def rank_and_world(mesh: Mesh | None = None) -> tuple[int, int]:
    """Return the rank of this process and the number of ranks that share a batch.

    Not collective: it only reads what torch knows already.

    Args:
        mesh: The axes that share a batch, in row-major order; None for the default process group. A process without
            one is rank 0 of 1.

    Returns:
        Rank and world: ``0 <= rank < world``.

    Raises:
        PlacementError: It is no mesh, or this process is no part of it.
    """
    if mesh is not None:
        if not isinstance(mesh, Mesh):
            raise PlacementError(f"mesh must be a torch DeviceMesh, as init_device_mesh() makes them; got {mesh!r}")
        coordinate = mesh.get_coordinate()
        if coordinate is None:
            raise PlacementError(f"rank {dist.get_rank()} is no part of the mesh {mesh}; give every rank one it is in")
        rank = 0
        for dim, index in enumerate(coordinate):
            rank = rank * mesh.size(dim) + index
        return rank, mesh.size()
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def open_group(mesh: Mesh | None = None, *, purpose: str) -> Group:
    """Return a group of all ranks of a mesh; of one process alone it needs no torch.distributed.

    Collective over these ranks, if there are several.

    Args:
        mesh: Who belongs to it; None for the default process group.
        purpose: What it is for, in messages and in torch's logs.
    """
    _, world = rank_and_world(mesh)
    if world == 1:
        return Group(None, 0, world, purpose)
    part = world < dist.get_world_size()  # then only these ranks come here; else all may agree on the group's name
    ranks = mesh.mesh.reshape(-1).tolist() if part and mesh is not None else None
    process_group = dist.new_group(
        ranks, timeout=_timeout(), backend="gloo", use_local_synchronization=part, group_desc=purpose
    )
    if not isinstance(process_group, dist.ProcessGroup):
        raise LostRankError(f"rank {dist.get_rank()} is no part of the group for {purpose}")
    return Group(process_group, process_group.rank(), world, purpose)


@final
class Group:
    """Ranks that agree: every method is collective over them, in the same order on each.

    Every wait has the limit of the default process group. A rank that is lost or late becomes a `LostRankError` on
    the others, which names it; the group is then of no more use.

    Args:
        process_group: A gloo group; None for one process alone.
        rank: Of this process in it, in the order of torch's own ranks.
        world: How many there are.
        purpose: What it is for.
    """

    def __init__(self, process_group: dist.ProcessGroup | None, rank: int, world: int, purpose: str) -> None:
        self.rank = rank
        self.world = world
        self._process_group = process_group
        self._left = False
        self._notes = None if process_group is None else _Notes(rank, world, f"{purpose}/{process_group.group_name}")

    def maximum(self, what: str, numbers: Sequence[int]) -> list[int]:
        """Return the largest of every rank's numbers, one by one; equally many on each rank.

        Args:
            what: What this rank waits for, in words.
            numbers: From -2^63 to 2^63 - 1.
        """
        return self.begin_maximum(what, numbers)()

    def begin_maximum(self, what: str, numbers: Sequence[int]) -> Callable[[], list[int]]:
        """Begin `maximum`, and return what waits for its result."""
        if self._alone:
            return lambda: list(numbers)
        tensor = torch.tensor(list(numbers), dtype=torch.int64, device="cpu")
        works = [self._reduce(what, tensor, dist.ReduceOp.MAX)]

        def wait() -> list[int]:
            self._waited(what, works.pop().wait)
            return _whole_numbers(tensor)

        return wait

    def total(self, what: str, numbers: Sequence[int]) -> list[int]:
        """Return the sum of every rank's numbers, one by one; sums beyond 2^63 - 1 wrap."""
        if self._alone:
            return list(numbers)
        tensor = torch.tensor(list(numbers), dtype=torch.int64, device="cpu")
        self._waited(what, self._reduce(what, tensor, dist.ReduceOp.SUM).wait)
        return _whole_numbers(tensor)

    def gather(self, what: str, numbers: Sequence[float]) -> list[list[float]]:
        """Return every rank's numbers, by rank, as float64; equally many on each rank."""
        if self._alone:
            return [list(numbers)]
        mine = torch.tensor(list(numbers), dtype=torch.float64, device="cpu")
        return [one.tolist() for one in self._all(what, mine)]

    def exchange(self, what: str, data: bytes) -> list[bytes]:
        """Return every rank's bytes, by rank; of any lengths, which are agreed on first."""
        if self._alone:
            return [data]
        sizes = [int(size) for (size,) in self.gather(what, [len(data)])]
        mine = torch.zeros(max(*sizes, 1), dtype=torch.uint8, device="cpu")
        mine[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else 0
        return [one[:size].numpy().tobytes() for one, size in zip(self._all(what, mine), sizes, strict=True)]

    def broadcast(self, what: str, data: bytes | None) -> bytes:
        """Return rank 0's bytes; the others' are not looked at."""
        mine = data or b""
        if self._alone:
            return mine
        (size,) = self.total(what, [len(mine) if self.rank == 0 else 0])
        held = torch.zeros(max(size, 1), dtype=torch.uint8, device="cpu")
        if self.rank == 0 and size:
            held = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
        self._waited(what, lambda: dist.broadcast(held, group=self._process_group, group_src=0))
        return held[:size].numpy().tobytes()

    def agree(self, what: str, error: AugendError | None) -> None:
        """Raise on all ranks alike if any of them has an error: that of the lowest such rank.

        Args:
            what: What this rank waits for, in words.
            error: This rank's own; None if it has none.

        Raises:
            AugendError: Of that rank's type and message, which names the rank if others have not the same.
        """
        if self._alone:
            if error is not None:
                raise error
            return
        (lowest,) = self.maximum(what, [-self.world if error is None else -self.rank])
        if lowest == -self.world:
            return
        mine = b"" if error is None else f"{type(error).__name__}\0{error}".encode()
        every = self.exchange(what, mine)
        kind, _, message = every[-lowest].decode().partition("\0")
        raise _kind(kind)(message if len(set(every)) == 1 else f"rank {-lowest}: {message}") from error

    def agreed(self, what: str, call: Callable[[], T]) -> T:
        """Return what a call returns, if it raises on no rank.

        Raises:
            AugendError: As `agree`.
        """
        try:
            result = call()
        except AugendError as error:
            self.agree(what, error)
            raise
        self.agree(what, None)
        return result

    def same(self, what: str, numbers: Mapping[str, int], error: AugendError | None = None) -> None:
        """Raise on all ranks alike if any has an error, or if their numbers differ; the same names on each rank.

        Args:
            what: What this rank waits for, in words.
            numbers: From -2^62 to 2^62, by what they are called in messages.
            error: This rank's own; None if it has none.

        Raises:
            AugendError: As `agree`.
            StateError: Numbers differ; names the first of them, and each rank's.
        """
        if self._alone:
            return self.agree(what, error)
        mine = list(numbers.values())
        failed, *both = self.maximum(what, [error is not None, *mine, *(-one for one in mine)])
        if failed:
            return self.agree(what, error)
        for name, highest, lowest in zip(numbers, both, both[len(mine) :], strict=False):
            if highest != -lowest:
                each = [int(one) for (one,) in self.gather(what, [numbers[name]])]
                told = ", ".join(f"{one} on rank {rank}" for rank, one in enumerate(each))
                raise StateError(f"{what}: {name} must be the same on all ranks; it is {told}")
        return None

    def explain(self, what: str, error: BaseException) -> LostRankError | None:
        """Return what an error of a collective elsewhere means for ranks; None if it was none of a collective's."""
        text = str(error).lower()
        if self._notes is None or not isinstance(error, RuntimeError) or isinstance(error, AugendError):
            return None
        if not any(word in text for word in _OF_A_COLLECTIVE):
            return None
        return self._lost(what, error)

    @property
    def _alone(self) -> bool:
        return self._process_group is None and not self._left

    def _leave(self, error: BaseException) -> None:
        """Close the connections, so that whoever waits for this rank hears of it now and not when its time is up.

        They are closed when nobody holds the group any more, and the frames of the error do.
        """
        traceback.clear_frames(error.__traceback__)
        group, self._process_group, self._left = self._process_group, None, True
        with suppress(RuntimeError, ValueError):
            dist.destroy_process_group(group)

    def _reduce(self, what: str, tensor: Tensor, operation: dist.ReduceOp.RedOpType) -> dist.Work:
        work = self._waited(what, lambda: dist.all_reduce(tensor, operation, group=self._process_group, async_op=True))
        if work is None:
            raise LostRankError(f"this process left the group that waits for {what}")
        return cast("dist.Work", work)

    def _all(self, what: str, mine: Tensor) -> list[Tensor]:
        every = [torch.empty_like(mine) for _ in range(self.world)]
        self._waited(what, lambda: dist.all_gather(every, mine, group=self._process_group))
        return every

    def _waited(self, what: str, call: Callable[[], T]) -> T:
        if self._left:
            raise LostRankError(f"rank {self.rank} left its group when a rank was lost, and cannot wait for {what}")
        calls = [call]
        del call  # once it has failed, nothing may hold what it waited for: see _leave
        try:
            return calls.pop()()
        except (RuntimeError, ValueError) as error:  # torch raises the latter for a group that is no more
            raise self._lost(what, error) from error

    def _lost(self, what: str, error: BaseException) -> LostRankError:
        if self._notes is None:  # one process waits for nobody
            return LostRankError(f"{what}: {error}")
        if self._left:
            return LostRankError(f"rank {self.rank} left its group when a rank was lost ({_first_line(error)})")
        self._notes.write(f"waits for {what}")
        self._leave(error)
        return LostRankError(f"{self._notes.read(what)} ({_first_line(error)})")


@final
class _Notes:
    """What each rank waited for when something went wrong, kept where all can read it: in the store of torch's own.

    Args:
        rank: Of this process.
        world: How many there are.
        where: Tells this group's notes from others'.
    """

    def __init__(self, rank: int, world: int, where: str) -> None:
        self._rank = rank
        self._world = world
        self._where = where
        self._store = dist.distributed_c10d.PrefixStore("augend", dist.distributed_c10d._get_default_store())  # noqa: SLF001  # torch has no other way
        atexit.register(_note_end, weakref.ref(self))

    def write(self, what: str) -> None:
        """Leave this rank's note; nothing happens where the store is gone with the rank that held it."""
        with suppress(RuntimeError):
            self._store.set(f"{self._where}/{self._rank}", what)

    def read(self, what: str) -> str:
        """Give the other ranks some time to leave their notes, and tell all of them."""
        others = [rank for rank in range(self._world) if rank != self._rank]
        until = time.monotonic() + _PATIENCE_SECONDS
        found: dict[int, str] = {}
        try:
            while time.monotonic() < until and len(found) < len(others):
                for rank in others:
                    key = f"{self._where}/{rank}"
                    if rank not in found and self._store.check([key]):
                        found[rank] = self._store.get(key).decode(errors="replace")
                time.sleep(_POLL_SECONDS)
        except RuntimeError:
            return f"rank {self._rank} waits for {what}, and the rank that keeps torch's store is gone"
        told = [f"rank {rank} {found.get(rank, 'gives no sign')}" for rank in others]
        told.sort(key=lambda one: "waits for" in one)  # those that are missing first
        return f"rank {self._rank} waits for {what}, and not all ranks come: {'; '.join(told)}"


def _whole_numbers(tensor: Tensor) -> list[int]:
    return [int(one) for one in tensor.tolist()]


def _note_end(notes: weakref.ref[_Notes]) -> None:
    """Say at the end of a process that it came to its end, and by what."""
    alive = notes()
    if alive is not None:
        error = getattr(sys, "last_value", None)
        alive.write("ended" if error is None else f"ended by {type(error).__name__}: {_first_line(error)}")


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def _kind(name: str) -> type[AugendError]:
    kinds = [AugendError]
    for kind in kinds:
        kinds.extend(kind.__subclasses__())
    return next((kind for kind in kinds if kind.__name__ == name), AugendError)


def _timeout() -> dt.timedelta:
    """Return the limit that the default process group has for every wait."""
    group = dist.distributed_c10d._get_default_group()  # noqa: SLF001  # torch tells the limit nowhere else
    backend = group._get_backend(group._device_types[0])  # noqa: SLF001  # the same
    limit: dt.timedelta = backend.options._timeout  # noqa: SLF001  # the same
    return limit
