"""Every example runs: the code blocks of README and docs, the run files, the shell commands, and the docstrings."""

from __future__ import annotations

import doctest
import importlib
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import augend
from augend._config import read

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "augend"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
DOCTEST_FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
FENCE = re.compile(r"^```(?P<language>[a-z]+)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """One fenced block of a page."""

    page: Path
    line: int
    language: str
    text: str


def blocks(page: Path, *languages: str) -> list[Block]:
    """Return a page's blocks in the given languages, in order."""
    text = page.read_text("utf-8")
    return [
        Block(page, text.count("\n", 0, found.start("text")), found["language"], found["text"])
        for found in FENCE.finditer(text)
        if found["language"] in languages
    ]


def named(page: Path) -> str:
    """Return the path of a page as a test's name."""
    return str(page.relative_to(ROOT))


def run_python(block: Block, namespace: dict[str, object]) -> None:
    """Run a block, or check it against its own output where it is written as at a prompt."""
    name = named(block.page)
    if block.text.startswith(">>>"):
        check(doctest.DocTestParser().get_doctest(block.text, namespace, name, str(block.page), block.line))
        return
    code = compile("\n" * block.line + block.text, name, "exec", dont_inherit=True)
    exec(code, namespace)  # noqa: S102  the project's own pages


def check(example: doctest.DocTest) -> None:
    """Run the examples of one docstring and fail with doctest's own report."""
    report: list[str] = []
    runner = doctest.DocTestRunner(optionflags=DOCTEST_FLAGS)
    runner.run(example, out=report.append, clear_globs=False)
    assert 0 == runner.failures, "".join(report)


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_python_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Python blocks of a page run one after the other in one namespace, in an empty directory."""
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": "page"}
    for block in blocks(page, "python"):
        run_python(block, namespace)


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_run_files_are_valid(page: Path, tmp_path: Path) -> None:
    """Every TOML block that describes a run is accepted by the command line's own reader."""
    for block in blocks(page, "toml"):
        if "[model]" in block.text:
            (tmp_path / "run.toml").write_text(block.text, "utf-8")
            read(tmp_path / "run.toml")


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.toml")), ids=named)
def test_example_run_files_are_valid(path: Path) -> None:
    """Every run file of the examples is accepted by the command line's own reader."""
    read(path)


@pytest.fixture(scope="module")
def verbs() -> set[str]:
    """The verbs that the command line itself lists."""
    done = subprocess.run([sys.executable, "-m", "augend", "--help"], capture_output=True, text=True, check=True)
    return set(re.findall(r"[a-z-]+", done.stdout))


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_shell_blocks_name_commands_that_exist(page: Path, verbs: set[str]) -> None:
    """Every line of a shell block starts with a command: a target of the Makefile, a verb of augend, or a program."""
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    for block in blocks(page, "console", "bash"):
        prompt = "$ " if block.language == "console" else ""
        for line in block.text.splitlines():
            if not line.strip() or not line.startswith(prompt):
                continue
            program, *arguments = line.removeprefix(prompt).split()
            where = f"{named(page)}:{block.line}: {line}"
            if program == "make":
                assert arguments[0] in targets, where
            elif program.removeprefix(".venv/bin/") == "augend":
                assert arguments[0] in verbs | {"--help"}, where
            else:
                assert shutil.which(program) is not None, where


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_docstring_examples_run(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The examples in a file's docstrings give what they say, with nothing imported but ``augend`` and ``torch``."""
    monkeypatch.chdir(tmp_path)
    for example in examples(path):
        check(example)


def examples(path: Path) -> list[doctest.DocTest]:
    """Find the docstrings of a file that have examples."""
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    module = importlib.import_module(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    found = doctest.DocTestFinder(exclude_empty=True).find(module, globs={"augend": augend, "torch": torch})
    return [example for example in found if example.examples]


def test_docstring_examples_are_found() -> None:
    """The search for examples is not blind: it finds the one of Tally."""
    assert ["augend._tally.Tally"] == [example.name for example in examples(PACKAGE / "_tally.py")]


def test_a_wrong_example_fails() -> None:
    """An example whose output is not what it says is reported."""
    example = doctest.DocTestParser().get_doctest(">>> 1 + 1\n3\n", {}, "wrong", None, 0)
    with pytest.raises(AssertionError, match=r"Expected:\s+3\s+Got:\s+2"):
        check(example)


def test_blocks_are_found(tmp_path: Path) -> None:
    """Blocks are told apart by language, in the order and at the lines where they stand."""
    page = tmp_path / "page.md"
    page.write_text("a\n```python\nx = 1\n```\n```toml\n[model]\n```\n```python\ny = x\n```\n", "utf-8")
    assert [Block(page, 2, "python", "x = 1\n"), Block(page, 8, "python", "y = x\n")] == blocks(page, "python")
    assert [Block(page, 5, "toml", "[model]\n")] == blocks(page, "toml")
