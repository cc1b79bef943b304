"""The README's loop, stopped anywhere and taken up again: the same weights and the same printed losses."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import jobs
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jobs import BATCH, MICRO, ROWS, Job, finished

import augend
import reference
from augend.errors import StateError

MOMENTS = 1 + 2 * (3 + 3 + 2) + 6  # one before the first row, one after each micro-batch and each step of two epochs


def stopped(directory: Path, moment: int, **options) -> list[str]:
    """Train up to a moment, save there, and lose the process; return what it printed."""
    job = Job(directory, **options)
    for _ in itertools.islice(job.moments(), moment + 1):
        pass
    job.run.save()
    job.run.close()
    return job.printed


@pytest.mark.parametrize("background", [False, True])
def test_resumed_after_every_microbatch_and_every_step(tmp_path, background):
    """Saved at any of 23 moments of two epochs and loaded by new objects: same bits, same printed losses."""
    expected = finished(Job(tmp_path / "whole"))
    assert MOMENTS == sum(1 for _ in Job(tmp_path / "count").moments())
    for moment in range(MOMENTS):
        printed = stopped(tmp_path / f"{moment}", moment, background=background)
        job = Job(tmp_path / f"{moment}", background=background)
        position = job.run.load_latest()
        assert len(printed) == position.step
        bits, rest = finished(job)
        assert expected == (bits, printed + rest), moment


@pytest.mark.parametrize("moment", [0, 1, 2, 4, 5, 11, 22])
def test_loaded_before_and_after_the_iterator_was_made(tmp_path, moment):
    """It does not matter whether the loop's iterator exists already when the checkpoint is loaded."""
    expected = finished(Job(tmp_path / "whole"))
    printed = stopped(tmp_path / "run", moment)
    job = Job(tmp_path / "run")
    batches = iter(job.data)
    job.run.load_latest()
    for batch in batches:
        for microbatch in job.grads.microbatches(batch):
            job.grads.backward(jobs.loss(job.model, microbatch))
        done = job.grads.step(job.optimizer, max_norm=1.0)
        printed.append(f"step {batch.step}  loss {done.loss!r}  |g| {done.norm!r}")
    assert expected == (job.bits(), printed)


def test_loaded_into_objects_that_were_used(tmp_path):
    """A checkpoint can be loaded into a job that has gone on, mid-batch or at its end: it goes back."""
    expected = finished(Job(tmp_path / "whole"))
    job = Job(tmp_path / "run", keep=30)
    moments = job.moments()
    paths = []
    for _ in range(7):
        next(moments)
        paths.append((job.run.save(), list(job.printed)))
    for path, printed in reversed(paths):
        job.run.load(path)
        job.printed = list(printed)
        assert expected == finished(job), path.name


def test_several_hops(tmp_path):
    """Saved right after a load, at a new place, and after each single micro-batch: the hops leave no trace."""
    expected = finished(Job(tmp_path / "whole"))
    printed: list[str] = []
    for hop in range(MOMENTS - 1):
        job = Job(tmp_path / "run")
        assert (hop == 0) == (job.run.load_latest() is None)
        for _ in itertools.islice(job.moments(), 2):  # one moment on: a micro-batch or a step
            job.run.save()
        printed += job.printed
        job.run.close()
        assert max(0, hop) == job.run.restarts
    job = Job(tmp_path / "run")
    job.run.load_latest()
    bits, rest = finished(job)
    assert expected == (bits, printed + rest)


