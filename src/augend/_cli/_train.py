"""Train what a run file describes, or go on with it, and tell a person about it."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

from torch import nn

from augend import Checkpoint, History, Position, inspect, models
from augend._cli._build import Rows, Training, batches, build_model, build_rows, build_training, use_threads
from augend._cli._console import Output
from augend._cli._course import Course
from augend._cli._directory import CHECKPOINTS, CONFIG, check_kept, checkpoints_of, keep_config, new_directory
from augend._cli._failures import complain
from augend._cli._fixed import Fixed
from augend._cli._launch import Launch
from augend._cli._memory import memory_of
from augend._cli._place import place
from augend._cli._ranks import Ranks, joined
from augend._cli._restore import loaded
from augend._cli._sample import sample
from augend._cli._trial import try_out
from augend._config import RunFile, refuse, to_toml
from augend.errors import CheckpointError, ConfigError, ContractError
from augend.sources import Tokenizer


def describe(run: RunFile) -> None:
    """Build and try out everything, and print the resolved run file and what it comes to, but train nothing.

    What it takes in memory is measured in a step with one micro-batch, whose outcome is thrown away.

    Raises:
        ConfigError: Something in the run file cannot be used.
    """
    console = Output()
    use_threads(run)
    rows, model = _tried_out(run)
    console.say(to_toml(run))
    training = build_training(run, rows, model, strict_bits=False)
    _introduce(console, run, rows, training)
    console.say(f"memory      {memory_of(run, rows, training)}")


def train(run: RunFile, name: str, directory: Path | None, launch: Launch, *, strict_bits: bool) -> None:
    """Train, and leave ``config.toml``, ``metrics.jsonl`` and ``checkpoints`` in the run directory.

    Ranks that are started again go on with the run that their predecessors have begun.

    Collective.

    Args:
        run: The run.
        name: What its directory is called where none is given.
        directory: Where the results go; a new numbered one under ``runs`` if None.
        launch: Which rank this is.
        strict_bits: Whether to refuse to go on where the bits would be others.

    Raises:
        ConfigError: Something in the run file cannot be used.
        typer.Exit: The run was interrupted.
    """
    with joined(launch, run.parallel.timeout_seconds) as ranks:
        begun = ranks.from_first(lambda: _begun(directory, launch))
        if begun:
            _go_on(run, Path(begun), launch, ranks, strict_bits=strict_bits)
            return
        stage = _Stage(run, ranks, strict_bits=strict_bits)
        made = Path(ranks.from_first(lambda: str(_made(name, directory, run, launch))))
        stage.introduce()
        course = Course(stage.console, made, stage.fixed, lambda _position: None, launch)
        stage.conclude(course.run(run, stage.rows, stage.training), made)


def resume(run: RunFile, directory: Path, launch: Launch, *, strict_bits: bool) -> None:
    """Train on from the newest good checkpoint of a run, or from the beginning where there is none yet.

    Collective.

    Args:
        run: The run, which may be changed in what a checkpoint does not fix, such as ``steps``; it becomes the run's
            config when the checkpoint is loaded.
        directory: The run directory.
        launch: Which rank this is.
        strict_bits: Whether to refuse to go on where the bits would be others.

    Raises:
        ConfigError: Something in the run file cannot be used, or does not fit what was saved.
        CheckpointError: All checkpoints are damaged, or another process trains in this directory.
        typer.Exit: The run was interrupted.
    """
    with joined(launch, run.parallel.timeout_seconds) as ranks:
        _go_on(run, directory, launch, ranks, strict_bits=strict_bits)


def _go_on(run: RunFile, directory: Path, launch: Launch, ranks: Ranks, *, strict_bits: bool) -> None:
    ranks.agreed(lambda: check_kept(directory) if ranks.leads else None)
    stage = _Stage(run, ranks, strict_bits=strict_bits)
    saved = bool(ranks.from_first(lambda: "saved" if checkpoints_of(directory / CHECKPOINTS) else ""))
    if saved:
        _check_goes_on(directory, stage.fixed, stage.training.steps)
    if saved and strict_bits:
        _check_cut(run, directory, ranks)
    stage.introduce()
    console = stage.console

    def when_loaded(position: Position | None) -> None:
        _say_position(console, position)
        keep_config(directory, run)

    course = Course(console, directory, stage.fixed, when_loaded, launch)
    try:
        history = course.run(run, stage.rows, stage.training)
    except ContractError as error:
        if course.begun:
            raise
        raise _does_not_fit(directory, error) from error
    if course.steps == 0:
        console.say(f"resumed     no step was left to do: {_why_and_what_goes_on(history, stage.training)}")
    stage.conclude(history, directory)


@final
class _Stage:
    """All that a run needs, built the same on every rank, and what is said before and after it.

    Collective.

    Args:
        run: The run.
        ranks: Who trains it.
        strict_bits: Whether to refuse to go on where the bits would be others.

    Raises:
        ConfigError: Something in the run file cannot be used.
    """

    def __init__(self, run: RunFile, ranks: Ranks, *, strict_bits: bool) -> None:
        use_threads(run)
        self.console = Output(quiet=not ranks.leads)
        self.rows, model = ranks.agreed(lambda: _tried_out(run))
        self.fixed = ranks.agreed(lambda: Fixed(run, self.rows.source))
        check_rows(run, self.fixed.rows, ranks)
        self._placed = place(run, model, ranks)
        self.training = build_training(run, self.rows, model, strict_bits=strict_bits)
        self._run = run
        self._ranks = ranks

    def introduce(self) -> None:
        """Say what is going to be trained, and by how many."""
        if not self._ranks.restarted:
            _introduce(self.console, self._run, self.rows, self.training)
        if self._ranks.world > 1:
            self.console.say(f"ranks       {self._placed}")

    def conclude(self, history: History, directory: Path) -> None:
        """Say what it came to; the ranks part, and the first one shows what a language model has learnt."""
        self._ranks.leave()
        if not self._ranks.leads:
            return
        _conclude(self.console, history)
        tokenizer = self.rows.source.tokenizer
        if tokenizer is not None and isinstance(self.training.model, models.Llama):
            self._show_sample(self._whole(directory), tokenizer)
        self.console.say(f"run         {directory}")

    def _whole(self, directory: Path) -> nn.Module:
        """Return the trained model; that of ranks that have parted lies in their last checkpoint."""
        if self._ranks.world == 1:
            return self.training.model
        model = build_model(self._run, self.rows.source)
        loaded(directory, model)
        return model

    def _show_sample(self, model: nn.Module, tokenizer: Tokenizer) -> None:
        if isinstance(model, models.Llama):
            prompt, completion = sample(model, self.training.validation or self.training.data, tokenizer)
            self.console.say(f"prompt      {_indented(prompt)}")
            self.console.say(f"completion  {_indented(completion)}")


def _begun(directory: Path | None, launch: Launch) -> str:
    """Return the directory of the run that these ranks, or those before them, have begun; empty if there is none.

    torchrun starts again with the same command, so under it a directory that holds a run is gone on with.
    """
    if launch.desk is not None:
        return str(launch.desk.run() or "")
    return str(directory) if launch.torchrun and directory is not None and (directory / CONFIG).is_file() else ""


def _made(name: str, wanted: Path | None, run: RunFile, launch: Launch) -> Path:
    directory = new_directory(name, wanted)
    keep_config(directory, run)
    if launch.desk is not None:
        launch.desk.name_run(directory)
    return directory


def _check_goes_on(directory: Path, fixed: Fixed, steps: int) -> None:
    """Refuse to go on as another run, or to fewer steps than are done, before anything is changed."""
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


def _check_cut(run: RunFile, directory: Path, ranks: Ranks) -> None:
    """Refuse micro-batches of another size, which sums only meet in training: then the config is changed already."""
    bits = json.loads(ranks.from_first(lambda: json.dumps(inspect(directory / CHECKPOINTS).bits))) or {}
    was = bits.get("microbatch_size", run.microbatch_size)
    if was != run.microbatch_size:
        remedy = f"the bits depend on it, and it was {was}; set it back, or leave out --strict-bits"
        raise refuse("microbatch_size", run.microbatch_size, remedy)


def _does_not_fit(directory: Path, error: ContractError) -> ConfigError:
    what = str(error).replace('pass other_bits="warn"', "leave out --strict-bits")
    what = what.replace("threads was", "parallel.threads was")
    return ConfigError(f"{directory}: cannot go on from what was saved: {what}")


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


def _tried_out(run: RunFile) -> tuple[Rows, nn.Module]:
    rows = build_rows(run)
    model = build_model(run, rows.source)
    try_out(run, rows.source, model, batches(run, rows.source, rows.train))
    return rows, model


def check_rows(run: RunFile, mine: Mapping[str, Any], ranks: Ranks) -> None:
    """Refuse rows that are others on another rank: some would be trained on twice, and others never.

    Collective.

    Raises:
        ConfigError: They are.
    """
    first = json.loads(ranks.from_first(lambda: json.dumps(mine)))

    def check() -> None:
        if mine != first:
            here, there = mine["count"], first["count"]
            numbers = f": {here} here, and {there} there" if here != there else ""
            remedy = "give every rank all rows, in one order that depends on nothing but the run file"
            raise refuse("data.source", run.data.source, f"its rows are not those of rank 0{numbers}; {remedy}")

    ranks.agreed(check)


def _introduce(console: Output, run: RunFile, rows: Rows, training: Training) -> None:
    parameters = sum(parameter.numel() for parameter in training.model.parameters())
    trained = sum(parameter.numel() for parameter in training.model.parameters() if parameter.requires_grad)
    of_them = "" if trained == parameters else f", {trained:,} of them trained"
    held_out = "none" if rows.held_out is None else f"{len(rows.held_out):,}"
    cut = f"{run.batch_size} rows in micro-batches of {run.microbatch_size}"
    console.say(f"model       {run.model.name}, {parameters:,} parameters{of_them}")
    console.say(f"data        {run.data.source}, {training.data.rows_per_epoch:,} rows, {held_out} held out")
    console.say(f"training    {training.steps:,} steps of {cut}, {run.optimizer.name}, {run.schedule.name} schedule")


def _conclude(console: Output, history: History) -> None:
    console.say(f"finished    {history.stopped}, {sum(step.seconds for step in history.steps):.1f} s of training")
    if history.validations:
        for name, estimate in history.validations[-1].estimates.items():
            console.say(f"held out    {name} {estimate}")


def _indented(text: str) -> str:
    return text.replace("\n", "\n            ")
