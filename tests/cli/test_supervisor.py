"""What the supervisor makes of what it sees: decisions first, on a crew of notes alone, then real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from augend._cli import _supervisor
from augend._cli._crew import is_alive
from augend._cli._desk import Desk, Ending, Worker
from augend._cli._supervisor import _Watch

SECONDS = 90
PIDS = 5_000_000  # above 2^22, the most that Linux gives to a process


class Crew:
    """A crew of notes: each look at it does the next thing of a story."""

    def __init__(self, folder: Path, *story: Callable[[Crew], object]) -> None:
        self.desk = Desk(folder)
        self.agents = 2
        self.gone: set[int] = set()
        self.asked: list[int] = []
        self.killed: list[int] = []
        self._story = list(story)
        self._workers: list[Worker] = []

    def look(self) -> None:
        """Do the next thing; the story must not be over before the watch is."""
        assert self._story, "the watch went on after the end of the story"
        self._story.pop(0)(self)

    def current(self) -> dict[int, Worker]:
        """Return the latest worker of each agent."""
        latest = {worker.agent: worker for worker in self._workers if worker.agent <= self.agents}
        return {worker.pid: worker for worker in latest.values()}

    def latest(self) -> list[Worker]:
        """Return the latest worker of each agent, dead ones too."""
        return list({worker.agent: worker for worker in self._workers}.values())

    def last_words(self) -> str:
        """Return what an agent's log might end with."""
        return "RendezvousTimeoutError"

    def come(self, number: int, *, rank: int, agent: int) -> None:
        """Let a worker come."""
        self._workers.append(Worker(pid=PIDS + number, agent=agent, rank=rank, world=2))


def both_come(first: int = 0) -> Callable[[Crew], object]:
    """Let a world of two come: rank 0 of agent 1, rank 1 of agent 2."""
    return lambda crew: [crew.come(first + rank, rank=rank, agent=rank + 1) for rank in (0, 1)]


def ends(number: int, *, code: int, **said: object) -> Callable[[Crew], object]:
    """Let a worker end with its word."""

    def end(crew: Crew) -> None:
        crew.desk.end(Ending(pid=PIDS + number, rank=number % 2, code=code, **said))
        crew.gone.add(PIDS + number)

    return end


def dies(*numbers: int) -> Callable[[Crew], object]:
    """Let workers die without a word."""
    return lambda crew: crew.gone.update(PIDS + number for number in numbers)


def leaves(crew: Crew) -> None:
    """Let the second agent die."""
    crew.agents -= 1


def nothing(_: Crew) -> None:
    """Let time go by."""


def watched(monkeypatch, crew: Crew, *signals: int) -> int:
    """Return the exit code that a story comes to."""
    monkeypatch.setattr(_supervisor, "_GLANCE_SECONDS", 0)
    monkeypatch.setattr(_supervisor, "_GRACE_SECONDS", 0)
    monkeypatch.setattr(_supervisor, "_FIRST_SECONDS", 0)
    monkeypatch.setattr(_supervisor, "kill", lambda pid: crew.killed.append(pid - PIDS))
    monkeypatch.setattr(_supervisor.os, "kill", lambda pid, number: crew.asked.append((pid - PIDS, number)))
    watch = _Watch(crew)
    watch.signals += signals
    return watch.until_the_end()


FAILURE = {"code": 2, "message": "model.name = 'x': no such name"}
LOST = {"code": 1, "message": "failed: rank 1 is gone", "lost": True}

