"""fit with a checkpoint: stopped or killed anywhere and gone on with, it is the run that was never interrupted."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import augend
from augend._fit import Begin, End, Event, Step, Validation
from augend._listeners import json_lines
from augend.errors import ContractError

ROWS = 24
STEPS = 6  # two epochs of three
CALLS = 24  # of the loss: six batches of three micro-batches, and three validations of two
OF_THE_PROCESS = {"seconds", "restarts", "memory_bytes"}


class KilledError(Exception):
    """The process is gone: whatever was not saved is lost."""


def rows(seed: int) -> dict[str, torch.Tensor]:
    """Draw a small regression problem."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(ROWS, 4, generator=generator)  # [rows, 4]
    return {"x": x, "y": x.sum(dim=1, keepdim=True) + 0.1 * torch.randn(ROWS, 1, generator=generator)}


def network() -> nn.Module:
    """Return a network with dropout and running statistics: all that an interruption could disturb."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.25), nn.Linear(8, 1))


def mse(model: nn.Module, microbatch) -> augend.Tally:
    """Return the squared error of each row."""
    return augend.losses.mse(model(microbatch["x"]), microbatch["y"])


def stuck(model: nn.Module, microbatch) -> augend.Tally:
    """Return the squared error in training, and the same number in every validation."""
    tally = mse(model, microbatch)
    return tally if model.training else augend.Tally(tally.total * 0 + 1, tally.count)


@dataclass
class Job:
    """One run: how it is to be trained, and where it is kept; each call of it is a new process."""

    directory: Path
    loss: Callable = mse
    microbatch_size: int = 3
    every_steps: int | None = None
    options: dict = field(default_factory=dict)
    heard: list[Event] = field(default_factory=list)

    @property
    def metrics(self) -> Path:
        """Where the lines go."""
        return self.directory / "metrics.jsonl"

    def __call__(self, trip: Callable[[augend.Checkpoint, object], None] | None = None) -> augend.History:
        """Build everything anew and fit; ``trip`` is called before each loss and for each event, and may interrupt."""
        self.model = network()
        self.heard = []
        data = augend.Batches(rows(0), batch_size=8, microbatch_size=self.microbatch_size)
        keep = {"every_seconds": 1e9, "every_steps": self.every_steps, "background": False}

        with augend.Checkpoint(self.directory / "checkpoints", **keep) as checkpoint:

            def loss(model: nn.Module, microbatch) -> augend.Tally:
                if trip is not None:
                    trip(checkpoint, microbatch)
                return self.loss(model, microbatch)

            def listen(event: Event) -> None:
                self.heard.append(event)
                if trip is not None:
                    trip(checkpoint, event)

            return self.fit(data, loss, checkpoint=checkpoint, listeners=(json_lines(self.metrics), listen))

    def fit(self, data: augend.Batches, loss: Callable, **options) -> augend.History:
        """Fit with all that could go wrong: momentum, schedule, clipping, validation."""
        return augend.fit(
            self.model,
            data,
            loss=loss,
            **{
                "optimizer": torch.optim.Adam(self.model.parameters(), lr=0.05),
                "steps": STEPS,
                "max_norm": 1.0,
                "schedule": lambda update: 0.1 / (update + 1),
                "validation": augend.Batches(rows(1), batch_size=ROWS, microbatch_size=12),
                "validate_every": 2,
                "digest_every": 2,
                "metrics": {"again": mse},
                **self.options,
                **options,
            },
        )

    def alone(self) -> tuple:
        """Fit without a checkpoint, and return what came of it."""
        self.model = network()
        data = augend.Batches(rows(0), batch_size=8, microbatch_size=self.microbatch_size)
        return outcome(self.model, self.fit(data, self.loss))

    def outcome(self) -> tuple:
        """Fit in a new process, and return what came of it."""
        history = self()
        return outcome(self.model, history)

    def stopped(self, trip: Callable) -> None:
        """Fit until ``trip`` asks the checkpoint to stop; the exit code is 3."""
        with pytest.raises(SystemExit) as caught:
            self(trip)
        assert 3 == caught.value.code

    def killed(self, trip: Callable) -> None:
        """Fit until ``trip`` raises; nothing is saved on the way out."""
        with pytest.raises(KilledError):
            self(trip)

    def check_metrics(self, history: augend.History) -> None:
        """One line for each step and validation, in order, and nothing else; the counts add up."""
        lines = [json.loads(line) for line in self.metrics.read_text("utf-8").splitlines()]
        steps = [line for line in lines if "validation" not in line]
        assert [step.step for step in history.steps] == [line["step"] for line in steps]
        assert [step.loss.value for step in history.steps] == [line["loss"] for line in steps]
        assert sum(step.count for step in history.steps) == sum(line["count"] for line in steps)
        expected = [one.step for one in history.validations]
        assert expected == [line["step"] for line in lines if "validation" in line]
        assert [line["step"] for line in lines] == sorted(line["step"] for line in lines)


def outcome(model: nn.Module, history: augend.History) -> tuple:
    """Return all that must be the same: weights, buffers, and the history but for its seconds; nan equals nan."""
    state = [(name, value.tolist()) for name, value in model.state_dict().items()]
    steps = [replace(step, seconds=0.0) for step in history.steps]
    validations = [replace(one, seconds=0.0) for one in history.validations]
    return state, repr((steps, validations, history.stopped))


def at(place: int, act: Callable[[augend.Checkpoint], None], kind: type = object) -> Callable:
    """Return a trip that acts at the place-th call with such an argument, from 0: a micro-batch, or an event."""
    seen = iter(range(10**6))

    def trip(checkpoint: augend.Checkpoint, what: object) -> None:
        if isinstance(what, kind) and next(seen) == place:
            act(checkpoint)

    return trip


def stop(checkpoint: augend.Checkpoint) -> None:
    """Ask to stop, as a signal does."""
    checkpoint.request_stop()


def kill(checkpoint: augend.Checkpoint) -> None:
    """End the process at once."""
    raise KilledError


@pytest.fixture(autouse=True, scope="module")
def disk_at_once() -> Iterator[None]:
    """Wait for no disk: processes end here, and machines do not."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(os, "fsync", lambda file: None)
        yield


