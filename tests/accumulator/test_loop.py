"""The rules of the loop: batches, positions, resumes, and two models in one loop."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import augend
import reference
from augend.errors import GradientError, StateError, TallyError

ROWS, BATCH, MICRO = 22, 8, 3  # three batches an epoch, the last of 6 rows; micro-batches of 3, 3, 2


def source() -> dict[str, torch.Tensor]:
    """Return 22 rows."""
    generator = torch.Generator().manual_seed(3)
    return {"x": torch.randn(ROWS, 4, generator=generator), "y": torch.randint(0, 3, (ROWS,), generator=generator)}


class Net(torch.nn.Module):
    """A network with dropout, so that random state matters."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.drop = torch.nn.Linear(4, 8), torch.nn.Linear(8, 3), torch.nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.drop(torch.tanh(self.a(x))))


def loss(model: torch.nn.Module, microbatch) -> augend.Tally:
    """Return the cross entropy of a micro-batch."""
    return augend.losses.cross_entropy(model(microbatch["x"]), microbatch["y"])


class Job:
    """Model, optimizer, accumulator and data of one process, and a checkpoint of them by hand."""

    def __init__(self, microbatch_size: int = MICRO, dtype: str = "float32", epochs: int | None = 2) -> None:
        torch.manual_seed(1)
        self.model = Net()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.grads = augend.Accumulator(self.model, dtype=dtype)
        self.data = augend.Batches(source(), batch_size=BATCH, microbatch_size=microbatch_size, seed=5, epochs=epochs)
        self.log: list[str] = []

    def save(self) -> dict[str, object]:
        state = self.grads.state_dict()
        plain = json.dumps({"data": self.data.state_dict(), **{k: v for k, v in state.items() if k != "sums"}})
        tensors = (self.model.state_dict(), self.optimizer.state_dict(), state["sums"])
        return {"plain": plain, "tensors": copy.deepcopy(tensors), "log": list(self.log)}

    def load(self, saved: dict[str, object]) -> None:
        plain = json.loads(saved["plain"])
        model, optimizer, sums = copy.deepcopy(saved["tensors"])
        self.model.load_state_dict(model)
        self.optimizer.load_state_dict(optimizer)
        self.data.load_state_dict(plain.pop("data"))
        self.grads.load_state_dict({**plain, "sums": sums})
        self.log = list(saved["log"])

    def moments(self) -> Iterator[None]:
        """Train to the end, pausing wherever a checkpoint could be taken."""
        yield
        for batch in self.data:
            for microbatch in self.grads.microbatches(batch):
                self.grads.backward(loss(self.model, microbatch))
                yield
            done = self.grads.step(self.optimizer, max_norm=1.0)
            if self.log[-1:] != [f"{batch.step} {done}"]:
                self.log.append(f"{batch.step} {done}")
            yield

    def outcome(self) -> tuple[str, list[str]]:
        return reference.digest(dict(self.model.named_parameters()), self.optimizer.state_dict()), self.log


def finished(job: Job) -> tuple[str, list[str]]:
    """Train to the end and return what came out."""
    for _ in job.moments():
        pass
    return job.outcome()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_resumed_after_any_microbatch_and_any_step(dtype: str) -> None:
    """Stopped at any moment of two epochs, dropout included, the run ends with the same bits and the same log."""
    expected = finished(Job(dtype=dtype))
    moments = sum(1 for _ in Job(dtype=dtype).moments())
    assert 1 + 2 * (3 + 3 + 2) + 6 == moments
    for stop in range(moments):
        job = Job(dtype=dtype)
        for _ in zip(range(stop + 1), job.moments(), strict=False):
            pass
        other = Job(dtype=dtype)
        other.load(job.save())
        assert expected == finished(other), stop


