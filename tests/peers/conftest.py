"""ggml and llama.cpp are compared with wherever their wheels are built for; elsewhere these tests are skipped."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ggml_process import Ggml
from llama_process import ask
from packaging.requirements import Requirement

PYPROJECT = Path(__file__).parent.parent.parent / "pyproject.toml"


def skip_without(wheel: str) -> None:
    """Skip the test, with that reason, where pyproject.toml says that a wheel is not built for this platform."""
    extras = tomllib.loads(PYPROJECT.read_text("utf-8"))["project"]["optional-dependencies"]
    (found,) = [each for each in map(Requirement, extras["test"]) if each.name == wheel]
    if not found.marker.evaluate():
        pytest.skip(f"{wheel} has no build for this platform")


@pytest.fixture(scope="session")
def ggml() -> Iterator[Ggml]:
    """Start ggml; where it should be and is not, the test fails."""
    skip_without("libggml-python")
    with Ggml() as process:
        yield process


@pytest.fixture(scope="session")
def llama() -> Callable[..., Any]:
    """Give the way to ask llama.cpp; where it should be and is not, the test fails."""
    skip_without("xllamacpp")
    return ask
