"""Where parameters, gradients and sums lie: plain, replicated, sharded by FSDP2 or HSDP, split by tensors."""

from augend._placement._fsdp import give_back
from augend._placement._place import Dtypes
from augend._placement._placement import Placement
from augend._placement._recognise import Sync, place
from augend._placement._tensors import local_of

__all__ = ["Dtypes", "Placement", "Sync", "give_back", "local_of", "place"]
