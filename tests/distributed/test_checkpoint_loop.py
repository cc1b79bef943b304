"""Checkpoints in a loop on ranks: when one is due, who may stop it, and what a resume on other ranks comes to."""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from disk import Faulty
from jobs_on_ranks import BATCH, MICRO, Job, Net, source, whole
from ranks import Ranks
from torch import Tensor

import augend
from augend.errors import CheckpointError

World = Callable[[int], Ranks]


def same(outcomes: list[Any]) -> Any:
    """Return what all ranks returned."""
    assert [outcomes[0]] * len(outcomes) == outcomes
    return outcomes[0]


# ---------------------------------------------------------------- stopping


def stop_one(directory: Path, how: str, which: int) -> tuple[int, object, str, bool]:
    """Ask one rank to stop before the third call; return at which call the run ended, and with what code."""
    job = Job(directory, "fsdp")
    calls, code = 0, None
    try:
        for _ in job.moments():
            if calls == 2 and dist.get_rank() == which:
                if how == "request":
                    job.run.request_stop()
                else:
                    os.kill(os.getpid(), signal.SIGTERM)
            calls += 1
            job.run.save_if_due()
    except SystemExit as stop:
        code = stop.code
    (path,) = directory.glob("0*")
    stopped = job.run.stop_requested
    job.run.close()
    return calls, code, path.name, stopped


@pytest.mark.parametrize(("how", "which"), [("signal", 1), ("signal", 0), ("request", 1)])
def test_a_signal_to_one_rank_stops_all(ranks2: Ranks, tmp_path: Path, how: str, which: int) -> None:
    """One call later all have saved the same, and end with code 3; a resume is where they stopped."""
    calls, code, name, stopped = same(ranks2.run(stop_one, tmp_path, how, which))
    assert (4, 3, "00000001-step-1", True) == (calls, code, name, stopped)
    assert augend.inspect(tmp_path).complete


# ---------------------------------------------------------------- when a save is due


def saves(directory: Path, options: dict[str, Any], first: dict[str, Any]) -> list[str]:
    """Run to the end and return the names of all checkpoints.

    Args:
        directory: Where.
        options: For the Checkpoint.
        first: For that of rank 0, in their place.
    """
    job = Job(directory, "fsdp", keep=100, **(first if dist.get_rank() == 0 else options))
    for _ in job.moments():
        job.run.save_if_due()
    job.run.close()
    return sorted(one.name for one in directory.glob("0*"))


def test_steps_are_counted_alike_on_all_ranks(ranks2: Ranks, tmp_path: Path) -> None:
    """A save is due as soon as a step is done, as in one process: no rank has to ask another."""
    names = same(ranks2.run(saves, tmp_path, {"every_steps": 2}, {"every_steps": 2}))
    assert ["00000001-step-2", "00000002-step-4"] == names


def test_seconds_are_those_of_the_first_rank(ranks2: Ranks, tmp_path: Path) -> None:
    """Its clock tells, and all save one call later; what other ranks' clocks say does not count."""
    none, every = {"every_seconds": 1e9}, {"every_seconds": 0}
    assert [] == same(ranks2.run(saves, tmp_path / "never", every, none))
    names = same(ranks2.run(saves, tmp_path / "always", none, every))
    expected = ["step-0-rows-6", "step-0-rows-12", "step-1", "step-1-rows-6"]
    assert [f"{number:08d}-{name}" for number, name in enumerate(expected, start=1)] == names[:4]
    assert 12 == len(names)  # of 13 calls, all but the first


def fail_unheard(directory: Path) -> tuple[int, str, list[str]]:
    """Save in the background on a full disk of rank 1; return at which call all hear of it."""
    job = Job(directory, "fsdp", background=True)
    job.run.save()
    job.run.wait()
    whole_disk = job.run._files
    if dist.get_rank() == 1:
        job.run._files = Faulty("write", 0)
    job.run.save()
    job.run._saving._future.exception()  # it has failed, and nobody was told
    job.run._files = whole_disk
    calls, message = 0, ""
    for _ in job.moments():
        calls += 1
        try:
            job.run.save_if_due()
        except CheckpointError as error:
            message = str(error)
            break
    job.run.save()
    job.run.close()
    return calls, message, sorted(one.name for one in directory.glob("0*"))


