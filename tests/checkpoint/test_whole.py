"""What belongs to a run is in its checkpoint, in its order, or the save says what is missing."""

from __future__ import annotations

import itertools
from pathlib import Path

import jobs
import pytest
import torch
from jobs import BATCH, MICRO, Job

import augend
from augend.errors import ContractError, StateError


def net(seed: int) -> torch.nn.Module:
    """Return a small network with dropout."""
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Dropout(0.5))


def batches() -> augend.Batches:
    """Return the rows of the jobs."""
    return augend.Batches(jobs.source(), batch_size=BATCH, microbatch_size=MICRO, epochs=1)


def test_a_batch_that_nobody_tracks_is_refused(tmp_path):
    """A plain loop over a batch leaves no trace in the data: saved, it would be trained twice after a resume."""
    model, data = net(0), batches()
    run = augend.Checkpoint(tmp_path, model=model, data=data, background=False)
    run.save()  # nothing is at hand yet
    for batch in data:
        for microbatch in batch:
            jobs.loss(model, microbatch).sum().total.sum().backward()
        with pytest.raises(StateError, match=r"data has handed out a batch.*grads\.microbatches\(batch\), or leave"):
            run.save()
        break
    run.close()


@pytest.mark.parametrize("moment", [0, 1, 3, 4])
def test_a_forgotten_accumulator_is_refused(tmp_path, moment):
    """An accumulator that goes through the data, and is no part, would lose its sums."""
    job = Job(tmp_path / "whole")
    run = augend.Checkpoint(tmp_path / "part", model=job.model, optimizer=job.optimizer, data=job.data)
    for _ in itertools.islice(job.moments(), moment + 1):
        pass
    with pytest.raises(StateError, match=r"an accumulator goes through data and is no part .*grads=grads"):
        run.save()
    job.data.unregister(job.grads)
    run.close()


@pytest.mark.parametrize("moment", [1, 3, 4])
def test_forgotten_data_are_refused(tmp_path, moment):
    """An accumulator whose data is no part would begin at row 0 after a resume; one that saw no batch needs none."""
    job = Job(tmp_path / "whole")
    run = augend.Checkpoint(
        tmp_path / "part", model=job.model, optimizer=job.optimizer, grads=job.grads, background=False
    )
    run.save()
    for _ in itertools.islice(job.moments(), moment + 1):
        pass
    with pytest.raises(StateError, match=r"grads goes through batches whose position is no part .*data=data"):
        run.save()
    run.close()


def pair(directory: Path, order: str, *, first: object = None):
    """Return two models with their accumulators over one data, given in some order, perhaps after somebody else."""
    models = {"a": net(0), "b": net(1)}
    optimizers = {name: torch.optim.SGD(model.parameters(), lr=0.1) for name, model in models.items()}
    grads = {name: augend.Accumulator(model) for name, model in models.items()}
    data = batches()
    if first is not None:
        data.register(first)
    parts = {f"grads_{name}": grads[name] for name in order}
    parts |= {f"optimizer_{name}": one for name, one in optimizers.items()}
    run = augend.Checkpoint(directory, **parts, **models, data=data, background=False)
    return models, optimizers, grads, data, run


def turn(models, optimizers, grads, batch, name: str) -> str:
    """Let one of two go through a batch."""
    for microbatch in grads[name].microbatches(batch):
        grads[name].backward(jobs.loss(models[name], microbatch))
    return repr(grads[name].step(optimizers[name]))


@pytest.mark.parametrize("resumed", ["ab", "ba"])
def test_the_order_of_the_keywords_does_not_matter(tmp_path, resumed):
    """Saved between one's step and the other's turn, resumed with keywords the other way round: same bits."""

    def train(directory: Path, order: str, *, cut: bool) -> list:
        models, optimizers, grads, data, run = pair(directory, "ab")
        for batch in data:
            turn(models, optimizers, grads, batch, "a")
            if cut:
                run.save()
                run.close()
                models, optimizers, grads, data, run = pair(directory, order)
                run.load_latest()
                batch = next(iter(data))  # noqa: PLW2901  # the same batch, of the new process
                turn(models, optimizers, grads, batch, "a")
            turn(models, optimizers, grads, batch, "b")
            break
        run.close()
        return [value.tolist() for model in models.values() for value in model.state_dict().values()]

    expected = train(tmp_path / "whole", "ab", cut=False)
    assert expected == train(tmp_path / "cut", resumed, cut=True)


def test_draws_go_by_names_and_not_by_the_order_of_keywords(tmp_path):
    """Who comes first in the draws does not depend on how the call is written."""
    outcomes = []
    for order in ("ab", "ba"):
        models, optimizers, grads, data, run = pair(tmp_path / order, order)
        for batch in data:
            for name in "ba":
                turn(models, optimizers, grads, batch, name)
        run.close()
        outcomes.append([value.tolist() for model in models.values() for value in model.state_dict().values()])
    assert outcomes[0] == outcomes[1]


