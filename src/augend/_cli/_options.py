"""What the verbs' arguments and options are called, once for all verbs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from augend._config import Setting

RunPath: TypeAlias = Annotated[Path, typer.Argument(metavar="RUN.TOML", help="The run file.", show_default=False)]
RunDirectory: TypeAlias = Annotated[
    Path, typer.Argument(metavar="DIR", help="The run directory, such as runs/digits-1.", show_default=False)
]
SavedPath: TypeAlias = Annotated[
    Path, typer.Argument(metavar="PATH", help="A run directory, or one checkpoint in it.", show_default=False)
]
Ranks: TypeAlias = Annotated[
    int | None, typer.Option("--ranks", metavar="N", help="Processes; the same as --set parallel.ranks=N.")
]
Settings: TypeAlias = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change one key of the run file, such as optimizer.lr=3e-4."),
]
Changes: TypeAlias = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change one key of the run's config, such as steps=800."),
]
Traceback: TypeAlias = Annotated[bool, typer.Option("--traceback", help="Show Python's traceback of a failure.")]


def again(settings: Sequence[str] | None, ranks: int | None, *, show_traceback: bool) -> list[str]:
    """Return the options that say to another process what they said to this one."""
    texts = [f"--set={text}" for text in settings or ()]
    return [*texts, *([] if ranks is None else [f"--ranks={ranks}"]), *(["--traceback"] if show_traceback else [])]


def changes(settings: Sequence[str] | None, ranks: int | None = None) -> list[Setting]:
    """Return what the command line changes of a run file.

    Raises:
        ConfigError: A ``--set`` is none.
    """
    texts = [*(settings or []), *([] if ranks is None else [f"parallel.ranks={ranks}"])]
    return [Setting.parse(text) for text in texts]
