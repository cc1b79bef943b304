"""Random state that is a function of what is computed, never of where."""

from __future__ import annotations

import hashlib
import random

import numpy as np
import torch


def digest(*parts: int | str) -> bytes:
    """Return 32 bytes that depend on every part: SHA-256 (FIPS 180-4) of the parts as Python writes them."""
    return hashlib.sha256(repr(parts).encode()).digest()


def seed_host(*parts: int | str) -> None:
    """Seed the generators that fetching and collating rows draw from, by what they are drawn for.

    Seeded are torch's generator of the CPU, Python's ``random`` and numpy's global generator, each from its own bytes
    of one digest.

    Args:
        parts: What the random numbers are for, for example ``("row", seed, epoch, row)``.
    """
    drawn = digest(*parts)
    torch.default_generator.manual_seed(int.from_bytes(drawn[:8], "little"))
    random.seed(int.from_bytes(drawn[8:16], "little"))
    np.random.seed(int.from_bytes(drawn[16:20], "little"))  # noqa: NPY002 - users' code draws from the global one


def seed_all(*parts: int | str) -> None:
    """Seed the generators of the host as `seed_host` does, and those of every device there is.

    `torch.manual_seed` formats a stack trace for each kind of device that it knows and that is not in use, which
    takes a millisecond, so it is called only where a device other than CUDA's might be.

    Args:
        parts: What the random numbers are for, for example ``("micro-batch", seed, epoch, step, first_row, ordinal)``.
    """
    seed = int.from_bytes(digest(*parts)[:8], "little")
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch left out its annotation
        torch.cuda.manual_seed_all(seed)
    elif torch.accelerator.is_available():
        torch.manual_seed(seed)
    seed_host(*parts)