def test_an_ordinal_that_somebody_else_has_is_refused(tmp_path):
    """Draws and rows go by ordinals: an accumulator that is no part and sits on a saved one is refused by name."""
    models, optimizers, grads, data, run = pair(tmp_path, "ab")
    turn(models, optimizers, grads, next(iter(data)), "a")
    run.save()
    run.close()
    stranger = augend.Accumulator(net(3))
    models, optimizers, grads, data, run = pair(tmp_path, "ab", first=stranger)
    with pytest.raises(ContractError, match=r"is number 0 of data, .*make the Checkpoint before.*unregister\(\)"):
        run.load_latest()
    data.unregister(stranger)
    run.load_latest()
    assert (grads["a"], grads["b"]) == data.owners[:2]
    run.close()


def test_ordinals_come_back(tmp_path):
    """Accumulators that came second and third draw as second and third after a resume that knows no first."""

    def train(models, optimizers, grads, data, run) -> list:
        for batch in data:
            for name in "ab":
                turn(models, optimizers, grads, batch, name)
        run.close()
        return [value.tolist() for model in models.values() for value in model.state_dict().values()]

    first = augend.Accumulator(net(3))
    whole = pair(tmp_path / "whole", "ab", first=first)
    whole[3].unregister(first)
    expected = train(*whole)
    cut = pair(tmp_path / "cut", "ab", first=first)
    cut[3].unregister(first)
    turn(*cut[:3], next(iter(cut[3])), "a")
    cut[4].save()
    cut[4].close()
    again = pair(tmp_path / "cut", "ba")
    again[4].load_latest()
    assert expected == train(*again)


def test_several_data_sets_and_their_accumulators(tmp_path):
    """Two models over two data sets: each goes on in its own, and a step that was taken is not taken again."""

    def job(directory: Path):
        models = {"a": net(0), "b": net(1)}
        optimizers = {name: torch.optim.SGD(model.parameters(), lr=0.1) for name, model in models.items()}
        grads = {name: augend.Accumulator(model) for name, model in models.items()}
        data = {name: batches() for name in models}
        parts = {
            f"{kind}_{name}": one
            for kind, all_ in (("o", optimizers), ("g", grads), ("d", data))
            for name, one in all_.items()
        }
        return models, optimizers, grads, data, augend.Checkpoint(directory, **models, **parts, background=False)

    def train(directory: Path, lines: list[str], stop: int | None = None) -> list | None:
        models, optimizers, grads, data, run = job(directory)
        run.load_latest()
        steps = 0
        for batch_a, batch_b in zip(data["a"], data["b"], strict=True):
            for name, batch in (("a", batch_a), ("b", batch_b)):
                lines.append(f"{batch.step} {name} {turn(models, optimizers, grads, batch, name)}")
                steps += 1
            if steps == stop:
                run.save()
                run.close()
                return None
        run.close()
        return [value.tolist() for model in models.values() for value in model.state_dict().values()]

    whole: list[str] = []
    expected = train(tmp_path / "whole", whole)
    cut: list[str] = []
    train(tmp_path / "cut", cut, stop=2)
    assert expected == train(tmp_path / "cut", cut)
    assert whole == cut


def test_epochs_go_on_where_they_were(tmp_path):
    """Stopped at any moment, a loop over epochs does each epoch's end exactly once, the last one's too."""

    def train(directory: Path, done: list[int], stop: int | None) -> None:
        job = Job(directory, epochs=3)
        job.run.load_latest()
        moments = 0
        for epoch in range(job.data.current_epoch, 3):
            for batch in job.data.epoch():
                assert epoch == batch.epoch
                for microbatch in job.grads.microbatches(batch):
                    job.grads.backward(jobs.loss(job.model, microbatch))
                job.grads.step(job.optimizer)
                moments += 1
                if moments == stop:
                    job.run.save()
                    job.run.close()
                    return
            done.append(epoch)
        job.run.close()

    for stop in range(1, 10):
        done: list[int] = []
        train(tmp_path / f"{stop}", done, stop)
        train(tmp_path / f"{stop}", done, None)
        assert [0, 1, 2] == done, stop


def test_a_warm_start_counts_its_own_steps(tmp_path):
    """Weights of another run's step 100 do not keep every_steps from counting here."""
    job = Job(tmp_path / "far")
    for _ in job.moments():
        pass
    path = job.run.save()
    job.run.close()
    other = Job(tmp_path / "here", every_steps=2, keep=9)
    for only in ("model", ["model"]):
        assert 6 == other.run.load(path, only=only).step
    for _ in itertools.islice(other.moments(), 9):
        other.run.save_if_due()
    assert ["00000001-step-2"] == sorted(one.name for one in (tmp_path / "here").glob("0*"))
    other.run.close()