STORIES = {
    "done": ([both_come(), ends(0, code=0), ends(1, code=0)], 0, ""),
    "refused by all": ([both_come(), ends(1, **FAILURE), ends(0, **FAILURE)], 2, "augend: rank 1: model.name"),
    "refused by the first": ([both_come(), ends(0, **FAILURE)], 2, "augend: model.name = 'x': no such name\n"),
    "failed on one, lost on the other": (
        [both_come(), ends(0, **LOST), ends(1, code=1, message="failed: KeyError: 'x'")],
        1,
        "augend: rank 1: failed: KeyError: 'x'\n",
    ),
    "nobody reads": ([both_come(), ends(0, code=141)], 141, ""),
    "killed, and back": (
        [both_come(), dies(1), ends(0, **LOST), both_come(2), ends(2, code=0), ends(3, code=0)],
        0,
        "augend: rank 1 was killed; the run goes on from its newest checkpoint\n",
    ),
    "killed, and the others fail of it": (  # what a rank says of another's end may have any type
        [both_come(), dies(0), ends(1, code=1, message="failed: x"), nothing, both_come(2), ends(2, code=0), dies(3)],
        0,
        "augend: rank 0 was killed; the run goes on from its newest checkpoint\n",
    ),
    "an agent is killed": (
        [both_come(), leaves, ends(0, **LOST), lambda crew: crew.come(2, rank=0, agent=1), ends(2, code=0), nothing],
        0,
        "augend: a rank is gone for good; the run goes on from its newest checkpoint, with 1 left\n",
    ),
    "done, and a rank that hangs in its end": ([both_come(), ends(0, code=0), *[nothing] * 3, dies(1)], 0, ""),
    "stopped by a signal to the ranks alone": (
        [both_come(), ends(0, code=3), ends(1, code=3), leaves, leaves],
        3,
        "",
    ),
    "stopped by torchrun between two worlds": (
        [both_come(), ends(0, code=3), both_come(2), ends(2, code=0), dies(3)],
        0,
        "",
    ),
}


@pytest.mark.parametrize("name", STORIES)
def test_each_story_has_its_end(monkeypatch, tmp_path, capsys, name):
    """Done is done; what a restart cannot mend ends with its code and its words; what was lost begins again."""
    story, code, said = STORIES[name]
    crew = Crew(tmp_path, *story)
    assert code == watched(monkeypatch, crew)
    output, message = capsys.readouterr()
    assert ("", True) == (output, message.startswith(said))
    assert message.count("\n") <= 1


def test_who_does_not_find_out_that_a_rank_is_lost_is_killed(monkeypatch, tmp_path, capsys):
    """A rank that hangs on in a world that is no more is killed after some seconds; its successors are let alone."""
    monkeypatch.setattr(_supervisor, "_LINGER_SECONDS", 0)

    def next_world(crew: Crew) -> None:
        assert 1 in crew.killed
        crew.gone.add(PIDS + 1)
        crew.come(2, rank=0, agent=1)

    later = [nothing, lambda crew: crew.come(3, rank=1, agent=2), nothing, ends(2, code=0), dies(3)]
    crew = Crew(tmp_path, both_come(), ends(0, **LOST), next_world, *later)
    assert 0 == watched(monkeypatch, crew)
    assert {1} == set(crew.killed)


def test_nothing_is_restarted_for_ever(monkeypatch, tmp_path, capsys):
    """Ranks that are lost again and again, with nothing saved between, end the run, with the last reason."""
    worlds = [part for first in range(0, 20, 2) for part in (both_come(first), ends(first, **LOST), dies(first + 1))]
    assert 1 == watched(monkeypatch, Crew(tmp_path, *worlds))
    last = capsys.readouterr().err.splitlines()[-1]
    what = "ranks were lost again and again, with nothing gained between"
    assert f"augend: failed: {what}; rank 1 is gone; nothing was begun" == last


def test_a_run_that_gains_is_restarted_as_often_as_it_takes(monkeypatch, tmp_path, capsys):
    """Twenty losses, each after one more line of metrics, are no reason to give up."""
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    desk = tmp_path / "desk"
    desk.mkdir()

    def gains(_: Crew) -> None:
        with (run / "metrics.jsonl").open("a") as file:
            file.write("x")

    worlds = [
        part for first in range(0, 40, 2) for part in (both_come(first), gains, ends(first, **LOST), dies(first + 1))
    ]
    crew = Crew(desk, lambda crew: crew.desk.name_run(run), *worlds, both_come(40), ends(40, code=0), ends(41, code=0))
    assert 0 == watched(monkeypatch, crew)


def test_without_any_agent_left_it_is_over(monkeypatch, tmp_path, capsys):
    """All agents dead: exit 1, and how the run goes on."""
    (tmp_path / "runs" / "a" / "checkpoints" / "00000001-step-3").mkdir(parents=True)
    desk = tmp_path / "desk"
    desk.mkdir()
    story = [lambda crew: crew.desk.name_run(tmp_path / "runs" / "a"), both_come(), dies(0, 1), leaves, leaves]
    assert 1 == watched(monkeypatch, Crew(desk, *story))
    last = capsys.readouterr().err.splitlines()[-1]
    kept = f"the last checkpoint is kept; go on with: augend resume {tmp_path}/runs/a"
    assert f"augend: failed: no rank is left; RendezvousTimeoutError; {kept}" == last


