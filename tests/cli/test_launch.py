"""How a process learns that it is one of several ranks, and what it leaves on the desk of its supervisor."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import typer
from torch.distributed import DistBackendError

from augend._cli._crew import is_alive
from augend._cli._desk import Desk, Ending, Worker
from augend._cli._failures import Reported, is_of_lost_ranks
from augend._cli._launch import DESK, Launch, launched
from augend.errors import CheckpointError, ConfigError, LostRankError

TORCHRUN = {"TORCHELASTIC_RUN_ID": "1", "RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "0"}
TOLD = "another rank is gone or late (Connection closed by peer [127.0.0.1]:1); what it said itself tells why"
GLOO = "[/pytorch/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1. This is typically caused by"


def test_torchrun_is_known_by_all_of_its_variables():
    """Rank, world and local rank are torchrun's; without one of its variables a process is alone."""
    assert Launch(rank=2, world=4, local_rank=0, torchrun=True) == launched(TORCHRUN)
    assert not launched(TORCHRUN).leads
    assert launched({**TORCHRUN, "RANK": "0"}).leads
    for name in TORCHRUN:
        others = {key: value for key, value in TORCHRUN.items() if key != name}
        assert Launch() == launched(others) == launched({**others, DESK: "/nowhere"})
    assert Launch() == launched({**TORCHRUN, "RANK": "one"})


def test_a_supervised_worker_has_a_desk(tmp_path):
    """Where the supervisor has named its desk, that is where notes go."""
    launch = launched({**TORCHRUN, DESK: str(tmp_path)})
    launch.desk.end(Ending(pid=7, rank=2, code=1))
    assert {7: Ending(pid=7, rank=2, code=1)} == Desk(tmp_path).endings()


def test_a_desk_keeps_what_was_left_on_it(tmp_path):
    """Workers come back in the order of their coming; the run's directory and the open gate once they are there."""
    desk = Desk(tmp_path)
    assert ({}, {}, None, False) == (desk.workers(), desk.endings(), desk.run(), desk.is_open())
    desk.enrol(1, 3)
    time.sleep(0.02)  # one clock tick of a file system
    desk._leave("worker-1", {"pid": 1, "agent": 5, "rank": 0, "world": 3})
    me = Worker(pid=os.getpid(), agent=os.getppid(), rank=1, world=3)
    assert [me, Worker(pid=1, agent=5, rank=0, world=3)] == list(desk.workers().values())
    desk.name_run(Path("runs/a b"))
    desk.open()
    desk.arrive()
    assert (Path("runs/a b"), True) == (desk.run(), desk.is_open())
    assert (True, False) == (desk.arrived(os.getpid()), desk.arrived(1))


def caused(error: Exception, cause: Exception) -> Exception:
    """Return an error that came of another."""
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("expected", "error"),
    [
        (True, LostRankError("rank 1 is gone")),
        (True, RuntimeError(GLOO)),
        (True, RuntimeError("[...] Timed out waiting 30000ms for recv operation to complete")),
        (True, DistBackendError("NCCL communicator was aborted")),
        (True, caused(CheckpointError("not saved"), LostRankError("rank 1 is gone"))),
        (False, RuntimeError("CUDA out of memory")),
        (False, KeyError("gloo")),
        (False, ConfigError("parallel.mode = 'gloo'")),
        (False, CheckpointError("no space left on device")),
    ],
)
def test_what_came_of_a_lost_rank_is_told_from_what_did_not(expected, error):
    """Only errors of collectives, and what they have caused, are of a lost rank: all others a restart cannot mend."""
    assert expected == is_of_lost_ranks(error)


class OwnError(RuntimeError):
    """An error of the user's own, which says what it likes."""


def test_a_users_own_error_is_never_of_a_lost_rank():
    """A type of its own that speaks of peers is not torch's."""
    assert not is_of_lost_ranks(OwnError("by peer"))


def ended(raised: BaseException | None) -> None:
    """End as a verb does: by an exception, or by none."""
    if raised is not None:
        raise raised


@pytest.mark.parametrize(
    ("raised", "code", "message", "lost", "left"),
    [
        (None, 0, "", False, None),
        (typer.Exit(3), 3, "", False, None),  # swallowed: to torchrun an interrupted worker has done its work
        (typer.Exit(141), 141, "", False, typer.Exit),
        (SystemExit(5), 5, "", False, SystemExit),
        (SystemExit("no"), 1, "", False, SystemExit),
        (SystemExit(None), 0, "", False, SystemExit),
        (KeyboardInterrupt(), 130, "interrupted", False, typer.Exit),
        (ConfigError("a = 1: set 2"), 2, "a = 1: set 2", False, typer.Exit),
        (CheckpointError("torn"), 1, "failed: torn", False, typer.Exit),
        (LostRankError("rank 0 is gone"), 1, "failed: rank 0 is gone", True, typer.Exit),
        (RuntimeError(GLOO), 1, f"failed: {TOLD}", True, typer.Exit),
    ],
)
def test_a_supervised_worker_says_how_it_ends_and_prints_nothing(tmp_path, capsys, raised, code, message, lost, left):
    """Every way to end is a note with the exit code that people shall see; only the supervisor prints it."""
    desk = Desk(tmp_path)
    caught = None
    try:
        with Reported(show_traceback=False, launch=Launch(rank=1, world=2, torchrun=True, desk=desk)):
            ended(raised)
    except BaseException as error:  # noqa: BLE001 - whatever leaves the block is what is looked at
        caught = type(error)
    expected = Ending(pid=os.getpid(), rank=1, code=code, message=message, lost=lost)
    assert ({os.getpid(): expected}, left) == (desk.endings(), caught)
    assert ("", "") == capsys.readouterr()


def test_a_traceback_goes_to_the_supervisor_too(tmp_path):
    """--traceback of a worker is kept with its note."""
    desk = Desk(tmp_path)
    with (
        pytest.raises(typer.Exit),
        Reported(show_traceback=True, launch=Launch(rank=1, world=2, torchrun=True, desk=desk)),
    ):
        raise ConfigError("a = 1")
    assert "Traceback (most recent call last):" in desk.endings()[os.getpid()].trace


ORPHAN = """
import os, sys, time
from augend._cli._launch import end_with
if len(sys.argv) > 1:
    end_with(int(sys.argv[1]))
    print(os.getpid(), flush=True)
    time.sleep(60)
else:
    import subprocess
    child = subprocess.Popen([sys.executable, __file__, str(os.getpid())])
    time.sleep(60)
"""


def test_a_process_ends_with_its_parent(tmp_path):
    """A parent that is killed, and can tell nobody, takes its worker with it."""
    script = tmp_path / "orphan.py"
    script.write_text(ORPHAN, "utf-8")
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True) as parent:
        child = int(parent.stdout.readline())
        parent.kill()
        end = time.monotonic() + 20
        while is_alive(child) and time.monotonic() < end:
            time.sleep(0.02)
        assert not is_alive(child)
