"""The course of a run: fit with the run's checkpoints, and every way to end that is not an error."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from shlex import quote
from typing import final

import typer
from torch import nn

from augend import Batches, Checkpoint, History, Position, Tally
from augend import fit as augend_fit
from augend._cli._build import Rows, Training
from augend._cli._console import Output
from augend._cli._directory import CHECKPOINTS, METRICS
from augend._cli._failures import INTERRUPTED_SAVED, INTERRUPTED_UNSAVED, complain
from augend._cli._fixed import Fixed
from augend._cli._launch import Launch
from augend._cli._signals import Announced
from augend._config import RunFile
from augend._fit import Begin, Event, Listener, LossFunction, Step
from augend._listeners import json_lines
from augend._progress import progress
from augend.data import Microbatch
from augend.errors import CheckpointError, EmptyWindowError, NonFiniteError


@final
class Course:
    """Trains in a run directory, from its newest good checkpoint or from the beginning.

    Args:
        console: Where progress is shown.
        directory: The run directory.
        fixed: What the run must have kept since its beginning.
        when_loaded: Called before the first step with the position that was loaded; None if nothing was saved yet.
        launch: Which rank this is.
    """

    _show: Listener  # there from Begin on: a refusal before it needs no bar

    def __init__(
        self,
        console: Output,
        directory: Path,
        fixed: Fixed,
        when_loaded: Callable[[Position | None], None],
        launch: Launch,
    ) -> None:
        self.begun = False
        self.steps = 0  # taken by this process
        self._console = console
        self._directory = directory
        self._fixed = fixed
        self._resume = f"augend resume {quote(str(directory))}"
        self._when_loaded = when_loaded
        self._signals = Announced(self._resume, launch)
        self._shown = ExitStack()

    def run(self, run: RunFile, rows: Rows, training: Training) -> History:
        """Train to the end.

        Raises:
            CheckpointError: All checkpoints are damaged, or another process trains in this directory; or the run could
                not be saved.
            ContractError: The run is not the one that was saved.
            EmptyWindowError, NonFiniteError: A batch cannot be trained on, and the run file says to stop then.
            typer.Exit: The run was interrupted.
        """
        checkpoint = Checkpoint(
            self._directory / CHECKPOINTS,
            keep=run.checkpoint.keep,
            every_steps=run.checkpoint.every_steps,
            every_seconds=run.checkpoint.every_seconds,
            run=self._fixed,
        )
        with self._ended_well(checkpoint, training.data), checkpoint, self._shown:
            return augend_fit(
                training.model,
                training.data,
                loss=self._beginning(rows.source.loss),
                optimizer=training.optimizer,
                steps=training.steps,
                max_norm=run.step.max_norm,
                schedule=training.schedule,
                validation=training.validation,
                validate_every=run.validate.every_steps,
                patience=run.validate.patience,
                metrics=rows.source.metrics,
                accumulator=training.accumulator,
                listeners=(json_lines(self._directory / METRICS), self._follow),
                empty=run.step.empty,
                nonfinite=run.step.nonfinite,
                digest_every=run.digest.every_steps,
                checkpoint=checkpoint,
            )

    def _beginning(self, loss: LossFunction) -> LossFunction:
        def noted(model: nn.Module, microbatch: Microbatch) -> Tally | Mapping[str, Tally]:
            self._begin()  # here on the other ranks: listeners are called on the first one alone
            return loss(model, microbatch)

        return noted

    def _begin(self) -> None:
        if not self.begun:
            self.begun = True
            self._signals.announce()

    def _follow(self, event: Event) -> None:
        if isinstance(event, Begin):
            self._begin()
            self._when_loaded(event.position)
            self._show = self._shown.enter_context(progress(self._console))
        elif isinstance(event, Step):
            self.steps += 1
        self._show(event)

    @contextmanager
    def _ended_well(self, checkpoint: Checkpoint, data: Batches) -> Iterator[None]:
        """Turn every interrupt into a line for people and an exit code, and say of an error how the run goes on."""
        try:
            with warnings.catch_warnings(), self._signals:
                warnings.filterwarnings("ignore", "a checkpoint was passed over: ")  # said by when_loaded
                yield
        except SystemExit as stop:
            if not checkpoint.stop_requested or stop.code != INTERRUPTED_SAVED:
                raise  # the user's own
            self._console.say(f"stopped     {_position(data)}; go on with: {self._resume}")
            raise typer.Exit(INTERRUPTED_SAVED) from None
        except KeyboardInterrupt:
            if self._console.quiet:
                pass  # the first rank says it
            elif self.begun:
                complain(f"ended at once; the last checkpoint is kept; go on with: {self._resume}")
            else:
                complain(f"interrupted before training began; begin with: {self._resume}")
            raise typer.Exit(INTERRUPTED_UNSAVED) from None
        except (EmptyWindowError, NonFiniteError) as error:
            raise type(error)(self._remedied(error)) from error
        except CheckpointError as error:
            if not self.begun:
                raise
            raise CheckpointError(f"{error}; when that is mended, go on with: {self._resume}") from error

    def _remedied(self, error: EmptyWindowError | NonFiniteError) -> str:
        """Say in the words of a run file what the library says in Python's."""
        if isinstance(error, EmptyWindowError):
            what = "a batch has no supervised item, so it has no mean"
            return f"{what}; leave such batches out with: {self._resume} --set step.empty=skip"
        what = str(error).partition("; the window ")[0]
        skip = f"leave such batches out with: {self._resume} --set step.nonfinite=skip"
        return f"{what}; {skip}; or go on from the last checkpoint with a lower rate: --set optimizer.lr=RATE"


def _position(data: Batches) -> str:
    """Say where the data stands, in the words of a ``Position``."""
    state = data.state_dict()
    ((rows_done, closed),) = state["ledger"]
    if closed:
        return f"step {state['step'] + 1}"
    return f"step {state['step']}" + (f", {rows_done} rows done" if rows_done else "")
