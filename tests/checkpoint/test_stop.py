"""Signals, however many listen to them; waits that are interrupted; and what happens when nobody holds a Checkpoint."""

from __future__ import annotations

import concurrent.futures
import functools
import gc
import itertools
import os
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from disk import Faulty
from jobs import Job

import augend
from augend._checkpoint import _background
from augend._checkpoint._background import Background
from augend._checkpoint._signals import StopRequest
from augend.errors import CheckpointError


@pytest.fixture
def seen() -> Iterator[list[int]]:
    """Take the signals, note them, and put back what was there."""
    before = {one: signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)}
    noted: list[int] = []
    for one in before:
        signal.signal(one, lambda number, frame: noted.append(number))
    yield noted
    for one, handler in before.items():
        signal.signal(one, handler)


def raised() -> None:
    """Send one SIGTERM."""
    signal.raise_signal(signal.SIGTERM)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_given_back_in_any_order(seen, order):
    """Three listen, and give back in any order: the handlers of before are there again, and get every signal."""
    requests = [StopRequest() for _ in range(3)]
    for one in requests:
        one.listen()
    for number in order:
        assert requests[number].listening
        requests[number].give_back()
        assert not requests[number].listening
    raised()
    assert [signal.SIGTERM] == seen
    assert [False] * 3 == [one.requested for one in requests]


def test_one_signal_is_a_request_to_all(seen):
    """Whoever listens is asked to stop, and the second signal does what it always did."""
    requests = [StopRequest() for _ in range(3)]
    for one in requests:
        one.listen()
    requests[1].give_back()
    raised()
    assert [True, False, True] == [one.requested for one in requests]
    assert [] == seen
    raised()
    assert [signal.SIGTERM] == seen


def test_given_back_by_another_thread_the_signal_is_not_lost(seen):
    """A garbage collector may run anywhere: the first signal after that goes to where it went before."""
    request = StopRequest()
    request.listen()
    thread = threading.Thread(target=request.give_back)
    thread.start()
    thread.join(60)
    for count in (1, 2):
        raised()
        assert [signal.SIGTERM] * count == seen
    assert not request.requested


def test_under_somebody_else_s_handler_it_passes_signals_on(seen):
    """A handler that stands on ours, and calls it, reaches the one of before when ours was given back."""
    request = StopRequest()
    request.listen()
    ours = signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGTERM, functools.partial(ours))
    request.give_back()
    raised()
    assert [signal.SIGTERM] == seen
    assert not request.requested


