"""Which optimizers were proved, and with which options: a proof takes longer than a small step."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import final
from weakref import WeakKeyDictionary

import torch
from torch import nn

from augend._finish._elementwise import check_elementwise, proof_key


@final
class Proven:
    """Proves optimizers once, and again where their options have changed."""

    def __init__(self) -> None:
        self._keys: WeakKeyDictionary[torch.optim.Optimizer, Hashable] = WeakKeyDictionary()

    def check(
        self, optimizers: list[torch.optim.Optimizer], parameters: Mapping[str, nn.Parameter]
    ) -> list[torch.optim.Optimizer]:
        """Return the optimizers, after proving that their steps do not depend on where a tensor is cut.

        Raises:
            ContractError: As ``check_elementwise``.
        """
        for one in optimizers:
            key = proof_key(one)
            if self._keys.get(one) != key:
                check_elementwise(one, parameters)
                self._keys[one] = key
        return optimizers
