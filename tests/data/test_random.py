"""Seeding: every generator, by what is computed."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from augend.data._random import seed_all, seed_host


def drawn():
    """One number of each global generator."""
    return torch.rand(()).item(), random.random(), np.random.rand()  # noqa: NPY002, S311 - the ones users draw from


@pytest.mark.parametrize("seed", [seed_host, seed_all])
def test_equal_parts_give_equal_numbers(seed):
    """All generators depend on every part and on nothing drawn before."""
    seed("row", -1, 2, 3)
    first = drawn()
    drawn()
    seed("row", -1, 2, 3)
    assert first == drawn()
    for other in [("row", -1, 2, 4), ("row", 1, 2, 3), ("collate", -1, 2, 3), ("row", -1, 23)]:
        seed(*other)
        assert not set(first) & set(drawn())


def test_both_seed_the_host_alike():
    """What a row draws does not depend on which of the two seeded."""
    seed_host("row", 5)
    host = drawn()
    seed_all("row", 5)
    assert host == drawn()


def test_devices_are_seeded_too(monkeypatch):
    """Devices get the seed of the host: CUDA's, once in use, directly, and others by torch.manual_seed."""
    cuda, others = [], []
    monkeypatch.setattr(torch, "manual_seed", others.append)
    monkeypatch.setattr(torch.cuda, "manual_seed_all", cuda.append)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    seed_all("row", 5)
    assert ([], []) == (cuda, others)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    seed_all("row", 5)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    seed_host("row", 6)
    seed_all("row", 5)
    assert (1, 1) == (len(cuda), len(others))
    assert torch.initial_seed() == cuda[0] % 2**64 == others[0] % 2**64
