"""Where the islands meet: setup, step, loop, reports; see README.md."""

from patch.training.worker import run

__all__ = ["run"]