SIGNALS = {
    "saved": ([nothing, ends(0, code=3), ends(1, code=3)], [signal.SIGTERM], 3, ""),
    "one dies of it": ([nothing, ends(0, code=3), dies(1)], [signal.SIGINT], 3, ""),
    "not yet in training": ([nothing, ends(0, code=130), ends(1, code=130)], [signal.SIGINT], 130, ""),
    "still in the making": (
        [nothing, ends(0, code=130, message="interrupted"), ends(1, code=130, message="interrupted")],
        [signal.SIGINT],
        130,
        "interrupted while the ranks were starting; nothing was begun",
    ),
    "cannot be saved": ([nothing, ends(1, **LOST), ends(0, code=1, message="failed: full")], [2], 1, "failed: full"),
    "not heard": ([nothing, dies(0, 1)], [2], 130, "interrupted while the ranks were starting; nothing was begun"),
    "twice": ([], [2, 15], 130, "ended at once; nothing was begun"),
}


@pytest.mark.parametrize("name", SIGNALS)
def test_a_signal_is_passed_on_once(monkeypatch, tmp_path, capsys, name):
    """The first signal goes to every worker once, as SIGINT, and what they come to is the end; the second ends all."""
    story, signals, code, said = SIGNALS[name]
    crew = Crew(tmp_path, both_come(), *story)
    assert code == watched(monkeypatch, crew, *signals)
    assert ([(0, signal.SIGINT), (1, signal.SIGINT)] if len(signals) == 1 else []) == crew.asked
    assert (f"augend: {said}\n" if said else "") == capsys.readouterr().err


def test_a_signal_before_any_worker_came_ends_at_once(monkeypatch, tmp_path, capsys):
    """Nobody is there to save anything."""
    crew = Crew(tmp_path, nothing)
    crew.desk.name_run(Path("runs/a-1"))
    assert 130 == watched(monkeypatch, crew, signal.SIGINT)
    said = (
        "augend: interrupted while the ranks were starting; nothing was saved yet; begin with: augend resume runs/a-1\n"
    )
    assert said == capsys.readouterr().err


# ---------------------------------------------------------------- real processes, with workers that need no torch

WORKER = """
import os, signal, sys, time
from pathlib import Path
import typer
from augend._cli._failures import Reported
from augend._cli._launch import enrolled
from augend.errors import ConfigError, LostRankError

launch = enrolled(os.environ)
stop = []
signal.signal(signal.SIGINT, lambda *_: stop.append(1))
seen = Path("seen")

def is_there(pid):
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return False
    status = Path(f"/proc/{pid}/stat")
    return not status.exists() or status.read_text().rpartition(") ")[2][0] != "Z"

def work():
    with Reported(show_traceback=False, launch=launch):
        if "refuse" in sys.argv:
            raise ConfigError("a = 1: set 2")
        port = os.environ["MASTER_PORT"]  # of this world, and no other
        (seen / f"{os.getpid()} {os.getppid()} {launch.rank} {launch.world} {port}").touch()
        while not Path("finish").exists():
            if stop:
                time.sleep(0.2)  # others' signals may come twice, ours does not
                (seen / f"stopped {launch.rank} {len(stop)}").touch()
                raise typer.Exit(3)
            if not all(is_there(file.name.split()[0]) for file in seen.glob(f"* {port}")):
                raise LostRankError("another one is gone")
            time.sleep(0.02)

try:
    work()
except typer.Exit as end:
    sys.exit(end.exit_code)
"""

SUPERVISOR = """
import os, sys
from pathlib import Path
from augend._cli._supervisor import supervise
sys.exit(supervise(["worker_of_tests", *sys.argv[1:]], 2, None, os.environ))
"""


@contextmanager
def supervised(folder: Path, *arguments: str) -> Iterator[subprocess.Popen]:
    """Run two workers under a supervisor of its own process; whoever is left over at the end is killed."""
    (folder / "worker_of_tests.py").write_text(WORKER, "utf-8")
    (folder / "supervisor_of_tests.py").write_text(SUPERVISOR, "utf-8")
    (folder / "seen").mkdir()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), *filter(None, sys.path)])}
    command = [sys.executable, "-m", "supervisor_of_tests", *arguments]
    with subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()
            end = time.monotonic() + 10
            while (left := alive(folder)) and time.monotonic() < end:
                time.sleep(0.02)
            for pid in left:
                os.kill(pid, signal.SIGKILL)
            assert [] == left