@pytest.fixture
def folders(tmp_path) -> Iterator[Path]:
    """New folders, as many as a test wants."""
    return (folder for number in range(10**6) if (folder := tmp_path / str(number)).mkdir() is None)


def all_lines(folder: Path) -> Counter:
    """Count the lines of the metrics and of what was moved aside."""
    return Counter(line for path in folder.glob("metrics*") for line in path.read_bytes().splitlines())


def test_a_checkpoint_changes_nothing(folders):
    """Kept after every step or not at all: the same weights, losses, validations and rates, bit for bit."""
    job = Job(next(folders), every_steps=1)
    expected, history = job.alone(), job()
    assert expected == outcome(job.model, history)
    assert (STEPS, 3) == (len(history.steps), len(history.validations))
    assert [Begin, Step, Step, Validation, Step, Step, Validation, Step, Step, Validation, End] == [
        type(event) for event in job.heard
    ]
    job.check_metrics(history)


@pytest.mark.parametrize("act", [stop, kill])
def test_interrupted_anywhere_it_goes_on_as_if_nothing_had_been(folders, act):
    """Stopped or killed at every micro-batch of training and of validation, the resumed run is the whole one."""
    expected = Job(next(folders)).alone()
    for place in range(CALLS + 1):
        job = Job(next(folders), every_steps=2)
        trip = at(place, act, augend.data.Microbatch)
        if act is kill and place < CALLS:
            job.killed(trip)
        elif act is stop and place < CALLS - 1:
            job.stopped(trip)
        else:
            job(trip)  # in the last micro-batch of the last validation, or never: the run ends first
        before = all_lines(job.directory)
        history = job()
        assert expected == outcome(job.model, history), place
        job.check_metrics(history)
        kept = Counter(job.metrics.read_bytes().splitlines())
        lost = all_lines(job.directory) - kept
        assert before - kept == lost, place
        assert act is kill or not lost


