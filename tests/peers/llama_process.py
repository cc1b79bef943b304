"""llama.cpp in a process of its own, a new one for each question, so that it takes no test along where it aborts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

SECONDS = 100


def ask(function: str, **request: Any) -> Any:
    """Call a function of ``llama_library`` and return what it returned.

    Raises:
        RuntimeError: It raised, or llama.cpp ended the process; with the end of what was said.
    """
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)

        def saved(array: np.ndarray) -> dict[str, str]:
            np.save(folder / "asked.npy", array)
            return {"array": str(folder / "asked.npy")}

        asked = {"folder": place, "function": function, "request": request}
        done = subprocess.run(
            [sys.executable, str(Path(__file__).with_name("llama_library.py"))],
            input=json.dumps(asked, default=saved),
            env={**os.environ, "GGML_NO_BACKTRACE": "1"},
            capture_output=True,
            text=True,
            check=False,
            timeout=SECONDS,
        )
        if done.returncode:
            raise RuntimeError(f"{function} ended with status {done.returncode}: {done.stderr[-500:]}")
        return json.loads((folder / "answer.json").read_text("utf-8"), object_hook=_loaded)


def _loaded(value: dict[str, Any]) -> Any:
    return np.load(value["array"]) if "array" in value else value