def seen(folder: Path) -> list[list[int]]:
    """Return process, agent, rank and world of every worker that came."""
    names = [file.name for file in (folder / "seen").iterdir() if not file.name.startswith("stopped")]
    return [[int(part) for part in name.split()] for name in names]


def alive(folder: Path) -> list[int]:
    """Return the workers and agents that are there still."""
    return sorted({pid for worker in seen(folder) for pid in worker[:2] if is_alive(pid)})


def wait_for(folder: Path, workers: int, process: subprocess.Popen) -> list[list[int]]:
    """Wait until so many workers have come in all."""
    end = time.monotonic() + SECONDS
    while len(found := seen(folder)) < workers:
        assert None is process.poll(), process.communicate()
        assert time.monotonic() < end
        time.sleep(0.02)
    return found


def test_a_signal_to_the_supervisor_comes_once_to_each_worker(tmp_path):
    """SIGTERM: both workers hear it once and end with 3, so does the command, and nobody is left."""
    with supervised(tmp_path) as process:
        wait_for(tmp_path, 2, process)
        process.terminate()
        assert ("", "") == process.communicate(timeout=SECONDS)
        assert 3 == process.returncode
        assert {"stopped 0 1", "stopped 1 1"} == {file.name for file in (tmp_path / "seen").glob("stopped*")}
        assert [] == alive(tmp_path)


@pytest.mark.long
def test_a_killed_supervisor_takes_all_with_it(tmp_path):
    """SIGKILL tells nobody; agents and workers end all the same."""
    with supervised(tmp_path) as process:
        wait_for(tmp_path, 2, process)
        assert 4 == len(alive(tmp_path))
        process.kill()
        process.wait(SECONDS)
        end = time.monotonic() + 10
        while alive(tmp_path) and time.monotonic() < end:
            time.sleep(0.02)
        assert [] == alive(tmp_path)


@pytest.mark.long
def test_what_a_restart_cannot_mend_is_not_restarted(tmp_path):
    """A refused run file is refused once: exit 2 and one line."""
    with supervised(tmp_path, "refuse") as process:
        assert ("", "augend: a = 1: set 2\n") == process.communicate(timeout=SECONDS)
        assert 2 == process.returncode


@pytest.mark.long
def test_a_second_signal_ends_at_once(tmp_path):
    """SIGTERM after SIGINT to workers that are busy: all are killed, and the command ends by the signal itself."""
    with supervised(tmp_path) as process:
        for pid, *_ in wait_for(tmp_path, 2, process):
            os.kill(pid, signal.SIGSTOP)  # the busiest worker there is
        process.send_signal(signal.SIGINT)
        time.sleep(0.5)
        process.terminate()
        output, message = process.communicate(timeout=SECONDS)
        assert (-signal.SIGTERM, "") == (process.returncode, output)
        assert "augend: ended at once; nothing was begun\n" == message
        assert [] == alive(tmp_path)


@pytest.mark.long
@pytest.mark.parametrize(("whom", "rank"), [("worker", 1), ("agent", 0)])
def test_a_killed_worker_comes_back_and_a_killed_agent_leaves_one_less(tmp_path, whom, rank):
    """After SIGKILL a new world comes: as many workers as before, or with the agent gone its worker too, and one."""
    with supervised(tmp_path) as process:
        first = wait_for(tmp_path, 2, process)
        pid, agent = next(worker[:2] for worker in first if worker[2] == rank)
        os.kill(pid if whom == "worker" else agent, signal.SIGKILL)
        world = 2 if whom == "worker" else 1
        wait_for(tmp_path, 2 + world, process)
        later = [worker for worker in seen(tmp_path) if worker not in first]
        assert [[each, world] for each in range(world)] == sorted(worker[2:4] for worker in later)
        assert not any(is_alive(worker[0]) for worker in first)
        (tmp_path / "finish").touch()
        output, message = process.communicate(timeout=SECONDS)
        assert (0, "", 1) == (process.returncode, output, message.count("\n")), message
        assert ("was killed" if whom == "worker" else "is gone for good") in message
        assert [] == alive(tmp_path)
