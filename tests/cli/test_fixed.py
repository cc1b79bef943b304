"""What may not change between a run's beginning and its end, as a part of its checkpoints."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from augend import Checkpoint, sources
from augend._cli._fixed import Fixed
from augend._config import Setting, read
from augend.errors import ConfigError


def fixed(rows: object, *settings: str) -> Fixed:
    """Build the part for rows of the user's own."""
    source = sources.Source(rows=rows, loss=lambda model, microbatch: None)
    return Fixed(read(Path("linear.toml"), [Setting.parse(text) for text in settings]), source)


def fingerprint(rows: object) -> str | None:
    """Return the fingerprint of rows of the user's own."""
    return fixed(rows).state_dict()["rows"]["sha256"]


class Rows:
    """A dataset of three rows, each made when it is asked for."""

    def __init__(self, make: Callable[[int], object]) -> None:
        self.make = make

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> object:
        return self.make(index)


KINDS = {
    "mapping": lambda last: {"x": torch.tensor([1.0, 2.0, last])},
    "tuple": lambda last: (torch.tensor([1.0, 2.0, last]), np.arange(3)),
    "tensor": lambda last: torch.tensor([1.0, 2.0, last]),
    "array": lambda last: np.array([1.0, 2.0, last]),
    "dataset": lambda last: TensorDataset(torch.tensor([1.0, 2.0, last])),
    "bfloat16": lambda last: torch.tensor([1.0, 2.0, last], dtype=torch.bfloat16),
    "numbers": lambda last: Rows(lambda index: [1.0, 2.0, last][index]),
    "texts": lambda last: Rows(lambda index: {"text": ["a", "b", str(last)][index], "n": [index]}),
    "scalars": lambda last: Rows(lambda index: np.float32([1.0, 2.0, last][index])),
}


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
def test_another_last_row_is_seen(folder, make):
    """Whatever kind the rows are of: equal ones have one fingerprint, and another last row gives another."""
    assert fingerprint(make(3.0)) == fingerprint(make(3.0))
    assert None is not fingerprint(make(3.0))
    assert fingerprint(make(3.0)) != fingerprint(make(4.0))


@pytest.mark.parametrize(
    "value",
    [object(), {"x": object()}, [b"bytes"], np.array([None]), torch.ones(2, device="meta"), torch.ones(2).to_sparse()],
    ids=["object", "in a mapping", "bytes", "objects of numpy", "meta", "sparse"],
)
def test_rows_of_no_known_kind_are_counted_only(folder, value):
    """A row that cannot be compared refuses nothing: the number of rows is what is left."""
    assert {"count": 3, "vocabulary": None, "sha256": None} == fixed(Rows(lambda index: value)).state_dict()["rows"]


def test_rows_that_draw_are_compared_by_the_run_s_seed(folder):
    """Rows made with the global generators are the same each time, and looking at them moves no generator."""

    def draw(index: int) -> list[float]:
        return [torch.rand(()).item(), random.random(), np.random.rand()]  # noqa: NPY002, S311 - what a user does

    first = fingerprint(Rows(draw))
    draw(0)
    before = torch.get_rng_state(), random.getstate()
    assert first == fingerprint(Rows(draw))
    assert None is not first
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == random.getstate()


def test_rows_that_are_never_the_same_are_counted_only(folder):
    """Rows from a generator of their own, which nobody can seed, refuse nothing either."""
    generator = np.random.default_rng()
    assert None is fingerprint(Rows(lambda index: generator.random()))


def test_every_row_of_a_named_source_is_seen(folder):
    """Of docstrings each pair counts, in its place."""
    Path("code").mkdir()
    functions = [f'def f{number}():\n    "Return {number}."\n' for number in range(5)]
    run = read(Path("llama.toml"), [Setting.parse("data={source='docstrings',folder='code'}")])
    found = []
    for order in ([0, 1, 2, 3, 4], [0, 2, 1, 3, 4], [0, 1, 2, 3, 4]):
        Path("code/functions.py").write_text("".join(functions[index] for index in order), "utf-8")
        found.append(Fixed(run, sources.docstrings("code")).state_dict()["rows"])
    assert found[0] == found[2]
    assert found[0]["sha256"] != found[1]["sha256"]
    assert (5, 258) == (found[0]["count"], found[0]["vocabulary"])


def test_digits_have_a_fingerprint(folder):
    """Rows that are columns are read as columns."""
    run = read(Path("linear.toml"), [Setting.parse("data={source='digits'}")])
    source = sources.digits()
    first = Fixed(run, source).state_dict()
    source.rows["x"][7, 7] += 1
    assert first["rows"]["sha256"] != Fixed(run, source).state_dict()["rows"]["sha256"]


def test_a_state_goes_through_a_checkpoint(folder):
    """What TOML can say, dates, nan and tables among it, is compared as what it was after it was on disk."""
    settings = ("model.when=2026-01-02T03:04:05Z", "model.rate=nan", "model.sizes=[1, {a=1.5}]", "model.'$x'=1")
    part = fixed(torch.ones(3), *settings)
    keys = part.state_dict()["keys"]
    assert datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC).isoformat() == keys["model.when"]
    with Checkpoint("saved", run=part) as checkpoint:
        checkpoint.save()
    with Checkpoint("saved", run=fixed(torch.ones(3), *settings)) as checkpoint:
        checkpoint.load_latest()
    part.load_state_dict(copy.deepcopy(part.state_dict()))
    with pytest.raises(ConfigError, match=r"^run: model\.rate = 1\.0: the run was begun with nan; set it back"):
        Checkpoint("saved", run=fixed(torch.ones(3), *settings, "model.rate=1.0")).load("saved")


def test_loading_refuses_as_preparing_does(folder):
    """A state of other rows is refused, with the two numbers where they differ."""
    part = fixed(torch.ones(3))
    with pytest.raises(ConfigError, match=r"^data\.source: its rows are others .*begun with \(4 then, 3 now\); bring"):
        part.load_state_dict(fixed(torch.ones(4)).state_dict())
