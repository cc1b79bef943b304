"""ggml is compared with wherever its wheel is built for; elsewhere these tests are skipped, with that reason."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from ggml_process import Ggml
from packaging.requirements import Requirement

PYPROJECT = Path(__file__).parent.parent.parent / "pyproject.toml"


@pytest.fixture(scope="session")
def ggml() -> Iterator[Ggml]:
    """Start ggml, unless pyproject.toml says that there is none here; where it should be and is not, the test fails."""
    extras = tomllib.loads(PYPROJECT.read_text("utf-8"))["project"]["optional-dependencies"]
    (wheel,) = [each for each in map(Requirement, extras["test"]) if each.name == "libggml-python"]
    if not wheel.marker.evaluate():
        pytest.skip("libggml-python has no build for this platform")
    with Ggml() as process:
        yield process
