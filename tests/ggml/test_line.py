"""The progress line has ggml's bytes with compat; without it, it is right to the end and keeps logs short."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from augend import Tally
from augend.errors import ContractError
from augend.ggml._dataset import Dataset
from augend.ggml._epoch import Progress
from augend.ggml._line import Bar, progress_line
from augend.ggml._parameters import Loss
from augend.ggml._result import Result

CASES = json.loads((Path(__file__).parents[1] / "golden" / "ggml" / "progress_bar.json").read_text())["cases"]


class Terminal(io.StringIO):
    """A stream that says that somebody looks at it."""

    def isatty(self) -> bool:
        return True


class Inputs:
    """What the bar reads of an optimizer: the physical batch of its inputs."""

    def __init__(self, rows: int) -> None:
        self.training = self.inputs = self
        self.shape = (1, rows, 1, 1)


def record(result: Result, case: dict, batch: int) -> None:
    """Record the k-th batch of an oracle case: a loss of 1/k, and every other row right where rows are judged."""
    hits = batch % 2 if "nan" not in case["lines"][0].partition("acc=")[2][:3] else None
    rows, loss = case["batch_size"], float(torch.tensor(1.0) / batch)
    result.record(rows=rows, loss=loss, period=1, loss_kind=Loss.MEAN, correct=hits)


def show(bar: Bar, *, train: bool, batches: int, rows: int, count: int, result: Result, after=lambda: None) -> None:
    """Call the bar for every batch of a part, and something else after each."""
    for batch in range(1, batches + 1):
        event = Progress(
            train=train,
            optimizer=Inputs(rows),
            dataset=Dataset(torch.zeros(count, 1)),
            result=result,
            batch=batch,
            batches=batches,
            started=0.0,
        )
        bar(event)
        after()


@pytest.mark.parametrize("compat", ["ggml", "prism"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case["ibatch_max"]))
def test_bytes_of_ggml(case: dict, compat: str) -> None:
    """Every line of every part has ggml's bytes: bar, counts, loss, accuracy, clock and line ends."""
    result = Result(compat=compat)
    for batch, expected in enumerate(case["lines"], 1):
        record(result, case, batch)
        actual = progress_line(
            train=case["train"],
            batch=batch,
            batches=case["ibatch_max"],
            rows=case["batch_size"],
            result=result,
            seconds=0.0,
            compat=compat,
        )
        assert expected.encode() == actual.encode()


def eighths(bar: str) -> int:
    """Count the eighths of a bar, whose cells fill from the left."""
    levels = [" ▏▎▍▌▋▊▉█".index(cell) for cell in bar]
    full = sum(levels) // 8
    assert [8] * full + [0] * (7 - full) == levels[:full] + levels[full + 1 :]
    return sum(levels)


@given(batches=st.integers(1, 300), data=st.data())
def test_a_bar_is_as_full_as_the_part_is_done(batches: int, data) -> None:
    """By default eight times eight eighths are full in proportion, rounded down, and all of them at the end."""
    batch = data.draw(st.one_of(st.integers(1, batches), st.just(batches)))
    line = progress_line(train=False, batch=batch, batches=batches, rows=1, result=Result(), seconds=0.0)
    assert 64 * batch // batches == eighths(line[8:16])
    assert line.startswith("val:   [")
    assert line.endswith("\r\n" if batch == batches else " \r")


@given(batches=st.integers(1, 300))
def test_ggmls_bar_is_never_full(batches: int) -> None:
    """With compat the last line lacks an eighth."""
    line = progress_line(
        train=True, batch=batches, batches=batches, rows=1, result=Result(compat="ggml"), seconds=0.0, compat="ggml"
    )
    assert 63 == eighths(line[8:16])


def test_the_clock_counts_and_extrapolates() -> None:
    """Elapsed time is cut to seconds, and the time left is in proportion to the batches left."""
    arguments = {"train": True, "batches": 4, "rows": 2, "result": Result()}
    line = progress_line(batch=1, seconds=3723.9, **arguments)
    assert " t=01:02:03 ETA=03:06:11 " in line
    assert " t=01:02:03 ETA=00:00:00 " in progress_line(batch=4, seconds=3723.9, **arguments)
    assert " t=100:00:00 " in progress_line(batch=4, seconds=360_000.0, **arguments)


