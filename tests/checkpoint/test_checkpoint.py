"""When a checkpoint is due, how a run stops, and what happens around a save: background, lock, record, signals."""

from __future__ import annotations

import errno
import gc
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from disk import Watched
from jobs import Job

import augend
from augend.errors import CheckpointError, ContractError


class Clock:
    """A clock that stands still until it is told."""

    def __init__(self, monkeypatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)


def names(directory: Path) -> list[str]:
    """Return the checkpoints in a directory, the oldest first."""
    return sorted(path.name for path in directory.glob("0*"))


def test_due_by_seconds_anywhere(tmp_path, monkeypatch):
    """With every_seconds, a save is made at the first call that is late enough, also in the middle of a batch."""
    clock = Clock(monkeypatch)
    job = Job(tmp_path, every_seconds=10.0, keep=99)
    moments = job.moments()
    next(moments)
    job.run.save_if_due()
    for _ in range(4):
        next(moments)
        clock.now += 6.0
        job.run.save_if_due()
    assert ["00000001-step-0-rows-6", "00000002-step-1"] == names(tmp_path)
    job.run.close()


@pytest.mark.parametrize("in_the_loop_only", [True, False])
def test_due_by_steps(tmp_path, in_the_loop_only):
    """With every_steps=2, each second step is saved: right after it, or after the next micro-batch, whoever calls."""
    job = Job(tmp_path, every_steps=2, keep=99)
    for moment, _ in enumerate(job.moments()):
        after_a_step = moment in {0, 4, 8, 11, 15, 19, 22}
        if not (in_the_loop_only and after_a_step):
            job.run.save_if_due()
    rows = "-rows-3" if in_the_loop_only else ""
    expected = [f"00000001-step-2{rows}", f"00000002-step-4{rows}"] + ([] if in_the_loop_only else ["00000003-step-6"])
    assert expected == names(tmp_path)
    job.run.close()


def test_a_resume_counts_as_a_save(tmp_path):
    """Right after a load nothing is due: the checkpoint that was loaded is not written again."""
    job = Job(tmp_path, every_steps=1)
    for _ in itertools.islice(job.moments(), 5):
        job.run.save_if_due()
    job.run.close()
    assert ["00000001-step-1"] == names(tmp_path)
    again = Job(tmp_path, every_steps=1)
    again.run.load_latest()
    again.run.save_if_due()
    assert ["00000001-step-1"] == names(tmp_path)
    again.run.close()


def test_ten_minutes_if_nothing_is_asked_for(tmp_path, monkeypatch):
    """Without every_steps and every_seconds a save is due every 600 seconds."""
    clock = Clock(monkeypatch)
    job = Job(tmp_path)
    job.run.save_if_due()
    clock.now += 599.0
    job.run.save_if_due()
    assert [] == names(tmp_path)
    clock.now += 1.0
    job.run.save_if_due()
    assert ["00000001-step-0"] == names(tmp_path)
    job.run.close()


def test_steps_are_counted_without_batches(tmp_path):
    """Without Batches the accumulator's updates count the steps; without both, every_steps is refused."""
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    grads = augend.Accumulator(model)
    run = augend.Checkpoint(tmp_path, every_steps=2, model=model, optimizer=optimizer, grads=grads, background=False)
    for _ in range(5):
        grads.backward(augend.losses.sum(model(torch.ones(2, 1))))
        run.save_if_due()
        grads.step(optimizer)
        run.save_if_due()
    assert ["00000001-step-2", "00000002-step-4"] == names(tmp_path)
    run.close()
    lonely = augend.Checkpoint(tmp_path / "lonely", every_steps=2, model=model)
    with pytest.raises(ContractError, match="every_steps needs something that counts steps"):
        lonely.save_if_due()
    lonely.close()


def test_keep_is_what_stays(tmp_path):
    """keep=3 leaves the newest three, in the order of their names."""
    job = Job(tmp_path, keep=3)
    for _ in itertools.islice(job.moments(), 6):
        job.run.save()
    assert ["00000004-step-0-rows-8", "00000005-step-1", "00000006-step-1-rows-3"] == names(tmp_path)
    job.run.close()


@pytest.mark.parametrize("moment", range(6))
def test_a_stop_request_saves_and_ends(tmp_path, moment):
    """The next save_if_due after a request saves, waits until all is on disk, and raises SystemExit(3)."""
    job = Job(tmp_path, background=True)
    for _ in itertools.islice(job.moments(), moment + 1):
        job.run.save_if_due()
    assert not job.run.stop_requested
    job.run.request_stop()
    assert job.run.stop_requested
    with pytest.raises(SystemExit) as caught:
        job.run.save_if_due()
    assert 3 == caught.value.code
    assert 1 == len(names(tmp_path))
    augend.verify(tmp_path)
    job.run.close()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_a_request_and_the_next_one_is_not(tmp_path, number):
    """The first SIGINT or SIGTERM is noted, and the handlers of before are back for the second."""
    before = [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)]
    job = Job(tmp_path)
    job.run.save_if_due()
    assert before != [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)]
    signal.raise_signal(number)
    assert job.run.stop_requested
    assert before == [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)]
    with pytest.raises(SystemExit):
        job.run.save_if_due()
    assert before == [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)]
    job.run.close()


