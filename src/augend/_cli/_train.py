"""Train what a run file describes, or go on with it, and tell a person about it."""

from __future__ import annotations

import warnings
from pathlib import Path

from augend import Checkpoint, History, Position, models
from augend._cli._build import Rows, Training, build_rows, build_training
from augend._cli._console import Output
from augend._cli._course import Course
from augend._cli._directory import CHECKPOINTS, CONFIG, check_kept, checkpoints_of, keep_config, new_directory
from augend._cli._failures import complain
from augend._cli._fixed import Fixed
from augend._cli._sample import sample
from augend._cli._trial import try_out
from augend._config import RunFile, refuse, to_toml
from augend.errors import CheckpointError, ConfigError, ContractError


def describe(run: RunFile) -> None:
    """Build and try out everything, and print the resolved run file and what it comes to, but train nothing.

    Raises:
        ConfigError: Something in the run file cannot be used.
    """
    console = Output()
    rows, training = _ready(run)
    console.say(to_toml(run))
    _introduce(console, run, rows, training)


def train(run: RunFile, name: str, directory: Path | None) -> None:
    """Train, and leave ``config.toml``, ``metrics.jsonl`` and ``checkpoints`` in the run directory.

    Args:
        run: The run.
        name: What its directory is called where none is given.
        directory: Where the results go; a new numbered one under ``runs`` if None.

    Raises:
        ConfigError: Something in the run file cannot be used.
        typer.Exit: The run was interrupted.
    """
    console = Output()
    rows, training = _ready(run)
    fixed = Fixed(run, rows.source)
    directory = new_directory(name, directory)
    keep_config(directory, run)
    _introduce(console, run, rows, training)
    course = Course(console, directory, fixed, lambda _position: None)
    _conclude(console, course.run(run, rows, training), rows, training)
    console.say(f"run         {directory}")


def go_on(run: RunFile, directory: Path) -> None:
    """Train on from the newest good checkpoint of a run, or from the beginning where there is none yet.

    Args:
        run: The run, which may be changed in what a checkpoint does not fix, such as ``steps``; it becomes the run's
            config when the checkpoint is loaded.
        directory: The run directory.

    Raises:
        ConfigError: Something in the run file cannot be used, or does not fit what was saved.
        CheckpointError: All checkpoints are damaged, or another process trains in this directory.
        typer.Exit: The run was interrupted.
    """
    console = Output()
    check_kept(directory)
    rows, training = _ready(run)
    fixed = Fixed(run, rows.source)
    _check_goes_on(directory, fixed, training.steps)
    _introduce(console, run, rows, training)

    def when_loaded(position: Position | None) -> None:
        _say_position(console, position)
        keep_config(directory, run)

    course = Course(console, directory, fixed, when_loaded)
    try:
        history = course.run(run, rows, training)
    except ContractError as error:
        if course.begun:
            raise
        raise _does_not_fit(directory, error) from error
    if course.steps == 0:
        console.say(f"resumed     no step was left to do: {_why_and_what_goes_on(history, training)}")
    _conclude(console, history, rows, training)
    console.say(f"run         {directory}")


def _check_goes_on(directory: Path, fixed: Fixed, steps: int) -> None:
    """Refuse to go on as another run, or to fewer steps than are done, before anything is changed."""
    if not checkpoints_of(directory / CHECKPOINTS):
        return
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what is passed over is said when it is loaded
            position = Checkpoint(directory / CHECKPOINTS, run=fixed).load(directory / CHECKPOINTS, only=("run",))
    except ConfigError as error:
        raise ConfigError(str(error).removeprefix("run: ")) from error
    except ContractError as error:
        raise _does_not_fit(directory, error) from error
    except CheckpointError as error:
        anew = f"augend fit {directory / CONFIG}"
        raise CheckpointError(f"{error}; bring a good one back from a copy, or begin a new run: {anew}") from error
    if position.step > steps:
        raise refuse("steps", steps, f"{position.step} are done already; set it to that or more")


def _does_not_fit(directory: Path, error: ContractError) -> ConfigError:
    return ConfigError(f"{directory}: cannot go on from what was saved: {error}")


def _why_and_what_goes_on(history: History, training: Training) -> str:
    """Say what ended a run, and what to set to train on."""
    keys = []
    if history.steps[-1].step + 1 == training.steps:
        keys.append("--set steps=N")
    if history.stopped != f"all {training.steps} steps are done":
        keys.append("--set validate.patience=N")
    return f"{history.stopped}; to train on: {' '.join(keys)}"


def _say_position(console: Output, position: Position | None) -> None:
    if position is None:
        console.say("resumed     at the beginning: nothing was saved yet")
        return
    for problem in position.damaged:
        complain(f"passed over a damaged checkpoint: {problem}")
    source = "" if position.path is None else f", from {position.path.name}"
    console.say(f"resumed     {position}{source}")


def _ready(run: RunFile) -> tuple[Rows, Training]:
    rows = build_rows(run)
    training = build_training(run, rows)
    try_out(run, rows.source, training.model, training.data)
    return rows, training


def _introduce(console: Output, run: RunFile, rows: Rows, training: Training) -> None:
    parameters = sum(parameter.numel() for parameter in training.model.parameters())
    held_out = "none" if rows.held_out is None else f"{len(rows.held_out):,}"
    cut = f"{run.batch_size} rows in micro-batches of {run.microbatch_size}"
    console.say(f"model       {run.model.name}, {parameters:,} parameters")
    console.say(f"data        {run.data.source}, {training.data.rows_per_epoch:,} rows, {held_out} held out")
    console.say(f"training    {training.steps:,} steps of {cut}, {run.optimizer.name}, {run.schedule.name} schedule")


def _conclude(console: Output, history: History, rows: Rows, training: Training) -> None:
    console.say(f"finished    {history.stopped}, {sum(step.seconds for step in history.steps):.1f} s of training")
    if history.validations:
        for name, estimate in history.validations[-1].estimates.items():
            console.say(f"held out    {name} {estimate}")
    if rows.source.tokenizer is not None and isinstance(training.model, models.Llama):
        prompt, completion = sample(training.model, training.validation or training.data, rows.source.tokenizer)
        console.say(f"prompt      {_indented(prompt)}")
        console.say(f"completion  {_indented(completion)}")


def _indented(text: str) -> str:
    return text.replace("\n", "\n            ")