def test_a_failure_in_the_background_is_heard_by_all_at_the_same_call(ranks2: Ranks, tmp_path: Path) -> None:
    """The ranks do not part over it: none raises while another goes on."""
    calls, message, names = same(ranks2.run(fail_unheard, tmp_path))
    assert 2 == calls
    assert message.startswith("rank 1: ")
    assert ["00000001-step-0", "00000002-step-0-rows-6"] == names


def stop_after_a_failure(directory: Path) -> tuple[object, list[str], list[str]]:
    """Ask to stop while a save has failed in the background."""
    job = Job(directory, "fsdp", background=True)
    job.run.save_if_due()
    if dist.get_rank() == 1:
        job.run.request_stop()
    job.run.save_if_due()
    before, job.run._files = job.run._files, Faulty("write", 0)
    job.run.save()
    job.run._saving._future.exception()
    job.run._files = before
    with warnings.catch_warnings(record=True) as caught, pytest.raises(SystemExit) as stop:
        warnings.simplefilter("always")
        job.run.save_if_due()
    job.run.close()
    return stop.value.code, [str(one.message)[:27] for one in caught], sorted(one.name for one in directory.glob("0*"))


def test_a_stop_saves_whatever_failed_before(ranks2: Ranks, tmp_path: Path) -> None:
    """The failure is told as a warning, and the last save is tried all the same."""
    assert (3, ["a checkpoint was not saved:"], ["00000001-step-0"]) == same(ranks2.run(stop_after_a_failure, tmp_path))


def train_meanwhile(directory: Path) -> tuple[dict[str, str], dict[str, str]]:
    """Save in the background, go on training at once, and load what was saved."""
    job = Job(directory, "fsdp", background=True)
    job.advance(1)
    expected = job.everything()
    job.run.save()
    job.advance(4)
    job.run.close()
    job.run.load_latest()
    found = job.everything()
    job.run.close()
    return expected, found


def test_training_on_does_not_change_what_is_being_written(ranks2: Ranks, tmp_path: Path) -> None:
    """The copy was made before, of every rank's shards at the same moment."""
    expected, found = same(ranks2.run(train_meanwhile, tmp_path))
    assert expected == found


def save_after_a_forward(directory: Path) -> tuple[dict[str, str], dict[str, str]]:
    """Save and load while the outermost module still has what it gathered for a forward without a backward."""
    job = Job(directory, "fsdp")
    job.advance(4)
    expected = job.everything()
    parts = job.run.parts
    run = augend.Checkpoint(directory, optimizer=parts["optimizer"], model=parts["model"], background=False)
    with torch.no_grad():
        job.model(torch.zeros(2, 4))
    run.save()
    job.model.reshard()
    job.advance(3)
    with torch.no_grad():
        job.model(torch.zeros(2, 4))
    run.load_latest()
    run.close()
    found = job.everything()
    return {name: expected[name] for name in ("weights", "moments")}, {
        name: found[name] for name in ("weights", "moments")
    }


def test_a_model_may_have_gathered_its_parameters(ranks2: Ranks, tmp_path: Path) -> None:
    """After a validation, FSDP2 keeps the outermost parameters whole: a save and a load do not mind."""
    expected, found = same(ranks2.run(save_after_a_forward, tmp_path))
    assert expected == found


# ---------------------------------------------------------------- random state


def draw(directory: Path, seeds: list[int]) -> list[list[float]]:
    """Draw on every rank after a save, and again after it was loaded."""
    run = augend.Checkpoint(directory, model=torch.nn.Linear(1, 1), background=False)
    torch.manual_seed(seeds[dist.get_rank()])
    run.save()
    before = torch.rand(2).tolist()
    run.load_latest()
    after = torch.rand(2).tolist()
    run.close()
    return [before, after]


def draw_elsewhere(directory: Path) -> list[float]:
    """Draw after loading."""
    run = augend.Checkpoint(directory, model=torch.nn.Linear(1, 1), background=False)
    run.load_latest()
    run.close()
    return torch.rand(2).tolist()