@pytest.mark.parametrize("kind", [Begin, Step, Validation])
@pytest.mark.parametrize("act", [stop, kill])
def test_interrupted_by_a_listener_it_goes_on_as_if_nothing_had_been(folders, act, kind):
    """Stopped or killed when any event is told: what was told and saved stays, the rest is told again."""
    expected = Job(next(folders)).alone()
    places = {Begin: 1, Step: STEPS, Validation: 3}[kind]
    for place in range(places):
        job = Job(next(folders), every_steps=1)
        trip = at(place, act, kind)
        if act is kill:
            job.killed(trip)
        elif kind is Validation and place == places - 1:
            job(trip)  # nothing was left to do: the request comes too late
        else:
            job.stopped(trip)
        history = job()
        assert expected == outcome(job.model, history), place
        job.check_metrics(history)


def test_one_micro_batch_a_process(folders):
    """Stopped after every single micro-batch, the last ones of their batches too: the same, and each step told once."""
    job = Job(next(folders))
    expected = job.alone()

    def trip(checkpoint: augend.Checkpoint, what: object) -> None:
        if isinstance(what, augend.data.Microbatch) and job.model.training:
            checkpoint.request_stop()

    heard = []
    for _ in range(3 * STEPS):  # micro-batches
        job.stopped(trip)
        heard += job.heard
    history = job()
    heard += job.heard
    assert expected == outcome(job.model, history)
    assert history.steps == tuple(event for event in heard if isinstance(event, Step))
    assert list(range(3 * STEPS + 1)) == [event.restarts for event in heard if isinstance(event, Begin)]


def test_a_stop_does_not_wait_for_a_validation(folders):
    """Asked in the first micro-batch of a validation, no second one is measured, and nothing of it is recorded."""
    job, validated = Job(next(folders)), []

    def trip(checkpoint: augend.Checkpoint, what: object) -> None:
        if isinstance(what, augend.data.Microbatch) and not job.model.training:
            validated.append(what.first_row)
            checkpoint.request_stop()

    job.stopped(trip)
    assert [0] == validated
    assert [Begin, Step, Step] == [type(event) for event in job.heard]
    assert job.model.training
    job()
    begin, validation = job.heard[:2]
    assert (2, 0) == (len(begin.history.steps), len(begin.history.validations))
    assert (Validation, 1) == (type(validation), validation.step)


@given(st.integers(0, CALLS + 12), st.integers(1, 4), st.sampled_from([2, 3, 4, 6, 8]), st.booleans())
@settings(max_examples=8)
def test_any_cut_and_any_pace_of_saving(place, every_steps, microbatch_size, killed):
    """Whatever the cut and however often it is saved, an interruption anywhere leaves no trace."""
    with tempfile.TemporaryDirectory() as folder:
        job = Job(Path(folder), every_steps=every_steps, microbatch_size=microbatch_size)
        expected = job.alone()
        with suppress(KilledError, SystemExit):  # or it ends before
            job(at(place, kill if killed else stop))
        history = job()
        assert expected == outcome(job.model, history)
        job.check_metrics(history)


@pytest.mark.parametrize("place", range(12))
def test_patience_counts_across_interruptions(tmp_path, place):
    """Early stopping comes at the same step, whatever was interrupted before it."""
    job = Job(tmp_path, loss=stuck, every_steps=1, options={"validate_every": 1, "patience": 2})
    expected = job.alone()
    with pytest.raises((KilledError, SystemExit)):
        job(at(place, kill if place % 2 else stop, augend.data.Microbatch))
    history = job()
    assert expected == outcome(job.model, history)
    assert (3, "no lower validation loss in 2 validations") == (len(history.steps), history.stopped)


