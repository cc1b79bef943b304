"""Find where two runs, or two checkpoints, part: by their numbers, their digests, and their tensors."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from augend import Comparison, compare, inspect
from augend._cli._directory import CONFIG, METRICS, checkpoints_of, step_of
from augend._cli._metrics import Digests, Metrics, Parting, digests, parting, read_metrics
from augend.errors import CheckpointError, ConfigError, ContractError


@final
@dataclass(frozen=True, slots=True)
class Run:
    """What is there of a run, or of one checkpoint.

    Args:
        path: What was given.
        metrics: Its numbers; None where there are none.
        checkpoints: The newest of each number of steps done.
        alone: Whether one checkpoint was given.
        config: Its resolved run file, by dotted keys; empty if it has none.
    """

    path: Path
    metrics: Metrics | None
    checkpoints: Mapping[int, Path]
    alone: bool
    config: Mapping[str, object]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """All that is to be told.

    Args:
        runs: Both.
        steps: Numbers of the steps that both have.
        parting: The first that differs.
        digests: What the digests say.
        comparison: Of the earliest checkpoints that differ, else of the last that were compared; None if none were.
        equal_after: Numbers of steps done of the checkpoints that were compared before, and are equal.
        bits: What the bits depend on and differs, with both values.
        notes: What could not be compared, and why.
    """

    runs: tuple[Run, Run]
    steps: tuple[int, ...]
    parting: Parting | None
    digests: Digests
    comparison: Comparison | None
    equal_after: tuple[int, ...]
    bits: Mapping[str, tuple[Any, Any]]
    notes: tuple[str, ...]

    @property
    def equal(self) -> bool:
        """Whether no difference was found in numbers, digests and tensors."""
        return self.parting is None and (self.comparison is None or self.comparison.equal)

    @property
    def config(self) -> dict[str, tuple[Any, Any]]:
        """Keys of the run files that differ, with both values."""
        return _unequal(*(run.config for run in self.runs)) if all(run.config for run in self.runs) else {}

    @property
    def later_steps(self) -> int:
        """How many steps after the parting the checkpoints are that are shown."""
        if self.comparison is None or self.parting is None:
            return 0
        return max(0, min(self.comparison.steps) - self.parting.step - 1)


def find(first: Path, second: Path) -> Found:
    """Compare two runs or checkpoints.

    Raises:
        ConfigError: They cannot be compared.
    """
    runs = _run(first), _run(second)
    notes: list[str] = []
    metrics = [run.metrics for run in runs]
    one, other = (Metrics({}, {}) if each is None else each for each in metrics)
    steps = tuple(sorted(one.steps.keys() & other.steps.keys()))
    if not steps and not any(run.alone for run in runs):
        lacking = [str(run.path) for run in runs if run.metrics is None or not run.metrics.steps]
        what = f"{' and '.join(lacking)} has no numbers" if lacking else "no step is in both"
        notes.append(f"steps are not compared: {what}")
    comparison, equal_after = _compared(runs, notes)
    parted = parting(one, other)
    if comparison is not None and comparison.equal and parted is not None:
        late = max(equal_after, default=0) > parted.step  # done steps are one more than the last one's number
        notes.append(
            "weights and optimizer are equal after the parting: other was reported than was trained"
            if late
            else "the checkpoints that both have are all of before the parting"
        )
    notes.extend(f"{run.path} has no {CONFIG}: run files are not compared" for run in runs if not run.config)
    if comparison is None and not steps:
        raise ConfigError(f"{first} and {second} cannot be compared: {'; '.join(notes)}")
    return Found(
        runs=runs,
        steps=steps,
        parting=parted,
        digests=digests(one, other),
        comparison=comparison,
        equal_after=equal_after,
        bits=_bits(runs, comparison),
        notes=tuple(notes),
    )


def _run(path: Path) -> Run:
    if not path.exists():
        raise ConfigError(f"{path}: no such path; give a run directory, such as runs/digits-1, or a checkpoint in it")
    checkpoints = checkpoints_of(path)
    metrics = path / METRICS
    if not checkpoints and not metrics.exists():
        raise ConfigError(f"{path}: nothing to compare: it has no {METRICS} and no checkpoints, or none yet")
    alone = checkpoints == [path]
    around = (path, path.resolve().parent, path.resolve().parent.parent)
    config = next((place / CONFIG for place in around if (place / CONFIG).is_file()), None)
    return Run(
        path,
        read_metrics(metrics) if metrics.exists() else None,
        {_understood(lambda: inspect(path).step): path} if alone else {step_of(each): each for each in checkpoints},
        alone,
        {} if config is None else _flat(_toml(config)),
    )


def _toml(path: Path) -> Mapping[str, object]:
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error


def _flat(table: Mapping[str, object], above: str = "") -> dict[str, object]:
    found: dict[str, object] = {}
    for name, value in table.items():
        found |= _flat(value, f"{above}{name}.") if isinstance(value, dict) else {f"{above}{name}": value}
    return found


def _understood(call: Callable[[], Any]) -> Any:
    """Return what a call returns; what cannot be read cannot be compared."""
    try:
        return call()
    except (CheckpointError, ContractError) as error:
        raise ConfigError(f"cannot be compared: {error}") from error


def _compared(runs: tuple[Run, Run], notes: list[str]) -> tuple[Comparison | None, tuple[int, ...]]:
    """Compare checkpoints after equally many steps until some differ, or the two that were given."""
    one, other = runs
    if one.alone and other.alone:
        comparison: Comparison = _understood(lambda: compare(one.path, other.path))
        if comparison.steps[0] != comparison.steps[1]:
            notes.append(f"the checkpoints are of different steps: {comparison.steps[0]} and {comparison.steps[1]}")
        return comparison, ()
    last: Comparison | None = None
    equal: list[int] = []
    both = sorted(one.checkpoints.keys() & other.checkpoints.keys())
    for step in both:
        try:
            last = compare(one.checkpoints[step], other.checkpoints[step])
        except (CheckpointError, ContractError) as error:
            notes.append(f"passed over: {error}")
            continue
        if not last.equal:
            break
        equal.append(step)
    if last is None and both:
        notes.append("no tensor is compared: none of the checkpoints that both have can be read")
    elif last is None:
        kept = (", ".join(map(str, run.checkpoints)) or "none" for run in runs)
        notes.append(f"no tensor is compared: no checkpoint after as many steps is in both ({' | '.join(kept)})")
    return last, tuple(equal)


def _bits(runs: tuple[Run, Run], comparison: Comparison | None) -> dict[str, tuple[Any, Any]]:
    """Return what differs of what the bits depend on, of the checkpoints compared, else of the newest."""
    if comparison is None:
        try:
            fingerprints = [inspect(run.path).bits for run in runs]
        except (CheckpointError, ContractError):
            return {}
    else:
        fingerprints = list(comparison.fingerprints)
    return _unequal(*(one or {} for one in fingerprints)) if all(fingerprints) else {}


def _unequal(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    names = dict.fromkeys([*first, *second])
    return {name: (first.get(name), second.get(name)) for name in names if first.get(name) != second.get(name)}