def test_resumed_twice_in_a_row() -> None:
    """A state saved right after a load is the same state: two hops end where none does."""
    expected = finished(Job())
    for stop in (2, 4, 5):
        job = Job()
        for _ in zip(range(stop), job.moments(), strict=False):
            pass
        for _ in range(2):
            hop = Job()
            hop.load(job.save())
            job = hop
        for _ in zip(range(2), job.moments(), strict=False):
            pass
        hop = Job()
        hop.load(job.save())
        assert expected == finished(hop), stop


def test_loaded_into_a_running_loop() -> None:
    """A state can be loaded into objects that were used, before and after their iterator was made."""
    expected = finished(Job())
    job = Job()
    running = job.moments()
    saved = []
    for _ in range(6):
        next(running)
        saved.append(job.save())
    job.load(saved[2])
    with pytest.raises(StateError, match="inside the loop"):
        next(running)
    for state in reversed(saved):
        job.load(state)
        assert expected == finished(job)


def watch(job: Job, produced: dict[str, list]) -> None:
    """Record every gradient that autograd produces for a job's model."""
    for name, parameter in job.model.named_parameters():
        parameter.register_hook(lambda g, name=name: produced.setdefault(name, []).append(g.double().numpy().copy()))


@given(st.data())
def test_another_microbatch_size_after_a_resume(data) -> None:
    """Resumed in mid-batch with another micro-batch size: each row once, the same count, sums within γ(k).

    k = number of micro-batches, before and after together, against the exact sum of the gradients produced.
    """
    stop, size = data.draw(st.integers(1, 3)), data.draw(st.integers(1, BATCH))
    produced: dict[str, list] = {}
    job = Job()
    watch(job, produced)
    for _ in zip(range(stop + 1), job.moments(), strict=False):
        pass
    other = Job(microbatch_size=size)
    watch(other, produced)
    other.load(job.save())
    batch = next(iter(other.data))
    seen = []
    for microbatch in other.grads.microbatches(batch):
        seen += microbatch["x"].tolist()
        other.grads.backward(loss(other.model, microbatch))
    assert source()["x"][batch.indices[stop * MICRO :]].tolist() == seen
    assert BATCH == other.grads.state.count
    for name, parts in produced.items():
        bound = reference.gamma(len(parts), torch.float32) * np.abs(np.stack(parts)).sum(axis=0)
        assert (np.abs(other.grads.pending[name].double().numpy() - reference.exact_sum(parts)) <= bound).all(), name


# ------------------------------------------------------------------ one call out of order


def first(job: Job) -> augend.data.Batch:
    """Return the first batch."""
    return next(iter(job.data))


def test_each_microbatch_needs_one_backward() -> None:
    """None and two are errors that say so; after reset the batch is offered from its start."""
    job = Job()
    batch = first(job)
    with pytest.raises(StateError, match="got no backward"):
        for _ in job.grads.microbatches(batch):
            pass
    with pytest.raises(StateError, match="a second backward"):
        for microbatch in job.grads.microbatches(batch):
            job.grads.backward(loss(job.model, microbatch))
            job.grads.backward(loss(job.model, microbatch))
    assert 3 == job.grads.state.count
    job.grads.reset()
    for microbatch in job.grads.microbatches(batch):
        job.grads.backward(loss(job.model, microbatch))
    assert BATCH == job.grads.step(job.optimizer).count


def test_a_batch_cannot_be_finished_before_its_end() -> None:
    """Leaving the loop early and finishing would lose rows: an error; going on with the same batch is fine."""
    job = Job()
    batch = first(job)
    for microbatch in job.grads.microbatches(batch):
        job.grads.backward(loss(job.model, microbatch))
        break
    for call in (job.grads.finish, job.grads.finish_mean, job.grads.finish_sums, lambda: job.grads.step(job.optimizer)):
        with pytest.raises(StateError, match="batch 0 has 3 of 8 rows done"):
            call()
    with pytest.raises(StateError, match="step 0 is not finished"):
        next(iter(job.data)), next(iter(job.data)).step
        for _ in job.data:
            pass
    job = Job()
    batch = first(job)
    for microbatch in job.grads.microbatches(batch):
        job.grads.backward(loss(job.model, microbatch))
        break
    for microbatch in job.grads.microbatches(batch):
        job.grads.backward(loss(job.model, microbatch))
    assert (BATCH, 3) == (job.grads.state.count, job.grads.state.microbatches)


