"""One of torchrun's agents, which keeps a worker alive: ``python -m augend._cli._agent``, started by the supervisor."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from augend._cli._desk import Desk
from augend._cli._launch import AGENT, end_with

_DEAF_TO: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # the supervisor decides what a signal means
_GLANCE_SECONDS: Final = 0.02


def main(arguments: Sequence[str]) -> None:
    """Wait until all agents are there, and keep a worker alive as long as the parent lives.

    Args:
        arguments: The parent's process, the desk, the file for what torchrun says, and then what torchrun takes.
    """
    parent, desk, log, *torchrun = arguments
    end_with(int(parent))
    for number in _DEAF_TO:
        signal.signal(number, signal.SIG_IGN)
    os.environ[AGENT] = str(os.getpid())
    sys.stderr = Path(log).open("w", buffering=1, encoding="utf-8")  # noqa: SIM115  # until the end; the worker has the real one

    from torch.distributed.run import main as run

    gate = Desk(Path(desk))
    gate.arrive()
    while not gate.is_open():
        time.sleep(_GLANCE_SECONDS)
    run(torchrun)


if __name__ == "__main__":
    main(sys.argv[1:])
