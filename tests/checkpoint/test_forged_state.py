"""A state that is no state, with all hashes right: refused in augend's own words, and nothing live is changed."""

from __future__ import annotations

import copy
import itertools
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from forge import STATE, forge_file
from little import Little, three_saves

import augend
from augend.errors import AugendError, CheckpointError

Place = tuple[str | int, ...]
VALUES = [
    *(None, True, 0, -1, 10**30, 1.5, 1e300, "", "x", "9" * 400, [], [[1, 2]], [0] * 1000, {}, {"a": 1}),
    *({"$tensor": "weight"}, {"$tensor": "none"}, {"$tensor": [1]}, {"$float": "nan"}, {"$float": "1e9"}),
    *({"$float": 10**400}, {"$tuple": [1]}, {"$tuple": "ab"}, {"$pairs": [[1, 2]]}, {"$pairs": 3}),
    *({"$pairs": [[[], 1]]}, {"$counter": [["a", "b"]]}, {"$counter": [[1]]}, {"$evil": 1}, {"$": None}),
    {"$tensor": "weight", "more": 1},
]
NESTS = [("[", "]"), ('{"a":', "}"), ('{"$tuple":[', "]}"), ('{"$pairs":[[0,', "]]}")]
TEXTS = [b"", b"{", b"\xff\xfe", b"\xff", b"[" * 100_000, b"1" * 10_000, b'{"a": NaN', b"null", b"[]", b'{"parts": {}}']


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Return a checkpoint, whose state each test replaces, and the state that was saved."""
    directory = tmp_path_factory.mktemp("saved") / "run"
    three_saves(directory)
    newest = max(path for path in directory.iterdir() if path.is_dir())
    return newest, json.loads((newest / STATE).read_bytes())


@pytest.fixture
def newest(saved: tuple[Path, dict[str, Any]]) -> Path:
    """Return the checkpoint."""
    return saved[0]


@pytest.fixture
def state(saved: tuple[Path, dict[str, Any]]) -> dict[str, Any]:
    """Return its state."""
    return saved[1]


def places_in(tree: object, place: Place = ()) -> Iterator[Place]:
    """Yield the way to every value in a state; of long lists the first ones."""
    yield place
    inner = tree.items() if isinstance(tree, dict) else enumerate(tree[:4]) if isinstance(tree, list) else ()
    for key, value in inner:
        yield from places_in(value, (*place, key))


def changed(state: dict[str, Any], place: Place, value: object, *, missing: bool) -> object:
    """Return a copy of a state with another value in one place, or with none."""
    if not place:
        return value
    changed = copy.deepcopy(state)
    inner: Any = changed
    for key in place[:-1]:
        inner = inner[key]
    if missing:
        del inner[place[-1]]
    else:
        inner[place[-1]] = value
    return changed


def check(newest: Path, state: object, what: object) -> None:
    """Load a checkpoint with this state: it loads, or an error of augend's comes and all is as it was."""
    forge_file(newest, STATE, json.dumps(state).encode())
    augend.verify(newest)
    little = Little(newest.parent / "elsewhere")
    little.train(2)
    before = little.digest()
    try:
        with suppress(AugendError):
            little.run.load(newest)
            return
    except Exception as error:  # noqa: BLE001  # the claim is that there is no other one
        pytest.fail(f"{what}: {error!r}")
    assert before == little.digest(), what


def attempts(state: dict[str, Any], every: int) -> Iterator[tuple[Place, object, bool]]:
    """Yield changes: every place without its value, and with each so-manyeth value, all of them in turn."""
    turn = itertools.count()
    for place in places_in(state):
        if place:
            yield place, None, True
        for value in VALUES:
            if next(turn) % every == 0:
                yield place, value, False


def test_any_value_in_any_place_loads_or_is_refused(newest: Path, state: dict[str, Any]) -> None:
    """No input brings another exception than augend's, or a change of what is live."""
    for place, value, missing in attempts(state, every=29):
        check(newest, changed(state, place, value, missing=missing), (place, value, missing))