def test_an_exception_in_the_body_loses_nothing() -> None:
    """A user's exception before backward leaves the micro-batch not done; the loop can be entered again."""
    expected = finished(Job())
    job = Job()
    running = job.moments()
    for _ in range(2):
        next(running)
    running.close()
    batch = None
    with pytest.raises(ZeroDivisionError):
        for batch in job.data:
            for _ in job.grads.microbatches(batch):
                raise ZeroDivisionError
    assert expected == finished(job)


def test_an_exception_in_backward_can_offer_the_batch_again() -> None:
    """Poisoned until reset; then the same batch starts over, and the run ends as if nothing had happened."""
    expected = finished(Job())
    job = Job()
    batch = first(job)

    def fail(gradient: torch.Tensor) -> None:
        raise RuntimeError("flaky")

    microbatches = job.grads.microbatches(batch)
    job.grads.backward(loss(job.model, next(microbatches)))
    handle = job.model.a.weight.register_hook(fail)
    with pytest.raises(RuntimeError, match="flaky"):
        job.grads.backward(loss(job.model, next(microbatches)))
    handle.remove()
    with pytest.raises(StateError, match="half added"):
        next(job.grads.microbatches(batch))
    job.grads.reset()
    assert expected == finished(job)


def test_reset_inside_the_loop_ends_the_loop() -> None:
    """reset() or load inside the body makes the loop's remaining micro-batches wrong: an error says so."""
    job = Job()
    batch = first(job)
    with pytest.raises(StateError, match="inside the loop over microbatches"):
        for microbatch in job.grads.microbatches(batch):
            job.grads.backward(loss(job.model, microbatch))
            job.grads.reset()


def test_finishing_inside_the_body_of_the_last_microbatch() -> None:
    """A step inside the loop is refused before the last micro-batch, and leaves no loop to go on after it."""
    job = Job()
    with pytest.raises(StateError, match="inside the loop over microbatches"):
        for microbatch in job.grads.microbatches(first(job)):
            job.grads.backward(loss(job.model, microbatch))
            if microbatch.rows_done == BATCH:
                job.grads.step(job.optimizer)


def test_a_stale_batch_is_refused() -> None:
    """A batch that the data has left cannot be entered, nor a window be mixed with another batch."""
    job = Job()
    batches = iter(job.data)
    old = next(batches)
    next(batches)
    with pytest.raises(StateError, match="step 0 is over"):
        next(job.grads.microbatches(old))
    job = Job()
    batch = first(job)
    for microbatch in job.grads.microbatches(batch):
        job.grads.backward(loss(job.model, microbatch))
        break
    fresh = Job()
    with pytest.raises(StateError, match="the window holds 3 rows of batch 0, and 0 of batch 0 count as done"):
        next(job.grads.microbatches(first(fresh)))
    job.data.load_state_dict(fresh.data.state_dict())
    with pytest.raises(StateError, match="Save and load accumulator and data together"):
        next(job.grads.microbatches(first(job)))


def test_a_plain_loop_over_the_batch_trains_rightly() -> None:
    """Without microbatches() the gradient is the same; nothing is tracked, and the data goes on by itself."""
    tracked, plain = Job(), Job()
    for job in (tracked, plain):
        for batch in job.data:
            for microbatch in job.grads.microbatches(batch) if job is tracked else batch:
                job.grads.backward(loss(job.model, microbatch))
            job.log.append(str(job.grads.step(job.optimizer, max_norm=1.0)))
    assert 6 == len(plain.log)
    assert tracked.outcome() == plain.outcome()
    assert plain.grads.state_dict()["loose"] is False  # nothing is pending


