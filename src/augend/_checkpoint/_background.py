"""One thing at a time in the background, whose failure is heard at the next call."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from typing import final


@final
class Background:
    """A place for one running call. Python itself waits for it before the process ends."""

    def __init__(self) -> None:
        self._future: Future[None] | None = None
        self._executor: ThreadPoolExecutor | None = None
        self._process = os.getpid()

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
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._future = self._executor.submit(call)
        self._executor.shutdown(wait=False)

    @property
    def failed(self) -> bool:
        """Whether the call has ended with an error, which `wait` raises."""
        return self._future is not None and self._future.done() and self._future.exception() is not None

    def wait(self) -> None:
        """Wait until nothing is running, and raise what it raised, once. Interrupted, it can be called again."""
        if self._future is None:
            return
        if self._process == os.getpid():  # else a fork, in which nothing runs
            wait_for([self._future])
            self._end()
        future, self._future = self._future, None
        if future.done():
            future.result()

    def tell(self) -> None:
        """Wait, and say as a warning what nobody would hear otherwise."""
        if self._future is None or self._process != os.getpid():
            return
        error, self._future = self._future.exception(), None
        self._end()
        if error is not None:
            warnings.warn(f"a checkpoint was not saved: {error}", RuntimeWarning, stacklevel=2)

    def _end(self) -> None:
        """Wait for the thread too, which has nothing more to do, and forget it."""
        if self._executor is not None:
            self._executor.shutdown(wait=True)
            self._executor = None
