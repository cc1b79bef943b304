"""The processes of a run on several ranks: torchrun's agents, one a rank, and the worker that each keeps alive."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Final, final

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but torch does not list it

from augend._cli._desk import Desk, Worker
from augend._cli._launch import DESK

_HOST: Final = "127.0.0.1"
_STORE_TIMEOUT: Final = timedelta(seconds=60)
# A dead agent is missed after 1 s x 5; then the others wait 3 s for more to come. Shorter ones split the agents.
_RENDEZVOUS: Final = "is_host=0,last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=5,read_timeout=15"
_RESTARTS: Final = 1_000_000  # the supervisor knows better when it is enough
_ENVIRONMENT: Final = {
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # else restarted workers find the addresses of those before them
    "PET_SHUTDOWN_TIMEOUT": "1",  # seconds; a worker of a world that is no more has nothing to finish
    "PET_SIGNALS_TO_HANDLE": "SIGUSR2",  # all others are the supervisor's
}
_DEFAULTS: Final = {"TORCH_CPP_LOG_LEVEL": "ERROR", **({"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {})}


@final
class Crew:
    """Agents with their workers, in sessions of their own: a Ctrl-C comes to the supervisor alone.

    The store where agents meet lives in this process, so that no agent is needed by the others.

    Args:
        folder: For their notes and logs.
        program: The module that each worker runs, and its arguments.
        ranks: How many.
        environment: What they are started with.
    """

    def __init__(self, folder: Path, program: Sequence[str], ranks: int, environment: Mapping[str, str]) -> None:
        self.desk = Desk(folder)
        self._store = TCPStore(_HOST, 0, is_master=True, wait_for_workers=False, timeout=_STORE_TIMEOUT)
        threads = str(max(1, (os.cpu_count() or 1) // ranks))
        own = {"OMP_NUM_THREADS": threads, **_DEFAULTS, **environment, **_ENVIRONMENT, DESK: str(folder)}
        torchrun = [
            *("--nnodes", f"1:{ranks}", "--nproc-per-node", "1", "--max-restarts", str(_RESTARTS)),
            *("--rdzv-backend", "c10d", "--rdzv-id", "augend", "--rdzv-endpoint", f"{_HOST}:{self._store.port}"),
            *("--rdzv-conf", _RENDEZVOUS, "--local-addr", _HOST, "--monitor-interval", "0.3"),
            *("--module", *program),
        ]
        self._agents = [_started(folder, number, torchrun, own) for number in range(ranks)]
        self._logs = [folder / f"agent-{number}.log" for number in range(ranks)]
        self._waiting = True
        self.gone: set[int] = set()  # workers that were seen to be no more

    def __enter__(self) -> Crew:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Kill whoever is left, and wait until they are gone."""
        for agent in self._agents:
            agent.kill()
        for agent in self._agents:
            agent.wait()
        self.look()

    def look(self) -> None:
        """Let the agents begin once all are ready, and kill the worker of one that is gone."""
        dead = {agent.pid for agent in self._agents if agent.poll() is not None}
        if self._waiting and all(agent.pid in dead or self.desk.arrived(agent.pid) for agent in self._agents):
            self._waiting = False
            self.desk.open()
        for worker in self.desk.workers().values():
            if worker.pid not in self.gone and not is_alive(worker.pid):
                self.gone.add(worker.pid)  # and never looked at again: its number may become another's
            elif worker.pid not in self.gone and worker.agent in dead:
                kill(worker.pid)

    @property
    def agents(self) -> int:
        """How many agents there are still."""
        return sum(agent.poll() is None for agent in self._agents)

    def current(self) -> dict[int, Worker]:
        """Return the latest worker of each agent that is still there, by its process."""
        alive = {agent.pid for agent in self._agents if agent.poll() is None}
        latest = {worker.agent: worker for worker in self.desk.workers().values() if worker.agent in alive}
        return {worker.pid: worker for worker in latest.values()}

    def latest(self) -> list[Worker]:
        """Return the latest worker of each agent, whether that is still there or not."""
        return list({worker.agent: worker for worker in self.desk.workers().values()}.values())

    def last_words(self) -> str:
        """Return the last line that an agent left in its log; empty if none did."""
        lines = [line for log in self._logs if log.exists() for line in log.read_text("utf-8", "replace").splitlines()]
        return next((line.strip() for line in reversed(lines) if line.strip()), "")


def is_alive(pid: int) -> bool:
    """Return whether a process is there, and not only its entry until somebody asks how it ended."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b") ")[2][:1] != b"Z"
    except FileNotFoundError:  # no such file system here, or gone in the meantime
        return not Path("/proc/self").exists()
    except ProcessLookupError:
        return False


def kill(pid: int) -> None:
    """Kill a worker and what it has started, which are a session."""
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def _started(
    folder: Path, number: int, torchrun: Sequence[str], environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    own = [str(os.getpid()), str(folder), str(folder / f"agent-{number}.log")]
    command = [sys.executable, "-m", "augend._cli._agent", *own, *torchrun]
    return subprocess.Popen(  # noqa: S603  # our own program
        command, env=dict(environment), stdin=subprocess.DEVNULL, start_new_session=True
    )