def test_one_add_counts_as_the_microbatch() -> None:
    """Gradients made by hand serve a micro-batch as well as a backward does."""
    job, other = Job(), Job()
    for batch in job.data:
        for microbatch in job.grads.microbatches(batch):
            tally = loss(job.model, microbatch)
            names, parameters = zip(*job.model.named_parameters(), strict=True)
            gradients = torch.autograd.grad(tally.total.sum(), parameters)
            job.grads.add(dict(zip(names, gradients, strict=True)), int(tally.count.sum()))
        job.grads.step(job.optimizer, max_norm=1.0)
    assert finished(other)[0] == job.outcome()[0]


def test_a_tally_must_have_the_rows_of_the_microbatch() -> None:
    """One number a token, or one a micro-batch, would give a wrong error bar: refused, with what to do."""
    job = Job()
    for microbatch in job.grads.microbatches(first(job)):
        for wrong in (
            loss(job.model, microbatch).sum(),
            augend.Tally(torch.zeros(9, requires_grad=True), torch.ones(9)),
        ):
            with pytest.raises(TallyError, match="and the micro-batch 3: error bars need one number a row"):
                job.grads.backward(wrong)
        break
    for microbatch in job.grads.microbatches(first(job)):
        tally = loss(job.model, microbatch)
        job.grads.backward(augend.Tally(tally.total.sum(), tally.count.sum()))


def test_the_gradient_of_finish_is_the_users_until_the_next_backward() -> None:
    """After finish the .grad can be changed and stepped by hand; inside a window any .grad is foreign."""
    job = Job()
    batches = iter(job.data)
    for microbatch in job.grads.microbatches(next(batches)):
        job.model.a.bias.grad = torch.zeros(8)
        with pytest.raises(GradientError, match="'a.bias'"):
            job.grads.backward(loss(job.model, microbatch))
        job.model.a.bias.grad = None
        job.grads.backward(loss(job.model, microbatch))
    job.grads.finish()
    with torch.no_grad():
        job.model.a.bias.grad.mul_(0.5)
    job.optimizer.step()
    for microbatch in job.grads.microbatches(next(batches)):
        job.grads.backward(loss(job.model, microbatch))
        assert job.model.a.bias.grad is None


def test_update_counts_steps_really_taken() -> None:
    """A skipped batch moves the data, not the update counter; the counter is saved."""
    job = Job(epochs=1)
    updates = []
    for batch in job.data:
        for microbatch in job.grads.microbatches(batch):
            tally = loss(job.model, microbatch)
            job.grads.backward(augend.Tally(tally.total, tally.count * 0) if batch.step == 1 else tally)
        updates.append(job.grads.step(job.optimizer, empty="skip").update)
        other = Job()
        other.load(job.save())
        assert updates[-1] == other.grads.updates
    assert [1, 1, 2] == updates


def test_a_batch_finished_before_the_save_is_not_stepped_again() -> None:
    """Resumed between two accumulators' steps, the first gets its saved record, the second its step."""
    outcomes = []
    for stop in (None, "middle"):
        pair = Pair()
        for batch in pair.data:
            for microbatch in pair.d.microbatches(batch, together=[pair.g]):
                pair.backward(microbatch)
            done = pair.d.step(pair.d_optimizer)
            if stop and batch.step == 1:
                before = reference.digest(pair.d_optimizer.state_dict())
                resumed = Pair()
                resumed.load(pair.save())
                pair = resumed
                batch = next(iter(pair.data))  # noqa: PLW2901  # the loop goes on in the other process
                assert [] == list(pair.d.microbatches(batch, together=[pair.g]))
                assert done == pair.d.step(pair.d_optimizer)
                assert before == reference.digest(pair.d_optimizer.state_dict())
            pair.g.step(pair.g_optimizer)
            if stop and batch.step == 1:
                break
        if stop:
            for batch in pair.data:
                for microbatch in pair.d.microbatches(batch, together=[pair.g]):
                    pair.backward(microbatch)
                pair.d.step(pair.d_optimizer)
                pair.g.step(pair.g_optimizer)
        outcomes.append(reference.digest(pair.save()["tensors"]))
    assert outcomes[0] == outcomes[1]


