"""The ranks of one command: how they find each other, and what they decide together."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import TypeVar, final

import torch
import torch.distributed as dist

from augend import errors
from augend._cli._failures import complain
from augend._cli._launch import Launch
from augend.errors import AugendError

T = TypeVar("T")


@contextmanager
def joined(launch: Launch, timeout_seconds: float) -> Iterator[Ranks]:
    """Join the ranks that were started together; one alone needs nobody.

    Collective. Every wait is over after the time-out. Warnings are lines like all others, and the first rank's.

    Args:
        launch: Which rank this is.
        timeout_seconds: How long a rank waits for the others.
    """
    if launch.world == 1:
        with warnings.catch_warnings():
            warnings.showwarning = partial(_show, set())
            yield Ranks(launch)
        return
    backend = "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(launch.local_rank % torch.cuda.device_count())
        backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout_seconds))
    with warnings.catch_warnings():
        ranks = Ranks(launch)
        if ranks.leads and not ranks.restarted:
            warnings.showwarning = partial(_show, set())
            if launch.shares_store:
                complain(
                    "warning: torchrun will not bring a lost rank back: set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for "
                    "it, or use augend's own --ranks"
                )
        else:
            warnings.simplefilter("ignore")
        yield ranks
        ranks.leave()


@final
class Ranks:
    """All ranks of the command: what is collective here is so over all of them.

    Args:
        launch: Which rank this is.

    Attributes:
        rank: Of this process.
        world: How many there are.
        restarted: Whether they come after others of the same command.
    """

    def __init__(self, launch: Launch) -> None:
        self.rank = launch.rank
        self.world = launch.world
        self.restarted = launch.desk is not None and len(launch.desk.workers()) > launch.world
        self._together = launch.world > 1

    @property
    def leads(self) -> bool:
        """Whether this is the rank that prints and writes."""
        return self.rank == 0

    def agreed(self, call: Callable[[], T]) -> T:
        """Return what a call returns, if it raises on no rank; else raise on all of them what it raised on the first.

        Collective.
        """
        if not self._together:
            return call()
        result, error = _tried(call)
        notes = _exchanged("" if error is None else f"{type(error).__name__}\n{error}", self.world)
        failed = [rank for rank, note in enumerate(notes) if note]
        if result is not None and not failed:
            return result[0]
        kind, _, message = notes[failed[0]].partition("\n")
        first = failed[0]
        raise getattr(errors, kind, AugendError)(f"rank {first}: {message}" if first else message) from error

    def from_first(self, call: Callable[[], str]) -> str:
        """Return on all ranks what a call returns on the first one, or raise there what it raises.

        Collective.
        """
        text = self.agreed(call if self.leads else str)
        return _exchanged(text, self.world)[0] if self._together else text

    def leave(self) -> None:
        """Let the others go: from here on this rank is alone.

        Collective.
        """
        if self._together:
            self._together = False
            dist.destroy_process_group()


def _show(shown: set[str], message: Warning | str, *_: object) -> None:
    text = str(message)
    if text not in shown:
        complain(f"warning: {text}")
    shown.add(text)


def _tried(call: Callable[[], T]) -> tuple[tuple[T] | None, AugendError | None]:
    try:
        return (call(),), None
    except AugendError as error:
        return None, error


def _exchanged(text: str, world: int) -> list[str]:
    mine = torch.frombuffer(bytearray(text.encode() + b"\n"), dtype=torch.uint8)  # [bytes], never empty
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(world)]
    dist.all_gather(sizes, torch.tensor([len(mine)]))
    padded = torch.zeros(max(int(size) for size in sizes), dtype=torch.uint8)  # [bytes]
    padded[: len(mine)] = mine
    every = [torch.empty_like(padded) for _ in range(world)]
    dist.all_gather(every, padded)
    return [one[: int(size) - 1].numpy().tobytes().decode() for one, size in zip(every, sizes, strict=True)]