def test_signals_are_given_back(tmp_path):
    """close(), the end of attached(), and the end of the object's life put the handlers back."""
    before = signal.getsignal(signal.SIGTERM)
    job = Job(tmp_path / "closed")
    job.run.load_latest()
    assert before == signal.getsignal(signal.SIGTERM)  # a loop that does not ask whether to save keeps its Ctrl-C
    job.run.save_if_due()
    assert before != signal.getsignal(signal.SIGTERM)
    job.run.close()
    assert before == signal.getsignal(signal.SIGTERM)
    with job.run.attached():
        job.run.save_if_due()
        assert before != signal.getsignal(signal.SIGTERM)
    assert before == signal.getsignal(signal.SIGTERM)
    job.run.save_if_due()
    with job.run.attached():
        pass
    assert before != signal.getsignal(signal.SIGTERM)
    del job
    gc.collect()
    assert before == signal.getsignal(signal.SIGTERM)


def test_signals_that_others_took_stay_theirs(tmp_path):
    """A handler that somebody installed in between is left alone; an ignored signal stays ignored."""
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)

    def theirs(number, frame):
        """Belong to somebody else."""

    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        job = Job(tmp_path)
        job.run.save_if_due()
        assert signal.SIG_IGN == signal.getsignal(signal.SIGINT)
        signal.signal(signal.SIGTERM, theirs)
        job.run.close()
        assert theirs == signal.getsignal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before[0])
        signal.signal(signal.SIGINT, before[1])


def test_another_thread_leaves_signals_alone(tmp_path):
    """Only the main thread may take signals; elsewhere a checkpoint works without."""
    before = signal.getsignal(signal.SIGTERM)
    job = Job(tmp_path)
    thread = threading.Thread(target=lambda: (job.run.save_if_due(), job.run.save(), job.run.close()))
    thread.start()
    thread.join(60)
    assert before == signal.getsignal(signal.SIGTERM)
    assert 1 == len(names(tmp_path))


class Full(Watched):
    """A disk that is full for as long as it is told to be."""

    def __init__(self) -> None:
        super().__init__()
        self.on = True

    def call(self, kind, *arguments):
        if self.on and kind == "fsync":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().call(kind, *arguments)