def test_drained_before_the_save_cannot_be_drained_again() -> None:
    """finish_mean closes the batch; after a resume its sums are gone, and asking for them says so."""
    job = Job()
    for microbatch in job.grads.microbatches(first(job)):
        job.grads.backward(loss(job.model, microbatch))
    job.grads.finish_mean()
    other = Job()
    other.data.register(other.grads)
    other.load(job.save())
    assert 1 == next(iter(other.data)).step
    again = Job()
    batch = first(again)
    batch.progress(again.grads).closed = batch.progress(again.grads).replay = True
    assert [] == list(again.grads.microbatches(batch))
    for call in (again.grads.finish_mean, again.grads.finish_sums, again.grads.finish):
        with pytest.raises(StateError, match="finished before it was loaded"):
            call()


def test_a_closed_batch_with_rows_in_the_window_is_refused() -> None:
    """A window of another moment than the data's is found when the batch is entered."""
    job = Job()
    batch = first(job)
    for microbatch in job.grads.microbatches(batch):
        job.grads.backward(loss(job.model, microbatch))
    batch.progress(job.grads).closed = batch.progress(job.grads).replay = True
    with pytest.raises(StateError, match="batch 0 is finished, yet the window holds 3 micro-batches"):
        next(job.grads.microbatches(batch))


def test_a_finished_batch_is_not_trained_on_again() -> None:
    """In the process that finished it, a batch cannot be entered again: silently training nothing would be worse."""
    job = Job()
    batch = first(job)
    for microbatch in job.grads.microbatches(batch):
        job.grads.backward(loss(job.model, microbatch))
    job.grads.step(job.optimizer)
    with pytest.raises(StateError, match="batch 0 is finished; take the next one"):
        next(job.grads.microbatches(batch))


def test_nothing_is_added_to_a_batch_that_was_finished_before() -> None:
    """While a resumed batch only gives its record, a backward would land in the next batch: refused."""
    job = Job()
    for microbatch in job.grads.microbatches(first(job)):
        job.grads.backward(loss(job.model, microbatch))
    done = job.grads.step(job.optimizer)
    other = Job()
    other.load(job.save())
    batch = first(other)
    assert [] == list(other.grads.microbatches(batch))
    microbatch = next(iter(batch))
    with pytest.raises(StateError, match="while batch 0 was finished before"):
        other.grads.backward(loss(other.model, microbatch))
    assert done == other.grads.step(other.optimizer)
    other = Job()
    other.load(job.save())
    assert [] == list(other.grads.microbatches(first(other)))
    other.grads.reset()  # there is nothing to drop, and the batch stays finished
    assert [[BATCH, True]] == other.data.state_dict()["ledger"]


def test_a_backward_after_leaving_the_loop_is_refused() -> None:
    """A micro-batch whose loop was left would be offered again and counted twice: refused, also by add."""
    job = Job()
    batch = first(job)
    for microbatch in job.grads.microbatches(batch):  # noqa: B007  it is used after the loop
        break
    for call in (lambda: job.grads.backward(loss(job.model, microbatch)), lambda: job.grads.add({}, 0)):
        with pytest.raises(StateError, match="has 8 rows to do"):
            call()
    for microbatch in job.grads.microbatches(batch):
        job.grads.backward(loss(job.model, microbatch))
    job.grads.add({"a.bias": torch.zeros(8)}, 0)  # what belongs to no row comes after the loop
    assert BATCH == job.grads.finish().count


