"""What the verbs' arguments and options are called, once for all verbs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from augend._config import RunFile, Setting, refuse

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
StrictBits: TypeAlias = Annotated[
    bool,
    typer.Option("--strict-bits", help="Refuse to go on where something else than before would change the bits."),
]
Traceback: TypeAlias = Annotated[bool, typer.Option("--traceback", help="Show Python's traceback of a failure.")]


def again(settings: Sequence[str] | None, ranks: int | None, *, strict_bits: bool, show_traceback: bool) -> list[str]:
    """Return the options that say to another process what they said to this one."""
    texts = [f"--set={text}" for text in settings or ()]
    flags = {"--strict-bits": strict_bits, "--traceback": show_traceback}
    given = [flag for flag, is_given in flags.items() if is_given]
    return [*texts, *([] if ranks is None else [f"--ranks={ranks}"]), *given]


def changes(settings: Sequence[str] | None, ranks: int | None = None) -> list[Setting]:
    """Return what the command line changes of a run file.

    Raises:
        ConfigError: A ``--set`` is none.
    """
    texts = [*(settings or []), *([] if ranks is None else [f"parallel.ranks={ranks}"])]
    return [Setting.parse(text) for text in texts]


def check_strictness(run: RunFile, *, strict_bits: bool) -> None:
    """Refuse ``--strict-bits`` for a run that promises no bits.

    Raises:
        ConfigError: It does not.
    """
    if strict_bits and run.accumulator.dtype != "exact":
        remedy = "--strict-bits is for runs whose bits do not depend on the cut; set 'exact', or leave the option out"
        raise refuse("accumulator.dtype", run.accumulator.dtype, remedy)


def threaded(environment: Mapping[str, str], threads: int | None) -> dict[str, str]:
    """Return an environment for ranks of so many threads; None leaves it as it is."""
    return {**environment, **({} if threads is None else {"OMP_NUM_THREADS": str(threads)})}
