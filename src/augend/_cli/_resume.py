"""``augend resume``: go on with a run that was interrupted."""

from __future__ import annotations

import os

import typer

from augend._cli._directory import config_of
from augend._cli._failures import Reported
from augend._cli._launch import enrolled
from augend._cli._options import (
    Changes,
    Ranks,
    RunDirectory,
    StrictBits,
    Traceback,
    again,
    changes,
    check_strictness,
    threaded,
)
from augend._config import read


def resume(
    directory: RunDirectory,
    *,
    settings: Changes = None,
    ranks: Ranks = None,
    strict_bits: StrictBits = False,
    show_traceback: Traceback = False,
) -> None:
    """Go on with a run from its newest good checkpoint, in its own directory.

    --set may change steps or epochs, microbatch_size, optimizer.lr, and what is in schedule, step, checkpoint,
    validate, digest and parallel; the change is kept, --ranks too. All else, and the rows, must be as in the
    beginning. Ends as fit does.
    """
    launch = enrolled(os.environ)
    with Reported(show_traceback=show_traceback, launch=launch):
        run = read(config_of(directory), changes(settings, ranks))
        check_strictness(run, strict_bits=strict_bits)
        if run.parallel.ranks > 1 and not launch.torchrun:
            from augend._cli._supervisor import supervise

            options = again(settings, ranks, strict_bits=strict_bits, show_traceback=show_traceback)
            environment = threaded(os.environ, run.parallel.threads)
            command = ["augend", "resume", str(directory), *options]
            raise typer.Exit(supervise(command, run.parallel.ranks, directory, environment))

        from augend._cli._train import resume as go_on

        go_on(run, directory, launch, strict_bits=strict_bits)
