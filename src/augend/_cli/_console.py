"""Where the command line prints."""

from __future__ import annotations

from contextlib import suppress
from typing import NoReturn, final

import typer
from rich.console import Console

from augend._cli._failures import NOBODY_READS


@final
class Output(Console):
    """Standard output, and the shell's way to end where nobody reads it any more, as in ``augend fit ... | head``."""

    def on_broken_pipe(self) -> NoReturn:
        """End the command quietly."""
        with suppress(SystemExit):
            super().on_broken_pipe()  # points standard output elsewhere, so that nothing else fails on it
        raise typer.Exit(NOBODY_READS)
