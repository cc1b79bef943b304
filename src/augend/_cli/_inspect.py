"""``augend inspect``: what the newest good checkpoint of a run holds."""

from __future__ import annotations

from typing import Annotated

import typer

from augend._cli._failures import FAILED, Reported
from augend._cli._options import SavedPath, Traceback


def inspect(
    path: SavedPath,
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
    show_traceback: Traceback = False,
) -> None:
    """Show where a checkpoint stands and what it holds; of a run, its newest good one.

    Reads only, also while the run goes on. Ends with 1 if there is no good checkpoint or the given one is damaged, 2
    if there is no such path.
    """
    with Reported(show_traceback=show_traceback):
        from augend._cli._saved import print_json, print_table

        whole = print_json(path) if as_json else print_table(path)
        if not whole:
            raise typer.Exit(FAILED)