def test_a_plain_loop_and_microbatches_do_not_mix() -> None:
    """Rows that a plain loop has added are not offered a second time."""
    job = Job()
    batch = first(job)
    for microbatch in batch:
        job.grads.backward(loss(job.model, microbatch))
    with pytest.raises(StateError, match="did not come from microbatches"):
        next(job.grads.microbatches(batch))
    assert BATCH == job.grads.finish().count


def test_an_old_generator_does_not_disturb_a_newer_loop() -> None:
    """A half-used loop that is collected late leaves the micro-batch of the loop that runs now alone."""
    job = Job()
    batch = first(job)
    old = job.grads.microbatches(batch)
    next(old)
    for microbatch in job.grads.microbatches(batch):
        if old is not None:
            old.close()
            old = None
        job.grads.backward(loss(job.model, microbatch))
    assert (BATCH, 3) == (job.grads.state.count, job.grads.state.microbatches)


def test_a_failed_step_can_offer_its_batch_again() -> None:
    """An exception in optimizer.step() keeps the batch open: after reset its rows are offered again, none is lost."""

    class Flaky(torch.optim.SGD):
        def step(self, closure=None):
            if not self.state.get("failed"):
                self.state["failed"] = True
                raise RuntimeError("flaky")
            return super().step(closure)

    job = Job()
    optimizer = Flaky(job.model.parameters(), lr=0.1)
    batch = first(job)
    for attempt in range(2):
        rows = 0
        for microbatch in job.grads.microbatches(batch):
            job.grads.backward(loss(job.model, microbatch))
            rows += microbatch.real_rows
        assert BATCH == rows
        if attempt:
            assert (BATCH, 1) == (job.grads.step(optimizer).count, job.grads.updates)
            continue
        with pytest.raises(RuntimeError, match="flaky"):
            job.grads.step(optimizer)
        assert all(parameter.grad is None for parameter in job.model.parameters())
        job.grads.reset()


def test_reset_right_after_a_resume_drops_the_batchs_progress() -> None:
    """A resumed window can be dropped before its batch is entered; the batch then starts over."""
    job = Job()
    for _ in zip(range(3), job.moments(), strict=False):
        pass
    other = Job()
    other.load(job.save())
    other.grads.reset()
    batch = first(other)
    assert BATCH == sum(one.real_rows for one in consumed(other, batch))


def test_a_load_after_a_reset_keeps_the_loaded_progress() -> None:
    """reset() drops what is there then, not what is loaded later: the run goes on with the same bits."""
    expected = finished(Job())
    job = Job()
    for _ in zip(range(3), job.moments(), strict=False):
        pass
    other = Job()
    other.grads.reset()
    other.load(job.save())
    assert expected == finished(other)


def consumed(job: Job, batch: augend.data.Batch) -> Iterator[augend.data.Microbatch]:
    """Run a batch and yield its micro-batches."""
    for microbatch in job.grads.microbatches(batch):
        job.grads.backward(loss(job.model, microbatch))
        yield microbatch


def test_a_window_belongs_to_one_batch() -> None:
    """Data rolled back to another batch with as many rows done is told from the window's own batch."""
    job = Job()
    batches = iter(job.data)
    job.data.register(job.grads)
    states = []
    for _ in range(2):
        batch = next(batches)
        for microbatch in job.grads.microbatches(batch):
            job.grads.backward(loss(job.model, microbatch))
            states.append(job.data.state_dict())
            if batch.step == 1:
                break
        if batch.step == 0:
            job.grads.step(job.optimizer)
    job.data.load_state_dict(states[0])
    with pytest.raises(StateError, match="the window holds 3 rows of batch 1, and 3 of batch 0 count as done"):
        next(job.grads.microbatches(first(job)))


# ------------------------------------------------------------------ two models in one loop


