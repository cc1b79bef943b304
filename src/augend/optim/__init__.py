"""What torch.optim lacks, as ordinary torch optimizers."""

from augend.optim._master import MasterWeights

__all__ = ["MasterWeights"]
