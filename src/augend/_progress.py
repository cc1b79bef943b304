"""What a person sees while a run goes on: a bar on a terminal, plain lines elsewhere, never both."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic
from typing import final

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from augend._fit import Begin, Event, Listener, Step, Validation

_WHOLE_RATE = 100  # rows a second, from where on decimals say nothing
_RATE_STEPS = 50  # the rate shown is that of the last so many steps


@contextmanager
def progress(console: Console | None = None, *, every_seconds: float = 5.0) -> Iterator[Listener]:
    """Show a run on the console, as the listener that this context hands out.

    Args:
        console: Where; standard output if None.
        every_seconds: Least time between two plain lines; validations, the first and the last step always have one.

    Example:
        >>> with progress() as show:  # doctest: +SKIP
        ...     augend.fit(model, data, loss=loss, optimizer=optimizer, steps=100, listeners=[show])
    """
    console = Console() if console is None else console
    if not console.is_interactive:
        yield _Lines(console, every_seconds)
        return
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=None), TextColumn("{task.fields[text]}"))
    with Progress(*columns, console=console, expand=True) as bar:
        yield _Bar(bar)


@final
class _Pace:
    """How fast rows go by in this process, and how long it may still take.

    Args:
        rows_before: Rows of the first step that were done before this process.
    """

    def __init__(self, rows_before: int = 0) -> None:
        self._latest: deque[tuple[int, float]] = deque(maxlen=_RATE_STEPS)  # rows and seconds of each step
        self._begun = monotonic()
        self._done = 0.0
        self._rows_before = rows_before

    def add(self, step: Step) -> None:
        rows = step.rows - self._rows_before
        self._latest.append((rows, step.seconds))
        self._done += max(rows, 1) / step.rows  # all rows may have been done, and the step only taken
        self._rows_before = 0

    def rows_per_second(self) -> float:
        seconds = sum(seconds for _, seconds in self._latest)
        return sum(rows for rows, _ in self._latest) / max(seconds, 1e-9)  # a clock may stand still for a short step

    def seconds_left(self, steps: int) -> float:
        return (monotonic() - self._begun) / self._done * steps


@final
class _Lines:
    """A line every few seconds."""

    def __init__(self, console: Console, every_seconds: float) -> None:
        self._console = console
        self._every_seconds = every_seconds
        self._steps = 0
        self._pace = _Pace()
        self._next = 0.0

    def __call__(self, event: Event) -> None:
        if isinstance(event, Begin):
            self._steps, self._pace = event.steps, _pace(event)
        elif isinstance(event, Step):
            self._pace.add(event)
            done = event.step + 1
            if monotonic() >= self._next or done == self._steps:
                self._next = monotonic() + self._every_seconds
                _print(self._console, _step_line(event, self._steps, self._pace))
        elif isinstance(event, Validation):
            _print(self._console, _validation_line(event))


@final
class _Bar:
    """One bar, and above it a line for each validation."""

    def __init__(self, bar: Progress) -> None:
        self._bar = bar
        self._pace = _Pace()
        self._task = bar.add_task("step 0", total=None, text="")
        self._steps = 0

    def __call__(self, event: Event) -> None:
        if isinstance(event, Begin):
            self._steps, self._pace = event.steps, _pace(event)
            self._bar.update(self._task, total=event.steps)
            if event.position is not None:
                done = event.position.step
                self._bar.update(self._task, completed=done, description=f"step {done}/{self._steps}")
        elif isinstance(event, Step):
            self._pace.add(event)
            done = event.step + 1
            text = f"loss {event.loss}  {_rate(event, self._steps, self._pace)}"
            self._bar.update(self._task, completed=done, description=f"step {done}/{self._steps}", text=text)
        elif isinstance(event, Validation):
            _print(self._bar.console, _validation_line(event))


def _pace(begin: Begin) -> _Pace:
    return _Pace(0 if begin.position is None else begin.position.rows_done)


def _print(console: Console, text: str) -> None:
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def _step_line(step: Step, steps: int, pace: _Pace) -> str:
    done = f"step {step.step + 1}/{steps}  epoch {step.epoch + 1}"
    skipped = "  skipped" if step.skipped else ""
    losses = "  ".join(f"{name} {estimate}" for name, estimate in step.losses.items())
    return f"{done}  {losses}  norm {step.norm:.4g}  lr {step.lr:.3g}  {_rate(step, steps, pace)}{skipped}"


def _rate(step: Step, steps: int, pace: _Pace) -> str:
    rate = pace.rows_per_second()
    return f"{rate:.{0 if rate >= _WHOLE_RATE else 1}f} rows/s  {_clock(pace.seconds_left(steps - step.step - 1))} left"


def _clock(seconds: float) -> str:
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def _validation_line(validation: Validation) -> str:
    estimates = "  ".join(f"{name} {estimate}" for name, estimate in validation.estimates.items())
    return f"validation after step {validation.step + 1}: {estimates}"
