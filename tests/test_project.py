"""The frame of the project: versions agree, every exception from a rule has its reason, nothing is left half done."""

from __future__ import annotations

import os
import re
import tomllib
from pathlib import Path

import pytest

import augend

ROOT = Path(__file__).parent.parent
PEERS = "tests/peers/conftest.py"  # starts the libraries that augend is compared with
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
CODE = [
    path
    for folder in ["src", "tests", "docs", "examples", "benchmarks"]
    for path in sorted((ROOT / folder).rglob("*.py*"))
    if path.suffix in {".py", ".pyi"} and path != Path(__file__)
]


def offences(pattern: str) -> list[str]:
    """Find the lines of the project's code that match a pattern."""
    return [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in CODE
        for number, line in enumerate(path.read_text("utf-8").splitlines(), start=1)
        if re.search(pattern, line)
    ]


def requirement_names(requirements: list[str]) -> set[str]:
    """Return the names of required distributions, augend itself left out."""
    return {re.match(r"[\w-]+", requirement)[0] for requirement in requirements} - {"augend"}


def test_versions_agree() -> None:
    """The package, its metadata and the newest entry of the changelog have one version."""
    newest = re.search(r"^## \[?(\d+\.\d+\.\d+)", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE)
    assert PYPROJECT["project"]["version"] == augend.__version__ == newest[1]


def test_changelog_has_the_numerics_heading() -> None:
    """Every release says what changed in the bits of a result, if only that nothing did."""
    releases = re.split(r"^## ", (ROOT / "CHANGELOG.md").read_text("utf-8"), flags=re.MULTILINE)[1:]
    assert [True] * len(releases) == ["\n### Numerics\n" in release for release in releases]


def test_everything_installed_is_pinned() -> None:
    """``constraints.txt`` is sorted, has one exact version a line, and has every direct dependency."""
    lines = [line for line in (ROOT / "constraints.txt").read_text("utf-8").splitlines() if not line.startswith("#")]
    pins = dict(line.split("==") for line in lines)
    extras = [name for extra in PYPROJECT["project"]["optional-dependencies"].values() for name in extra]
    assert sorted(lines) == lines
    assert set() == requirement_names(PYPROJECT["project"]["dependencies"] + extras) - pins.keys()
    assert re.fullmatch(r"\d+\.\d+\.\d+", pins["torch"])


def test_every_ignored_rule_has_a_reason() -> None:
    """A lint rule that is switched off for the project or for some files says why beside it."""
    lint = (ROOT / "pyproject.toml").read_text("utf-8").split("[tool.ruff.lint]")[1].split("[tool.ruff.lint.flake8")[0]
    codes = [line for line in lint.splitlines() if re.search(r'"[A-Z]+\d*"', line) and "ALL" not in line]
    assert len(codes) > 20
    assert [] == [line for line in codes if not re.search(r"# \S", line)]


def test_every_exception_from_a_check_has_a_reason() -> None:
    """Each ``noqa`` and each ``type: ignore`` in the code names its rule and says why."""
    unreasoned = offences(r"# noqa(?!: [A-Z]+\d+(, [A-Z]+\d+)*\s+\S)")
    untyped = offences(r"# type: ignore(?!\[[a-z, -]+\]\s+# \S)")
    assert [] == unreasoned + untyped


@pytest.mark.parametrize(
    "pattern",
    [
        r"\b(TODO|FIXME|XXX)\b",
        r"pragma: no (cover|branch)",
        r"\bpytest\.(skip|xfail|importorskip)\b|mark\.(skip|skipif|xfail)\b",
    ],
)
def test_nothing_is_left_half_done(pattern: str) -> None:
    """No reminder stands in for work, no line is hidden from coverage, no test is skipped but for want of a peer."""
    allowed = 'pytest.skip(f"{wheel} has no build for this platform")'
    found = [line for line in offences(pattern) if not re.fullmatch(rf"{PEERS}:\d+: {re.escape(allowed)}", line)]
    assert [] == found


def test_make_has_the_commands_of_the_readme() -> None:
    """The README's two commands, and all others promised, are targets of the Makefile with a line of help each."""
    targets = dict(re.findall(r"^([a-z-]+):.*?## (.+)$", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    every = {"help", "demo", "test", "test-long", "lint", "docs", "bench", "proof", "proof-full", "clean"}
    assert every == targets.keys()
    readme = (ROOT / "README.md").read_text("utf-8")
    assert ["make demo", "make test"] == re.findall(r"^make [a-z-]+", readme, re.MULTILINE)[:2]


def test_continuous_integration_runs_lint_and_the_tests() -> None:
    """``.ci/run`` is executable and calls the same commands that a person does."""
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    called = re.findall(r"^make .+$", script.read_text("utf-8"), re.MULTILINE)
    assert ["make lint", "make test", "make test-long"] == called


def test_package_is_typed_and_licensed() -> None:
    """Type checkers are told to read the annotations, and the licence named is the licence shipped."""
    assert (ROOT / "src" / "augend" / "py.typed").is_file()
    assert "Apache-2.0" == PYPROJECT["project"]["license"]
    text = (ROOT / "LICENSE").read_text("utf-8")
    assert "Version 2.0, January 2004" in text
    assert "END OF TERMS AND CONDITIONS" in text
