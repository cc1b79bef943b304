"""``make proof``: how it deals micro-batches, and that it says whether runs ended alike. The whole takes minutes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from dealing import DEALS, Dealt
from hypothesis import given
from hypothesis import strategies as st
from runs import CONTROL, DEMO, MATRIX, Run

import augend

PROOF = Path(__file__).resolve().parents[2] / "benchmarks" / "proof"


@given(st.sampled_from(sorted(DEALS)), st.integers(0, 40), st.integers(1, 9), st.integers(0, 99))
def test_every_micro_batch_is_dealt_once(deal: str, count: int, world: int, step: int) -> None:
    """To one of so many ranks, by every rule."""
    queues = DEALS[deal](count, world, step)
    assert world == len(queues)
    assert list(range(count)) == sorted(number for queue in queues for number in queue)


def draws(offered: object) -> list[tuple[int, int, int, float]]:
    """Return of each micro-batch which rows it has, how many count, what is done after it, and a random number."""
    return [(each.first_row, each.real_rows, each.rows_done, torch.rand(()).item()) for each in offered]


@pytest.mark.parametrize("deal", sorted(DEALS))
def test_dealt_micro_batches_are_the_batches_own(deal: str) -> None:
    """All ranks together have each with the random state that augend gives it; the others have fillers meanwhile."""
    data = augend.Batches(torch.arange(26), batch_size=13, microbatch_size=2)
    owner = type("Owner", (), {})()
    for batch in data:
        expected = {first: (real, drawn) for first, real, _, drawn in draws(batch)}
        dealt = [Dealt(batch, rank=rank, world=3, deal=deal) for rank in range(3)]
        offered = [draws(each.remaining(owner)) for each in dealt]
        real = [(first, (rows, drawn)) for one in offered for first, rows, _, drawn in one if rows]
        assert sorted(expected.items()) == sorted(real)
        assert {each.rounds_left(owner) for each in dealt} == {len(one) for one in offered}
        done = [[rows for _, _, rows, _ in one] for one in offered]
        assert done[0] == sorted(done[0])
        assert [done[0]] * 3 == done
        assert 13 == done[0][-1]
        if batch.last:
            break


def test_the_runs_are_those_that_are_promised() -> None:
    """A plain process, two to four ranks, killed and resumed, shuffled; at full length each pair of worlds."""
    assert {0, 2, 3, 4} <= {run.ranks for run in DEMO}
    assert any(run.resumed not in (None, run.ranks) for run in DEMO)
    assert any(run.deal == "shuffled" for run in DEMO)
    assert {"float32"} == {run.dtype for run in CONTROL}
    worlds = {1, 2, 3, 4, 8}
    assert {(one, other) for one in worlds for other in worlds - {one}} == {
        (run.ranks, run.resumed) for run in MATRIX if run.resumed is not None
    }
    assert set(DEALS) - {"strided"} == {run.deal for run in MATRIX} - {None}
    assert Run(ranks=4, place="hsdp of 2 replicas") in MATRIX
    assert len(set(MATRIX)) == len(MATRIX)


SCRIPT = """
import torch, tasks
from compare import prove
from runs import Run
torch.set_num_threads(1)
exact = [Run(ranks=0), Run(ranks=2, resumed=1)]
float32 = [Run(ranks=0, dtype="float32"), Run(ranks=2, dtype="float32", deal="shuffled")]
print(prove(tasks.mlp(), 3, exact, float32[:1]), prove(tasks.mlp(), 3, float32, []))
"""


def test_it_says_whether_runs_ended_alike(tmp_path: Path) -> None:
    """A run that was killed by SIGKILL and resumed ends as another; two in float32 do not, and that is said."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", SCRIPT],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(PROOF), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    lines = done.stdout.splitlines()
    assert ["True False"] == lines[-1:], done.stderr
    assert 1 == sum(
        line.startswith("NOT THE SAME: weights, optimizer state, norms or losses of float32") for line in lines
    )
