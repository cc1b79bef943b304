"""A job's hold on its directory: the ranks that belong to it, and the lock that rank 0 has for all of them."""

from __future__ import annotations

from pathlib import Path
from typing import final

from augend._checkpoint._directory import Lock, check_owner
from augend._checkpoint._files import Files
from augend._checkpoint._ranks import told
from augend._group import Group, open_group, rank_and_world
from augend.errors import CheckpointError, PlacementError


@final
class Tenancy:
    """Who may write to a directory, from the first call that needs it until `leave`."""

    def __init__(self) -> None:
        self._group: Group | None = None
        self._writers: Group | None = None
        self._lock: Lock | None = None
        self.token = ""  # of the lock: what ranks know it by

    @property
    def entered(self) -> bool:
        """Whether this job has the directory; a process forked from one of its ranks has not."""
        return bool(self.token) and (self._lock is None or self._lock.held)

    def meet(self) -> Group:
        """Return the group in which ranks agree. Collective where it is new.

        Raises:
            PlacementError: The process group has changed since.
        """
        if self._group is None:
            self._group = open_group(None, purpose="checkpoints")
        known, now = (self._group.rank, self._group.world), rank_and_world()
        if known != now:
            raise PlacementError(
                f"this Checkpoint was first used by rank {known[0]} of {known[1]}, and this is rank {now[0]} of "
                f"{now[1]}: make the process group first, then the Checkpoint"
            )
        return self._group

    def writers(self) -> Group:
        """Return the group of the threads that write in the background. Collective where it is new."""
        if self._writers is None:
            self._writers = open_group(None, purpose="the files of checkpoints")
        return self._writers

    def enter(self, files: Files, directory: Path) -> None:
        """Lock the directory, of several ranks the first. Collective.

        Raises:
            CheckpointError: Another job is in it, it cannot be written to, or a rank does not see it. On all ranks.
        """
        group = self.meet()

        def lock() -> str:
            self._lock = Lock(files, directory)
            if group.world > 1:
                self._lock.show()
            return self._lock.token

        token = told(group, f"rank 0 to lock {directory}", lock)
        try:
            group.agreed(f"every rank to look at {directory}", lambda: check_owner(directory, token))
        except CheckpointError:
            self.leave()
            raise
        self.token = token

    def leave(self) -> None:
        """Give the directory back. The ranks still know each other."""
        if self._lock is not None:
            self._lock.release()
        self._lock, self.token = None, ""
