"""``augend resume``: go on with a run that was interrupted."""

from __future__ import annotations

from augend._cli._directory import config_of
from augend._cli._failures import Reported
from augend._cli._options import Changes, Ranks, RunDirectory, Traceback, changes
from augend._config import read


def resume(
    directory: RunDirectory, *, settings: Changes = None, ranks: Ranks = None, show_traceback: Traceback = False
) -> None:
    """Go on with a run from its newest good checkpoint, in its own directory.

    --set may change steps or epochs, microbatch_size, optimizer.lr, and what is in schedule, step, checkpoint and
    validate; the change is kept. All else, and the rows, must be as in the beginning. Ends as fit does.
    """
    with Reported(show_traceback=show_traceback):
        run = read(config_of(directory), changes(settings, ranks))

        from augend._cli._train import go_on

        go_on(run, directory)
