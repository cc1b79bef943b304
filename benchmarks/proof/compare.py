"""Make many runs, print a line for each, and say whether those that must end alike do."""

from __future__ import annotations

from collections.abc import Sequence

import forked
from runs import Ended, Run, execute, expected_forwards
from tasks import Task


def prove(task: Task, steps: int, runs: Sequence[Run], control: Sequence[Run]) -> bool:
    """Make all runs, and say whether those that must end alike do, and those of the control do not."""
    ended = {run: told(run, task, steps) for run in runs}
    others = {run: told(run, task, steps) for run in control}
    failed = [run for run, one in [*ended.items(), *others.items()] if one is None]
    for run in failed:
        print(f"FAILED: {run}")
    alike = differing(ended)
    if not alike and not failed:
        first = next(iter(ended.values()))
        print(
            f"all {len(ended)} exact runs ended with the same weights and optimizer state, and told the same norms, "
            f"losses and error bars, to the last bit: {first.outcome.digest}"
        )
    for sentence in alike:
        print(f"NOT THE SAME: {sentence}")
    digests = {one.outcome.digest for one in others.values() if one is not None}
    shown = "ended differently" if len(digests) == len(others) else "NOT SHOWN: some ended alike"
    print(f"control: {len(others)} runs with float32 sums {shown}")
    return not alike and not failed and len(digests) == len(others)


def told(run: Run, task: Task, steps: int) -> Ended | None:
    """Make a run and print its line; None if it came to no end."""
    try:
        ended = execute(run, task, steps)
    except forked.LostError as error:
        print(f"{run}: {error}", flush=True)
        return None
    print(f"{ended.outcome.digest}  {run}  ({ended.forwards} forwards, {ended.seconds:.1f} s)", flush=True)
    if run.resumed is None and ended.forwards != expected_forwards(run, task, ended.outcome):
        print(f"{run}: expected {expected_forwards(run, task, ended.outcome)} forwards", flush=True)
        return None
    return ended


def differing(ended: dict[Run, Ended | None]) -> list[str]:
    """Return in which way each run differs from the first."""
    done = [(run, one.outcome) for run, one in ended.items() if one is not None]
    sentences = []
    for run, outcome in done[1:]:
        first, expected = done[0]
        steps = expected.steps[-len(outcome.steps) :]
        parts = {
            "weights": expected.weights != outcome.weights,
            "optimizer state": expected.optimizer != outcome.optimizer,
            "norms or losses": repr(steps) != repr(outcome.steps),
        }
        if any(parts.values()):
            words = ", ".join(name for name, other in parts.items() if other)
            sentences.append(f"{words} of {run} and of {first}")
    return sentences
