"""What fit has told: saved as bytes that cost one copy, read back exactly, and refused by line and field."""

from __future__ import annotations

import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from augend import Estimate
from augend._fit import Begin, End, Step, Validation
from augend._fit._told import Told
from augend.errors import StateError
from augend.metrics import Ranks

FLOATS = st.floats()  # nan and the infinities too
COUNTS = st.integers(0, 2**63 - 1) | st.floats(0, 1e300)
DIGESTS = st.dictionaries(st.text(max_size=5), st.from_regex(r"\A[0-9a-f]{16}\Z"), max_size=3)
ESTIMATES = st.dictionaries(
    st.text(max_size=5), st.builds(Estimate, FLOATS, FLOATS, COUNTS, low=FLOATS, high=FLOATS), min_size=1, max_size=3
)


def step(number: int, **changes) -> Step:
    """Make step ``number`` of epochs of three."""
    values = {
        "step": number, "epoch": number // 3, "rows": 8, "losses": {"loss": Estimate(2.5, 0.25, 96)}, "count": 96,
        "norm": 0.5, "scale": 1.0, "skipped": False, "update": number + 1, "lr": 1e-3, "seconds": 0.125,
    }  # fmt: skip
    return Step(**{**values, **changes})


def validation(number: int, **changes) -> Validation:
    """Make a validation after step ``number``."""
    values = {"step": number, "epoch": number // 3, "estimates": {"loss": Estimate(2.0, 0.5, 10)}, "seconds": 0.5}
    return Validation(**{**values, **changes})


def told(events) -> Told:
    """Tell events to nobody."""
    history = Told((), Ranks())
    for event in events:
        history(event)
    return history


def said(history: Told) -> str:
    """Return all of a history as text, in which nan equals nan and 1 is not 1.0."""
    return repr((history.steps, history.validations))


@st.composite
def histories(draw) -> Told:
    """Draw what a run may have told."""
    events, first, update = [], draw(st.integers(0, 5)), 0
    for number in range(first, first + draw(st.integers(0, 4))):
        skipped = draw(st.booleans())
        update += not skipped
        fields = {name: draw(FLOATS) for name in ("norm", "scale", "lr", "seconds")}
        losses, count = draw(ESTIMATES), draw(COUNTS)
        fields.update(offers=draw(st.integers(1, 2)), digests=draw(DIGESTS))
        events.append(step(number, losses=losses, count=count, skipped=skipped, update=update, **fields))
        if draw(st.booleans()):
            events.append(validation(number, estimates=draw(ESTIMATES), seconds=draw(FLOATS)))
    return told(events)


@given(histories())
def test_a_history_is_read_back_exactly(history):
    """Every number comes back with its type and bits, infinities too, a nan as nan, and every name in its place."""
    read = Told((), Ranks())
    read.load_state_dict(history.state_dict())
    assert said(history) == said(read)
    assert all(
        math.copysign(1, one.norm) == math.copysign(1, other.norm)
        for one, other in zip(history.steps, read.steps, strict=True)
        if not math.isnan(one.norm)  # a nan has no sign that means anything
    )


@given(histories(), st.integers(0, 3))
def test_a_loaded_history_goes_on_as_one_that_was_told(history, more):
    """What is told after a load is saved as if all had been told in one process; nothing of the load is told."""
    heard: list[object] = []
    read = Told([heard.append], Ranks())
    read.load_state_dict(history.state_dict())
    assert [] == heard
    last = history.steps[-1] if history.steps else step(-1)
    for number in range(last.step + 1, last.step + 1 + more):
        event = step(number, epoch=last.epoch + 1, update=last.update)
        history(event)
        read(event)
    expected, actual = history.state_dict(), read.state_dict()
    assert expected["validations"] == actual["validations"]
    assert torch.equal(expected["steps"], actual["steps"])


def test_a_state_is_plain_lines_of_json_and_a_copy():
    """The steps are lines that json reads; a state does not change when more is told."""
    history = told([step(0), step(1, norm=math.nan, scale=-math.inf), validation(1)])
    state = history.state_dict()
    before = state["steps"].clone()
    history(step(2))
    history(validation(2))
    assert torch.equal(before, state["steps"])
    assert 1 == len(state["validations"])
    lines = [json.loads(line) for line in bytes(state["steps"].tolist()).splitlines()]
    assert [[0, 0.5, 1.0], [1, "nan", "-inf"]] == [[line["step"], line["norm"], line["scale"]] for line in lines]
    assert lines == json.loads(json.dumps(lines, allow_nan=False))


def test_a_step_is_encoded_once():
    """A save reads no step again: with all of them changed behind its back the state is the same."""
    history = told(map(step, range(5)))
    expected = history.state_dict()["steps"]
    history.steps.clear()
    assert torch.equal(expected, history.state_dict()["steps"])


def test_nothing_told_is_a_state_too():
    """The state of an empty history loads, and empties another."""
    history = told([step(0), validation(0)])
    history.load_state_dict(Told((), Ranks()).state_dict())
    assert said(Told((), Ranks())) == said(history)
    assert 0 == history.state_dict()["steps"].numel()


def test_events_are_kept_and_handed_on():
    """Begin and End are handed on and not kept; end() returns what was told."""
    heard: list[object] = []
    history = Told([heard.append], Ranks())
    events = [Begin(steps=1), step(0), validation(0)]
    for event in events:
        history(event)
    whole = history.end("done")
    assert [*events, End(history=whole)] == heard
    assert ((events[1],), (events[2],), "done") == (whole.steps, whole.validations, whole.stopped)


def test_preparing_a_load_changes_nothing():
    """Until the returned function is called the old history is there; then the new one is."""
    history, other = told([step(0)]), told([step(0), step(1)])
    before = said(history)
    swap = history.prepare_load(other.state_dict())
    assert before == said(history)
    swap()
    assert said(other) == said(history)


def changed(**fields) -> dict[str, object]:
    """Return the state of three steps and a validation, with entries replaced."""
    return {**told([step(0), step(1), step(2), validation(1)]).state_dict(), **fields}


def with_line(number: int, **fields) -> dict[str, object]:
    """Return that state with fields of one line changed, or left out where they are None."""
    lines = [json.loads(line) for line in bytes(changed()["steps"].tolist()).splitlines()]
    lines[number - 1].update(fields)
    lines[number - 1] = {name: value for name, value in lines[number - 1].items() if value is not None}
    return changed(steps=as_tensor("".join(json.dumps(line) + "\n" for line in lines)))


def with_validation(**fields) -> dict[str, object]:
    """Return that state with fields of the validation changed."""
    (plain,) = changed()["validations"]
    return changed(validations=[{**plain, **fields}])


def as_tensor(text: str) -> torch.Tensor:
    """Return text as uint8 ``[bytes]``."""
    return torch.tensor(list(text.encode()), dtype=torch.uint8)


ESTIMATE = {"name": "loss", "value": 2.0, "error": 0.5, "count": 10, "low": 1.5, "high": 2.5}
REFUSED = [
    ([], "exactly the fields steps, validations, version; got list"),
    ({}, r"exactly the fields steps, validations, version; got \[\]"),
    (changed(more=1), "exactly the fields"),
    (changed(version=2), "version of the history must be 1; got 2: written by another augend"),
    (changed(version=True), "version of the history must be 1; got True"),
    (changed(steps="x"), r"steps of the history must be a uint8 tensor \[bytes\]; got str"),
    (changed(steps=torch.zeros(3)), r"got torch.float32 of \[3\]"),
    (changed(steps=torch.zeros(3, 1, dtype=torch.uint8)), r"got torch.uint8 of \[3, 1\]"),
    (changed(steps=changed()["steps"][:-1]), "the last line of the history's steps is torn"),
    (changed(steps=as_tensor("{}\n")), "line 1 of the history's steps: Object missing required field `step`"),
    (changed(steps=as_tensor("\n")), "line 1 of the history's steps: Input data was truncated"),
    (changed(steps=as_tensor('{"step": NaN}\n')), "line 1 of the history's steps: JSON is malformed"),
    (with_line(2, lr=None), "line 2 of the history's steps: Object missing required field `lr`"),
    (with_line(2, other=1), "line 2 of the history's steps: Object contains unknown field `other`"),
    (with_line(3, skipped=1), r"line 3 .*Expected `bool`, got `int` - at `\$.skipped`"),
    (with_line(3, step=2.0), r"line 3 .*Expected `int`, got `float` - at `\$.step`"),
    (with_line(3, step=True), r"line 3 .*Expected `int`, got `bool` - at `\$.step`"),
    (with_line(1, step=-1), r"line 1 .*Expected `int` >= 0 - at `\$.step`"),
    (with_line(1, rows=0), r"line 1 .*Expected `int` >= 1 - at `\$.rows`"),
    (with_line(1, count=-0.5), r"line 1 .*Expected `float` >= 0.0 - at `\$.count`"),
    (with_line(1, count="nan"), r"line 1 .*Expected `int \| float`, got `str` - at `\$.count`"),
    (with_line(1, norm="NaN"), r"line 1 .*Invalid enum value 'NaN' - at `\$.norm`"),
    (with_line(1, losses=[]), r"line 1 .*Expected `array` of length >= 1 - at `\$.losses`"),
    (with_line(1, losses=[{**ESTIMATE, "low": None}]), r"line 1 .*at `\$.losses\[0\].low`"),
    (with_line(1, losses=[ESTIMATE, ESTIMATE]), "line 1 of the history's steps: 'loss' is there twice"),
    (with_line(1, offers=0), r"line 1 .*Expected `int` >= 1 - at `\$.offers`"),
    (with_line(1, digests={"weight": "0" * 15}), r"line 1 .*Expected `str` matching regex .* - at `\$.digests\[...\]`"),
    (with_line(2, step=3), "line 2 of the history's steps: step must be 1, one more than before; got 3"),
    (with_line(1, epoch=1), "line 2 of the history's steps: epoch must be at least 1, as before; got 0"),
    (with_line(2, update=4), "line 2 of the history's steps: update must be 1 or one more; got 4"),
    (changed(validations=()), "validations of the history must be a list; got tuple"),
    (changed(validations=[1]), "validation 1 of the history: Expected `object`, got `int`"),
    (with_validation(seconds=None), r"validation 1 of the history: .* - at `\$.seconds`"),
    (with_validation(estimates=[ESTIMATE, ESTIMATE]), "validation 1 of the history: 'loss' is there twice"),
    (with_validation(step=3), "validation 1 of the history: step must be one of the history's, after -1; got 3"),
    (with_validation(epoch=1), "validation 1 of the history: epoch must be its step's, 0; got 1"),
    (changed(validations=changed()["validations"] * 2), "validation 2 of the history: .* after 1; got 1"),
]


@pytest.mark.parametrize(("state", "says"), REFUSED, ids=[says for _, says in REFUSED])
def test_what_is_no_history_is_refused_by_line_and_field(state, says):
    """A refused state changes nothing, and the message names what is wrong and where."""
    history = told([step(0), validation(0)])
    before = said(history), history.state_dict()
    with pytest.raises(StateError, match=says):
        history.load_state_dict(state)
    assert before[0] == said(history)
    assert torch.equal(before[1]["steps"], history.state_dict()["steps"])


def test_a_step_that_was_offered_once_and_has_no_digests_says_nothing_of_either():
    """Lines of an augend that knew neither field are read; and a long run without digests does not grow by them."""
    history = told([step(0), step(1, offers=2, digests={"b": "0" * 16, "a": "f" * 16})])
    first, second = (json.loads(line) for line in bytes(history.state_dict()["steps"].tolist()).splitlines())
    assert {"offers", "digests"} == set(second) - set(first)
    assert ["b", "a"] == list(second["digests"])
    again = Told((), Ranks())
    again.load_state_dict(history.state_dict())
    assert [(1, {}), (2, {"b": "0" * 16, "a": "f" * 16})] == [(one.offers, one.digests) for one in again.steps]


def test_the_changes_of_these_tests_start_from_a_state_that_loads():
    """Unchanged, each of the states that were refused above is taken."""
    for state in (changed(), with_line(1), with_validation()):
        history = Told((), Ranks())
        history.load_state_dict(state)
        assert 3 == len(history.steps) == history.steps[-1].update
