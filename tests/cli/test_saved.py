"""augend inspect, verify and evaluate: what is said of what was saved, to people and to programs."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch

import augend
from augend import __version__
from augend._cli import main
from augend._cli._console import in_units
from augend._cli._restore import restored


def flip(path: Path) -> None:
    """Change one bit in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def weights_of(saved: Path, number: int) -> Path:
    """Return the one file of weights of a checkpoint."""
    (path,) = (saved / "checkpoints" / f"0000000{number}-step-0" / "model").iterdir()
    return path


def complaint(capsys) -> str:
    """Return the one line on standard error, where nothing is on standard output."""
    output, message = capsys.readouterr()
    assert "" == output
    assert 1 == message.count("\n")
    return message


def test_inspect_shows_a_person_what_is_there(saved, capsys):
    """augend inspect prints position, sizes and digest as aligned lines, and nothing on standard error."""
    assert 0 == main(["inspect", str(saved)])
    output, message = capsys.readouterr()
    assert "" == message
    found = augend.inspect(saved)
    labels = ["checkpoint", "step", "epoch", "rows_done", "microbatch", "count", "updates", "world"]
    labels += ["part model", "part optimizer", "size", "created", "versions", "digest"]
    lines = output.splitlines()
    assert labels == [line[:15].rstrip() for line in lines]
    assert f"checkpoint     {saved}/checkpoints/00000003-step-0" == lines[0]
    assert re.fullmatch(r"part model     2 tensors, \d+ bytes", lines[8])
    assert f"versions       augend {__version__}, torch {torch.__version__}" == lines[-2]
    assert f"digest         {found.digest}" == lines[-1]


def test_inspect_json_is_one_object_and_nothing_else(saved, capsys):
    """augend inspect --json prints exactly the plain form of augend.inspect, on one line."""
    assert 0 == main(["inspect", str(saved), "--json"])
    output, message = capsys.readouterr()
    assert ("", 1) == (message, output.count("\n"))
    plain = json.loads(output)
    assert augend.inspect(saved).to_plain() == plain
    assert set() == {"step", "microbatch", "rows_done", "count", "world", "digest", "complete"} - plain.keys()


def test_inspect_names_damaged_newer_checkpoints(saved, capsys):
    """Of a run whose newest checkpoint is damaged the next older one is shown, and what is wrong with the newer."""
    flip(weights_of(saved, 3))
    assert 0 == main(["inspect", str(saved)])
    output = capsys.readouterr().out
    assert output.startswith(f"checkpoint     {saved}/checkpoints/00000002-step-0\n")
    assert re.search(r"^damaged newer  .*00000003-step-0.*model/.*safetensors", output, re.MULTILINE)


def test_inspect_of_a_damaged_checkpoint_says_so(saved, capsys):
    """A damaged checkpoint that is asked for itself is shown with what is wrong, without a digest, and ends with 1."""
    flip(weights_of(saved, 3))
    newest = str(saved / "checkpoints" / "00000003-step-0")
    assert 1 == main(["inspect", newest])
    output = capsys.readouterr().out
    assert re.search(r"^damaged        .*model/.*safetensors", output, re.MULTILINE)
    assert "digest" not in output
    assert 1 == main(["inspect", newest, "--json"])
    plain = json.loads(capsys.readouterr().out)
    assert (False, None) == (plain["complete"], plain["digest"])


@pytest.mark.parametrize("verb", ["inspect", "verify", "evaluate"])
def test_what_is_not_there_is_one_line(saved, capsys, verb):
    """No such path is wrong usage; a run in which nothing was saved yet, or nothing good, is a failure."""
    assert 2 == main([verb, "nowhere"])
    assert complaint(capsys).startswith("augend: nowhere: no such ")
    for number in (1, 2, 3):
        flip(weights_of(saved, number))
    if verb != "verify":
        assert 1 == main([verb, str(saved)])
        assert re.search(r"00000003-step-0.*00000002-step-0.*00000001-step-0", complaint(capsys))
    shutil.rmtree(saved / "checkpoints")
    assert 1 == main([verb, str(saved)])
    assert complaint(capsys).startswith(f"augend: failed: {saved} holds no checkpoint")


