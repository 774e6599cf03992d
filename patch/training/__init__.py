"""The training run, built from the other packages: setup, step, loop, metrics; see README.md."""

from patch.training.worker import run

__all__ = ["run"]
