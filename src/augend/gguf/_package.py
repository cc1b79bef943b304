"""The package `gguf`, which knows the types of tensors."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from augend.errors import GGUFError


def package() -> Any:
    """Return the package `gguf`.

    Raises:
        GGUFError: It is not installed.
    """
    try:
        return import_module("gguf")
    except ImportError as error:
        raise GGUFError(
            "GGUF files need the package gguf, which is not installed: pip install 'augend[gguf]'"
        ) from error
