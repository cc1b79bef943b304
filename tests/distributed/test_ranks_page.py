"""``docs/ranks.md``: its program runs on ranks, in every way of placing the model that it shows, and says the same."""

from __future__ import annotations

import contextlib
import io
import math
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
from ranks import Ranks
from torch.distributed.run import get_args_parser

import augend
from augend.data._deal import Rounds

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "ranks.md"
TEXT = PAGE.read_text("utf-8")
STEPS = 12  # two epochs of 576 rows in batches of 96

CALLS = {
    "sharded": "train(sharded(build()), 'runs/sharded')",
    "shared sums": "train(build(), 'runs/every')",
    "replicated": "replicated()",
    "hybrid": "hybrid(replicas=dist.get_world_size())",
    "tensor parallel": "tensor_parallel(ways=dist.get_world_size())",
}


def program() -> str:
    """Return the Python of the page, block after block."""
    return "\n".join(re.findall(r"^```python\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL))


def told(call: str, directory: str) -> tuple[str, dict[str, Any]]:
    """Run a call of the page in a directory; return what rank 0 printed, and the last record."""
    before = Path.cwd()
    os.chdir(directory)
    printed = io.StringIO()
    try:
        names: dict[str, Any] = {"__name__": "page"}
        exec(program(), names)  # noqa: S102  the project's own page
        with contextlib.redirect_stdout(printed), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")  # the page tells of it
            done = eval(call, names)  # noqa: S307  as above
    finally:
        os.chdir(before)
    last = {"count": done.count, "microbatches": done.microbatches, "update": done.update}
    return printed.getvalue(), {**last, "loss": done.loss.value, "error": done.loss.error}


@pytest.fixture(scope="module")
def alone(ranks1: Ranks, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    """What the program says on one rank."""
    (one,) = ranks1.run(told, CALLS["shared sums"], str(tmp_path_factory.mktemp("alone")))
    return one


@pytest.mark.parametrize("way", CALLS)
def test_every_way_of_placing_the_model_says_the_same(
    ranks2: Ranks, alone: tuple[str, dict[str, Any]], tmp_path: Path, way: str
) -> None:
    """On two ranks: the first step's loss, error bar and norm as printed, all counts, and a loss within its noise."""
    (printed, done), (silent, other) = ranks2.run(told, CALLS[way], str(tmp_path))
    lines = printed.splitlines()
    assert (alone[0].splitlines()[0], STEPS, "") == (lines[0], len(lines), silent)
    assert repr(done) == repr(other)
    for name in ("count", "microbatches", "update"):
        assert alone[1][name] == done[name]
    # Rounding alone moves the weights after the first step: far less than what another sample of rows would.
    assert abs(alone[1]["loss"] - done["loss"]) <= alone[1]["error"] / 1000


def test_parameters_in_sixteen_bits_train(ranks2: Ranks, tmp_path: Path) -> None:
    """The page's policy for bfloat16 is accepted, and the loss falls."""
    (printed, done), _ = ranks2.run(told, "narrow()", str(tmp_path))
    first = float(re.search(r"loss ([0-9.]+)", printed)[1])
    assert STEPS == done["update"]
    assert math.isfinite(done["loss"])
    assert done["loss"] < first


@pytest.mark.long
def test_the_program_runs_under_torchrun(tmp_path: Path) -> None:
    """As the page says: two processes of one machine, and the first block is the whole program."""
    (tmp_path / "train.py").write_text(re.search(r"^```python\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)[1], "utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "train.py"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert 0 == done.returncode, done.stderr
    assert STEPS == done.stdout.count("loss")
    assert (STEPS, True) == ((at := augend.inspect(tmp_path / "runs" / "sharded")).step, at.complete)


def test_fillers_cost_what_the_page_says() -> None:
    """12 micro-batches on 5 ranks need 3 rounds; 3 of their 15 places are fillers, a fifth."""
    rounds = Rounds(rows=96, rows_done=0, microbatch_size=8, rank=0, world=5)
    assert (12, 3, 3) == (rounds.microbatches, len(rounds), rounds.fillers)
    assert "12\nmicro-batches on 5 ranks need 3 rounds, and 3 of their 15 places are fillers, 20 % of the work" in TEXT


def test_torchrun_has_the_options() -> None:
    """Every option of the page's calls of torchrun is one of this torch's, and both machines are told the same."""
    known = {name for action in get_args_parser()._actions for name in action.option_strings}
    calls = re.findall(r"torchrun (--nnodes=2.*?train\.py)", TEXT, re.DOTALL)
    assert set() == set(re.findall(r"--[a-z-]+", "".join(calls))) - known
    first, second = calls
    assert second == first.replace("is_host=1", "is_host=0").replace("addr=10.0.0.1", "addr=10.0.0.2")
