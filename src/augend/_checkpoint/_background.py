"""One thing at a time in the background, whose failure is heard at the next call."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import final


@final
class Background:
    """A place for one running call. Python itself waits for it before the process ends."""

    def __init__(self) -> None:
        self._future: Future[None] | None = None

    @property
    def busy(self) -> bool:
        """Whether the call is still running."""
        return self._future is not None and not self._future.done()

    def start(self, call: Callable[[], None]) -> None:
        """Start a call, after the one before it has ended well.

        Raises:
            Whatever the call before it raised.
        """
        self.wait()
        executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._future = executor.submit(call)
        executor.shutdown(wait=False)

    def check(self) -> None:
        """Raise what a call that has ended raised; do not wait for one that runs."""
        if not self.busy:
            self.wait()

    def wait(self) -> None:
        """Wait until nothing is running, and raise what it raised, once."""
        future, self._future = self._future, None
        if future is not None:
            future.result()
