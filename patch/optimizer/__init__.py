"""The optimizer: gradients, AdamW, schedule; see README.md."""

from patch.optimizer.replicated_adamw import ReplicatedAdamW
from patch.optimizer.schedule import learning_rate

__all__ = ["ReplicatedAdamW", "learning_rate"]
