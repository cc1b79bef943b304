"""The command ``augend``: its verbs, and the last word on wrong usage."""

from __future__ import annotations

from collections.abc import Sequence

import typer
from typer.exceptions import TyperException

from augend import __version__
from augend._cli._check import check
from augend._cli._diff import diff
from augend._cli._evaluate import evaluate
from augend._cli._export import export
from augend._cli._failures import FAILED, INTERRUPTED_UNSAVED, WRONG_USAGE, complain
from augend._cli._fit import fit
from augend._cli._generate import generate
from augend._cli._inspect import inspect
from augend._cli._resume import resume
from augend._cli._streams import open_all, written_out
from augend._cli._verify import verify

app = typer.Typer(
    name="augend",
    help="Train with PyTorch; the result does not depend on how the work was cut.",
    add_completion=False,
    rich_markup_mode=None,
)
app.command(short_help="Train as a run file says.")(fit)
app.command(short_help="Go on with a run that was interrupted.")(resume)
app.command(short_help="Measure a trained model on the held-out rows.")(evaluate)
app.command(short_help="Continue a prompt with a trained language model.")(generate)
app.command(short_help="Measure what cutting the first batch does.")(check)
app.command(short_help="Show where a checkpoint stands and what it holds.")(inspect)
app.command(short_help="Check every byte of a run's checkpoints.")(verify)
app.command(short_help="Show where two runs part: the first step, tensor and bit.")(diff)
app.command(short_help="Write a trained model for other programs.")(export)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    Args:
        arguments: What follows ``augend`` on the command line; that of the process if None.

    Returns:
        0 done; 1 failed; 2 wrong usage or configuration; 3 interrupted and saved; 130 interrupted at once; 141 nobody
        reads the output any more.
    """
    open_all()
    try:
        code = app(arguments, prog_name="augend", standalone_mode=False)
    except TyperException as error:
        complain(f"{error.format_message().rstrip('.')} (see augend --help)")
        return WRONG_USAGE
    except typer.Abort:
        complain("interrupted")
        return INTERRUPTED_UNSAVED
    except OSError as error:  # of --help and --version: a verb reports its own
        written_out()
        complain(f"failed: standard output cannot be written: {error.strerror}")
        return FAILED
    code = code if isinstance(code, int) else 0
    return code if written_out() else code or FAILED


def _version(asked: bool) -> None:  # noqa: FBT001 - a typer callback is called so
    if asked:
        print(__version__)
        raise typer.Exit


@app.callback()
def _augend(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),  # noqa: FBT001, FBT003 - typer's way to declare a flag
) -> None:
    """Train with PyTorch; the result does not depend on how the work was cut."""
