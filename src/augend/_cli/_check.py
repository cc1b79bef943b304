"""``augend check``: the first batch, whole, cut by augend, and cut the usual way."""

from __future__ import annotations

from augend._cli._failures import Reported
from augend._cli._options import RunPath, Settings, Traceback, changes
from augend._config import read


def check(run_file: RunPath, *, settings: Settings = None, show_traceback: Traceback = False) -> None:
    """Measure on the run's own first batch what cutting it does to the gradient and the loss.

    The reference is the whole batch at once in float64. Nothing is trained or written.
    """
    with Reported(show_traceback=show_traceback):
        run = read(run_file, changes(settings))

        from augend._cli._compare import compare

        compare(run)