@pytest.mark.parametrize("optimizer", jobs.OPTIMIZERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_resumed_with_every_optimizer(tmp_path, optimizer, dtype):
    """With any optimizer, master weights too: in mid-batch, right before and right after a step, bit for bit."""
    expected = finished(Job(tmp_path / "whole", optimizer=optimizer, dtype=dtype))
    for moment in (0, 2, 3, 4, 13):
        printed = stopped(tmp_path / f"{moment}", moment, optimizer=optimizer, dtype=dtype)
        job = Job(tmp_path / f"{moment}", optimizer=optimizer, dtype=dtype)
        job.run.load_latest()
        bits, rest = finished(job)
        assert expected == (bits, printed + rest), moment


def whole_numbers(microbatch_size: int, directory: Path) -> tuple:
    """Return a linear job on whole numbers, whose sums are exact for every cut."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(-3, 4, (ROWS, 3), generator=generator).float()
    model = torch.nn.Linear(3, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-8)
    grads = augend.Accumulator(model)
    data = augend.Batches(x, batch_size=BATCH, microbatch_size=microbatch_size, epochs=1, drop_last=True)
    run = augend.Checkpoint(directory, model=model, optimizer=optimizer, grads=grads, data=data, background=False)
    return model, optimizer, grads, data, run


@given(first=st.integers(1, BATCH), second=st.integers(1, BATCH), moment=st.integers(0, 4), seed=st.integers(0, 9))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=25)
def test_another_microbatch_size_after_the_resume(tmp_path_factory, first, second, moment, seed):
    """Resumed in mid-batch with another micro-batch size: each row once, and the same bits where sums are exact."""
    directory = tmp_path_factory.mktemp("cut")

    def trained(size: int, place: Path, *, stop: int | None = None):
        model, optimizer, grads, data, run = whole_numbers(size, place)
        run.load_latest()
        seen = []
        made = 0
        for batch in data:
            for microbatch in grads.microbatches(batch):
                seen += [(batch.step, row) for row in microbatch[0].tolist()]
                grads.backward(augend.losses.mse(model(microbatch[0]), microbatch[0].sum(dim=1, keepdim=True)))
                made += 1
                if made == stop:
                    run.save()
                    run.close()
                    return seen, None
            grads.step(optimizer)
        run.close()
        return seen, model.weight.tolist()

    rows, expected = trained(BATCH, directory / "whole")
    before, weights = trained(first, directory / "cut", stop=moment + 1)
    after, weights = trained(second, directory / "cut") if weights is None else ([], weights)
    assert rows == before + after
    assert expected == weights


def test_another_microbatch_size_is_within_the_bound(tmp_path):
    """On real numbers, resumed with another cut, the sums differ by no more than two orders of one sum may.

    Both are float32 sums of the same row gradients, by micro-batches and, inside a backward, by rows and features: each
    is within γ(n)·Σ|g| of the exact one, n = 8 rows + 8 features + 3 micro-batches (Higham 2002, §4.2) and, for the
    roundings of forward and backward themselves, 16 more for each of the three factors of the chain rule.
    """

    def sums(size: int, place: Path, *, resume: bool) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
        grads = augend.Accumulator(model)
        data = augend.Batches(jobs.source(), batch_size=BATCH, microbatch_size=size, epochs=1)
        run = augend.Checkpoint(place, model=model, grads=grads, data=data, background=False)
        if resume:
            run.load_latest()
        batch = next(iter(data))
        for microbatch in grads.microbatches(batch):
            grads.backward(jobs.loss(model, microbatch))
            if not resume and size != BATCH:
                break
        run.save()
        run.close()
        return {name: one.clone() for name, one in grads.pending.items()}

    sums(MICRO, tmp_path / "cut", resume=False)
    cut = sums(2, tmp_path / "cut", resume=True)
    whole = sums(BATCH, tmp_path / "whole", resume=False)
    magnitude = magnitudes()
    u = 2.0**-24
    n = 8 + 8 + 3 + 3 * 16
    for name, one in whole.items():
        bound = 2 * (n * u / (1 - n * u)) * magnitude[name]
        assert bool(((one - cut[name]).abs() <= bound).all()), name


def magnitudes() -> dict[str, torch.Tensor]:
    """Return Σ|g| over the rows of the first batch, in float64, |g| itself bounded by sums of magnitudes."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)).double()
    data = augend.Batches(jobs.source(), batch_size=BATCH, microbatch_size=1, epochs=1)
    total = {name: torch.zeros_like(one) for name, one in model.named_parameters()}
    for microbatch in next(iter(data)):
        x = microbatch["x"].double()
        hidden = torch.tanh(model[0](x)).abs()  # [1, 8]
        error = torch.ones(1, 3, dtype=torch.float64)  # |softmax - onehot| is at most one
        back = error @ model[2].weight.abs()  # [1, 8]; the slope of tanh is at most one
        total["2.weight"] += error.T @ hidden
        total["2.bias"] += error[0]
        total["0.weight"] += back.T @ x.abs()
        total["0.bias"] += back[0]
    return total


class Pair:
    """Two models with an accumulator and an optimizer each, in one loop over one data."""

    def __init__(self, directory: Path, printed: list[str]) -> None:
        torch.manual_seed(0)
        self.models = {"one": jobs.Net(), "two": torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Dropout(0.5))}
        self.optimizers = {name: torch.optim.AdamW(one.parameters(), lr=0.01) for name, one in self.models.items()}
        self.grads = {name: augend.Accumulator(one, foreign="drop") for name, one in self.models.items()}
        self.data = augend.Batches(jobs.source(), batch_size=BATCH, microbatch_size=MICRO, seed=2, epochs=1)
        parts = {f"optimizer_{name}": one for name, one in self.optimizers.items()}
        parts |= {f"grads_{name}": one for name, one in self.grads.items()}
        self.run = augend.Checkpoint(directory, **self.models, **parts, data=self.data, background=False)
        self.printed = printed

    def together(self) -> Iterator[None]:
        """Both get a backward for each micro-batch, then each its step."""
        for batch in self.data:
            for microbatch in self.grads["one"].microbatches(batch, together=[self.grads["two"]]):
                for name in self.models:
                    self.backward(name, microbatch)
                yield
            for name in self.models:
                self.step(name, batch)
                yield

    def in_turn(self) -> Iterator[None]:
        """One goes through the batch and steps, then the other."""
        for batch in self.data:
            for name in self.models:
                for microbatch in self.grads[name].microbatches(batch):
                    self.backward(name, microbatch)
                    yield
                self.step(name, batch)
                yield

    def backward(self, name: str, microbatch) -> None:
        """Do one micro-batch of one model."""
        self.grads[name].backward(jobs.loss(self.models[name], microbatch))

    def step(self, name: str, batch) -> None:
        """Step one model; a batch that it closed before the resume gives its record again."""
        line = f"{batch.step} {name} {self.grads[name].step(self.optimizers[name])!r}"
        if line not in self.printed:
            self.printed.append(line)

    def train(self, order: str, stop: int | None = None) -> tuple[str, int]:
        """Go on from the newest checkpoint to the end, or save at a moment and stop; return bits and moments."""
        self.run.load_latest()
        moments = 0
        for _ in getattr(self, order)():
            moments += 1
            if moments == stop:
                self.run.save()
                break
        self.run.close()
        states = [one.state_dict() for one in (*self.models.values(), *self.optimizers.values())]
        return reference.digest(states), moments