class Waiting(Watched):
    """A disk that does nothing until the gate is open."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()

    def call(self, kind, *arguments):
        if kind == "create":
            assert self.gate.wait(60)
        return super().call(kind, *arguments)


@pytest.mark.parametrize("call", ["wait", "save", "save_if_due", "close"])
def test_an_error_in_the_background_is_raised_by_the_next_call(tmp_path, call):
    """A full disk is told by the next call, once; the checkpoint before it is whole, and the next save works."""
    job = Job(tmp_path, background=True)
    first = job.run.save()
    job.run.wait()
    job.run._files = disk = Full()
    job.run.save()
    with pytest.raises(CheckpointError, match="00000002-step-0 could not be saved: No space left on device"):
        while True:  # save_if_due does not wait, so it may have to be called again
            getattr(job.run, call)()
    disk.on = False
    augend.verify(tmp_path)
    assert [first.name] == names(tmp_path)
    job.run.save()
    job.run.close()
    augend.verify(tmp_path)
    assert [first.name, "00000002-step-0"] == names(tmp_path)


def test_what_is_saved_is_what_was_there(tmp_path):
    """Training goes on while the files are written: they hold what was there at the call."""
    job = Job(tmp_path, background=True)
    for _ in itertools.islice(job.moments(), 3):
        pass
    before = job.everything()
    job.run._files = disk = Waiting()
    job.run.save()
    with torch.no_grad():
        for tensor in (*job.model.state_dict().values(), *job.grads.pending.values()):
            tensor.zero_()
    assert before != job.everything()
    disk.gate.set()
    job.run.wait()
    job.run.load_latest()
    assert before == job.everything()
    job.run.close()


def test_seconds_do_not_queue_behind_a_slow_disk(tmp_path, monkeypatch):
    """While a save is still being written nothing is due by seconds: a slow disk does not stop the loop."""
    clock = Clock(monkeypatch)
    job = Job(tmp_path, background=True, every_seconds=1.0)
    job.run.save_if_due()
    job.run._files = disk = Waiting()
    for _ in range(5):
        clock.now += 2.0
        job.run.save_if_due()
    disk.gate.set()
    job.run.wait()
    assert ["00000001-step-0"] == names(tmp_path)
    clock.now += 2.0
    job.run.save_if_due()
    job.run.close()
    assert ["00000001-step-0", "00000002-step-0"] == names(tmp_path)


def test_two_jobs_cannot_share_a_directory(tmp_path):
    """A second job is refused before anything is read or written, by name; a closed one lets it in."""
    first, second = Job(tmp_path), Job(tmp_path)
    assert first.run.load_latest() is None
    for call in (second.run.load_latest, second.run.save_if_due, second.run.save):
        with pytest.raises(CheckpointError, match=r"in use by another Checkpoint of this process.*close\(\) it first"):
            call()
    (tmp_path / "lock").write_text("process 7 since yesterday\n", "utf-8")
    with pytest.raises(
        CheckpointError, match=r"in use by another job \(process 7 since yesterday\).*another directory"
    ):
        second.run.save()
    first.run.close()
    assert second.run.load_latest() is None
    second.run.close()


def test_a_dropped_checkpoint_lets_the_next_one_in(tmp_path):
    """As in a notebook whose cell is run again: the object that nobody holds any more gives the directory back."""
    job = Job(tmp_path)
    job.run.save()
    del job
    gc.collect()
    job = Job(tmp_path)
    assert job.run.load_latest() is not None
    job.run.close()


def test_restarts_are_counted(tmp_path):
    """Each load_latest that went on is on record with its position; a load of one checkpoint is none."""
    job = Job(tmp_path)
    assert 0 == job.run.restarts
    job.run.load_latest()
    assert 0 == job.run.restarts
    path = job.run.save()
    job.run.load(path)
    assert 0 == job.run.restarts
    for count in (1, 2):
        job.run.load_latest()
        assert count == job.run.restarts
    lines = (tmp_path / "restarts.jsonl").read_text("utf-8").splitlines()
    assert all('"step": 0, "rows_done": 0, "from": "00000001-step-0"' in line for line in lines)
    job.run.close()


def test_attached_parts_are_there_for_the_block(tmp_path):
    """What a block attaches is saved inside it only; no object is a part twice, and a taken name is refused."""
    model, other = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    run = augend.Checkpoint(tmp_path, net=model, background=False)
    with run.attached(model=model, other=other) as same:
        assert run is same
        assert {"net", "other"} == set(augend.inspect(run.save()).parts)
    assert {"net"} == set(augend.inspect(run.save()).parts)
    with pytest.raises(ContractError, match="another net already"), run.attached(net=other):
        pass
    run.close()


def test_a_stale_save_is_swept(tmp_path):
    """What a save that was killed left behind is gone after the next load or save."""
    job = Job(tmp_path)
    job.run.save()
    for name in (".saving-00000009-step-3", ".old-00000001-step-0"):
        (tmp_path / name / "model").mkdir(parents=True)
        (tmp_path / name / "model" / "half").write_bytes(b"x")
    job.run.load_latest()
    assert ["00000001-step-0", "lock", "restarts.jsonl"] == sorted(path.name for path in tmp_path.iterdir())
    job.run.close()


def test_damaged_checkpoints_do_not_count_as_kept(tmp_path):
    """With keep=2 and a damaged newest one, two good ones stay before it goes."""
    job = Job(tmp_path, keep=2)
    job.run.save()
    damaged = job.run.save()
    (damaged / "state.json").write_bytes(b"{}")
    with pytest.warns(UserWarning, match=r"passed over: .*00000002-step-0: state.json has 2 bytes"):
        position = job.run.load_latest()
    assert "00000001-step-0" == position.path.name
    assert 1 == len(position.damaged)
    job.run.save()
    assert ["00000001-step-0", "00000002-step-0", "00000003-step-0"] == names(tmp_path)
    job.run.save()
    assert ["00000003-step-0", "00000004-step-0"] == names(tmp_path)
    job.run.close()


SCRIPT = """
import os, sys, torch, augend
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
grads = augend.Accumulator(model)
data = augend.Batches(torch.ones(64, 2), batch_size=4, microbatch_size=2, epochs=None)
run = augend.Checkpoint(sys.argv[1], model=model, optimizer=optimizer, grads=grads, data=data, every_seconds=0)
run.load_latest()
for batch in data:
    for microbatch in grads.microbatches(batch):
        grads.backward(augend.losses.sum(model(microbatch[0])))
        run.save_if_due()
        print("ready", flush=True)
    grads.step(optimizer)
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 3), (signal.SIGINT, 3), (signal.SIGKILL, -9)])
def test_a_hand_written_loop_ends_by_signals(tmp_path, number, code):
    """SIGTERM and SIGINT end a hand-written loop with 3; after SIGKILL, too, the newest checkpoint is whole."""
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        while not names(tmp_path):  # the first one is still being written
            assert "ready\n" == process.stdout.readline()
        process.send_signal(number)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert (code, "") == (process.returncode, errors)
    augend.verify(tmp_path)
    inspection = augend.inspect(tmp_path)
    assert (inspection.step, inspection.rows_done) >= (0, 2)
