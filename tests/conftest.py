"""What holds for every test: one thread, deterministic algorithms, and no traces left in torch's global state."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import numpy as np
import pytest
import torch

import models_from_packages

hypothesis.settings.register_profile("default", deadline=None, max_examples=30, print_blob=True)
hypothesis.settings.register_profile("long", parent=hypothesis.settings.get_profile("default"), max_examples=500)
hypothesis.settings.load_profile("default")  # make test-long asks for the other with --hypothesis-profile=long

torch.set_num_threads(1)
torch.use_deterministic_algorithms(mode=True)


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """Give SmolLM2-135M-Instruct, a GGUF file of 98 MB, for the long tests."""
    return models_from_packages.smollm2()


@pytest.fixture(autouse=True)
def untouched_random_state() -> Iterator[None]:
    """Give every test the same random state, whatever ran before, and take back what it drew."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002  the global one is meant
    yield
    random.setstate(states[0])
    np.random.set_state(states[1])  # noqa: NPY002  the global one is meant
    torch.set_rng_state(states[2])


@pytest.fixture(autouse=True)
def untouched_torch_modes() -> Iterator[None]:
    """Fail a test that leaves one of torch's global modes changed, and put the mode back for the next test."""
    before = torch_modes()
    yield
    after = torch_modes()
    changed = [f"{name} from {before[name]} to {after[name]}" for name in before if before[name] != after[name]]
    torch.set_default_dtype(before["default dtype"])
    torch.set_grad_enabled(before["grad mode"])
    torch.set_num_threads(before["threads"])
    torch.use_deterministic_algorithms(mode=before["deterministic algorithms"])
    torch.set_default_device(None)  # not to "cpu", which would put a mode around every call
    if changed:
        pytest.fail(f"the test changed torch's {', '.join(changed)} and did not put it back")


def torch_modes() -> dict[str, object]:
    """Read the global modes that a test might leave changed."""
    return {
        "default dtype": torch.get_default_dtype(),
        "grad mode": torch.is_grad_enabled(),
        "threads": torch.get_num_threads(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "default device": torch.get_default_device(),
    }
