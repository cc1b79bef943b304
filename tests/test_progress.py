"""What a person sees: a bar on a terminal, plain lines elsewhere, never both."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from augend import Estimate, Position, _progress
from augend._fit import Begin, End, History, Step, Validation
from augend._progress import progress


class Clock:
    """A clock that moves when told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        """Tell the time."""
        return self.now


@pytest.fixture
def clock(monkeypatch) -> Clock:
    """Replace the clock that the progress reads."""
    clock = Clock()
    monkeypatch.setattr(_progress, "monotonic", clock)
    return clock


def step(number: int, **changes) -> Step:
    """Make step ``number`` of 8 rows in half a second."""
    values = {
        "step": number, "epoch": number // 4, "rows": 8, "losses": {"loss": Estimate(2.5, 0.25, 96)}, "count": 96,
        "norm": 0.5, "scale": 1.0, "skipped": False, "update": number + 1, "lr": 1e-3, "seconds": 0.5,
    }  # fmt: skip
    return Step(**{**values, **changes})


def validation(number: int) -> Validation:
    """Make a validation after step ``number``."""
    estimates = {"loss": Estimate(2.0, 0.125, 10), "accuracy": Estimate(0.75, 0.0625, 10)}
    return Validation(step=number, epoch=0, estimates=estimates, seconds=0.5)


def shown(events, clock: Clock, *, terminal: bool, width: int = 100, **options) -> str:
    """Show events, each half a second after the one before."""
    file = io.StringIO()
    console = Console(file=file, force_terminal=terminal, force_interactive=terminal, width=width, _environ={})
    with progress(console, **options) as show:
        for event in events:
            clock.now += 0.5
            show(event)
    return file.getvalue()


END = End(history=History(steps=(), validations=(), stopped="done"))


def test_elsewhere_there_are_plain_lines(clock):
    """Without a terminal: the first step, then a line every few seconds, each validation, the last step; no escapes."""
    steps = [step(number) for number in range(20)]
    text = shown([Begin(steps=20), *steps[:3], validation(2), *steps[3:], END], clock, terminal=False)
    lines = text.splitlines()
    assert "\x1b" not in text
    first = "step 1/20  epoch 1  loss 2.500 ± 0.250  norm 0.5  lr 0.001  16.0 rows/s  0:10 left"
    assert first == lines[0]
    assert "validation after step 3: loss 2.000 ± 0.125  accuracy 0.7500 ± 0.0625" == lines[1]
    assert ["1", "10", "20"] == [match for line in lines for match in re.findall(r"^step (\d+)/", line)]
    assert lines[-1].endswith("0:00 left")
    assert 4 == len(lines)


def test_a_long_line_is_not_broken(clock):
    """Plain lines are one line each, however narrow the console claims to be."""
    assert 1 == shown([Begin(steps=9), step(0)], clock, terminal=False, width=20).count("\n")


def test_the_interval_is_that_which_was_asked_for(clock):
    """With every_seconds=0 each step has its line."""
    text = shown([Begin(steps=9), *map(step, range(5))], clock, terminal=False, every_seconds=0.0)
    assert 5 == text.count("\n")


def test_a_skipped_step_and_all_terms_are_said(clock):
    """A line names every loss term, and says when the update was skipped."""
    losses = {"main": Estimate(2.0, 0.5, 8), "aux": Estimate(4.0, 1.0, 9)}
    text = shown([Begin(steps=9), step(0, losses=losses, skipped=True)], clock, terminal=False)
    assert "main 2.000 ± 0.500  aux 4.00 ± 1.00" in text
    assert text.endswith("left  skipped\n")


def test_on_a_terminal_there_is_a_bar(clock):
    """On a terminal: step of steps, loss with its error, rate and time left on one line; no plain step lines."""
    text = shown([Begin(steps=20), *map(step, range(5)), END], clock, terminal=True)
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)
    assert "━" in plain
    last = re.split(r"[\r\n]+", plain.strip())[-1]
    assert re.fullmatch(r"step 5/20 +[━╸╺ ]+ loss 2.500 ± 0.250  16.0 rows/s  0:08 left *", last)
    assert "epoch" not in plain


def test_validations_stay_above_the_bar(clock):
    """A validation is printed once, in full, above the bar."""
    text = shown([Begin(steps=20), step(0), validation(0), step(1), END], clock, terminal=True)
    assert 1 == text.count("validation after step 1: loss 2.000 ± 0.125  accuracy 0.7500 ± 0.0625")


def test_the_terminal_is_given_back_after_an_exception(clock):
    """The cursor is shown again, also when training raises."""
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, force_interactive=True, width=80, _environ={})

    def failing() -> None:
        with progress(console) as show:
            show(Begin(steps=2))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        failing()
    assert file.getvalue().rindex("\x1b[?25h") > file.getvalue().rindex("\x1b[?25l")


def resumed(step: int, rows_done: int = 0) -> Begin:
    """Begin where an earlier process stopped."""
    return Begin(steps=20, position=Position(epoch=step // 4, step=step, rows_done=rows_done), restarts=1)


def test_the_bar_of_a_resumed_run_begins_where_it_was(clock):
    """Before the first step the bar stands at the steps that are done."""
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown([resumed(12), END], clock, terminal=True))
    assert re.search(r"step 12/20 +[━╸╺]+", plain)


@pytest.mark.parametrize("terminal", [False, True])
def test_the_time_left_is_counted_from_this_process(clock, terminal):
    """Half a second a step, whatever was done before: one step in, seven of twenty are left."""
    text = shown([resumed(12), step(12)], clock, terminal=terminal)
    assert "step 13/20" in text
    assert "16.0 rows/s  0:04 left" in text


@pytest.mark.parametrize(
    ("rows_done", "expected"),
    [(6, "4.0 rows/s  0:14 left"), (8, "0.0 rows/s  0:28 left"), (0, "16.0 rows/s  0:04 left")],
)
def test_rows_of_an_earlier_process_are_not_counted_in_the_rate(clock, rows_done, expected):
    """Of the first step only the rows that were left count; where none was, the finish counts as one."""
    assert expected in shown([resumed(12, rows_done), step(12)], clock, terminal=False)
    text = shown([resumed(12, rows_done), step(12), step(13)], clock, terminal=False, every_seconds=0.0)
    assert f"{(16 - rows_done) / 1.0:.1f} rows/s" in text.splitlines()[-1]


def test_a_second_run_starts_its_own_count(clock):
    """Begin resets pace and length: the time left is that of the new run."""
    events = [Begin(steps=20), step(0), Begin(steps=2), step(0)]
    for terminal in (False, True):
        assert "0:00 left" in shown(events, clock, terminal=terminal, every_seconds=0.0).split("left")[-2] + "left"


@pytest.mark.parametrize(
    ("seconds", "expected"), [(0.4, "0:00"), (59.6, "1:00"), (3599, "59:59"), (36_061, "10:01:01")]
)
def test_time_left_reads_as_a_clock(seconds, expected):
    """Seconds are shown as minutes and seconds, and hours where there are any."""
    assert expected == _progress._clock(seconds)


def test_the_console_is_standard_output_by_default(capsys, clock):
    """Without a console the lines go to standard output."""
    with progress() as show:
        show(Begin(steps=2))
        show(step(0))
    assert capsys.readouterr().out.startswith("step 1/2  epoch 1  loss")
