"""How this process was started: alone, by torchrun, or by ``augend`` itself as one of several ranks."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, final

from augend._cli._desk import Desk

DESK: Final = "AUGEND_DESK"  # set by our supervisor for its workers
AGENT: Final = "AUGEND_AGENT"  # set by our agent for its worker: who must live on
_TORCHRUN: Final = "TORCHELASTIC_RUN_ID"
_GLANCE_SECONDS: Final = 0.1


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """What the environment says about this process.

    Args:
        rank: Of this process.
        world: How many ranks there are.
        local_rank: Its number on this machine.
        torchrun: Whether torchrun started it.
        desk: Where its supervisor reads; None if nobody supervises it but torchrun.
        shares_store: Whether ranks that torchrun starts again find the addresses of those before them, and die of it.
    """

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    torchrun: bool = False
    shares_store: bool = False
    desk: Desk | None = None

    @property
    def leads(self) -> bool:
        """Whether this is the rank that prints and writes."""
        return self.rank == 0


def launched(environment: Mapping[str, str]) -> Launch:
    """Read how a process was started.

    Args:
        environment: Its environment variables; torchrun has set all of its own, or it was not torchrun.
    """
    numbers = [environment.get(name, "") for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")]
    if _TORCHRUN not in environment or not all(number.isdecimal() for number in numbers):
        return Launch()
    rank, world, local_rank = map(int, numbers)
    desk = environment.get(DESK)
    restarts = environment.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"
    return Launch(
        rank=rank,
        world=world,
        local_rank=local_rank,
        torchrun=True,
        shares_store=restarts and environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        desk=None if desk is None else Desk(Path(desk)),
    )


def enrolled(environment: Mapping[str, str]) -> Launch:
    """Read how this process was started; one that ``augend`` started says that it is there, and ends with its parent.

    Args:
        environment: Its environment variables.
    """
    launch = launched(environment)
    if launch.desk is not None:
        end_with(int(environment[AGENT]))
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun's, at the end of a world: SIGKILL follows
        signal.signal(signal.SIGINT, signal.default_int_handler)  # the supervisor's, and nobody else's
        launch.desk.enrol(launch.rank, launch.world)
    return launch


def end_with(parent: int) -> None:
    """Kill this process as soon as its parent is no more, so that nothing is left running, or writing, behind a job.

    Args:
        parent: The process that must be the parent.
    """
    threading.Thread(target=_watch, args=(parent,), name="augend-parent", daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_GLANCE_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)
