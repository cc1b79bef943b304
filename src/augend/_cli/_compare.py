"""Compare the whole first batch of a run with its cuts, and tell a person about it."""

from __future__ import annotations

import math
from typing import Final

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from augend._cli._build import batches, build_model, build_rows
from augend._cli._console import Output
from augend._cli._trial import try_out
from augend._config import RunFile
from augend.testing import CutReport, check_cuts

_VISIBLE: Final = 1e-4


def compare(run: RunFile) -> None:
    """Print what cutting the run's first batch does, by augend and the usual way.

    Raises:
        ConfigError: Something in the run file cannot be used.
    """
    rows = build_rows(run)
    model = build_model(run, rows.source)
    try_out(run, rows.source, model, batches(run, rows.source, rows.train))
    report = check_cuts(
        model,
        rows.train,
        loss=rows.source.loss,
        batch_size=run.batch_size,
        microbatch_sizes=_sizes(run),
        seed=run.seed,
        collate_fn=rows.source.collate,
    )
    _print(Output(), report)


def _sizes(run: RunFile) -> list[int]:
    """Return the run's own cut, one that leaves a short rest, and single rows."""
    uneven = min(run.batch_size * 2 // 5 + 1, run.batch_size)
    return sorted({run.microbatch_size or run.batch_size, uneven, 1}, reverse=True)


def _print(console: Console, report: CutReport) -> None:
    what = f"{report.rows} rows, {report.count:,} supervised items"
    values = f"loss {report.loss:.6f}, gradient norm {report.norm:.6f}"
    console.print(f"The first batch, whole, in float64: {what}, {values}.", highlight=False, soft_wrap=True)
    console.print("Cut into micro-batches, it is off by:", highlight=False, soft_wrap=True)
    table = Table("micro-batch", box=SIMPLE_HEAD, show_edge=False)
    for column in ("augend\ngradient", "\nloss", "mean of means\ngradient", "\nloss"):
        table.add_column(column, justify="right")
    for cut in report.cuts:
        off = (cut.gradient, cut.loss, cut.usual_gradient, cut.usual_loss)
        table.add_row(f"{cut.microbatch_size} {'row' if cut.microbatch_size == 1 else 'rows'}", *map(_share, off))
    console.print(table)


def _share(deviation: float) -> str:
    """Show a relative deviation: percent where it is visible, else its power of ten."""
    if math.isnan(deviation):
        return "undefined"
    return f"{deviation:.2%}" if deviation >= _VISIBLE else f"{deviation:.1e}"
