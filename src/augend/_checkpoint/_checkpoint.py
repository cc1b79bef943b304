"""Checkpoint: stop anywhere, go on anywhere."""

from __future__ import annotations

import functools
import json
import warnings
import weakref
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from os import PathLike
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Final, Self, final

from augend._checkpoint._background import Background
from augend._checkpoint._collection import Parts
from augend._checkpoint._directory import check_owner, count_restarts, names_in, next_name, record_restart, sweep
from augend._checkpoint._due import Due, at_least_one
from augend._checkpoint._files import Files, LocalFiles
from augend._checkpoint._inspect import newest_good
from augend._checkpoint._load import position_in, prepare_all, prepare_parts
from augend._checkpoint._parts import Commit, Part
from augend._checkpoint._position import Position
from augend._checkpoint._publish import Place, write_checkpoint
from augend._checkpoint._ranks import Poll, check_equal, first_alone, told
from augend._checkpoint._save import take_snapshot
from augend._checkpoint._signals import StopRequest
from augend._checkpoint._tenancy import Tenancy
from augend._checkpoint._tree import split
from augend._group import Group
from augend.errors import ContractError, StateError

_INTERRUPTED: Final = 3


@final
class Checkpoint:
    """Keeps a run on disk: after any micro-batch, safe against every crash, readable without augend.

    A checkpoint is a directory with a ``manifest.json``, a ``state.json`` and, for each part that has tensors, a
    directory of safetensors files; a model's tensors are there under their own names. Nothing is pickled, and nothing
    is executed on loading. It gets its name only when every byte is on disk, so whatever has a name is whole, unless
    the disk has changed it since; that is found by hashes, and the newest good one is used.

    On several ranks each writes its own part of every tensor, and any number of ranks, however the tensors are spread
    there, reads what it needs; what goes wrong on one rank is raised on all.

    Saved are the parts that are given: modules with their buffers, optimizers (by parameter names, without a step, a
    cast or a change), accumulators with the sums of the open batch, the position of the data, and anything else with
    ``state_dict`` and ``load_state_dict``; besides, the state of the global random generators.

    Args:
        directory: Where; made and locked by the first load_latest, save_if_due or save. One job at a time may use it.
            Of several ranks, on a disk that all of them share.
        keep: How many good checkpoints to keep; the only good one is never removed.
        every_steps: ``save_if_due`` saves after so many steps: as soon as the last of them is done.
        every_seconds: ``save_if_due`` saves when so much time has gone by since the last save, also in the middle of
            a batch. If neither is given: 600.
        background: Whether files are written while training goes on. Everything is copied first; an error is raised
            by the next call, of several ranks by the one after it.
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
        self.directory = Path(directory).absolute()  # the program may go elsewhere
        self._keep = at_least_one("keep", keep)
        self._due = Due(every_steps, every_seconds)
        self._counts_steps = every_steps is not None
        self._background = background
        self._files: Files = LocalFiles()
        self._parts = Parts()
        self._tenancy = Tenancy()
        self._saving = Background()
        self._stop = StopRequest()
        self._poll = Poll()
        self._damaged: set[str] = set()
        self._half_loaded = False
        weakref.finalize(self, _leave, self._saving, self._stop)
        self._parts.add(stateful)

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
            ContractError: A part holds something that cannot be saved, or that is no tensor and differs on ranks.
            PlacementError: The process group is another than at the first call.
            LostRankError: A rank is gone, or somewhere else.
        """
        group = self._enter()
        self.wait()
        group.agreed("every rank to begin a save", self._check_savable)
        snapshot = take_snapshot(self._parts, group)
        position = snapshot.position
        named = functools.partial(next_name, self.directory, position.step, position.rows_done)
        name: str = told(group, "rank 0 to name the checkpoint", named)
        writers = self._tenancy.writers() if self._background else group
        place = Place(files=self._files, directory=self.directory, token=self._tenancy.token, group=writers)
        write = functools.partial(write_checkpoint, place, name, snapshot, keep=self._keep, damaged=set(self._damaged))
        if self._background:
            self._saving.start(write)
        else:
            write()
        self._due.note(self._parts.steps_done())
        return self.directory / name

    def _check_savable(self) -> None:
        if not self._parts:
            raise ContractError(
                "there is nothing to save; give Checkpoint its parts, as in Checkpoint(..., model=model)"
            )
        if self._half_loaded:
            raise StateError("the last load was interrupted in the middle of it; load again before you save")

    def save_if_due(self) -> None:
        """Save if it is time, or if somebody asked the run to stop: then it ends here, with ``SystemExit(3)``.

        Made to be called after every ``backward`` and after every ``step``; costs microseconds if nothing is due.
        From the first call on, SIGINT and SIGTERM are such a request; a second signal does what it always did.

        Collective: every rank, equally often. A stop that any rank wants, the seconds of rank 0's clock, and a failure
        in the background are sent without waiting, and taken by all ranks together at the next call.

        Raises:
            SystemExit: A stop was requested, and everything is saved and on disk. Its code is 3.
            CheckpointError, StateError, ContractError, PlacementError, LostRankError: As `save`, also of an earlier
                save in the background.
        """
        group = self._enter()
        self._stop.listen()
        stop, failed, due = self._poll.take(group, self._wishes)
        if stop:
            self._stop.requested = True
            self._saving.tell()  # what failed before is only said: this save is to be tried in any case
            self.save()
            self.wait()
            raise SystemExit(_INTERRUPTED)
        if failed:
            self._saving.wait()
        if due or self._due.by_steps(self._parts.steps_done):
            self.save()
        self._poll.post(group, "every rank to come to save_if_due", self._wishes)

    def _wishes(self) -> list[int]:
        """Return whether this process wants to stop, has a failure to tell, and finds a save due by its clock."""
        due = self._due.by_seconds(busy=self._saving.busy) and self._tenancy.meet().rank == 0
        return [int(self._stop.requested), int(self._saving.failed), int(due)]

    def wait(self) -> None:
        """Wait until what was saved in the background is on disk: on each rank, of all ranks.

        Not collective: no rank waits here for another's call.

        Raises:
            CheckpointError: It could not be saved.
            LostRankError: A rank is gone.
        """
        self._saving.wait()

    # ---------------------------------------------------------------- stopping

    @property
    def stop_requested(self) -> bool:
        """Whether the next `save_if_due` saves and ends the run; of several ranks this one's wish, one call sooner."""
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
            ContractError, StateError: It does not fit the parts; they are as they were, on all ranks.
            PlacementError, LostRankError: As `save`.
        """
        group = self._enter()
        self._stop.requested = False
        self._poll.drop()
        self.wait()
        if not told(group, f"rank 0 to look into {self.directory}", self._swept):
            return None
        path, manifest, damaged = newest_good(self.directory, group)
        commit = prepare_all(path, manifest, self._parts, group)
        position = position_in(manifest, path, list(damaged.values()))
        _warn(position)
        record = functools.partial(record_restart, self._files, self.directory, _line(position))
        first_alone(group, "rank 0 to record the restart", record)
        self._damaged = set(damaged)
        self._take(commit)
        return position

    def _swept(self) -> list[str]:
        check_owner(self.directory, self._tenancy.token)
        sweep(self._files, self.directory)
        return names_in(self.directory)

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
            ContractError, StateError: It does not fit the parts; they are as they were, on all ranks.
            PlacementError, LostRankError: As `save`.
        """
        group = self._tenancy.meet()
        check_equal(group, "a load", self._parts.kinds())
        found, manifest, damaged = newest_good(Path(path), group)
        position = position_in(manifest, found, list(damaged.values()))
        if only is None:
            commit = prepare_all(found, manifest, self._parts, group)
            _warn(position)
            self._take(commit)
        else:
            chosen = [only] if isinstance(only, str) else only
            commit = prepare_parts(found, manifest, self._parts, chosen, group)
            _warn(position)
            commit()
        return position

    def _take(self, commit: Commit) -> None:
        self._half_loaded = True
        try:
            commit()
        except ContractError:
            self._half_loaded = False  # all of it was undone
            raise
        self._half_loaded = False
        self._due.note(self._parts.steps_done())

    @property
    def restarts(self) -> int:
        """How often a run in this directory went on from a checkpoint."""
        return count_restarts(self.directory)

    # ---------------------------------------------------------------- parts

    @property
    def parts(self) -> Mapping[str, object]:
        """The objects that are saved, by name. Read-only."""
        return MappingProxyType(self._parts.owners(object))

    @contextmanager
    def attached(self, **stateful: object) -> Iterator[Self]:
        """Add parts for the time of a block; signals that were not taken over before are given back at its end.

        Args:
            stateful: Parts by name. An object that is a part already, under whatever name, is left as it is.

        Raises:
            ContractError: Another object has that name.
        """
        new = self._parts.without(stateful)
        listening = self._stop.listening
        self._parts.add(new)
        try:
            yield self
        finally:
            self._parts.remove(new)
            if not listening:
                self._stop.give_back()

    # ---------------------------------------------------------------- the directory

    def _enter(self) -> Group:
        """Keep others out from here on; what could never be saved is refused now, and not in ten minutes."""
        group = self._tenancy.meet()
        if not self._tenancy.entered:
            check_equal(group, "the Checkpoint", {"the directory": str(self.directory), **self._parts.kinds()})
            if self._counts_steps:
                self._parts.check_counted()
            for part in self._parts:
                group.agreed(f"every rank to read the state of {part.name}", functools.partial(_readable, part))
            self._tenancy.enter(self._files, self.directory)
        return group

    def close(self) -> None:
        """Wait for what is being saved, and give back the directory and the signals.

        Not collective. Before the process group is destroyed.

        Raises:
            CheckpointError, LostRankError: As `wait`.
        """
        self._poll.drop()
        try:
            self.wait()
        finally:
            self._stop.give_back()
            self._tenancy.leave()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _readable(part: Part) -> None:
    split(part.capture(), part.name)


def _leave(saving: Background, stop: StopRequest) -> None:
    """Do what nobody did before the Checkpoint, or the program, came to its end."""
    saving.tell()
    stop.give_back()


def _warn(position: Position) -> None:
    for reason in position.damaged:
        warnings.warn(f"a checkpoint was passed over: {reason}", stacklevel=3)


def _line(position: Position) -> str:
    at = datetime.now(UTC).isoformat(timespec="seconds")
    name = None if position.path is None else position.path.name
    return json.dumps({"at": at, "step": position.step, "rows_done": position.rows_done, "from": name})
