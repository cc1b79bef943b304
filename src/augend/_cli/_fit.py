"""``augend fit``: train what a run file describes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from augend._cli._failures import Reported
from augend._cli._options import RunPath, Settings, Traceback
from augend._config import Setting, read


def fit(
    run_file: RunPath,
    *,
    settings: Settings = None,
    ranks: Annotated[
        int | None, typer.Option(metavar="N", help="Processes; the same as --set parallel.ranks=N.")
    ] = None,
    run_dir: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="New directory for the results; runs/NAME-1, -2, ... if not given."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check the run on its first rows, print it, and train nothing.")
    ] = False,
    show_traceback: Traceback = False,
) -> None:
    """Train a model as a run file says, and keep its numbers in a run directory.

    Ends with 0 when done, 1 if training failed, 2 if the run file or the command line cannot be used, 130 if
    interrupted, 141 if nobody reads the output.
    """
    with Reported(show_traceback=show_traceback):
        texts = [*(settings or []), *([] if ranks is None else [f"parallel.ranks={ranks}"])]
        run = read(run_file, [Setting.parse(text) for text in texts])

        from augend._cli._train import describe, train

        if dry_run:
            describe(run)
        else:
            train(run, run_file.stem, run_dir)
