"""The directory of a run: new, never one that holds something."""

from __future__ import annotations

from itertools import count
from pathlib import Path

from augend.errors import ConfigError


def new_directory(name: str, wanted: Path | None) -> Path:
    """Make the directory of a run.

    Args:
        name: What the run is called; the default is ``runs/NAME-N`` with the first free N from 1.
        wanted: What ``--run-dir`` says.

    Raises:
        ConfigError: It holds something already, or cannot be made.
    """
    try:
        return _numbered(name) if wanted is None else _empty(wanted)
    except OSError as error:
        raise ConfigError(f"--run-dir {wanted or 'runs'}: cannot be made: {error.strerror}") from error


def _numbered(name: str) -> Path:
    runs = Path("runs")
    runs.mkdir(exist_ok=True)
    path = next(path for number in count(1) if not (path := runs / f"{name}-{number}").exists())
    path.mkdir()
    return path


def _empty(path: Path) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    if any(path.iterdir()):
        raise ConfigError(f"--run-dir {path}: holds something already; name a new directory")
    return path