class Pair:
    """A small GAN: two models, two accumulators, one Batches."""

    def __init__(self, dtype: torch.dtype = torch.float32, microbatch_size: int = MICRO) -> None:
        torch.manual_seed(2)
        self.generator = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 4)).to(dtype)
        self.critic = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 1)).to(dtype)
        self.work = "float64" if dtype == torch.float64 else "float32"
        self.d = augend.Accumulator(self.critic, dtype=self.work, foreign="drop")
        self.g = augend.Accumulator(self.generator, dtype=self.work, foreign="drop")
        self.d_optimizer = torch.optim.SGD(self.critic.parameters(), lr=0.1, momentum=0.9)
        self.g_optimizer = torch.optim.SGD(self.generator.parameters(), lr=0.05, momentum=0.9)
        rows = {name: one.to(dtype) if one.is_floating_point() else one for name, one in source().items()}
        self.data = augend.Batches(rows, batch_size=BATCH, microbatch_size=microbatch_size, seed=5, epochs=2)
        self.data.register(self.d)
        self.data.register(self.g)

    def noise(self, x: torch.Tensor) -> torch.Tensor:
        return x.flip(1)  # of the row itself, so that it does not depend on the cut

    def tallies(self, x: torch.Tensor) -> tuple[augend.Tally, augend.Tally]:
        bce = augend.losses.binary_cross_entropy
        fake = self.generator(self.noise(x))
        ones = torch.ones(len(x), 1, dtype=x.dtype)
        critic = bce(self.critic(x), ones) + bce(self.critic(fake.detach()), 0 * ones)
        return critic, bce(self.critic(fake), ones)

    def backward(self, microbatch) -> None:
        critic, generator = self.tallies(microbatch["x"])
        self.g.backward(generator)
        self.d.backward(critic)

    def save(self) -> dict[str, object]:
        tensors = (
            self.generator.state_dict(), self.critic.state_dict(),
            self.d_optimizer.state_dict(), self.g_optimizer.state_dict(),
        )  # fmt: skip
        grads = (self.d.state_dict(), self.g.state_dict())
        return {"tensors": copy.deepcopy(tensors), "grads": grads, "data": self.data.state_dict()}

    def load(self, saved: dict[str, object]) -> None:
        parts = (self.generator, self.critic, self.d_optimizer, self.g_optimizer)
        for part, state in zip(parts, saved["tensors"], strict=True):
            part.load_state_dict(copy.deepcopy(state))
        self.data.load_state_dict(saved["data"])
        for grads, state in zip((self.d, self.g), saved["grads"], strict=True):
            grads.load_state_dict(state)


def trained_pair(pair: Pair, *, together: bool) -> Pair:
    """Train a pair, both models in one loop over the micro-batches, or one loop after the other."""
    for batch in pair.data:
        if together:
            for microbatch in pair.d.microbatches(batch, together=[pair.g]):
                pair.backward(microbatch)
            pair.d.step(pair.d_optimizer)
            pair.g.step(pair.g_optimizer)
            continue
        for microbatch in pair.d.microbatches(batch):
            pair.d.backward(pair.tallies(microbatch["x"])[0])
        pair.d.step(pair.d_optimizer)
        for microbatch in pair.g.microbatches(batch):
            pair.g.backward(pair.tallies(microbatch["x"])[1])
        pair.g.step(pair.g_optimizer)
    return pair


def whole_pair(*, together: bool, moved: float = 0.0) -> Pair:
    """Train the float64 twin by hand, each batch at once, with plain autograd and torch's own optimizers."""
    pair = Pair(torch.float64)
    with torch.no_grad():
        for parameter in (*pair.critic.parameters(), *pair.generator.parameters()):
            parameter.add_(moved)
    x = source()["x"].double()
    for batch in pair.data:
        part = x[batch.indices]
        gradients = {}
        for which, model in ((0, pair.critic), (1, pair.generator)):
            tally = pair.tallies(part)[which]
            gradients[which] = reference.mean_gradients(model, tally.total, float(tally.count.sum()))
            if not together:
                give(model, gradients[which])
                (pair.d_optimizer, pair.g_optimizer)[which].step()
        if together:
            give(pair.critic, gradients[0])
            give(pair.generator, gradients[1])
            pair.d_optimizer.step()
            pair.g_optimizer.step()
    return pair


