"""ggml in a process of its own, so that where it aborts, it does not take the tests along.

The process answers lists of requests, each in a fork of itself, and in another after each request that ended it. Both
ends speak lines of JSON, in which a float32 is written with all its digits.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO, NoReturn, Self

import numpy as np


def encode(value: Any) -> Any:
    """Write an array as its dtype, shape and numbers."""
    if not isinstance(value, np.ndarray):
        raise TypeError(type(value))
    return {"dtype": str(value.dtype), "shape": value.shape, "numbers": value.ravel().tolist()}


def decode(value: dict[str, Any]) -> Any:
    """Read an array again."""
    return np.array(value["numbers"], value["dtype"]).reshape(value["shape"]) if "dtype" in value else value


class Ggml:
    """The process, while it is entered."""

    def __enter__(self) -> Self:
        self.process = subprocess.Popen(
            [sys.executable, __file__],
            env={**os.environ, "GGML_NO_BACKTRACE": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        return self

    def __exit__(self, *_: object) -> None:
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait(timeout=20)

    def ask(self, function: str, requests: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Call a function of ``ggml_library`` for each request.

        Returns:
            What it returned for each, or ``{"ended": [signal, message]}`` where ggml ended the process.
        """
        self.process.stdin.write(json.dumps([function, requests], default=encode) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline(), object_hook=decode)


def answers(library: ModuleType, function: str, requests: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Call a function for each request in a fork, and in a new one for what follows after each that ended it."""
    done: list[dict[str, Any]] = []
    while len(done) < len(requests):
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors:
            child = os.fork()
            if child == 0:
                _answer_and_exit(library, function, requests[len(done) :], out, errors)
            _, status = os.waitpid(child, 0)
            out.seek(0)
            errors.seek(0)
            said = errors.read().decode()
            done += [json.loads(line, object_hook=decode) for line in out]
            if os.WIFSIGNALED(status):
                done.append({"ended": [signal.Signals(os.WTERMSIG(status)).name, *said.splitlines()[:1]]})
            elif status:
                raise RuntimeError(f"{function} ended with status {status}: {said}")
    return done


def _answer_and_exit(
    library: ModuleType, function: str, requests: Sequence[Mapping[str, Any]], out: BinaryIO, errors: BinaryIO
) -> NoReturn:
    os.dup2(errors.fileno(), 2)
    code = 1
    try:
        for request in requests:
            line = json.dumps(getattr(library, function)(**request), default=encode)
            out.write(line.encode() + b"\n")
            out.flush()
        code = 0
    finally:
        if code:
            sys.excepthook(*sys.exc_info())
            sys.stderr.flush()
        os._exit(code)


def _serve() -> None:
    sys.path.insert(0, str(Path(__file__).parent))
    import ggml_library  # noqa: PLC0415  not in the process that runs the tests

    ggml_library.library()
    for line in sys.stdin:
        function, requests = json.loads(line, object_hook=decode)
        answered = json.dumps(answers(ggml_library, function, requests), default=encode)
        print(answered, flush=True)  # noqa: T201  the answer


if __name__ == "__main__":
    _serve()
