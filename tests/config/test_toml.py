"""Writing run files: what is written reads back as what was meant."""

from __future__ import annotations

import math
import tomllib
from datetime import date, datetime, time, timedelta, timezone

from hypothesis import given
from hypothesis import strategies as st

from augend._config import Setting, read, to_toml
from augend._config._toml import dump

TEXT = st.text(st.characters(exclude_categories=["Cs"]))  # a lone surrogate cannot be in a TOML file
OFFSETS = st.integers(-23 * 60, 23 * 60).map(lambda minutes: timezone(timedelta(minutes=minutes)))
VALUES = st.recursive(
    TEXT
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats()
    | st.dates(date(1000, 1, 1))
    | st.times()
    | st.datetimes(datetime(1000, 1, 1), timezones=st.none() | OFFSETS),  # noqa: DTZ001  TOML has local ones too
    lambda inner: st.lists(inner) | st.dictionaries(TEXT, inner),
    max_leaves=8,
)


def same(expected: object, actual: object) -> bool:
    """Compare with types and signs, and a nan equal to a nan."""
    if type(expected) is not type(actual):
        return False
    if isinstance(expected, dict):
        return expected.keys() == actual.keys() and all(same(expected[key], actual[key]) for key in expected)
    if isinstance(expected, list):
        return len(expected) == len(actual) and all(map(same, expected, actual))
    if isinstance(expected, float):
        return repr(expected) == repr(actual)
    return expected == actual


@given(st.dictionaries(TEXT, VALUES))
def test_a_table_reads_back_as_it_was(table):
    """Any table of TOML values, also with odd keys, nested, infinite or undefined, survives the way to text."""
    assert same(table, tomllib.loads(dump(table)))


@given(VALUES, st.integers(1, 10**6), st.floats(min_value=0, exclude_min=True, allow_infinity=False))
def test_a_run_reads_back_as_it_was(tmp_path_factory, value, steps, rate):
    """The resolved run file of any run is a run file of the same run, and resolves to the same text."""
    folder = tmp_path_factory.mktemp("toml")
    path = folder / "run.toml"
    path.write_text(f'steps = {steps}\n[model]\nname = "mlp"\n[data]\nsource = "digits"\n', encoding="utf-8")
    text = to_toml(read(path, [Setting(("model", "odd key"), value), Setting(("optimizer", "lr"), rate)]))
    path.write_text(text, encoding="utf-8", newline="")
    run = read(path)
    assert text == to_toml(run)
    assert (steps, rate) == (run.steps, run.optimizer.lr)
    assert same(value, run.model.arguments["odd key"])


def test_absent_keys_and_empty_tables_are_not_written():
    """What TOML cannot say, an absent value, is left out, and so is a table with nothing in it."""
    assert "" == dump({})
    assert 'a = "\\u007f\\t\\""\nb = nan\n"c d" = -0.0\n' == dump({"a": '\x7f\t"', "b": math.nan, "c d": -0.0})
    assert "at = 07:30:00\n" == dump({"at": time(7, 30)})
