"""Checkpoint: stop anywhere, go on anywhere."""

from __future__ import annotations

import functools
import json
import time
import warnings
import weakref
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import Final, Self, TypeVar, final

from torch import nn

from augend._accumulator import Accumulator
from augend._checkpoint._background import Background
from augend._checkpoint._directory import Lock, count_restarts, names_in, next_name, record_restart, sweep
from augend._checkpoint._files import Files, LocalFiles
from augend._checkpoint._inspect import newest_good
from augend._checkpoint._load import check_parts, load_all, load_parts, position_in
from augend._checkpoint._parts import Part, part_of
from augend._checkpoint._position import Position, step_and_rows
from augend._checkpoint._save import take_snapshot, write_checkpoint
from augend._checkpoint._signals import StopRequest
from augend._group import rank_and_world
from augend.data import Batches
from augend.errors import ContractError, PlacementError

T = TypeVar("T")

_INTERRUPTED: Final = 3
_EVERY_SECONDS: Final = 600.0


@final
class Checkpoint:
    """Keeps a run on disk: after any micro-batch, safe against every crash, readable without augend.

    A checkpoint is a directory with a ``manifest.json``, a ``state.json`` and, for each part that has tensors, a
    directory of safetensors files; a model's tensors are there under their own names. Nothing is pickled, and nothing
    is executed on loading. It gets its name only when every byte is on disk, so whatever has a name is whole, unless
    the disk has changed it since; that is found by hashes, and the newest good one is used.

    Saved are the parts that are given: modules with their buffers, optimizers (by parameter names, without a step, a
    cast or a change), accumulators with the sums of the open batch, the position of the data, and anything else with
    ``state_dict`` and ``load_state_dict``; besides, the state of the global random generators.

    Args:
        directory: Where; made when the first thing is saved. One job at a time may use it.
        keep: How many good checkpoints to keep; the only good one is never removed.
        every_steps: ``save_if_due`` saves after so many steps: as soon as the last of them is done.
        every_seconds: ``save_if_due`` saves when so much time has gone by since the last save, also in the middle of
            a batch. If neither is given: 600.
        background: Whether files are written while training goes on. Everything is copied first; an error is raised
            by the next call.
        stateful: The parts, by the names under which they are saved.

    Raises:
        ContractError: An argument is out of its domain, or a part cannot be saved.

    Example:
        >>> import tempfile
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> grads = augend.Accumulator(model)
        >>> data = augend.Batches(torch.ones(8, 2), batch_size=4, microbatch_size=2, epochs=1)
        >>> directory = tempfile.mkdtemp()
        >>> with augend.Checkpoint(directory, model=model, optimizer=optimizer, grads=grads, data=data) as run:
        ...     run.load_latest()  # nothing there yet
        ...     for batch in data:
        ...         for microbatch in grads.microbatches(batch):
        ...             grads.backward(augend.losses.sum(model(microbatch[0])))
        ...             run.save_if_due()
        ...         done = grads.step(optimizer)
        ...     path = run.save()
        >>> path.name
        '00000001-step-2'
    """

    def __init__(
        self,
        directory: str | PathLike[str],
        *,
        keep: int = 2,
        every_steps: int | None = None,
        every_seconds: float | None = None,
        background: bool = True,
        **stateful: object,
    ) -> None:
        for name, value, least in (
            ("keep", keep, 1),
            ("every_steps", every_steps, 1),
            ("every_seconds", every_seconds, 0),
        ):
            if value is not None and not value >= least:
                raise ContractError(f"{name} must be at least {least}; got {value}")
        self.directory = Path(directory)
        self._keep = keep
        self._every_steps = every_steps
        self._every_seconds = _EVERY_SECONDS if every_steps is None and every_seconds is None else every_seconds
        self._background = background
        self._files: Files = LocalFiles()
        self._parts: dict[str, Part] = {}
        self._lock: Lock | None = None
        self._saving = Background()
        self._stop = StopRequest()
        self._damaged: set[str] = set()
        self._saved_at: float | None = None
        self._saved_step = 0
        self._finalizer = weakref.finalize(self, self._stop.give_back)
        self._add(stateful)

    # ---------------------------------------------------------------- saving

    def save(self) -> Path:
        """Copy everything, and write it, in the background unless that was declined.

        Allowed after any ``backward`` and any ``step``. Waits for the save before it.

        Collective: every rank, at the same place.

        Returns:
            The path that the checkpoint has when it is on disk; see `wait`.

        Raises:
            CheckpointError: This save, or an earlier one in the background, failed; what was there before is
                untouched. Or another job uses the directory.
            StateError: Accumulator and data do not agree, a window cannot go on, or a gradient waits in ``.grad``.
            ContractError: A part holds something that cannot be saved.
        """
        self._enter()
        self.wait()
        if not self._parts:
            raise ContractError(
                "there is nothing to save; give Checkpoint its parts, as in Checkpoint(..., model=model)"
            )
        snapshot = take_snapshot(list(self._parts.values()))
        position = snapshot.position
        name = next_name(self.directory, position.step, position.rows_done)
        write = functools.partial(
            write_checkpoint, self._files, self.directory, name, snapshot, keep=self._keep, damaged=set(self._damaged)
        )
        if self._background:
            self._saving.start(write)
        else:
            write()
        self._note_saved(position)
        return self.directory / name

    def save_if_due(self) -> None:
        """Save if it is time, or if somebody asked the run to stop: then it ends here, with ``SystemExit(3)``.

        Made to be called after every ``backward`` and after every ``step``; costs microseconds if nothing is due.
        From the first call on, SIGINT and SIGTERM are such a request; a second signal does what it always did.

        Collective: every rank, equally often.

        Raises:
            SystemExit: A stop was requested, and everything is saved and on disk. Its code is 3.
            CheckpointError, StateError, ContractError: As `save`, also of an earlier save in the background.
        """
        self._enter()
        self._stop.listen()
        self._saving.check()
        if self._stop.requested:
            self.save()
            self.wait()
            raise SystemExit(_INTERRUPTED)
        if self._is_due():
            self.save()

    def wait(self) -> None:
        """Wait until what was saved in the background is on disk.

        Raises:
            CheckpointError: It could not be saved.
        """
        self._saving.wait()

    def _is_due(self) -> bool:
        now = time.monotonic()
        if self._saved_at is None:
            self._saved_at = now
        if self._every_seconds is not None and now - self._saved_at >= self._every_seconds and not self._saving.busy:
            return True
        if self._every_steps is None:
            return False
        return self._steps_done() // self._every_steps > self._saved_step // self._every_steps

    def _note_saved(self, position: Position) -> None:
        self._saved_at = time.monotonic()
        self._saved_step = position.step

    # ---------------------------------------------------------------- stopping

    @property
    def stop_requested(self) -> bool:
        """Whether the next `save_if_due` saves and ends the run."""
        return self._stop.requested

    def request_stop(self) -> None:
        """Ask the run to end at the next `save_if_due`."""
        self._stop.requested = True

    # ---------------------------------------------------------------- loading

    def load_latest(self) -> Position | None:
        """Load the newest good checkpoint of the directory into the parts.

        Damaged newer ones are passed over, with a warning. Everything is checked before anything is loaded. An earlier
        request to stop is forgotten: this is a new beginning.

        Collective: every rank.

        Returns:
            Where training goes on; None if nothing was ever saved here.

        Raises:
            CheckpointError: There are checkpoints, and none of them is good, or another job uses the directory.
            ContractError, StateError: It does not fit the parts; they are as they were.
        """
        self._enter()
        self._stop.requested = False
        self.wait()
        sweep(self._files, self.directory)
        if not names_in(self.directory):
            return None
        path, manifest, damaged = newest_good(self.directory)
        load_all(path, manifest, list(self._parts.values()))
        self._damaged = set(damaged)
        position = position_in(manifest, path, list(damaged.values()))
        self._went_on(position)
        return position

    def load(self, path: str | PathLike[str], *, only: Collection[str] | None = None) -> Position:
        """Load one checkpoint into the parts, or into some of them.

        Everything is checked before anything is loaded. Takes no lock: also another run's checkpoint can be loaded.

        Collective: every rank.

        Args:
            path: A checkpoint, or a directory of them, whose newest good one is taken.
            only: Names of the parts to load; the random state is then left alone. None: all, which must be all that
                were saved.

        Returns:
            The position that the checkpoint was saved at.

        Raises:
            CheckpointError: It is not whole.
            ContractError, StateError: It does not fit the parts; they are as they were.
        """
        found, manifest, damaged = newest_good(Path(path))
        if only is None:
            load_all(found, manifest, list(self._parts.values()))
        else:
            check_parts(manifest, only)
            if unknown := set(only) - self._parts.keys():
                raise ContractError(f"only={min(unknown)!r} is no part of this Checkpoint; it has {list(self._parts)}")
            load_parts(found, manifest, [self._parts[name] for name in only])
        position = position_in(manifest, found, list(damaged.values()))
        self._note_saved(position)
        return position

    @property
    def restarts(self) -> int:
        """How often a run in this directory went on from a checkpoint."""
        return count_restarts(self.directory)

    def _went_on(self, position: Position) -> None:
        for reason in position.damaged:
            warnings.warn(f"a checkpoint was passed over: {reason}", stacklevel=3)
        line = {
            "step": position.step,
            "rows_done": position.rows_done,
            "from": str(position.path and position.path.name),
        }
        at = datetime.now(UTC).isoformat(timespec="seconds")
        record_restart(self._files, self.directory, json.dumps({"at": at, **line}))
        self._note_saved(position)

    # ---------------------------------------------------------------- parts

    @contextmanager
    def attached(self, **stateful: object) -> Iterator[Self]:
        """Add parts for the time of a block; signals that were not taken over before are given back at its end.

        Args:
            stateful: Parts by name. An object that is a part already, under whatever name, is left as it is.

        Raises:
            ContractError: Another object has that name.
        """
        owned = [part.owner for part in self._parts.values()]
        new = {name: owner for name, owner in stateful.items() if not any(owner is one for one in owned)}
        listening = self._stop.listening
        self._add(new)
        try:
            yield self
        finally:
            for name in new:
                del self._parts[name]
            if not listening:
                self._stop.give_back()

    def _add(self, stateful: Mapping[str, object]) -> None:
        for name in stateful:
            if name in self._parts:
                raise ContractError(f"this Checkpoint has another {name} already; use one and the same object")
        self._parts.update({name: part_of(name, owner, self._modules) for name, owner in stateful.items()})
        if len(self._owners(Batches)) == 1:  # with several, nobody but the loop knows which goes with which
            (data,) = self._owners(Batches)
            for accumulator in self._owners(Accumulator):
                data.register(accumulator)

    def _modules(self) -> Mapping[str, nn.Module]:
        return {name: part.owner for name, part in self._parts.items() if isinstance(part.owner, nn.Module)}

    def _owners(self, kind: type[T]) -> list[T]:
        return [part.owner for part in self._parts.values() if isinstance(part.owner, kind)]

    def _steps_done(self) -> int:
        for data in self._owners(Batches):
            return step_and_rows(data)[0]
        for accumulator in self._owners(Accumulator):
            return accumulator.updates
        raise ContractError("every_steps needs something that counts steps: add data=Batches or an Accumulator")

    # ---------------------------------------------------------------- the directory

    def _enter(self) -> None:
        _, world = rank_and_world()
        if world > 1:
            raise PlacementError(f"this version keeps checkpoints of one process, and there are {world} ranks")
        if self._lock is None:
            self._lock = Lock(self._files, self.directory)

    def close(self) -> None:
        """Wait for what is being saved, and give back the directory and the signals.

        Raises:
            CheckpointError: It could not be saved.
        """
        try:
            self.wait()
        finally:
            self._stop.give_back()
            if self._lock is not None:
                self._lock.release()
                self._lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
