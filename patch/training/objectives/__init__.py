"""The objectives that a run minimises."""

from patch.training.objectives.objective import Objective

__all__ = ["Objective"]