@pytest.mark.parametrize("options", [{}, {"validate_every": 1, "patience": 2}])
def test_a_run_that_has_ended_does_nothing_more(tmp_path, options):
    """Fitted again it returns the whole history with its reason, tells no step, and writes nothing."""
    job = Job(tmp_path, loss=stuck, options=options)
    expected = job.outcome()
    saved = sorted((tmp_path / "checkpoints").glob("0*"))
    lines = job.metrics.read_bytes()
    assert expected == job.outcome()
    assert [Begin, End] == [type(event) for event in job.heard]
    assert saved == sorted((tmp_path / "checkpoints").glob("0*"))
    assert lines == job.metrics.read_bytes()


def test_a_larger_number_of_steps_goes_on(tmp_path):
    """A run that had ended goes on where it was: three steps and then six are six at once."""
    job = Job(tmp_path, options={"validate_every": 3})
    expected = job.alone()
    job.options["steps"] = 3
    assert "all 3 steps are done" == job().stopped
    del job.options["steps"]
    assert expected == job.outcome()
    assert [3, 4, 5] == [event.step for event in job.heard if isinstance(event, Step)]


def test_the_end_is_saved_though_nothing_is_due(tmp_path):
    """Without any save on the way, the last state is on disk when fit returns."""
    job = Job(tmp_path)
    job()
    path = tmp_path / "checkpoints"
    augend.verify(path)
    assert (STEPS, 0) == (augend.inspect(path).step, augend.inspect(path).microbatch)


def test_the_end_is_on_disk_when_it_is_told(tmp_path, monkeypatch):
    """Saved in the background on a slow disk, the last state is nevertheless whole when listeners hear of the end."""
    monkeypatch.setattr(os, "fsync", lambda file: time.sleep(0.02))
    model = network()
    seen: list[int] = []

    def listen(event: Event) -> None:
        if isinstance(event, End):
            seen.append(augend.inspect(tmp_path).step)

    data = augend.Batches(rows(0), batch_size=8, microbatch_size=3)
    options = {"loss": mse, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "listeners": [listen]}
    with augend.Checkpoint(tmp_path) as checkpoint:
        augend.fit(model, data, **options, steps=2, checkpoint=checkpoint)
    assert [2] == seen


def test_listeners_hear_where_it_goes_on(folders):
    """Begin has the history that is not told again, the restarts and the position; nothing where it begins."""
    job = Job(next(folders))
    job.stopped(at(12, stop, augend.data.Microbatch))  # the second micro-batch of the fourth step
    fresh = job.heard[0]
    assert ((), (), 0, None) == (fresh.history.steps, fresh.history.validations, fresh.restarts, fresh.position)
    told = [replace(event, seconds=0.0) for event in job.heard[1:]]
    history = job()
    begin = job.heard[0]
    assert [Begin(steps=STEPS, history=begin.history, restarts=1, position=begin.position)] == job.heard[:1]
    assert ("step 3, 6 rows done", 1) == (str(begin.position), begin.position.epoch)
    assert [event for event in told if isinstance(event, Step)] == [
        replace(s, seconds=0.0) for s in begin.history.steps
    ]
    assert [1] == [validation.step for validation in begin.history.validations]
    assert [3, 4, 5] == [event.step for event in job.heard if isinstance(event, Step)]
    assert history == job.heard[-1].history
    restarts = [
        json.loads(line)["restarts"] for line in job.metrics.read_text("utf-8").splitlines() if "loss_e" in line
    ]
    assert [0, 0, 0, 1, 1, 1] == restarts


def test_a_run_killed_before_its_first_checkpoint_begins_anew(folders):
    """Nothing was saved: all lines are moved aside, and training begins at its first row."""
    job = Job(next(folders))
    expected = job.alone()
    job.killed(at(7, kill, augend.data.Microbatch))
    before = job.metrics.read_bytes()
    assert expected == job.outcome()
    assert (0, None) == (job.heard[0].restarts, job.heard[0].position)
    assert before == (job.directory / "metrics.lost-1.jsonl").read_bytes()