@pytest.mark.parametrize("verb", ["inspect", "verify"])
def test_a_file_is_no_checkpoint(folder, capsys, verb):
    """A path that is a file is said to be no checkpoint."""
    assert 1 == main([verb, "linear.toml"])
    assert "linear.toml is no checkpoint" in complaint(capsys)


def test_verify_has_a_line_for_each_checkpoint(saved, capsys):
    """augend verify prints ok and a size for each checkpoint of a run, the oldest first, and ends with 0."""
    for place in (saved, saved / "checkpoints"):
        assert 0 == main(["verify", str(place)])
        output, message = capsys.readouterr()
        assert "" == message
        names = [f"{saved}/checkpoints/0000000{number}-step-0" for number in (1, 2, 3)]
        assert names == re.findall(r"^ok       (\S+), [\d.]+ (?:bytes|kB)$", output, re.MULTILINE)
        assert 3 == output.count("\n")


def test_verify_names_the_damaged_file(saved, capsys):
    """A damaged checkpoint has a line that names the file, the others are still ok; the command ends with 1."""
    flip(weights_of(saved, 2))
    assert 1 == main(["verify", str(saved)])
    output, message = capsys.readouterr()
    assert "" == message
    assert ["ok", "damaged", "ok"] == [line.split()[0] for line in output.splitlines()]
    assert re.search(r"^damaged  .*00000002-step-0.*model/.*safetensors", output, re.MULTILINE)
    for number, code in ((1, 0), (2, 1)):
        assert code == main(["verify", str(saved / "checkpoints" / f"0000000{number}-step-0")])


def test_verify_leaves_out_what_the_run_removes_meanwhile(saved, capsys, monkeypatch):
    """A checkpoint that a running job prunes while the others are read is not called damaged."""

    def verify(path: Path) -> None:
        if "00000001" in path.name:
            shutil.rmtree(path)
        augend.verify(path)

    monkeypatch.setattr("augend._cli._saved.verify", verify)
    assert 0 == main(["verify", str(saved)])
    assert ["ok", "ok"] == [line.split()[0] for line in capsys.readouterr().out.splitlines()]


def test_evaluate_measures_the_held_out_rows(saved, capsys):
    """augend evaluate prints the loss of the newest model over the held-out rows, as augend.evaluate measures it."""
    assert 0 == main(["evaluate", str(saved)])
    output, message = capsys.readouterr()
    assert "" == message
    found = restored(saved)
    rows = augend.Batches(found.rows.held_out, batch_size=2, microbatch_size=2)
    loss = augend.evaluate(found.model, rows, loss=found.rows.source.loss)["loss"]
    assert [
        f"checkpoint  {saved}/checkpoints/00000003-step-0",
        "updates     0",
        "data        nets_of_the_cli:rows, 2 rows: the held-out rows",
        f"held out    loss {loss}",
    ] == output.splitlines()


def test_evaluate_says_when_no_rows_are_held_out(saved, capsys):
    """Without held-out rows all are measured, and the lines say so."""
    config = saved / "config.toml"
    config.write_text(config.read_text("utf-8").replace("validation = 0.25", "validation = 0.0"), "utf-8")
    assert 0 == main(["evaluate", str(saved / "checkpoints" / "00000001-step-0")])
    output = capsys.readouterr().out
    assert "00000001-step-0\n" in output
    assert "8 rows: none are held out, so all rows it was trained on\n" in output
    assert re.search(r"^all rows    loss \d", output, re.MULTILINE)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 bytes"),
        (999, "999 bytes"),
        (1000, "1.0 kB"),
        (999_499, "999.5 kB"),
        (999_500, "1.0 MB"),
        (2_500_000_000, "2.5 GB"),
        (5 * 10**15, "5000.0 TB"),
    ],
)
def test_sizes_are_told_in_powers_of_a_thousand(size, text):
    """Sizes are whole below a thousand bytes, and have one decimal in kB, MB, GB and TB."""
    assert text == in_units(size)
