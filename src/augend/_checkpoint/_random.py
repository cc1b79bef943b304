"""The state of the global random generators, as text and numbers."""

from __future__ import annotations

import base64
import random
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from augend._group import rank_and_world
from augend.errors import ContractError


def capture_random() -> dict[str, Any]:
    """Return the state of torch's generators on the CPU and its accelerators, of ``random``, and of numpy's."""
    version, numbers, gauss = random.getstate()
    name, key, position, has_gauss, cached = cast("tuple[str, Any, int, int, float]", np.random.get_state())  # noqa: NPY002  # the global generator is what is saved
    return {
        "torch": _text(torch.get_rng_state()),
        "accelerators": [_text(state) for state in _accelerators()],
        "python": [version, list(numbers), gauss],
        "numpy": [name, [int(one) for one in key], int(position), int(has_gauss), float(cached)],
    }


def prepare_random(saved: dict[str, Any]) -> Callable[[], None]:
    """Check saved states; return what sets the generators to them.

    States of accelerators are taken where as many are here as there were; `augend.Batches` seeds all of them before
    each micro-batch anyway.

    Raises:
        ContractError: A state is not one.
    """
    try:
        cpu = _tensor(saved["torch"])
        torch.Generator().set_state(cpu)
        accelerators = [_tensor(one) for one in saved["accelerators"]]
        version, numbers, gauss = saved["python"]
        python = (version, tuple(numbers), gauss)
        random.Random().setstate(python)  # noqa: S311  # a trial, for its errors
        name, key, *rest = saved["numpy"]
        legacy = (name, np.array(key, dtype=np.uint32), *rest)
        np.random.RandomState().set_state(legacy)  # a trial, for its errors
    except (LookupError, ValueError, TypeError, RuntimeError, ArithmeticError) as error:
        raise ContractError(f"the saved random state is not one: {error!r}") from error

    def commit() -> None:
        torch.set_rng_state(cpu)
        random.setstate(python)
        np.random.set_state(legacy)  # noqa: NPY002  # the global generator is what was saved
        devices = _devices()
        if len(accelerators) == len(devices):
            for index, state in zip(devices, accelerators, strict=True):
                torch.get_device_module().set_rng_state(state, index)

    return commit


def _devices() -> list[int]:
    """Return the accelerators that are this process's: all, or of several ranks its own."""
    if not torch.accelerator.is_available():
        return []
    if rank_and_world()[1] > 1:
        return [torch.accelerator.current_device_index()]
    return list(range(torch.accelerator.device_count()))


def _accelerators() -> list[Tensor]:
    return [torch.get_device_module().get_rng_state(index) for index in _devices()]


def _text(state: Tensor) -> str:
    return base64.b64encode(state.cpu().numpy().tobytes()).decode()


def _tensor(text: str) -> Tensor:
    return torch.tensor(list(base64.b64decode(text, validate=True)), dtype=torch.uint8, device="cpu")