def test_the_default_is_not_forgotten():
    """Where there was no handler but the system's, a signal that comes after all ends the process."""
    code = (
        "import signal, threading\nfrom augend._checkpoint._signals import StopRequest\n"
        "request = StopRequest(); request.listen()\n"
        "thread = threading.Thread(target=request.give_back); thread.start(); thread.join()\n"
        "signal.raise_signal(signal.SIGTERM); print('still here')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (-signal.SIGTERM, "") == (done.returncode, done.stdout)


def test_listening_again(seen):
    """After a stop was served or given back, a new beginning listens anew."""
    request = StopRequest()
    for _ in range(2):
        request.listen()
        raised()
        assert request.requested
        request.requested = False
    request.listen()
    request.give_back()
    request.listen()
    raised()
    assert (True, []) == (request.requested, seen)


def test_no_thread_is_left_where_nothing_runs():
    """After wait(), the thread of the call has ended too: who looks sees none, and a fork would inherit none."""
    background = Background()
    for _ in range(20):
        background.start(lambda: None)
        background.wait()
        assert [] == [one.name for one in threading.enumerate() if one.name.startswith("checkpoint")]


def test_an_interrupted_wait_can_be_repeated(monkeypatch):
    """Ctrl-C while the disk is waited for: what runs is not forgotten, and its error is heard by the next call."""
    gate = threading.Event()
    background = Background()

    def write() -> None:
        assert gate.wait(60)
        raise CheckpointError("no space")

    def interrupted(futures):
        raise KeyboardInterrupt

    background.start(write)
    monkeypatch.setattr(_background, "wait_for", interrupted)
    with pytest.raises(KeyboardInterrupt):
        background.wait()
    assert background.busy
    monkeypatch.setattr(_background, "wait_for", concurrent.futures.wait)
    gate.set()
    with pytest.raises(CheckpointError, match="no space"):
        background.wait()
    background.wait()


def test_an_interrupted_wait_loses_no_checkpoint(tmp_path, monkeypatch):
    """Interrupted in wait(), then loaded: the save that was running is there."""
    job = Job(tmp_path, background=True)
    job.run.save()

    def interrupted(futures):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(_background, "wait_for", interrupted)
        with pytest.raises(KeyboardInterrupt):
            job.run.wait()
    assert 0 == job.run.load_latest().step
    job.run.close()


def test_a_directory_is_free_as_soon_as_nobody_holds_its_checkpoint(tmp_path):
    """As in a notebook whose cell is run again: no garbage collection is needed, and a running save is waited for."""
    gc.disable()
    try:
        for background in (False, True):
            job = Job(tmp_path, background=background)
            job.run.load_latest()
            job.run.save()
            del job
        job = Job(tmp_path)
        assert "00000002-step-0" == job.run.load_latest().path.name
        job.run.close()
    finally:
        gc.enable()


def test_a_save_that_nobody_heard_of_is_told(tmp_path):
    """If the last save failed in the background and nobody called again, the end of the object says so."""
    job = Job(tmp_path, background=True)
    job.run.save()
    job.run.wait()
    job.run._files = Faulty("fsync", 0)
    job.run.save()
    with pytest.warns(RuntimeWarning, match="a checkpoint was not saved: .*No space left on device"):
        del job
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gc.collect()


def test_a_save_that_nobody_heard_of_is_told_at_the_end_of_the_program(tmp_path):
    """A program that ends after a save that failed says so on standard error."""
    code = (
        "import sys, torch, augend\nsys.path.insert(0, sys.argv[2])\nfrom disk import Faulty\n"
        "run = augend.Checkpoint(sys.argv[1], model=torch.nn.Linear(1, 1))\nrun.load_latest()\n"
        "run._files = Faulty('fsync', 0)\nrun.save()"
    )
    command = [sys.executable, "-c", code, str(tmp_path), str(Path(__file__).parent)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert "a checkpoint was not saved" in done.stderr
    assert "No space left on device" in done.stderr


def test_a_stop_is_tried_after_a_failed_save(tmp_path):
    """A save that failed before does not keep a stop request from saving; it is told as a warning."""
    job = Job(tmp_path, background=True)
    job.run.save_if_due()
    job.run._files = Faulty("fsync", 0)
    job.run.save()
    while job.run._saving.busy:
        pass
    job.run.request_stop()
    with pytest.warns(RuntimeWarning, match="No space left"), pytest.raises(SystemExit):
        job.run.save_if_due()
    assert 0 == augend.inspect(tmp_path).step
    job.run.close()


def test_a_forked_process_holds_nothing(tmp_path):
    """In a fork the directory belongs to the parent: a save there is refused, and a close does not wait."""
    job = Job(tmp_path, background=True)
    gate = threading.Event()
    job.run.load_latest()
    job.run._saving.start(lambda: gate.wait(60))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python warns of forks beside threads, which is the point
        child = os.fork()
    if child == 0:
        code = 1
        try:
            job.run.save()
        except CheckpointError as error:
            code = 2 if f"another job (process {os.getppid()} " in str(error) else 3
        job.run.close()
        os._exit(code)
    _, status = os.waitpid(child, 0)
    assert 2 == os.waitstatus_to_exitcode(status)
    gate.set()
    job.run.save()
    job.run.close()


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_loading_in_another_mode_leaves_ordinary_tensors(tmp_path, mode):
    """Loaded inside inference_mode, the run goes on outside of it as if it had been loaded there."""
    expected = None
    for inside in (False, True):
        job = Job(tmp_path / f"{inside}")
        for _ in itertools.islice(job.moments(), 7):
            pass
        job.run.save()
        if inside:
            with mode():
                job.run.load_latest()
        for _ in job.moments():
            pass
        expected = expected or job.bits()
        job.run.close()
    assert expected == job.bits()


def test_another_default_device_changes_nothing(tmp_path):
    """torch.set_default_device does not reach what is saved and loaded."""
    job = Job(tmp_path)
    for _ in itertools.islice(job.moments(), 7):
        pass
    before = job.everything()
    torch.set_default_device("meta")
    try:
        job.run.save()
        job.run.load_latest()
    finally:
        torch.set_default_device(None)
    assert before == job.everything()
    job.run.close()


def test_the_directory_stays_where_it_was(tmp_path, monkeypatch):
    """A relative directory is that of the moment when the Checkpoint was made."""
    monkeypatch.chdir(tmp_path)
    job = Job(Path("run"))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert tmp_path / "run" / "00000001-step-0" == job.run.save()
    job.run.close()