def test_named_terms_and_an_accumulator_of_one_s_own(tmp_path):
    """With named terms, float64 sums and a given accumulator: stopped and gone on with, the same."""

    def terms(model: nn.Module, microbatch) -> dict[str, augend.Tally]:
        tally = mse(model, microbatch)
        return {"main": tally, "aux": augend.Tally(tally.total * 2, tally.count)}

    def accumulator(job: Job) -> dict:
        return {"accumulator": augend.Accumulator(job.model, dtype="float64", terms=("main", "aux"))}

    class Terms(Job):
        def fit(self, data, loss, **options):
            return super().fit(data, loss, **accumulator(self), **options)

    job = Terms(tmp_path, loss=terms)
    expected = job.alone()
    job.stopped(at(8, stop, augend.data.Microbatch))
    assert expected == job.outcome()
    assert ["main", "aux"] == list(job.heard[0].history.steps[0].losses) == list(job.heard[-1].history.steps[-1].losses)


def parts(directory: Path, **others: object) -> tuple[nn.Module, augend.Checkpoint, dict]:
    """Return a model, a checkpoint that has all parts under names of its own, and what fit needs besides."""
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    grads, data = augend.Accumulator(model), augend.Batches(rows(0), batch_size=8, microbatch_size=3)
    checkpoint = augend.Checkpoint(
        directory, every_steps=1, background=False, net=model, adam=optimizer, sums=grads, rows=data, **others
    )
    return model, checkpoint, {"data": data, "loss": mse, "optimizer": optimizer, "accumulator": grads}


def test_parts_that_the_checkpoint_has_already_are_left_as_they_are(tmp_path):
    """A checkpoint that was made with the same objects, under any names, is used as it is, and can load it all."""
    model, checkpoint, options = parts(tmp_path)
    with checkpoint:
        history = augend.fit(model, **options, steps=3, checkpoint=checkpoint)
    other, checkpoint, options = parts(tmp_path)
    with checkpoint:
        again = augend.fit(other, **options, steps=3, checkpoint=checkpoint)
    assert outcome(model, history) == outcome(other, again)


def test_an_accumulator_that_fit_knows_nothing_of_brings_no_step_twice(tmp_path):
    """A second accumulator in the checkpoint has nothing of the batch that was done last; it is not done again."""

    def fitted(folder: str, stop_after: int) -> tuple:
        second = network()
        other = augend.Accumulator(second)
        model, checkpoint, options = parts(tmp_path / folder, second=second, other=other)
        trip = at(stop_after, stop, Step)
        options["listeners"] = [lambda event: trip(checkpoint, event)]
        with checkpoint:
            return outcome(model, augend.fit(model, **options, steps=3, checkpoint=checkpoint))

    with pytest.raises(SystemExit):
        fitted("stopped", stop_after=1)
    assert fitted("whole", stop_after=3) == fitted("stopped", stop_after=3)


def test_a_checkpoint_of_another_run_is_refused_before_anything_is_told(tmp_path):
    """A checkpoint of another model changes nothing, and no listener hears of it."""
    job = Job(tmp_path)
    job()
    lines = job.metrics.read_bytes()
    heard: list[Event] = []
    model = nn.Linear(4, 1)
    before = model.weight.tolist()
    with augend.Checkpoint(tmp_path / "checkpoints") as checkpoint, pytest.raises(ContractError):
        augend.fit(
            model,
            augend.Batches(rows(0), batch_size=8, microbatch_size=3),
            loss=mse,
            optimizer=torch.optim.Adam(model.parameters()),
            steps=9,
            checkpoint=checkpoint,
            listeners=(json_lines(job.metrics), heard.append),
        )
    assert ([], before, lines) == (heard, model.weight.tolist(), job.metrics.read_bytes())


