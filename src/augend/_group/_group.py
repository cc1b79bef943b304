"""Ranks that agree: numbers, bytes and errors that are the same on all of them."""

from __future__ import annotations

import hashlib
import json
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final, TypeVar, final

import torch
import torch.distributed as dist
from torch import Tensor

from augend._group._link import Link, first_line
from augend.errors import AugendError, LostRankError, StateError

T = TypeVar("T")
_SLOTS: Final = 16  # numbers of every message that ranks may come to from different places: gloo aborts on other sizes
_MARKS: Final = 2
_NOTHING: Final = -(2**63)
_OF_A_COLLECTIVE: Final = (  # what torch says of it, and hardly anybody else
    *("/gloo/", "closed by peer", "reset by peer", "caused pair closure", "monitoredBarrier", "DistBackend"),
    *("NCCL", "ProcessGroup", "between collectives on ranks", "wait timeout"),
)


@final
class Group:
    """Ranks that agree: every method is collective over them, in the same order on each.

    Every wait has the limit of the default process group. A rank that is lost or late becomes a `LostRankError` on
    the others, which names it; the group is then of no more use. Ranks that come from different places, told apart
    by what they say that they wait for, get a `StateError`.

    Args:
        link: Its connections; None for one process alone.
        rank: Of this process in it, in the order of torch's own ranks.
        world: How many there are.
    """

    def __init__(self, link: Link | None, rank: int, world: int) -> None:
        self.rank = rank
        self.world = world
        self._link = link
        self._notes = None if link is None else link.notes

    def maximum(self, what: str, numbers: Sequence[int]) -> list[int]:
        """Return the largest of every rank's numbers, one by one; equally many on each rank.

        Args:
            what: What this rank waits for, in words.
            numbers: From -2^63 to 2^63 - 1.
        """
        return self.begin_maximum(what, numbers)()

    def begin_maximum(self, what: str, numbers: Sequence[int]) -> Callable[[], list[int]]:
        """Begin `maximum`, and return what waits for its result. Many numbers are sent once their number is agreed on.

        Args:
            what: What this rank waits for, in words: the same on all ranks.
            numbers: As of `maximum`.

        Raises:
            StateError: By the returned call, on all ranks: they wait for different things.
        """
        if self.world == 1:
            return lambda: list(numbers)
        mark = _mark(f"{len(numbers)} for {what}")
        head = list(numbers) if len(numbers) <= _SLOTS - _MARKS else []
        padding = [_NOTHING] * (_SLOTS - _MARKS - len(head))
        tensor = torch.tensor([mark, -mark, *head, *padding], dtype=torch.int64, device="cpu")
        works = [self._reduce(what, tensor, dist.ReduceOp.MAX)]

        def wait() -> list[int]:
            self._waited(what, works.pop().wait)
            largest, smallest, *rest = _whole_numbers(tensor)
            if largest != -smallest:
                self._refuse_places(what)
            return rest[: len(head)] if head or not numbers else self._maximum_of_many(what, numbers)

        return wait

    def total(self, what: str, numbers: Sequence[int]) -> list[int]:
        """Return the sum of every rank's numbers, one by one; sums beyond 2^63 - 1 wrap. Only after `maximum`."""
        if self.world == 1:
            return list(numbers)
        tensor = torch.tensor(list(numbers), dtype=torch.int64, device="cpu")
        self._waited(what, self._reduce(what, tensor, dist.ReduceOp.SUM).wait)
        return _whole_numbers(tensor)

    def gather(self, what: str, numbers: Sequence[float]) -> list[list[float]]:
        """Return every rank's numbers, by rank, as float64; equally many on each rank."""
        if self.world == 1:
            return [list(numbers)]
        mine = torch.tensor(list(numbers), dtype=torch.float64, device="cpu")
        return [one.tolist() for one in self._all(what, mine)]

    def exchange(self, what: str, data: bytes) -> list[bytes]:
        """Return every rank's bytes, by rank; of any lengths, which are agreed on first."""
        if self.world == 1:
            return [data]
        sizes = [int(size) for (size,) in self.gather(what, [len(data)])]
        mine = torch.zeros(max(*sizes, 1), dtype=torch.uint8, device="cpu")
        mine[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else 0
        return [one[:size].numpy().tobytes() for one, size in zip(self._all(what, mine), sizes, strict=True)]

    def broadcast(self, what: str, data: bytes | None) -> bytes:
        """Return rank 0's bytes; the others' are not looked at."""
        mine = data or b""
        if self.world == 1:
            return mine
        (size,) = self.maximum(what, [len(mine) if self.rank == 0 else 0])
        held = torch.zeros(max(size, 1), dtype=torch.uint8, device="cpu")
        if self.rank == 0 and size:
            held = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
        self._waited(what, lambda: self._linked(what).broadcast(held).wait())
        return held[:size].numpy().tobytes()

    def agree(self, what: str, error: AugendError | None) -> None:
        """Raise on all ranks alike if any of them has an error: that of the lowest such rank.

        Args:
            what: What this rank waits for, in words.
            error: This rank's own; None if it has none.

        Raises:
            AugendError: Of that rank's type and message, which names the rank if others have not the same.
        """
        if self.world == 1:
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

    def same(self, what: str, values: Mapping[str, object], error: AugendError | None = None) -> None:
        """Raise on all ranks alike if any has an error, or if their values differ; the same names on each rank.

        Args:
            what: What this rank waits for, in words.
            values: What JSON keeps, by what it is called in messages.
            error: This rank's own; None if it has none.

        Raises:
            AugendError: As `agree`.
            StateError: Values differ; names the first of them, and each rank's.
        """
        if self.world == 1:
            return self.agree(what, error)
        text = json.dumps(values, default=repr)
        failed, largest, smallest = self.maximum(what, [error is not None, _mark(text), -_mark(text)])
        if failed:
            return self.agree(what, error)
        if largest != -smallest:
            first, *others = every = [json.loads(one) for one in self.exchange(what, text.encode())]
            name = next(name for name in first if any(other[name] != first[name] for other in others))
            told = ", ".join(f"{one[name]!r:.80} on rank {rank}" for rank, one in enumerate(every))
            raise StateError(f"{what}: {name} must be the same on all ranks; it is {told}")
        return None

    @contextmanager
    def explained(self, what: str) -> Iterator[None]:
        """Turn the errors of collectives elsewhere, in this block, into those of this group.

        Raises:
            LostRankError: A rank is gone, late, or somewhere else.
        """
        try:
            yield
        except RuntimeError as error:
            lost = self.explain(what, error)
            if lost is None:
                raise
            raise lost from error

    def explain(self, what: str, error: BaseException) -> LostRankError | None:
        """Return what an error of a collective elsewhere means for ranks; None if it was none of a collective's."""
        if self.world == 1 or not isinstance(error, RuntimeError) or isinstance(error, AugendError):
            return None
        if not any(words in str(error) for words in _OF_A_COLLECTIVE):
            return None
        return self._lost(what, error)

    def _maximum_of_many(self, what: str, numbers: Sequence[int]) -> list[int]:
        tensor = torch.tensor(list(numbers), dtype=torch.int64, device="cpu")
        self._waited(what, self._reduce(what, tensor, dist.ReduceOp.MAX).wait)
        return _whole_numbers(tensor)

    def _refuse_places(self, what: str) -> None:
        places = [one.decode() for one in self.exchange("the other ranks' places", what.encode())]
        told = ", ".join(f"rank {rank} waits for {place}" for rank, place in enumerate(places))
        raise StateError(f"ranks are at different places: {told}. Every rank must make the same calls in one order")

    def _linked(self, what: str) -> Link:
        if self._link is None:
            raise LostRankError(f"rank {self.rank} left its group when a rank was lost, and cannot wait for {what}")
        return self._link

    def _reduce(self, what: str, tensor: Tensor, operation: dist.ReduceOp.RedOpType) -> dist.Work:
        return self._waited(what, lambda: self._linked(what).reduce(tensor, operation))

    def _all(self, what: str, mine: Tensor) -> list[Tensor]:
        every = [torch.empty_like(mine) for _ in range(self.world)]
        self._waited(what, lambda: self._linked(what).gather(every, mine).wait())
        return every

    def _waited(self, what: str, call: Callable[[], T]) -> T:
        calls = [call]
        del call  # once it has failed, nothing may hold what it waited for: see _lost
        try:
            return calls.pop()()
        except AugendError:
            raise
        except RuntimeError as error:
            raise self._lost(what, error) from error

    def _lost(self, what: str, error: BaseException) -> LostRankError:
        """Leave a note, and the group: whoever waits for this rank hears of it now and not when its time is up.

        Connections are closed when nobody holds them any more, and the frames of the error do.
        """
        if self._link is None or self._notes is None:
            return LostRankError(f"rank {self.rank} left its group when a rank was lost ({first_line(error)})")
        self._notes.write(f"waits for {what}")
        traceback.clear_frames(error.__traceback__)
        self._link = None
        return LostRankError(f"{self._notes.read(what)} ({first_line(error)})")


def _kind(name: str) -> type[AugendError]:
    kinds = [AugendError]
    for kind in kinds:
        kinds.extend(kind.__subclasses__())
    return next((kind for kind in kinds if kind.__name__ == name), AugendError)


def _mark(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 2


def _whole_numbers(tensor: Tensor) -> list[int]:
    return [int(one) for one in tensor.tolist()]
