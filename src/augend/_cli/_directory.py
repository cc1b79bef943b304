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
_LOCK: Final = "lock"  # in CHECKPOINTS, and there before the first step
_PARTIAL: Final = f"{CONFIG}.partial"
_NAME: Final = f"{'[0-9]' * 8}*-step-*"


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
    if not (path / CONFIG).is_file() and _names(path) == [_PARTIAL]:
        raise ConfigError(f"{path}: this run was never begun; begin it with: augend fit RUN.TOML --run-dir {path}")
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
    partial = directory / _PARTIAL
    with partial.open("w", encoding="utf-8") as file:
        file.write(to_toml(run))
        file.flush()
        os.fsync(file.fileno())
    partial.replace(directory / CONFIG)
    _sync(directory)
    _sync(directory.parent)  # a new directory's own name


def checkpoints_of(path: Path) -> list[Path]:
    """Return the checkpoints of a run directory or a directory of checkpoints, the oldest first, or the one given."""
    if path.resolve().match(_NAME) or (path / "manifest.json").exists():
        return [path]
    for folder in (path, path / CHECKPOINTS):
        if found := list(folder.glob(_NAME)):
            return sorted(found, key=lambda each: (len(each.name.partition("-")[0]), each.name))
    return []


def step_of(checkpoint: Path) -> int:
    """Return how many steps a checkpoint of a run has behind it, which its name tells."""
    return int(checkpoint.name.split("-")[2])


def check_kept(directory: Path) -> None:
    """Refuse to go on with a run that has lost a part of what it wrote.

    Raises:
        ConfigError: It has metrics and nowhere a checkpoint could be, or its metrics are no file.
    """
    metrics = directory / METRICS
    if metrics.exists() and not metrics.is_file():
        raise ConfigError(f"{metrics}: no file, so the run's numbers cannot be kept in it; move it away")
    begun = metrics.exists() and metrics.stat().st_size > 0
    if begun and not (directory / CHECKPOINTS / _LOCK).exists():
        raise ConfigError(
            f"{directory / CHECKPOINTS}: the run's checkpoints are gone (a disk that is not mounted?); bring them "
            f"back, or begin a new run with: augend fit {directory / CONFIG}"
        )


def _names(path: Path) -> list[str]:
    return [each.name for each in path.iterdir()]


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _numbered(name: str) -> Path:
    runs = Path("runs")
    runs.mkdir(exist_ok=True)
    return next(path for number in count(1) if _is_new(path := runs / f"{name}-{number}"))


def _is_new(path: Path) -> bool:
    """Make a directory, and tell whether nobody had that name; a link that leads nowhere has it, too."""
    try:
        path.mkdir()
    except FileExistsError:
        return False
    return True


def _empty(path: Path) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    if _names(path) == [_PARTIAL]:
        (path / _PARTIAL).unlink()  # of a run that crashed before it had a config
    if any(path.iterdir()):
        raise ConfigError(f"--run-dir {path}: holds something already; name a new directory")
    return path
