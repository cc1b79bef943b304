"""The ranks themselves: they run cases, and whatever a case does, the test ends and the next one runs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed
from ranks import Died, Hung, LostError, Ranks

from augend.errors import StateError


def add(number: int) -> tuple[int, int, torch.Tensor]:
    """Return rank, world and the sum over ranks of number + rank."""
    total = torch.tensor([number + torch.distributed.get_rank()])
    torch.distributed.all_reduce(total)
    return torch.distributed.get_rank(), torch.distributed.get_world_size(), total


def refuse(which: int) -> str:
    """Raise on one rank."""
    if torch.distributed.get_rank() == which:
        raise StateError("not so")
    return "well"


def end(which: int) -> str:
    """End one rank, as a crash does."""
    if torch.distributed.get_rank() == which:
        os.kill(os.getpid(), signal.SIGKILL)
    return "well"


def sleep(which: int, seconds: float) -> str:
    """Let one rank do nothing for a while."""
    if torch.distributed.get_rank() == which:
        time.sleep(seconds)
    return "well"


def wait_for_nobody() -> str:
    """Let rank 0 wait for a collective that rank 1 never joins."""
    if torch.distributed.get_rank() == 0:
        torch.distributed.barrier()
    return "well"


def warn() -> None:
    """Warn."""
    warnings.warn("careless", UserWarning, stacklevel=1)


def litter(kind: str) -> None:
    """Leave something behind."""
    if kind == "dtype":
        torch.set_default_dtype(torch.float64)
    elif kind == "environment":
        os.environ["LITTER"] = "1"
    elif kind == "thread":
        thread = threading.Thread(target=raise_in_thread)
        thread.start()
        thread.join()


def raise_in_thread() -> None:
    """Raise where nobody looks."""
    raise ValueError("unseen")


def groups() -> int:
    """Make a group, and return how many there are."""
    torch.distributed.new_group()
    return len(torch.distributed.distributed_c10d._world.pg_map)


def raise_beside_a_waiting_rank() -> str:
    """Let rank 0 wait for rank 1, which raises instead."""
    if torch.distributed.get_rank() == 1:
        raise StateError("of my own")
    torch.distributed.barrier()
    return "well"


def unsendable() -> object:
    """Return what pickle cannot send."""
    return lambda: None


def threads_after_a_fork() -> tuple[str, int]:
    """Return what every case relies on: the debug level, and one thread."""
    return os.environ["TORCH_DISTRIBUTED_DEBUG"], torch.get_num_threads()


@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_case_runs_on_every_rank(ranks, world: int) -> None:
    """Every rank gets the arguments, knows its place, reaches the others, and its result comes back in order."""
    expected = [(rank, world, world * 5 + world * (world - 1) // 2) for rank in range(world)]
    assert expected == [(rank, of, int(total)) for rank, of, total in ranks(world).run(add, 5)]
    assert [("DETAIL", 1)] * world == ranks(world).run(threads_after_a_fork)


def test_an_exception_comes_back_as_itself(ranks2: Ranks) -> None:
    """``run`` raises what a rank raised, says which rank it was, and the world goes on."""
    with pytest.raises(StateError, match="not so") as caught:
        ranks2.run(refuse, 1)
    assert caught.value.__notes__[0].startswith("rank 1:\nTraceback")
    first, second = ranks2.outcomes(refuse, 1)
    assert ("well", StateError, "not so") == (first, type(second), str(second))
    assert [3, 3] == [int(total) for _, _, total in ranks2.run(add, 1)]


def test_a_warning_is_an_error(ranks1: Ranks) -> None:
    """Ranks are as strict as the test run."""
    with pytest.raises(UserWarning, match="careless"):
        ranks1.run(warn)


def test_a_result_that_cannot_be_sent_is_an_error(ranks1: Ranks) -> None:
    """The test is told what the result was."""
    with pytest.raises(RuntimeError, match="cannot be sent"):
        ranks1.run(unsendable)


def test_a_rank_that_dies_fails_the_test_and_not_the_next(ranks2: Ranks) -> None:
    """The message has the signal; the next case runs in a new world."""
    with pytest.raises(LostError, match="rank 1 died with exit code -9"):
        ranks2.run(end, 1)
    assert [3, 3] == [int(total) for _, _, total in ranks2.run(add, 1)]


def test_a_rank_that_hangs_fails_the_test_and_not_the_next(ranks2: Ranks) -> None:
    """The message shows where the rank was; the next case runs in a new world."""
    with pytest.raises(LostError, match=r"rank 0 hung(.|\n)*in sleep"):
        ranks2.run(sleep, 0, 50.0, seconds=4)
    assert [3, 3] == [int(total) for _, _, total in ranks2.run(add, 1)]


@pytest.mark.parametrize(
    ("kind", "words"),
    [("dtype", "default dtype"), ("environment", "LITTER"), ("thread", "unseen")],
)
def test_a_case_that_leaves_something_behind_fails(ranks1: Ranks, kind: str, words: str) -> None:
    """Torch's modes, the environment and exceptions in threads are looked at after each case."""
    with pytest.raises(LostError, match=words):
        ranks1.run(litter, kind)


