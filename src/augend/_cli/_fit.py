"""``augend fit``: train what a run file describes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from augend._cli._failures import Reported
from augend._cli._launch import enrolled
from augend._cli._options import (
    Ranks,
    RunPath,
    Settings,
    StrictBits,
    Traceback,
    again,
    changes,
    check_strictness,
    threaded,
)
from augend._config import read


def fit(
    run_file: RunPath,
    *,
    settings: Settings = None,
    ranks: Ranks = None,
    run_dir: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="New directory for the results; runs/NAME-1, -2, ... if not given."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check the run on its first rows, print it, and train nothing.")
    ] = False,
    strict_bits: StrictBits = False,
    show_traceback: Traceback = False,
) -> None:
    """Train a model as a run file says, and keep its numbers and its checkpoints in a run directory.

    Ctrl-C or SIGTERM finishes the micro-batch and saves the run; augend resume goes on with it. A second one ends at
    once, and leaves the last checkpoint.

    Ends with 0 when done, 1 if training failed, 2 if the run file or the command line cannot be used, 3 if interrupted
    and saved, 130 if interrupted at once, 141 if nobody reads the output.
    """
    launch = enrolled(os.environ)
    with Reported(show_traceback=show_traceback, launch=launch):
        run = read(run_file, changes(settings, ranks))
        check_strictness(run, strict_bits=strict_bits)
        if dry_run:
            from augend._cli._train import describe

            if launch.leads:
                describe(run)
            return
        if run.parallel.ranks > 1 and not launch.torchrun:
            from augend._cli._supervisor import supervise

            where = [] if run_dir is None else ["--run-dir", str(run_dir)]
            options = again(settings, ranks, strict_bits=strict_bits, show_traceback=show_traceback)
            command = ["fit", str(run_file), *where, *options]
            environment = threaded(os.environ, run.parallel.threads)
            raise typer.Exit(supervise(["augend", *command], run.parallel.ranks, None, environment))

        from augend._cli._train import train

        train(run, run_file.stem, run_dir, launch, strict_bits=strict_bits)
