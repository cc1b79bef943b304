"""``augend diff``: the first step, tensor and bit where two runs part."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from augend._cli._failures import FAILED, Reported
from augend._cli._options import Traceback


def diff(
    first: Annotated[Path, typer.Argument(metavar="A", help="A run directory, or one checkpoint.", show_default=False)],
    second: Annotated[Path, typer.Argument(metavar="B", help="Another one.", show_default=False)],
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
    show_traceback: Traceback = False,
) -> None:
    """Show the first step, tensor and bit where two runs part.

    Of two runs, every number in metrics.jsonl is compared, and the digests that are there every digest.every_steps;
    then weights and optimizer state of the earliest checkpoints that differ, of those kept of one step. Reads only.

    Ends with 0 if no difference was found, 1 if they differ, 2 if they cannot be compared.
    """
    with Reported(show_traceback=show_traceback):
        from augend._cli._differences import print_json, print_lines

        equal = print_json(first, second) if as_json else print_lines(first, second)
        if not equal:
            raise typer.Exit(FAILED)
