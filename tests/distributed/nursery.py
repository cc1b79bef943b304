"""The process that the ranks of a test are forked from: it imports torch once, and every rank begins in no time.

Run by ``ranks.py``, never imported by it: ``python nursery.py FD`` obeys what comes through the socket FD. Standard
input is a lifeline: when the test run is gone, it ends, and every process here with it.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import importlib.util
import os
import pickle
import random
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from types import FrameType
from typing import Any

import coverage
import hypothesis
import numpy as np
import pytest
import torch
import torch.distributed
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.tensor.parallel

import augend

HELD = hypothesis, pytest  # which every case's file imports: once here, for all ranks

# What ended by itself in a rank without reaching its case: an exception in a thread or in a destructor.
strays: list[str] = []


def obey(orders: Connection) -> None:
    """Fork a rank for each ``("fork", settings)``, wait for one for each ``("wait", pid)``, until the socket closes."""
    children: set[int] = set()
    while True:
        try:
            order, argument = orders.recv()
        except EOFError:
            break
        if order == "fork":
            handle = recv_handle(orders)
            sys.stdout.flush()
            sys.stderr.flush()
            pid = os.fork()
            if pid == 0:
                orders.close()
                live(Connection(handle), **argument)
            os.close(handle)
            children.add(pid)
            orders.send(pid)
        else:
            _, status = os.waitpid(argument, 0)
            children.discard(argument)
            orders.send(os.waitstatus_to_exitcode(status))
    for pid in children:
        os.kill(pid, signal.SIGKILL)


def live(
    pipe: Connection,
    *,
    rank: int,
    world: int,
    log: str,
    group_seconds: float,
    measure: str | None,
    paths: list[str],
    once: bool,
) -> None:
    """Be one rank from beginning to end: join the group, run the cases that come, leave without a trace.

    With ``once`` it leaves as a program does whose whole text is the case: an exception ends the process.
    """
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    sys.path[:] = paths
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    threading.Thread(target=end_with_the_run, daemon=True).start()
    measured = begin_measuring(measure)
    code, failed = 1, False
    try:
        if once:  # as a program of a user, who has no watch over collectives
            torch.distributed.set_debug_level(torch.distributed.DebugLevel.OFF)
        join(pipe, rank, world, timedelta(seconds=group_seconds))
        threading.excepthook = lambda args: strays.append(f"thread {args.thread}: {args.exc_value!r}")
        sys.unraisablehook = lambda args: strays.append(f"{args.object!r}: {args.exc_value!r}")
        while order := pipe.recv_bytes():
            answer, failed = work(order, rank, once=once)
            pipe.send_bytes(answer)
            if once:
                break
        if failed and once:
            code = 1
        else:
            leave()
            code = 0
    except (EOFError, BrokenPipeError):
        code = 0  # nobody waits any more
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:  # noqa: BLE001  printed: there is no frame above this one that belongs here
        traceback.print_exc()
    finally:
        if measured is not None:
            measured.stop()
            measured.save()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def end_with_the_run() -> None:
    """End this process when the test run is gone, whatever the main thread waits for."""
    while os.read(0, 1):
        pass
    os._exit(1)


def begin_measuring(settings: str | None) -> coverage.Coverage | None:
    """Measure what this rank covers, into a file of its own that pytest-cov finds and combines."""
    if settings is None:
        return None
    config, data = settings.split("\n")
    measured = coverage.Coverage(data_file=data, data_suffix=True, config_file=config)
    measured.start()
    return measured


def join(pipe: Connection, rank: int, world: int, timeout: timedelta) -> None:
    """Make the default group. Rank 0 keeps the store, as under torchrun: with it, it is gone."""
    if rank == 0:
        store = torch.distributed.TCPStore("127.0.0.1", 0, world, is_master=True, wait_for_workers=False)
        pipe.send(store.port)
    else:
        port = pipe.recv()
        store = torch.distributed.TCPStore("127.0.0.1", port, world, timeout=timeout)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timeout)


def work(order: bytes, rank: int, *, once: bool) -> tuple[bytes, bool]:
    """Run one case; return what to answer, its outcome and what it left behind, and whether it failed."""
    name, path, function, arguments, checkup = pickle.loads(order)  # noqa: S301  our own words
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002  the global one is meant
    before = state()
    strays.clear()
    warnings.resetwarnings()
    warnings.simplefilter("error")
    error, result = None, None
    try:
        case = load(name, path, function)
        result = case(*pickle.loads(arguments))  # noqa: S301  our own words
    except Exception as caught:  # noqa: BLE001  sent to the test, which judges it
        error = caught
        error.add_note(f"rank {rank}:\n{traceback.format_exc()}")
        if once:
            sys.last_value, sys.last_traceback = error, error.__traceback__  # as when an exception ends a program
        else:
            error.__traceback__ = None
    answer, failed = encode(result, error), error is not None
    del result, error
    warnings.resetwarnings()
    gc.collect()
    left = [] if checkup else tidy(before)
    return pickle.dumps((answer, left)), failed


def encode(result: Any, error: Exception | None) -> bytes:
    """Pickle an outcome; an exception that cannot be pickled is told in words."""
    notes = [] if error is None else error.__notes__
    try:
        answer = pickle.dumps((result, error, notes))
        pickle.loads(answer)  # noqa: S301  our own words
    except Exception as caught:  # noqa: BLE001  whatever pickle says of it
        words = f"cannot be sent: {caught!r}; it is {result!r}" if error is None else f"{type(error).__name__}: {error}"
        return pickle.dumps((None, RuntimeError(words), notes))
    return answer


def load(name: str, path: str, function: str) -> Callable[..., Any]:
    """Find a case in its file, which is imported once, under the name that it has in the test run."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    found = sys.modules[name]
    for part in function.split("."):
        found = getattr(found, part)
    return found


