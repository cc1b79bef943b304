"""Names and arguments of a run file: found, checked, or refused by key, value and remedy."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import pytest
import torch

from augend._cli._names import bound, find
from augend.errors import ConfigError

if TYPE_CHECKING:
    from nowhere import Missing


def make(
    width: int,
    *,
    rate: float = 1.0,
    shape: tuple[int, ...] = (),
    kind: Literal["a", "b"] = "a",
    path: Path = Path(),
    call: object = None,
) -> list[object]:
    """Return what it was given."""
    return [width, rate, shape, kind, path, call]


def opaque(anything: Missing, more=1) -> None:
    """Take something whose annotation cannot be read at run time."""


def odd(either: int | torch_like = 1) -> None:  # noqa: F821  read as text only
    """Have an annotation that names nothing."""


def tensors(pair: tuple[float | torch.Tensor, int | None] = (1.0, 1), rate: float | torch.Tensor = 1.0) -> None:
    """Take numbers that may be tensors, as torch's optimizers do."""


class Thing:
    """Something with arguments."""

    def __init__(self, parameters: list, size: int = 1, scale: int | Path = 1) -> None:
        self.size = size


def open_ended(first: int, **rest: object) -> None:
    """Take anything by name."""


def test_a_known_name_is_found():
    """A known name gives its function."""
    assert make is find("model.name", "make", {"make": make})


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("lama", ["model.name = 'lama'", "no such name", "did you mean llama?", "known here: llama, mlp", "module:"]),
        ("zzz", ["model.name = 'zzz'", "no such name; known here: llama, mlp"]),
        (":make", ["model.name = ':make'", "expected module:function"]),
        ("json:", ["model.name = 'json:'", "expected module:function"]),
        ("json:a-b", ["model.name = 'json:a-b'", "expected module:function"]),
        ("no_such_module:make", ["no module named no_such_module", str(Path.cwd()), "installed packages"]),
        (".a:make", ["model.name = '.a:make'", "expected module:function"]),
        ("a..b:make", ["model.name = 'a..b:make'", "expected module:function"]),
        ("builtins:dict", ["model.name = 'builtins:dict'", "arguments cannot be known"]),
        ("json:dumpz", ["model.name = 'json:dumpz'", "json has no such function", "did you mean dump"]),
        ("json:__doc__", ["model.name = 'json:__doc__'", "json has no such function"]),
    ],
)
def test_a_name_that_is_nothing_is_refused(name, parts):
    """Unknown names, and modules and functions that are not there, are refused with what is."""
    with pytest.raises(ConfigError) as caught:
        find("model.name", name, {"llama": make, "mlp": make})
    assert [] == [part for part in parts if part not in str(caught.value)]


def test_a_module_beside_the_user_is_found(tmp_path, monkeypatch):
    """module:function is looked for in the current directory, as python -m does."""
    (tmp_path / "nets_of_a_test.py").write_text("def make():\n    return 7\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    for _ in range(2):
        assert 7 == find("model.name", "nets_of_a_test:make", {})()
    assert 1 == sys.path.count("")


@pytest.mark.parametrize("text", ["def make(:", "from json import no_such_name"])
def test_a_module_that_cannot_be_imported_is_refused(text, tmp_path, monkeypatch):
    """A module that is no Python, or lacks what it imports, is refused by key; what it raises itself is its own."""
    (tmp_path / "spoilt_net_of_a_test.py").write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    importlib.invalidate_caches()
    with pytest.raises(ConfigError, match=r"^model\.name = 'spoilt_net_of_a_test:make': .* cannot be imported: "):
        find("model.name", "spoilt_net_of_a_test:make", {})


def test_arguments_arrive_as_annotated():
    """A list becomes a tuple, text a path, a whole number a fraction, where the annotation says so."""
    arguments = {"width": 3, "rate": 2, "shape": [1, 2], "kind": "b", "path": "a/b", "call": [1]}
    assert [3, 2.0, (1, 2), "b", Path("a/b"), [1]] == make(**bound("model", make, arguments))
    assert isinstance(bound("model", make, arguments)["rate"], float)


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ({"width": 1, "widht": 2}, ["model.widht = 2", "no argument of make", "did you mean width?", "known here: "]),
        ({}, ["model.width: missing", "make needs it", "[model]", "width = "]),
        ({"width": "wide"}, ["model.width = 'wide'", "expected int, got str"]),
        ({"width": True}, ["model.width = true", "expected int, got bool"]),
        ({"width": 1, "rate": []}, ["model.rate = []", "expected float, got list"]),
        ({"width": 1, "kind": "c"}, ["model.kind = 'c'", "expected one of 'a', 'b'"]),
        ({"width": 1, "path": 3}, ["model.path = 3", "expected Path, got int"]),
    ],
)
def test_an_argument_that_does_not_fit_is_refused(arguments, parts):
    """Unknown, missing and wrongly typed arguments are refused by key and value before anything is called."""
    with pytest.raises(ConfigError) as caught:
        bound("model", make, arguments)
    assert [] == [part for part in parts if part not in str(caught.value)]


def test_numbers_that_may_be_tensors_are_checked_as_numbers():
    """A tensor in an annotation does not switch its check off: length and types of a list are still looked at."""
    assert {"pair": (0.5, 3), "rate": 2.0} == bound("optimizer", tensors, {"pair": [0.5, 3], "rate": 2})
    with pytest.raises(ConfigError, match=r"^optimizer\.pair = \[0\.5\]: expected list of length 2, got 1$"):
        bound("optimizer", tensors, {"pair": [0.5]})
    with pytest.raises(ConfigError, match=r"^optimizer\.rate = 'x': expected float, got str$"):
        bound("optimizer", tensors, {"rate": "x"})


def test_what_the_run_gives_is_not_the_file_s():
    """An argument that does not come from the run file cannot be set there, and is not asked for."""
    assert {"size": 2} == bound("optimizer", Thing, {"size": 2}, given=("parameters",))
    with pytest.raises(ConfigError, match=r"^optimizer\.parameters = 1: no argument of Thing"):
        bound("optimizer", Thing, {"parameters": 1}, given=("parameters",))


def test_a_function_that_takes_anything_gets_it():
    """A function with **keywords takes every argument; its named ones are still asked for."""
    assert {"first": 1, "other": "x"} == bound("data", open_ended, {"first": 1, "other": "x"})
    with pytest.raises(ConfigError, match=r"^data\.first: missing"):
        bound("data", open_ended, {"other": "x"})


def test_annotations_that_cannot_be_read_are_left_to_the_function():
    """Where an annotation names nothing, or is of a kind that cannot be checked, the value is passed as it is."""
    assert {"anything": [1]} == bound("data", opaque, {"anything": [1]})
    assert {"either": "x"} == bound("data", odd, {"either": "x"})
    assert {"scale": [1]} == bound("optimizer", Thing, {"scale": [1]}, given=("parameters",))
