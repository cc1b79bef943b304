"""The directory of a run: made new, never one that holds something; found again; its config, safe against a crash."""

from __future__ import annotations

import os
from itertools import count
from pathlib import Path
from typing import Final

from augend._config import RunFile, to_toml
from augend.errors import ConfigError

CONFIG: Final = "config.toml"
METRICS: Final = "metrics.jsonl"
CHECKPOINTS: Final = "checkpoints"


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


def config_of(path: Path) -> Path:
    """Return the config of a run directory.

    Raises:
        ConfigError: There is no such directory, or it is none of a run.
    """
    if not path.is_dir():
        raise ConfigError(f"{path}: no such directory; give the directory of a run, such as runs/digits-1")
    if not (path / CONFIG).is_file():
        raise ConfigError(f"{path}: not the directory of a run, it has no {CONFIG}; augend fit makes one")
    return path / CONFIG


def config_around(path: Path) -> Path:
    """Return the config of a run directory, or of the run that a checkpoint, or their directory, belongs to.

    Raises:
        ConfigError: There is no such directory, or it is in none of a run.
    """
    here = path.resolve()
    if path.is_dir() and not (path / CONFIG).is_file():
        for place in (here.parent, here.parent.parent):
            if (place / CONFIG).is_file():
                return place / CONFIG
    return config_of(path)


def keep_config(directory: Path, run: RunFile) -> None:
    """Write the config of a run so that whatever happens there is the old one (or none), or the new one, whole.

    Raises:
        OSError: It cannot be written.
    """
    partial = directory / f"{CONFIG}.partial"
    with partial.open("w", encoding="utf-8") as file:
        file.write(to_toml(run))
        file.flush()
        os.fsync(file.fileno())
    partial.replace(directory / CONFIG)
    _sync(directory)
    _sync(directory.parent)  # a new directory's own name


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


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
