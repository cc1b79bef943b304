"""Train what a run file describes, and tell a person about it."""

from __future__ import annotations

from pathlib import Path

import typer
from rich.console import Console

from augend import History, models
from augend import fit as augend_fit
from augend._cli._build import Rows, Training, build_rows, build_training
from augend._cli._console import Output
from augend._cli._directory import new_directory
from augend._cli._failures import INTERRUPTED_UNSAVED, complain
from augend._cli._sample import sample
from augend._cli._trial import try_out
from augend._config import RunFile, to_toml
from augend._listeners import json_lines
from augend._progress import progress


def describe(run: RunFile) -> None:
    """Build and try out everything, and print the resolved run file and what it comes to, but train nothing.

    Raises:
        ConfigError: Something in the run file cannot be used.
    """
    console = Output()
    rows, training = _ready(run)
    _say(console, to_toml(run))
    _introduce(console, run, rows, training)


def train(run: RunFile, name: str, directory: Path | None) -> None:
    """Train, and leave ``config.toml`` and ``metrics.jsonl`` in the run directory.

    Args:
        run: The run.
        name: What its directory is called where none is given.
        directory: Where the results go; a new numbered one under ``runs`` if None.

    Raises:
        ConfigError: Something in the run file cannot be used.
    """
    console = Output()
    rows, training = _ready(run)
    directory = new_directory(name, directory)
    (directory / "config.toml").write_text(to_toml(run), encoding="utf-8")
    _introduce(console, run, rows, training)
    try:
        with progress(console) as show:
            history = augend_fit(
                training.model,
                training.data,
                loss=rows.source.loss,
                optimizer=training.optimizer,
                steps=training.steps,
                max_norm=run.step.max_norm,
                schedule=training.schedule,
                validation=training.validation,
                validate_every=run.validate.every_steps,
                patience=run.validate.patience,
                metrics=rows.source.metrics,
                accumulator=training.accumulator,
                listeners=(json_lines(directory / "metrics.jsonl"), show),
                empty=run.step.empty,
                nonfinite=run.step.nonfinite,
            )
    except KeyboardInterrupt:
        complain(f"interrupted: the weights are lost, this version keeps no checkpoints; numbers are in {directory}")
        raise typer.Exit(INTERRUPTED_UNSAVED) from None
    _conclude(console, history, rows, training)
    _say(console, f"run         {directory}")


def _ready(run: RunFile) -> tuple[Rows, Training]:
    rows = build_rows(run)
    training = build_training(run, rows)
    try_out(run, rows.source, training.model, training.data)
    return rows, training


def _introduce(console: Console, run: RunFile, rows: Rows, training: Training) -> None:
    parameters = sum(parameter.numel() for parameter in training.model.parameters())
    held_out = "none" if rows.held_out is None else f"{len(rows.held_out):,}"
    cut = f"{run.batch_size} rows in micro-batches of {run.microbatch_size}"
    _say(console, f"model       {run.model.name}, {parameters:,} parameters")
    _say(console, f"data        {run.data.source}, {training.data.rows_per_epoch:,} rows, {held_out} held out")
    _say(console, f"training    {training.steps:,} steps of {cut}, {run.optimizer.name}, {run.schedule.name} schedule")


def _conclude(console: Console, history: History, rows: Rows, training: Training) -> None:
    _say(console, f"finished    {history.stopped}, {sum(step.seconds for step in history.steps):.1f} s of training")
    if history.validations:
        for name, estimate in history.validations[-1].estimates.items():
            _say(console, f"held out    {name} {estimate}")
    if rows.source.tokenizer is not None and isinstance(training.model, models.Llama):
        prompt, completion = sample(training.model, training.validation or training.data, rows.source.tokenizer)
        _say(console, f"prompt      {_indented(prompt)}")
        _say(console, f"completion  {_indented(completion)}")


def _indented(text: str) -> str:
    return text.replace("\n", "\n            ")


def _say(console: Console, text: str) -> None:
    console.print(text, highlight=False, markup=False, soft_wrap=True)
