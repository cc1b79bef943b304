"""``python -m augend``, and the entry point of the ``augend`` command."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import suppress

_INTERRUPTED = 130  # 128 + SIGINT, as shells say it


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    Args:
        arguments: What follows ``augend`` on the command line; that of the process if None.
    """
    try:
        from augend._cli import main as run

        return run(arguments)
    except KeyboardInterrupt:  # in the imports, or on the way out
        with suppress(OSError):
            os.write(2, b"augend: interrupted\n")
        return _INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
