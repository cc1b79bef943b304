"""What the verbs' arguments and options are called, once for all verbs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypeAlias

import typer

RunPath: TypeAlias = Annotated[Path, typer.Argument(metavar="RUN.TOML", help="The run file.", show_default=False)]
Settings: TypeAlias = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change one key of the run file, such as optimizer.lr=3e-4."),
]
Traceback: TypeAlias = Annotated[bool, typer.Option("--traceback", help="Show Python's traceback of a failure.")]
