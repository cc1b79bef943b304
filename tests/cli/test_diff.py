"""augend diff: the first step, tensor and bit where two runs part, or that none is found."""

from __future__ import annotations

import json
import math
import re
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from augend import Checkpoint
from augend._cli import main
from augend._cli._metrics import Digests, Metrics, Parting, bits_of, digests, parting, read_metrics
from augend.errors import ConfigError

EVERY = ["--set=checkpoint.every_steps=1", "--set=checkpoint.keep=9", "--set=digest.every_steps=2"]
NUMBERS = st.sampled_from([0.5, -0.0, 0.0, 1, 1.0, None, 1e300])


def fitted(directory: str, *settings: str) -> str:
    """Train linear.toml into a directory."""
    assert 0 == main(["fit", "linear.toml", f"--run-dir={directory}", *EVERY, *settings])
    return directory


def parted(directory: str, at: int, steps: int, *settings: str) -> str:
    """Train so many steps, the last ones with another rate."""
    fitted(directory, f"--set=steps={at}", *settings)
    assert 0 == main(["resume", directory, f"--set=steps={steps}", "--set=optimizer.lr=0.5"])
    return directory


def said(capsys, code: int, *arguments: str) -> str:
    """Run a comparison that must end so, with nothing on standard error, and return what it prints."""
    capsys.readouterr()
    assert code == main(["diff", *arguments])
    output, message = capsys.readouterr()
    assert "" == message
    return output