@pytest.mark.parametrize("seeds", [[1, 1], [1, 2]])
def test_every_rank_goes_on_with_its_own_draws(ranks: World, tmp_path: Path, seeds: list[int]) -> None:
    """Where the generators differ each rank has its own back, and further ranks begin with the first one's."""
    (first, again), (second, once_more) = ranks(2).run(draw, tmp_path, seeds)
    assert first == again
    assert second == once_more
    assert (first == second) == (seeds == [1, 1])
    assert [first, second, first] == ranks(3).run(draw_elsewhere, tmp_path)
    (path,) = tmp_path.glob("0*")
    assert (seeds == [1, 2]) == (path / "random-00002.json").exists()
    assert not (path / "random-00001.json").exists()


# ---------------------------------------------------------------- other ranks go on with a batch


def save_everywhere(directory: Path, place: str) -> tuple[list[Any], dict[str, Tensor]]:
    """Train one batch, saving after every micro-batch; return what was pending each time, and the weights after it."""
    job = Job(directory, place, optimizer="sgd", keep=100)
    pending = []
    for number, _ in zip(range(4), job.moments(), strict=False):
        if number < 3:
            job.run.save()
            pending.append(whole(job.grads.state_dict()))
    job.run.close()
    return pending, job.weights()


def go_on(path: Path, place: str) -> tuple[Any, dict[str, Tensor]]:
    """Load one of them, and finish the batch."""
    job = Job(path.parent / "other", place, seed=3, optimizer="sgd")
    job.run.load(path)
    pending = whole(job.grads.state_dict())
    while job.grads.updates == 0:
        job.advance(1)
    job.run.close()
    return pending, job.weights()


def digest(pending: dict[str, Any]) -> tuple[str, object]:
    """Return the sums, to the bit, and everything else of a window."""
    sums = {name: one.numpy().tobytes() for name, one in pending["sums"]["loss"].items()}
    return repr(sorted(sums.items())), {name: one for name, one in pending.items() if name != "sums"}


def magnitudes() -> dict[str, Tensor]:
    """Return the sum of |gradient| over the micro-batches of the first batch, over its rows."""
    torch.manual_seed(1)
    model = Net()
    data = augend.Batches(source(), batch_size=BATCH, microbatch_size=MICRO, seed=5, epochs=2)
    total = {name: torch.zeros_like(one, dtype=torch.float64) for name, one in model.state_dict().items()}
    for microbatch in next(iter(data)):
        model.zero_grad()
        augend.losses.cross_entropy(model(microbatch["x"]), microbatch["y"]).total.sum().backward()
        for name, one in model.named_parameters():
            total[name] += 0 if one.grad is None else one.grad.double().abs()
    return {name: one / BATCH for name, one in total.items()}


@pytest.mark.parametrize("place", ["fsdp", "replicated"])
def test_a_batch_begun_on_two_ranks_is_finished_on_any_number(ranks: World, tmp_path: Path, place: str) -> None:
    """Saved after every micro-batch on 2 ranks, taken up on 1, 3 and 2: nothing is lost and nothing counted twice.

    Sums, moments and counters are the same to the bit; after the step so are the weights on 2 ranks again, and on
    others they are within the bound of the sums, twice γ(k) of the magnitudes, beside the roundings of the division
    and of the weight itself. The micro-batches are the same, so their gradients are.
    """
    (pending, expected), *_ = ranks(2).run(save_everywhere, tmp_path, place)
    u = 2.0**-24
    gamma = (4 + 3 + 3) * u / (1 - (4 + 3 + 3) * u)  # micro-batches + ranks + 3
    bound = {name: (2 * gamma + 4 * u) * one for name, one in magnitudes().items()}
    paths = sorted(tmp_path.glob("0*"))
    assert 3 == len(paths)
    for number, path in enumerate(paths):
        for world in (1, 3, 2):
            for found, weights in ranks(world).run(go_on, path, place):
                assert digest(pending[number]) == digest(found)
                for name, one in expected.items():
                    allowed = bound[name] + 2 * u * one.double().abs()
                    assert bool(((weights[name].double() - one.double()).abs() <= allowed * (world != 2)).all()), name
