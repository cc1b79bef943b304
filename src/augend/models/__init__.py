"""Small models to begin with; any ``nn.Module`` will do as well.

`export` writes one for others to read; `lora` puts adapters into one, and `merge_lora` makes them part of it.
"""

from __future__ import annotations

from augend.models._export import export as export
from augend.models._llama import Llama as Llama
from augend.models._lora import lora as lora
from augend.models._lora import lora_state as lora_state
from augend.models._lora import merge_lora as merge_lora
from augend.models._mlp import MLP as MLP

__all__ = ["MLP", "Llama", "export", "lora", "lora_state", "merge_lora"]
