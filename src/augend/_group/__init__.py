"""The door to torch.distributed: which rank this is, and what ranks tell each other about their work.

Everything here goes over gloo groups of our own, with tensors on the CPU: so a GPU never waits, and what is said here
cannot be mixed up with the collectives of a model.
"""

from augend._group._group import Group
from augend._group._open import Mesh, open_group, rank_and_world

__all__ = ["Group", "Mesh", "open_group", "rank_and_world"]
