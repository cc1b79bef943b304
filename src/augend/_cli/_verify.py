"""``augend verify``: whether every byte of a run's checkpoints is what was written."""

from __future__ import annotations

import typer

from augend._cli._failures import FAILED, Reported
from augend._cli._options import SavedPath, Traceback


def verify(path: SavedPath, *, show_traceback: Traceback = False) -> None:
    """Read every file of a checkpoint, or of all checkpoints of a run, and compare it with its checksum.

    Ends with 1 if one is damaged or there is none, 2 if there is no such path.
    """
    with Reported(show_traceback=show_traceback):
        from augend._cli._saved import print_verified

        if not print_verified(path):
            raise typer.Exit(FAILED)
