"""Small models to begin with; any ``nn.Module`` will do as well. `export` writes one for others to read."""

from __future__ import annotations

from augend.models._export import export as export
from augend.models._llama import Llama as Llama
from augend.models._mlp import MLP as MLP

__all__ = ["MLP", "Llama", "export"]
