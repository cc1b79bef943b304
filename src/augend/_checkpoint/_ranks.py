"""What ranks tell each other about a checkpoint: what rank 0 found, and whether all are about the same."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Final, TypeVar, final

from augend._group import Group
from augend.errors import AugendError, ContractError

T = TypeVar("T")

_FIRST_PAUSE_SECONDS: Final = 0.005
_LONGEST_PAUSE_SECONDS: Final = 1.0  # far from any time-out
ALONE: Final = Group(None, 0, 1)
_HEX_DIGITS: Final = 15  # 60 bits, which an int64 holds with a sign


def told(group: Group, what: str, call: Callable[[], Any]) -> Any:
    """Return what a call returns on rank 0, where alone it is made; what JSON keeps.

    Raises:
        AugendError: What it raised, on all ranks.
    """

    def first() -> bytes:
        return json.dumps(call()).encode() if group.rank == 0 else b""

    return json.loads(group.broadcast(what, patiently(group, what, first)))


def patiently(group: Group, what: str, call: Callable[[], T]) -> T:
    """Return what a call returns, if it raises on no rank; it may take longer than the ranks' time-out.

    While it runs, ranks tell each other that they are there: so the slow one is waited for, and a lost one is not.

    Raises:
        AugendError: What the lowest rank raised that raised, on all ranks.
    """
    if group.world == 1:
        return call()
    done = threading.Event()
    results: list[T] = []
    error: AugendError | None = None
    company = _Company(group, what, done)
    with suppress(RuntimeError):  # the program is ending, and no thread begins any more: the others wait meanwhile
        company.start()
    try:
        results.append(call())  # in this thread, with its modes and its device
    except AugendError as caught:
        error = caught
    finally:
        done.set()
        company.end()
    company.check()
    group.agree(what, error)
    return results[0]


@final
class _Company(threading.Thread):
    """Comes together with the other ranks' again and again, until every rank is done."""

    def __init__(self, group: Group, what: str, done: threading.Event) -> None:
        super().__init__(name="company", daemon=True)
        self._group = group
        self._what = what
        self._done = done
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            _be_there(self._group, self._what, self._done)
        except BaseException as error:  # noqa: BLE001  # raised where the call is over
            self._error = error

    def end(self) -> None:
        """Wait until every rank is done; without a thread of its own, come together here."""
        if self.ident is None:
            self.run()
        else:
            self.join()

    def check(self) -> None:
        """Raise what the other ranks' company ended with."""
        if self._error is not None:
            raise self._error


def _be_there(group: Group, what: str, done: threading.Event) -> None:
    """Come together again and again, until every rank is done."""
    pause, busy = _FIRST_PAUSE_SECONDS, 1
    while busy:
        ended = done.wait(pause)
        (busy,) = group.maximum(what, [not ended])
        pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)


def first_alone(group: Group, what: str, call: Callable[[], object]) -> None:
    """Make a call on rank 0 alone, and wait for it on all, however long it takes.

    Raises:
        AugendError: What it raised, on all ranks.
    """
    patiently(group, what, call if group.rank == 0 else lambda: None)


def fingerprint(text: str) -> int:
    """Return 60 bits of the SHA-256 of a text."""
    return int(hashlib.sha256(text.encode()).hexdigest()[:_HEX_DIGITS], 16)


def all_equal(group: Group, what: str, number: int) -> bool:
    """Tell whether every rank has the same number."""
    largest, smallest = group.maximum(what, [number, -number])
    return largest == -smallest


def check_equal(group: Group, what: str, texts: Mapping[str, str]) -> None:
    """Refuse what is not the same on all ranks: names, their order, and the text of each.

    Raises:
        ContractError: Names the first that differs, and the rank; the same on all ranks.
    """
    if group.world == 1:
        return
    mine = json.dumps({name: hashlib.sha256(text.encode()).hexdigest() for name, text in texts.items()})
    if all_equal(group, what, fingerprint(mine)):
        return
    first, *others = [json.loads(one) for one in group.exchange(what, mine.encode())]
    for rank, other in enumerate(others, start=1):
        for name in {**first, **other}:
            if first.get(name) != other.get(name):
                owner = rank if name in other else 0
                verb = "differs from rank 0's" if name in first and name in other else "is not on every rank"
                raise ContractError(
                    f"{what}: {name} of rank {owner} {verb}; what is no tensor must be equal on all ranks: compute it "
                    "from what all ranks know, or leave it out"
                )
    raise ContractError(
        f"{what}: the parts must be given in the same order on all ranks; rank 0 has {', '.join(first)}"
    )


@final
class Poll:
    """A question that nobody waits for: what ranks say at one call is known to all at the next."""

    def __init__(self) -> None:
        self._answer: Callable[[], list[int]] | None = None

    def take(self, group: Group, wishes: Callable[[], list[int]]) -> list[int]:
        """Return, for each wish, whether any rank had it when it was last asked; one process alone is asked now."""
        if group.world == 1:
            return wishes()
        answer, self._answer = self._answer, None
        return [0] * len(wishes()) if answer is None else answer()

    def post(self, group: Group, what: str, wishes: Callable[[], list[int]]) -> None:
        """Ask every rank; the answer is for the next call."""
        if group.world > 1:
            self._answer = group.begin_maximum(what, wishes())

    def drop(self) -> None:
        """Forget what was asked: on all ranks, or on none."""
        self._answer = None