@pytest.mark.parametrize("value", [None, True, -1, 1.5, 10**30, "x", []])
def test_an_ordinal_that_is_none_is_refused(newest: Path, state: dict[str, Any], value: object) -> None:
    """An accumulator's number is a small whole one; nothing is allocated for what claims to be more."""
    forge_file(newest, STATE, json.dumps(changed(state, ("ordinals", "data", "grads"), value, missing=False)).encode())
    little = Little(newest.parent / "elsewhere")
    before = little.digest()
    with pytest.raises(CheckpointError, match="the order of the accumulators cannot be read"):
        little.run.load(newest)
    assert before == little.digest()


@pytest.mark.long
def test_every_value_in_every_place_loads_or_is_refused(newest: Path, state: dict[str, Any]) -> None:
    """The same with all values everywhere."""
    for place, value, missing in attempts(state, every=1):
        check(newest, changed(state, place, value, missing=missing), (place, value, missing))


@pytest.mark.parametrize("depth", [60, 150, 400, 900, 5_000, 200_000])
@pytest.mark.parametrize(("begin", "end"), NESTS)
def test_no_depth_is_too_deep(newest: Path, state: dict[str, Any], depth: int, begin: str, end: str) -> None:
    """Nested a little or a lot, in the state of a part: an error of augend's, not Python's recursion."""
    text = json.dumps(changed(state, ("parts", "model", "state", "weight"), "here", missing=False))
    forge_file(newest, STATE, text.replace('"here"', f"{begin * depth}1{end * depth}").encode())
    little = Little(newest.parent / "elsewhere")
    before = little.digest()
    with pytest.raises(AugendError):
        little.run.load(newest)
    assert before == little.digest()


@pytest.mark.parametrize("text", TEXTS)
def test_a_state_that_is_no_text_of_one_is_refused(newest: Path, text: bytes) -> None:
    """Whatever bytes there are: CheckpointError names the file."""
    forge_file(newest, STATE, text)
    little = Little(newest.parent / "elsewhere")
    before = little.digest()
    with pytest.raises(CheckpointError, match=r"state\.json"):
        little.run.load(newest)
    assert before == little.digest()


WATCH = """
import sys
from pathlib import Path
import augend
from little import Little, loaded

place = Path(sys.argv[1])
others = [Little(place.parent / "other") for _ in range(3)]
loaded(place), augend.verify(place), augend.inspect(place)  # whatever is imported late is now there
events = []
sys.addaudithook(lambda name, arguments: events.append((name, arguments)) if watching else None)
watching = True
position = others[0].run.load(place)
others[1].run.load(place, only=["model"])
others[2].run.directory = place
others[2].run.load_latest()
augend.verify(place), augend.inspect(place).to_plain()
watching = False
known = {"compile", "exec", "import", "marshal.loads", "pickle.find_class", "code.__new__", "function.__new__"}
known |= {"subprocess.Popen", "os.system", "os.exec", "os.fork", "os.posix_spawn", "ctypes.dlopen", "socket.connect"}
assert any(name == "open" for name, _ in events)
assert not [event for event in events if event[0] in known], events
"""


def test_nothing_in_a_checkpoint_is_executed(newest: Path, state: dict[str, Any], tmp_path: Path) -> None:
    """Loading and looking compile, import, unpickle and start nothing, by Python's own audit."""
    forge_file(newest, STATE, json.dumps(state).encode())
    shutil.copytree(newest.parent, tmp_path / "run")
    command = [sys.executable, "-c", WATCH, str(tmp_path / "run")]
    path = ":".join(path for path in sys.path if path)
    done = subprocess.run(command, env={"PYTHONPATH": path}, capture_output=True, text=True, check=False)
    assert ("", 0) == (done.stderr, done.returncode)