def give(model: torch.nn.Module, gradients: dict[str, torch.Tensor]) -> None:
    """Write gradients."""
    for name, parameter in model.named_parameters():
        parameter.grad = gradients[name]


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("size", [1, 3, 8])
def test_a_gan_trains_as_its_float64_twin(together: bool, size: int) -> None:
    """Two accumulators over one Batches, cut anywhere, follow the whole-batch float64 twin.

    In float64 the two differ by rounding only. Weights and gradients are below 1 here, so each of the six updates
    injects at most γ(n) a weight, n = rows + features + micro-batches + 30 operations deep; a perturbation of the
    start grows by a factor that the test measures on the twin. Hence 6 · growth · γ(n).
    """
    twin = whole_pair(together=together)
    growth = 1e6 * distance(twin, whole_pair(together=together, moved=1e-6))
    assert 0.5 < growth < 10
    pair = trained_pair(Pair(torch.float64, microbatch_size=size), together=together)
    assert distance(pair, twin) <= 6 * growth * reference.gamma(BATCH + 6 + BATCH + 30, torch.float64)


def distance(first: Pair, second: Pair) -> float:
    """Return the largest difference between two pairs' weights."""
    mine = [*first.critic.parameters(), *first.generator.parameters()]
    theirs = [*second.critic.parameters(), *second.generator.parameters()]
    assert max(float(one.abs().max().detach()) for one in mine) < 1
    return max(float((a - b).abs().max().detach()) for a, b in zip(mine, theirs, strict=True))


def test_accumulators_in_one_loop_each_need_their_backward() -> None:
    """With together=, a micro-batch that one of them missed is an error."""
    pair = Pair()
    with pytest.raises(StateError, match="got no backward"):
        for microbatch in pair.d.microbatches(next(iter(pair.data)), together=[pair.g]):
            pair.d.backward(pair.tallies(microbatch["x"])[0])


def test_accumulators_in_one_loop_must_be_equally_far() -> None:
    """One that missed a micro-batch, or was reset alone, would lose or double rows: refused until all are reset."""
    pair = Pair()
    batch = next(iter(pair.data))
    with pytest.raises(ZeroDivisionError):
        for microbatch in pair.d.microbatches(batch, together=[pair.g]):
            pair.d.backward(pair.tallies(microbatch["x"])[0])
            raise ZeroDivisionError
    with pytest.raises(StateError, match="have done 3, 0 of its rows; call reset"):
        next(pair.d.microbatches(batch, together=[pair.g]))
    pair.d.reset()
    for microbatch in pair.d.microbatches(batch, together=[pair.g]):
        pair.backward(microbatch)
    assert (BATCH, 2 * BATCH) == (pair.g.finish().count, pair.d.finish().count)  # real and invented rows


def test_one_that_was_reset_alone_after_a_resume_is_not_equally_far() -> None:
    """Before its batch is entered a reset counts too: the other's rows would be added twice, so it is refused."""
    pair = Pair()
    for microbatch in pair.d.microbatches(next(iter(pair.data)), together=[pair.g]):
        pair.backward(microbatch)
        break
    resumed = Pair()
    resumed.load(pair.save())
    resumed.d.reset()
    batch = next(iter(resumed.data))
    with pytest.raises(StateError, match="have done 0, 3 of its rows; call reset"):
        next(resumed.d.microbatches(batch, together=[resumed.g]))
    resumed.d.reset()
    resumed.g.reset()
    for microbatch in resumed.d.microbatches(batch, together=[resumed.g]):
        resumed.backward(microbatch)
    assert (BATCH, 2 * BATCH) == (resumed.g.finish().count, resumed.d.finish().count)
