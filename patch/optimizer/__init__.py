"""The optimizer: gradients, AdamW, schedule; see README.md."""

from patch.optimizer.overlapped_optimizer import OverlappedDistributedOptimizer
from patch.optimizer.schedule import learning_rate

__all__ = ["OverlappedDistributedOptimizer", "learning_rate"]
