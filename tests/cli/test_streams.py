"""Standard streams that are closed, full or gone: no message goes where none belongs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from augend import __main__ as program
from augend._cli import main
from augend._cli._streams import open_all, written_out

COMMAND = f"{sys.executable} -m augend"


def shell(line: str) -> subprocess.CompletedProcess:
    """Run a line of shell."""
    return subprocess.run(["/bin/sh", "-c", line], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("arguments", ["--help", "--version"])
def test_help_that_cannot_be_written_is_one_line(folder, arguments):
    """A full disk under standard output is a failure in one line, and nothing is said on the way out."""
    done = shell(f"{COMMAND} {arguments} > /dev/full")
    expected = "augend: failed: standard output cannot be written: No space left on device\n"
    assert (1, expected) == (done.returncode, done.stderr)


def test_a_refusal_does_not_go_to_standard_output(folder):
    """With standard error closed nobody hears a refusal, and standard output has nothing of it."""
    done = shell(f"{COMMAND} fit nowhere.toml 2>&-")
    assert (2, "") == (done.returncode, done.stdout)


def test_no_file_of_a_run_gets_the_number_of_a_closed_stream(folder):
    """What is said at a signal with all streams closed is lost, and no byte of it is in a file of the run."""
    Path("stop").write_text("loss 8 SIGTERM SIGTERM", "utf-8")
    done = shell(f"exec {COMMAND} fit stopped.toml --set checkpoint.every_steps=1 <&- >&- 2>&-")
    assert -signal.SIGTERM == done.returncode
    said = [path for path in Path("runs").rglob("*") if path.is_file() and b"ended at once" in path.read_bytes()]
    assert [] == said
    assert 0 == main(["verify", "runs/stopped-1"])
    assert 0 == main(["resume", "runs/stopped-1"])


def test_streams_that_are_closed_lead_nowhere(monkeypatch):
    """Python has None for a stream that was closed before it began: that becomes a place where text is lost."""
    opened, kept = [], os.fstat

    def closed(number: int) -> os.stat_result:
        if number == 2:
            raise OSError(9, "Bad file descriptor")
        return kept(number)

    with monkeypatch.context() as patched:
        patched.setattr("augend._cli._streams.os.fstat", closed)
        patched.setattr("augend._cli._streams.os.open", lambda path, flags: opened.append((path, flags)))
        patched.setattr(sys, "stdout", None)
        patched.setattr(sys, "stderr", None)
        open_all()
        for stream in (sys.stdout, sys.stderr):
            with stream:
                assert os.devnull == stream.name
                print("lost", file=stream)
    assert [(os.devnull, os.O_RDWR)] == opened


def test_what_cannot_be_written_out_is_dropped(monkeypatch, tmp_path):
    """Standard output that fails once is led elsewhere, so that Python does not fail on it once more at its end."""
    with Path("/dev/full").open("w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        full.write("text")
        assert not written_out()
        assert written_out()


def test_output_that_fails_at_the_end_is_a_failure(monkeypatch):
    """A command whose last words cannot be written has failed, unless it says something worse."""
    monkeypatch.setattr("augend._cli._app.written_out", lambda: False)
    assert 1 == main(["--version"])
    assert 2 == main(["fit", "nowhere.toml"])


def test_an_interrupt_outside_a_verb_is_one_line(monkeypatch, capfd):
    """Ctrl-C while the command line is read, or before that in the imports, ends with 130 and one line."""

    def interrupted(*_: object, **__: object) -> None:
        raise typer.Abort

    monkeypatch.setattr("augend._cli._app.app", interrupted)
    assert 130 == program.main(["--version"])
    assert ("", "augend: interrupted\n") == capfd.readouterr()

    def earlier(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("augend._cli.main", earlier)
    assert 130 == program.main(["--version"])
    assert ("", "augend: interrupted\n") == capfd.readouterr()