def test_groups_that_a_case_made_are_dropped(ranks2: Ranks) -> None:
    """A hundred cases may make a group each."""
    assert ranks2.run(groups) == ranks2.run(groups)


def test_a_case_is_a_function_of_a_module(ranks1: Ranks) -> None:
    """A lambda cannot be found by name in another process."""
    with pytest.raises(ValueError, match="must be a function of a module"):
        ranks1.run(lambda: None)


def test_fatal_returns_what_became_of_each_rank(ranks3: Ranks) -> None:
    """A case that is meant to lose ranks tells of each: a result, an exception, an exit code, or that it hung."""
    first, second, third = ranks3.fatal(end, 1)
    assert ("well", -9, "well") == (first, second.code, third)
    assert isinstance(second, Died)
    outcomes = ranks3.fatal(sleep, 2, 50.0, seconds=5)
    assert ["well", "well"] == outcomes[:2]
    assert isinstance(outcomes[2], Hung)
    assert "in sleep" in outcomes[2].log


def test_an_exception_ends_a_rank_of_fatal(ranks2: Ranks) -> None:
    """As in a program: the others see the connection close long before the group's time-out."""
    before = time.monotonic()
    waited, raised = ranks2.fatal(raise_beside_a_waiting_rank, group_seconds=60, seconds=90)
    assert (RuntimeError, StateError) == (type(waited), type(raised))
    assert 50 > time.monotonic() - before


def test_fatal_has_a_group_with_its_own_time_out(ranks2: Ranks) -> None:
    """A rank that waits in a collective for one that never comes fails after the group's seconds."""
    before = time.monotonic()
    waited, gone = ranks2.fatal(wait_for_nobody, group_seconds=1)
    assert (RuntimeError, "well") == (type(waited), gone)
    assert 50 > time.monotonic() - before


ORPHAN = """
import time
from ranks import Nursery, Ranks
from test_ranks import sleep
import threading

ranks = Ranks(Nursery(), 2)
threading.Thread(target=ranks.run, args=(sleep, 0, 100.0), daemon=True).start()
while ranks._live is None:
    time.sleep(0.1)
print(*(each.pid for each in ranks._live.ranks), ranks._nursery._process.pid, flush=True)
time.sleep(100)
"""


def test_ranks_do_not_outlive_the_test_run() -> None:
    """When the test run is killed, its ranks end by themselves, also in the middle of a case."""
    here = str(Path(__file__).parent)
    environment = {**os.environ, "PYTHONPATH": here}
    command = [sys.executable, "-c", ORPHAN]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True) as run:
        pids = [int(word) for word in run.stdout.readline().split()]
        run.kill()
    assert 3 == len(pids)
    end_at = time.monotonic() + 20
    while (left := [pid for pid in pids if alive(pid)]) and time.monotonic() < end_at:
        time.sleep(0.1)
    assert [] == left


def alive(pid: int) -> bool:
    """Say whether a process runs; one that only waits to be buried does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"
