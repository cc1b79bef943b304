"""``augend evaluate``: what a trained model makes of the rows that were held out."""

from __future__ import annotations

from augend._cli._failures import Reported
from augend._cli._options import SavedPath, Traceback


def evaluate(path: SavedPath, *, show_traceback: Traceback = False) -> None:
    """Measure a run's newest good checkpoint, or a given one, on the held-out rows; on all rows if none are.

    Each number is value ± standard error over the rows. Reads only, also while the run goes on.
    """
    with Reported(show_traceback=show_traceback):
        from augend._cli._measure import measure

        measure(path)