def plainly(capsys, code: int, *arguments: str) -> dict:
    """Return what --json prints, read strictly."""
    output = said(capsys, code, *arguments, "--json")
    assert 1 == output.count("\n")
    return json.loads(output, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def refused(capsys, *arguments: str) -> str:
    """Run a comparison that must be refused, and return the one line that says why."""
    capsys.readouterr()
    assert 2 == main(["diff", *arguments])
    output, message = capsys.readouterr()
    assert ("", 1) == (output, message.count("\n"))
    return message


@pytest.fixture
def threads() -> Iterator[None]:
    """Put back the number of threads."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_equal_runs_are_equal(folder, capsys):
    """Of the same run twice: over which steps, digests and tensors no difference was found; exit 0."""
    output = said(capsys, 0, fitted("a", "--set=steps=4"), fitted("b", "--set=steps=4", "--set=checkpoint.keep=3"))
    assert (
        "A              a\n"
        "B              b\n"
        "steps          4 in both, 0 to 3 (from 0, as in metrics.jsonl)\n"
        "equal          loss, norm and all other numbers of every step and validation, to the bit\n"
        "digests        all digests are equal after 2 steps from 1 to 3\n"
        "checkpoints    after 3, 4 steps: every bit is equal (8 tensors of weights and optimizer, 11 elements)\n"
        "config         checkpoint.keep: 9 in A, 3 in B\n"
        "result         no difference was found in the numbers of 4 steps, in 8 tensors, bit by bit\n"
    ) == output
    plain = plainly(capsys, 0, "a", "b")
    assert (True, [0, 1, 2, 3], None) == (plain["equal"], plain["steps"], plain["parting"])
    assert {"equal": [1, 3], "step": None, "tensors": []} == plain["digests"]
    assert ([3, 4], []) == (plain["checkpoints"]["equal_after"], plain["checkpoints"]["differences"])
    assert {"checkpoint.keep": ["9", "3"]} == plain["config"]


def test_the_first_step_tensor_and_bit_are_shown(folder, capsys):
    """Runs that part at step 3: the step, what differs there, the tensor by digest, and the first element with bits."""
    fitted("a", "--set=steps=7")
    parted("b", 3, 7)
    output = said(capsys, 1, "a", "b")
    lines = output.splitlines()
    assert "parting        step 3 is the first that differs" == lines[3]
    bits = [struct.pack(">d", rate).hex() for rate in (0.001, 0.5)]
    assert f"  lr           0.001 and 0.5; bits {bits[0]} and {bits[1]}" == lines[4]
    assert (
        "digests        all digests are equal after step 1; first different after step 3: weight, and 1 more" in lines
    )
    assert "checkpoints    after 1, 2, 3 steps: every bit is equal (8 tensors" in output
    place = lines.index("checkpoints    after 4 steps:")
    paths = [Path(line.strip()) for line in lines[place + 1 : place + 3]]
    assert ["a", "b"] == [path.parts[0] for path in paths]
    weights = [weight_of(path) for path in paths]
    assert "  tensor       model weight[0, 0], element 0 of 2 (float32)" == lines[place + 3]
    values, bits = re.fullmatch(r"  values       (.*); bits (.*)", lines[place + 4]).groups()
    assert [float(one[0, 0]) for one in weights] == [float(torch.tensor(float(one))) for one in values.split(" and ")]
    assert [struct.pack(">f", one[0, 0]).hex() for one in weights] == bits.split(" and ")
    assert "  elements     2 of 2 of this tensor differ" == lines[place + 5]
    assert "  all          2 of 8 tensors, 3 of 11 elements differ" == lines[place + 6]
    assert "config         optimizer.lr: 0.001 in A, 0.5 in B" in lines
    assert "result         they differ" == lines[-1]
    plain = plainly(capsys, 1, "a", "b")
    assert (False, 3, {"values": [0.001, 0.5], "bits": [struct.pack(">d", rate).hex() for rate in (0.001, 0.5)]}) == (
        plain["equal"],
        plain["parting"]["step"],
        plain["parting"]["numbers"]["lr"],
    )
    assert {"equal": [1], "step": 3, "tensors": ["weight", "bias"]} == plain["digests"]
    assert ([4, 4], 0, [1, 2, 3]) == tuple(
        plain["checkpoints"][name] for name in ("steps", "steps_after_parting", "equal_after")
    )
    assert [float(one[0, 0]) for one in weights] == plain["checkpoints"]["differences"][0]["values"]


def weight_of(checkpoint: Path) -> torch.Tensor:
    """Read the weight of a checkpoint without augend."""
    (path,) = (checkpoint / "model").iterdir()
    return load_file(path)["weight"]


def test_it_says_when_what_is_kept_is_later_than_the_parting(folder, capsys):
    """Where the checkpoints of the parting are gone, the earliest that are left are shown, and how late they are."""
    fitted("a", "--set=steps=7", "--set=checkpoint.keep=1")
    parted("b", 3, 7, "--set=checkpoint.keep=1")
    assert "checkpoints    after 7 steps, 3 steps after the parting:\n" in said(capsys, 1, "a", "b")
    assert 3 == plainly(capsys, 1, "a", "b")["checkpoints"]["steps_after_parting"]


def test_it_says_when_no_later_checkpoint_is_in_both(folder, capsys):
    """Checkpoints of before the parting are equal, and it is said that they are all of before."""
    fitted("a", "--set=steps=7")
    parted("b", 3, 7)
    for path in Path("b", "checkpoints").glob("0*-step-[4-9]"):
        shutil.rmtree(path)
    output = said(capsys, 1, "a", "b")
    assert "checkpoints    after 1, 2, 3 steps: every bit is equal" in output
    assert "note           the checkpoints that both have are all of before the parting\n" in output


def test_it_says_when_no_checkpoint_is_of_one_step(folder, capsys):
    """Runs of other lengths are compared over the steps that both have, and it is said that no tensor was."""
    fitted("a", "--set=steps=4", "--set=checkpoint.keep=1")
    fitted("b", "--set=steps=3", "--set=checkpoint.keep=1")
    output = said(capsys, 0, "a", "b")
    assert "steps          3 in both, 0 to 2 " in output
    assert "note           no tensor is compared: no checkpoint after as many steps is in both (4 | 3)\n" in output
    assert None is plainly(capsys, 0, "a", "b")["checkpoints"]


def test_what_is_damaged_is_passed_over(folder, capsys):
    """A damaged checkpoint of a run is named, and the next one is compared; given by itself, it is refused."""
    runs = fitted("a", "--set=steps=3"), fitted("b", "--set=steps=3")
    damaged = Path("a/checkpoints/00000001-step-1")
    (weights,) = (damaged / "model").iterdir()
    weights.write_bytes(weights.read_bytes()[:-1])
    output = said(capsys, 0, *runs)
    assert "checkpoints    after 2, 3 steps: every bit is equal" in output
    assert re.search(r"^note           passed over: a/checkpoints/00000001-step-1: .*safetensors", output, re.MULTILINE)
    message = refused(capsys, str(damaged), "b/checkpoints/00000001-step-1")
    assert message.startswith("augend: cannot be compared: a/checkpoints/00000001-step-1: ")


def test_checkpoints_can_be_compared_by_themselves(folder, capsys):
    """Two checkpoints are compared whatever their steps; one is compared with that of a run after as many steps."""
    fitted("a", "--set=steps=3")
    fitted("b", "--set=steps=3")
    first, second = "a/checkpoints/00000001-step-1", "b/checkpoints/00000002-step-2"
    output = said(capsys, 1, first, second)
    assert "checkpoints    after 1 step in A and 2 in B:\n" in output
    assert "note           the checkpoints are of different steps: 1 and 2\n" in output
    assert "steps  " not in output
    assert "checkpoints    after 1 step: every bit is equal" in said(capsys, 0, first, "b")
    assert "checkpoints    every bit is equal (8 tensors" in said(capsys, 0, first, "b/checkpoints/00000001-step-1")
    assert "checkpoints    after 1, 2, 3 steps: every bit" in said(capsys, 0, "a/checkpoints", "b")


def test_a_model_of_another_shape_is_told(folder, capsys):
    """Tensors that only fit in name are listed, and the rest is compared."""
    fitted("a", "--set=steps=1")
    fitted("b", "--set=steps=1", "--set=model.name=nets_of_the_cli:noisy")
    output = said(capsys, 1, "a", "b")
    assert "  unlike       model weight is only in A\n" in output
    assert "model.name: nets_of_the_cli:make in A, nets_of_the_cli:noisy in B\n" in output


@pytest.mark.usefixtures("threads")
def test_what_the_bits_depend_on_is_told(folder, capsys):
    """Exact runs with other threads: the difference is named although no bit of a small model depends on it."""
    exact = ["--set=steps=2", "--set=accumulator.dtype=exact"]
    fitted("a", *exact)
    fitted("b", *exact, "--set=parallel.threads=2")
    output = said(capsys, 0, "a", "b")
    assert "bits           threads: 1 in A, 2 in B\nconfig         parallel.threads: 1 in A, 2 in B\n" in output
    assert {"threads": [1, 2]} == plainly(capsys, 0, "a", "b")["bits"]
    for path in Path("b", "checkpoints").glob("0*"):
        shutil.move(path, path.with_name(path.name.replace("step-", "step-9")))  # of no step that both have
    assert {"threads": [1, 2]} == plainly(capsys, 0, "a", "b")["bits"]
    for path in Path("b", "checkpoints").glob("0*"):
        (path / "manifest.json").unlink()
    assert {} == plainly(capsys, 0, "a", "b")["bits"]


def test_what_cannot_be_compared_is_refused(folder, capsys):
    """No such path, no run, nothing in common, a line or a config that nobody wrote: one line, exit 2."""
    fitted("a", "--set=steps=1")
    assert "none: no such path; give a run directory" in refused(capsys, "none", "a")
    Path("empty").mkdir()
    assert "empty: nothing to compare: it has no metrics.jsonl and no checkpoints" in refused(capsys, "a", "empty")
    shutil.copytree("a", "b")
    shutil.rmtree("b/checkpoints")
    Path("b/metrics.jsonl").write_text('{"step": 7, "loss": 1.0}\n', "utf-8")
    message = refused(capsys, "a", "b")
    assert "a and b cannot be compared: steps are not compared: no step is in both; no tensor is compared: " in message
    Path("b/metrics.jsonl").write_text("", "utf-8")
    assert "steps are not compared: b has no numbers; no tensor" in refused(capsys, "a", "b")
    Path("b/metrics.jsonl").write_text('{"step": 0}\n[]\n', "utf-8")
    assert "augend: b/metrics.jsonl: line 2 is no JSON object with a step" in refused(capsys, "a", "b")
    Path("b/metrics.jsonl").write_text('{"step": 0}\n', "utf-8")
    Path("b/config.toml").write_text("=", "utf-8")
    assert "augend: b/config.toml: cannot be read: " in refused(capsys, "a", "b")
    Path("b/metrics.jsonl").unlink()
    Path("b/metrics.jsonl").mkdir()
    assert "augend: b/metrics.jsonl: cannot be read: Is a directory" in refused(capsys, "a", "b")


def test_a_line_that_is_being_written_is_left_out(tmp_path):
    """The last line of a run that goes on may be torn; validations stand beside the steps."""
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0, "loss": 1.0}\n{"step": 0, "validation": {}}\n{"step": 1, "lo', "utf-8")
    found = read_metrics(path)
    assert ([0], [0]) == (list(found.steps), list(found.validations))
    path.write_text('{"loss": 1.0}\n', "utf-8")
    with pytest.raises(ConfigError, match=r"line 1 is no JSON object with a step"):
        read_metrics(path)


def run_of(lines: list[dict]) -> Metrics:
    """Return the metrics of a run with these lines."""
    return Metrics({step: {"step": step, **line} for step, line in enumerate(lines)}, {})


@given(
    lines=st.lists(st.fixed_dictionaries({"loss": NUMBERS, "norm": NUMBERS}), min_size=1, max_size=6),
    changes=st.dictionaries(st.integers(0, 5), st.tuples(st.sampled_from(["loss", "norm"]), NUMBERS), max_size=3),
    own=st.integers(),
)
def test_the_first_number_that_differs_is_found(lines, changes, own):
    """Whatever changed, the first step with another number is the parting; 0.0 and -0.0, 1 and 1.0 are different.

    Time, ranks and memory are none of a run's numbers.
    """
    others = [{**line, "world": own, "seconds": own} for line in lines]
    expected = None
    for step, (name, value) in sorted(changes.items()):
        if step < len(lines):
            before, others[step][name] = lines[step][name], value
            if expected is None and repr(before) != repr(value):
                expected = Parting(step, {name: (before, value)})
    lines = [{**line, "world": 1, "seconds": 0.5} for line in lines]
    assert repr(expected) == repr(parting(run_of(lines), run_of(others)))


def test_digests_are_compared_one_by_one():
    """In the first one's order, at steps and of tensors that both have; a digest alone is a parting."""
    first = run_of([{"digests": {"b": "1", "a": "1"}}, {}, {"digests": {"b": "2", "a": "2", "c": "2"}}, {}])
    second = run_of([{"digests": {"a": "1", "b": "1"}}, {"digests": {"a": "9"}}, {"digests": {"a": "3", "b": "3"}}])
    assert Digests((0,), 2, ("b", "a")) == digests(first, second)
    assert Parting(2, {}) == parting(first, second)
    assert Digests((0, 2), None, ()) == digests(first, first)
    assert Digests((), None, ()) == digests(first, run_of([{}]))


def test_a_validation_can_be_the_parting():
    """Where only what was measured differs, the step of the validation is the first that differs."""
    lines = {0: {"step": 0, "loss": 1.0}, 1: {"step": 1, "loss": 1.0}}
    first, second = (
        Metrics(lines, {1: {"step": 1, "validation": {"loss": {"value": value, "count": 3}}}}) for value in (0.5, None)
    )
    assert Parting(1, {"validation.loss.value": (0.5, None)}) == parting(first, second)
    assert None is parting(first, Metrics(lines, {}))


def test_bits_are_those_of_a_float():
    """A float has 64 bits, big end first; what is no float has none to show."""
    assert ["3ff0000000000000", "8000000000000000"] == [bits_of(1.0), bits_of(-0.0)]
    assert [None] * 3 == [bits_of(1), bits_of(None), bits_of(True)]


def test_numbers_that_json_has_not_are_text(saved, capsys):
    """A nan and an inf among weights are shown as such, in JSON as text."""
    path = next(Path(saved, "checkpoints").glob("00000003*"))
    model = torch.nn.Linear(2, 1)
    torch.nn.init.constant_(model.weight, math.nan)
    torch.nn.init.constant_(model.bias, -math.inf)
    with Checkpoint("nan", model=model, background=False) as checkpoint:
        checkpoint.save()
    plain = plainly(capsys, 1, str(path), "nan")
    assert [["nan"], ["-inf"]] == [one["values"][1:] for one in plain["checkpoints"]["differences"]]
    assert "  values       3 and nan; bits 40400000 and 7fc00000\n" in said(capsys, 1, str(path), "nan")
