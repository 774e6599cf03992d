"""The former place of `patch.training.objectives.Objective`; release 0.2 removes it."""

from patch.training.objectives import Objective

__all__ = ["Objective"]
