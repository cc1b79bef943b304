"""metrics.jsonl: one strict JSON object a line, complete after every event."""

from __future__ import annotations

import json
import math

import pytest
import torch

from augend import Estimate
from augend._fit import Begin, End, History, Step, Validation
from augend._listeners import json_lines

STEP_KEYS = [
    "step", "epoch", "loss", "loss_error", "count", "rows", "norm", "scale", "skipped", "update", "offers", "lr",
    "seconds", "world", "restarts", "memory_bytes",
]  # fmt: skip


def step(**changes) -> Step:
    """Make a step."""
    values = {
        "step": 3, "epoch": 0, "rows": 8, "losses": {"loss": Estimate(2.5, 0.25, 96)}, "count": 96, "norm": 0.5,
        "scale": 1.0, "skipped": False, "update": 4, "lr": 1e-3, "seconds": 0.125,
    }  # fmt: skip
    return Step(**{**values, **changes})


def strictly(line: str) -> dict:
    """Read one line of JSON and refuse what only Python calls JSON."""
    return json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def written(path) -> list[dict]:
    """Read all lines."""
    return [strictly(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_a_step_is_one_line_with_every_key(tmp_path):
    """A step's line has the keys of the contract, in their order, and numbers that read back exactly."""
    path = tmp_path / "metrics.jsonl"
    json_lines(path)(step())
    (line,) = written(path)
    assert STEP_KEYS == list(line)
    assert [3, 0, 2.5, 0.25, 96, 8, 0.5, 1.0, False, 4, 1, 1e-3, 0.125, 1, 0] == list(line.values())[:-1]
    assert line["memory_bytes"] > 10**7  # torch alone is larger


def test_every_line_is_there_before_the_next_event(tmp_path):
    """What was told is in the file at once, and an existing file is continued."""
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0}\n', encoding="utf-8")
    write = json_lines(path)
    for number in (1, 2):
        write(step(step=number))
        assert list(range(number + 1)) == [line["step"] for line in written(path)]


def test_a_validation_has_value_error_and_count_of_each_name(tmp_path):
    """A validation's line holds every estimate under its name; begin and end write nothing."""
    path = tmp_path / "metrics.jsonl"
    write = json_lines(path)
    estimates = {"loss": Estimate(2.0, 0.5, 10), "accuracy": Estimate(0.75, math.nan, 4)}
    write(Begin(steps=4))
    write(Validation(step=3, epoch=1, estimates=estimates, seconds=0.5))
    write(End(history=History(steps=(), validations=(), stopped="done")))
    expected = {
        "step": 3,
        "epoch": 1,
        "seconds": 0.5,
        "validation": {
            "loss": {"value": 2.0, "error": 0.5, "count": 10},
            "accuracy": {"value": 0.75, "error": None, "count": 4},
        },
    }
    assert [expected] == written(path)


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_what_is_undefined_is_null(tmp_path, odd):
    """NaN and infinities, which JSON does not have, are null: undefined, and never a number."""
    path = tmp_path / "metrics.jsonl"
    json_lines(path)(step(losses={"loss": Estimate(odd, odd, 0)}, norm=odd, scale=odd))
    (line,) = written(path)
    assert [None] * 4 == [line[key] for key in ("loss", "loss_error", "norm", "scale")]


def test_several_terms_are_all_there(tmp_path):
    """With several terms the first is the loss, and all of them stand under losses."""
    path = tmp_path / "metrics.jsonl"
    json_lines(path)(step(losses={"main": Estimate(2.0, 0.5, 8), "aux": Estimate(4.0, 1.0, 9)}))
    (line,) = written(path)
    assert [*STEP_KEYS, "losses"] == list(line)
    assert 2.0 == line["loss"]
    assert {"value": 4.0, "error": 1.0, "count": 9} == line["losses"]["aux"]


def test_digests_are_there_where_there_are_any(tmp_path):
    """Digests stand at the end of their step's line, in the model's order; how often a batch was offered, in every."""
    path = tmp_path / "metrics.jsonl"
    json_lines(path)(step(offers=2, digests={"z": "0" * 16, "a": "f" * 16}))
    (line,) = written(path)
    assert [*STEP_KEYS, "digests"] == list(line)
    assert 2 == line["offers"]
    assert [("z", "0" * 16), ("a", "f" * 16)] == list(line["digests"].items())


def test_memory_is_the_accelerator_s_where_one_was_used(tmp_path, monkeypatch):
    """Where an accelerator holds memory its peak is reported, else that of the process."""
    path = tmp_path / "metrics.jsonl"
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    for peak in (123, 0):
        monkeypatch.setattr(torch.accelerator, "max_memory_allocated", lambda peak=peak: peak)
        json_lines(path)(step())
    used, unused = (line["memory_bytes"] for line in written(path))
    assert 123 == used
    assert unused > 10**7
