"""Where the command line prints."""

from __future__ import annotations

from contextlib import suppress
from typing import Final, NoReturn, final

import typer
from rich.console import Console

from augend._cli._failures import NOBODY_READS

_THOUSAND: Final = 1000


@final
class Output(Console):
    """Standard output, and the shell's way to end where nobody reads it any more, as in ``augend fit ... | head``."""

    def say(self, text: str) -> None:
        """Print text as it is: not wrapped, nothing in it coloured or read as markup."""
        self.out(text, highlight=False)

    def on_broken_pipe(self) -> NoReturn:
        """End the command quietly."""
        with suppress(SystemExit):
            super().on_broken_pipe()  # points standard output elsewhere, so that nothing else fails on it
        raise typer.Exit(NOBODY_READS)


def in_units(size_bytes: int) -> str:
    """Return a number of bytes for people, in powers of a thousand as disks are sold."""
    size, unit = float(size_bytes), "bytes"
    for larger in ("kB", "MB", "GB", "TB"):
        if round(size) < _THOUSAND:
            break
        size, unit = size / _THOUSAND, larger
    return f"{size_bytes} bytes" if unit == "bytes" else f"{size:.1f} {unit}"