def test_a_short_last_batch_is_counted_as_it_is() -> None:
    """The data of a part are its rows, not its batches times a whole one."""
    arguments = {"train": True, "batches": 3, "rows": 4, "all_rows": 9, "result": Result(), "seconds": 0.0}
    assert "data=0000008/0000009 " in progress_line(batch=2, **arguments)
    assert "data=0000009/0000009 " in progress_line(batch=3, **arguments)


@pytest.mark.parametrize("batch", [0, 4])
def test_a_batch_that_is_not_there(batch: int) -> None:
    """A batch outside of the part is an error, as a division by it would be."""
    with pytest.raises(ContractError, match=f"from 1 to 3; got {batch}"):
        progress_line(train=True, batch=batch, batches=3, rows=1, result=Result(), seconds=0.0)


def test_a_log_gets_one_line_for_each_part() -> None:
    """Where nobody looks, a part leaves its last line, without a carriage return."""
    stream, result = io.StringIO(), Result()
    tally = Tally(torch.tensor([1.0, 3.0]), torch.ones(2))
    result.record(rows=2, loss=2.0, period=1, loss_kind=Loss.MEAN, tally=tally, correct=1)
    bar = Bar(stream, clock=lambda: 5.0)
    show(bar, train=True, batches=3, rows=4, count=19, result=result)
    show(bar, train=False, batches=2, rows=4, count=19, result=Result())
    train, validation, rest = stream.getvalue().split("\n")
    accuracy = result.accuracy()
    assert (
        f"train: [████████] data=0000012/0000012 loss=2.00000±1.00000 acc=50.00±{100 * accuracy.error:.2f}% "
        "t=00:00:05 ETA=00:00:00"
    ) == train
    assert validation.startswith("val:   [████████] data=0000007/0000007 loss=0.00000±nan acc=nan±nan% ")
    assert not rest


def test_a_terminal_is_written_to_a_few_times_a_second() -> None:
    """A line comes when enough time went by, and at the end of a part."""
    stream, now = Terminal(), [0.0]
    bar = Bar(stream, every_seconds=10.0, clock=lambda: now[0])

    def tick() -> None:
        now[0] += 1.0

    show(bar, train=True, batches=39, rows=1, count=39, result=Result(), after=tick)
    *lines, end = stream.getvalue().split("\r")
    assert ["0000001", "0000011", "0000021", "0000031", "0000039"] == [line[23:30] for line in lines]
    assert "\n" == end


@pytest.mark.parametrize("stream", [io.StringIO(), Terminal()], ids=["log", "terminal"])
def test_ggml_writes_every_line(stream: io.StringIO) -> None:
    """With compat every batch has its line, wherever it goes."""
    bar = Bar(stream, compat="ggml", clock=lambda: 0.0)
    show(bar, train=True, batches=5, rows=1, count=5, result=Result(compat="ggml"))
    assert 5 == stream.getvalue().count("\r")
    assert 1 == stream.getvalue().count("\n")


@pytest.mark.parametrize(("compat", "name"), [(None, "fit"), ("ggml", "ggml_opt_fit")])
def test_the_frame_of_a_fit(compat, name: str) -> None:
    """Each epoch has a head and ends with an empty line, and the fit with its time, as ggml prints them."""
    stream = io.StringIO()
    bar = Bar(stream, compat=compat)
    for epoch in (1, 2):
        bar.begin(epoch, 30)
    bar.end(61.0)
    expected = f"{name}: epoch 0001/0030:\n\n{name}: epoch 0002/0030:\n\n{name}: training took 00:01:01\n"
    assert expected == stream.getvalue()


def test_a_fit_without_epochs_has_no_gap() -> None:
    """Where no epoch was made, as after a resume of what was done, there is nothing to set apart."""
    stream = io.StringIO()
    Bar(stream).end(0.5)
    assert "fit: training took 00:00:00\n" == stream.getvalue()
