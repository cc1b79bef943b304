"""dtype="exact": killed at any moment and resumed on any other number of ranks, the run ends in the same bits."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
from exact_cases import order, train, weighted
from job import Job, Moment, Outcome
from ranks import Ranks
from tasks import TASKS, Task

World = Callable[[int], Ranks]

STEPS = 4
SPIKE = 2  # the step whose first row has a gradient that is 10^6 times larger
MOMENTS = {
    "in the middle of a batch": Moment(1, 0, 4),
    "inside the measuring pass": Moment(0, 0, 4),
    "with a second offer pending": Moment(0, 0, 9),
    "in the middle of the second offer": Moment(0, 1, 4),
    "after the second offer": Moment(0, 1, 9),
    "before the spike is known": Moment(SPIKE, 0, 4),
    "with the spike's second offer pending": Moment(SPIKE, 0, 9),
    "in the middle of the spike's second offer": Moment(SPIKE, 1, 4),
}
FEW = ("in the middle of a batch", "inside the measuring pass", "with the spike's second offer pending")


def task(kind: str) -> Task:
    """Return what is trained: "nan" is an MLP to whose second batch a nan comes, before it is saved."""
    if kind == "nan":
        return weighted(TASKS["mlp"](), {order(STEPS)[1][0]: float("nan")})
    return weighted(TASKS[kind](), {order(STEPS)[SPIKE][0]: 1e6})


def job(kind: str, place: str = "replicated", deal: str | None = None) -> Job:
    """Return one rank's part of a run."""
    return Job(task(kind), place, deal, step=(("nonfinite", "skip"),))


def save_at(
    directory: Path, kind: str, place: str, names: tuple[str, ...]
) -> tuple[Outcome, dict[str, tuple[Path, Moment]]]:
    """Train to the end, saving at each of some moments; return how it ended, and the checkpoint of each.

    What is trained after a save is as good as lost: each resume begins with its checkpoint alone.
    """
    saver = job(kind, place)
    waiting = {name: MOMENTS[name] for name in names}
    saved: dict[str, tuple[Path, Moment]] = {}
    with saver.checkpoint(directory, keep=100) as run:
        for at in saver.moments(STEPS):
            due = [name for name, moment in waiting.items() if at >= moment]
            for name in due:
                del waiting[name]
                run.save()
                saved[name] = (max(directory.glob("0*")), at)
    return saver.outcome(), saved


def go_on(path: Path, kind: str, place: str, deal: str | None) -> Outcome:
    """Go on from a checkpoint to the end."""
    other = job(kind, place, deal)
    with other.checkpoint(path.parent / "other") as run:
        run.load(path)
        return other.train(STEPS)


@functools.cache
def alone(kind: str) -> Outcome:
    """Train in one process, without a break."""
    return job(kind).train(STEPS)


@pytest.mark.parametrize(
    ("kind", "before", "elsewhere", "names"),
    [
        ("mlp", 1, [(2, "fsdp", None), (3, "replicated", None)], FEW),
        ("mlp", 2, [(1, "replicated", None), (3, "fsdp, kept", None)], tuple(MOMENTS)),
        ("mlp", 3, [(1, "fsdp", "shuffled"), (2, "last", "uneven")], FEW),
        ("nan", 2, [(1, "replicated", None), (3, "fsdp", "uneven")], FEW[:1]),
        ("llama", 2, [(3, "fsdp", "shuffled")], FEW[:2]),
    ],
)
def test_a_run_goes_on_elsewhere_to_the_same_bits(
    ranks: World,
    tmp_path: Path,
    kind: str,
    before: int,
    elsewhere: list[tuple[int, str, str | None]],
    names: tuple[str, ...],
) -> None:
    """Weights, optimizer state, and what each further step tells, are those of a run without a break.

    Saved in the middle of a batch, inside the measuring pass, with a second offer pending, in the middle of one and
    after one, in the first batch and in one with a spike of 10^6; taken up by other numbers of ranks, on which the
    model lies otherwise, and where what is left of the batch is dealt otherwise. A save disturbs nothing.
    """
    expected = alone(kind)
    again = (0,) if kind == "nan" else (0, SPIKE, SPIKE + 1)
    assert [1 + (step in again) for step in range(STEPS)] == [told.offers for told in expected.steps]
    assert [kind == "nan" and step == 1 for step in range(STEPS)] == [told.done.skipped for told in expected.steps]
    outcomes = ranks(before).run(save_at, tmp_path, kind, "fsdp", names)
    for ended, _ in outcomes:
        assert (expected.digest, repr(expected.steps)) == (ended.digest, repr(ended.steps))
    _, saved = outcomes[0]
    for name, (path, at) in saved.items():
        assert MOMENTS[name][:2] == at[:2], f"{name}: saved at {at}"
        for world, place, deal in elsewhere:
            for ended in ranks(world).run(go_on, path, kind, place, deal):
                told = f"{name}, {at}, from {before} ranks to {world}, {place}, {deal}"
                assert (told, expected.digest) == (told, ended.digest)
                assert (told, repr(expected.steps[at.step :])) == (told, repr(ended.steps))


def test_float32_ends_otherwise(ranks: World) -> None:
    """The control: without exact sums, one rank and two do not even end alike without a break."""
    spike = {order(STEPS)[SPIKE][0]: 1e6}
    digests = {
        one.digest
        for world in (1, 2)
        for one in ranks(world).run(train, "mlp", "fsdp", None, STEPS, spike, {"dtype": "float32"})
    }
    assert 2 == len(digests)
    assert alone("mlp").digest not in digests