def state() -> dict[str, object]:
    """Read what a case must leave as it found it."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    return {
        "default dtype": torch.get_default_dtype(),
        "grad mode": torch.is_grad_enabled(),
        "threads of torch": torch.get_num_threads(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "signal handlers": {number: by for number, by in handlers.items() if not isinstance(by, FrameType)},
        "environment": dict(os.environ),
        "directory": os.getcwd(),  # noqa: PTH109  compared, not used
        "default group": torch.distributed.is_initialized(),
        "threads": sorted(thread.name for thread in threading.enumerate() if not thread.daemon),
    }


def tidy(before: dict[str, object]) -> list[str]:
    """Return what a case has changed and left so, and drop the groups that it made; meshes may be used again."""
    after = state()
    left = [f"{name}: {before[name]} became {after[name]}" for name in before if before[name] != after[name]]
    left += strays
    if after["default group"]:
        drop_groups()
    return left


def drop_groups() -> None:
    """Destroy the groups that a case made, all but those of meshes, which are used again.

    Torch names a group of some ranks after how many groups there are, and a name used twice has the old addresses in
    the store: so the number of groups must never go down.
    """
    known = torch.distributed.distributed_c10d._world
    for group in list(known.pg_map):
        if group is not torch.distributed.group.WORLD and not group.group_desc.startswith("mesh"):
            known.pg_names[Gone()] = known.pg_names[group]
            torch.distributed.destroy_process_group(group)


class Gone:
    """Stands for a group that was destroyed."""


def leave() -> None:
    """Destroy the default group, and with it all others."""
    names = torch.distributed.distributed_c10d._world.pg_names
    for group in list(names):
        if isinstance(group, Gone):
            del names[group]
    torch.distributed.destroy_process_group()


def add_ranks() -> int:
    """Add the ranks + 1 of the default group: a case that any world passes as long as its group works."""
    number = torch.tensor([torch.distributed.get_rank() + 1])
    torch.distributed.all_reduce(number)
    return int(number)


def prepare() -> None:
    """Set torch's modes and import all of augend now, once for all ranks."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(mode=True)  # imports torch's compiler, which takes longer than all else here
    for name in augend.__all__:
        getattr(augend, name)
    gc.freeze()  # what was imported stays; a rank looks for garbage in what its cases made


if __name__ == "__main__":
    prepare()
    obey(Connection(int(sys.argv[1])))