@pytest.mark.parametrize("place", [0, 2, 4, 10])
def test_called_again_after_an_interruption(folders, place):
    """In one process, with the same objects and with the exception still at hand, the next call goes on: same bits."""
    job = Job(next(folders))
    expected = job.alone()
    job.model = network()
    optimizer = torch.optim.Adam(job.model.parameters(), lr=0.05)
    data = augend.Batches(rows(0), batch_size=8, microbatch_size=3)
    calls = iter(range(10**6))

    def loss(model: nn.Module, microbatch) -> augend.Tally:
        if next(calls) == place:
            checkpoint.request_stop()
        return mse(model, microbatch)

    with augend.Checkpoint(job.directory / "checkpoints", background=False) as checkpoint:
        with pytest.raises(SystemExit) as caught:
            job.fit(data, loss, optimizer=optimizer, checkpoint=checkpoint)
        history = job.fit(data, loss, optimizer=optimizer, checkpoint=checkpoint)
    assert 3 == caught.value.code
    assert expected == outcome(job.model, history)


def test_the_accumulator_of_the_checkpoint_is_used(folders):
    """One that the Checkpoint has is not joined by a second one of fit's own: its dtype counts, and its draws."""
    outcomes = []
    for place in ("accumulator", "checkpoint"):
        model = network()
        grads = augend.Accumulator(model, dtype="float64")
        data = augend.Batches(rows(0), batch_size=8, microbatch_size=3)
        parts, options = ({}, {"accumulator": grads}) if place == "accumulator" else ({"mine": grads}, {})
        with augend.Checkpoint(next(folders) / "checkpoints", **parts, background=False) as checkpoint:
            job = Job(next(folders))
            job.model = model
            outcomes.append(outcome(model, job.fit(data, mse, checkpoint=checkpoint, **options)))
        assert STEPS == grads.updates
        assert [grads] == [owner for owner in data.owners if owner is not None]
    assert outcomes[0] == outcomes[1]


def test_a_checkpoint_that_is_none_is_refused():
    """A path is no Checkpoint; the message names what is."""
    job = Job(Path())
    job.model = network()
    data = augend.Batches(rows(0), batch_size=8, microbatch_size=3)
    with pytest.raises(ContractError, match=r"checkpoint must be an augend\.Checkpoint; got 'runs/x'"):
        job.fit(data, mse, checkpoint="runs/x")


def test_fewer_steps_than_are_done_are_refused(folders):
    """Training cannot end before where it is: said before anything is told or saved."""
    job = Job(next(folders))
    job()
    saved = sorted(job.directory.rglob("*"))
    metrics = job.metrics.read_bytes()
    job.options["steps"] = STEPS - 1
    with pytest.raises(ContractError, match=f"would end after step {STEPS - 1}, and {STEPS} are done already"):
        job()
    assert [] == job.heard
    assert metrics == job.metrics.read_bytes()
    assert {one.name for one in job.directory.rglob("*")} - {one.name for one in saved} <= {"restarts.jsonl"}


def test_steps_before_a_checkpoint_s_first_one_keep_their_lines(folders):
    """Trained without a save, then with one, then resumed: the lines of the first steps stay where they are."""
    job = Job(next(folders))
    job.model = network()
    optimizer = torch.optim.Adam(job.model.parameters(), lr=0.05)
    data = augend.Batches(rows(0), batch_size=8, microbatch_size=3)
    grads = augend.Accumulator(job.model)
    options = {"optimizer": optimizer, "accumulator": grads, "listeners": [json_lines(job.metrics)]}
    job.fit(data, mse, steps=2, **options)
    before = job.metrics.read_bytes()
    for steps in (4, STEPS):
        with augend.Checkpoint(job.directory / "checkpoints", background=False) as checkpoint:
            history = job.fit(data, mse, steps=steps, checkpoint=checkpoint, **options)
    assert [2, 3, 4, 5] == [step.step for step in history.steps]
    lines = job.metrics.read_bytes()
    assert lines.startswith(before)
    steps = [json.loads(line)["step"] for line in lines.splitlines() if b"validation" not in line]
    assert list(range(STEPS)) == steps
    assert not list(job.directory.glob("*lost*"))