@pytest.mark.parametrize("order", ["together", "in_turn"])
def test_two_accumulators_over_one_data(tmp_path, order):
    """Two models in one loop, together or one after the other, saved and resumed at every moment: same bits."""
    printed: list[str] = []
    expected, moments = Pair(tmp_path / "whole", printed).train(order)
    for stop in range(1, moments + 1):
        mine: list[str] = []
        Pair(tmp_path / f"{stop}", mine).train(order, stop)
        bits, _ = Pair(tmp_path / f"{stop}", mine).train(order)
        assert (expected, printed) == (bits, mine), stop


def test_an_epoch_s_rest_has_exactly_its_rows(tmp_path):
    """Stopped anywhere in an epoch: what is left is exactly its other rows, each once, and its other steps."""

    def rows_of(job: Job, stop: int) -> list[list[float]]:
        seen: list[list[float]] = []
        made = 0
        for batch in job.data.epoch():
            for microbatch in job.grads.microbatches(batch):
                seen += microbatch["x"].tolist()
                job.grads.backward(jobs.loss(job.model, microbatch))
                made += 1
                if made == stop:
                    job.run.save()
                    job.run.close()
                    return seen
            job.grads.step(job.optimizer)
        assert job.data.steps_per_epoch == job.grads.updates
        return seen

    every_row = sorted(jobs.source()["x"].tolist())
    for stop in range(1, 9):
        first = rows_of(Job(tmp_path / f"{stop}"), stop)
        job = Job(tmp_path / f"{stop}")
        position = job.run.load_latest()
        assert 0 == position.epoch
        assert every_row == sorted(first + rows_of(job, 0)), stop


def test_finish_between_its_gradient_and_the_step_is_refused(tmp_path):
    """Between finish() and the optimizer's step the update is in .grad, which is not saved: refused, unchanged."""
    job = Job(tmp_path / "run")
    batch = next(iter(job.data))
    for microbatch in job.grads.microbatches(batch):
        job.grads.backward(jobs.loss(job.model, microbatch))
    job.grads.finish()
    before = job.everything()
    with pytest.raises(StateError, match=r"grads wrote its mean to \.grad .*zero_grad"):
        job.run.save()
    assert before == job.everything()
    job.optimizer.step()
    job.optimizer.zero_grad()
    job.run.save()


def test_a_loose_window_is_refused(tmp_path):
    """Micro-batches that did not come from grads.microbatches() would be counted twice after a resume: refused."""
    job = Job(tmp_path / "run")
    for microbatch in next(iter(job.data)):
        job.grads.backward(jobs.loss(job.model, microbatch))
    with pytest.raises(StateError, match=r"grads holds micro-batches .*grads\.microbatches\(batch\)"):
        job.run.save()


def test_a_window_of_another_batch_is_refused(tmp_path):
    """Data that was moved on its own, away from the rows that the accumulator holds, cannot be saved with it."""
    job = Job(tmp_path / "run")
    start = job.data.state_dict()
    for _ in itertools.islice(job.moments(), 3):
        pass
    job.data.load_state_dict(start)
    with pytest.raises(StateError, match=r"grads holds 6 rows of batch 0, and the data counts 0 rows of batch 0"):
        job.run.save()
