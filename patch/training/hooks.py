"""The base class of hooks, which the training loop calls: metrics, plots, progress, each in its own file.

A new hook is a subclass of `TrainerHook` and a line in `worker.build_hooks`.
"""

from __future__ import annotations

from typing import Any

Record = dict[str, Any]
"""One object of log/metrics.jsonl."""


class TrainerHook:
    """A hook of the training loop; a subclass overrides the methods that it needs.

    Hooks are called in the order of the trainer's list. All ranks call the same methods at the same steps,
    with the same records. A hook that only writes files belongs in the list of rank 0 alone; the other ranks
    wait for it after a save, but not at other times. A hook that uses collectives belongs in the list of
    every rank, and several such hooks must have the same order on all ranks.
    """

    def on_step(self, iteration: int, seconds: float) -> None:
        """Called after every step.

        Args:
            iteration: number of the step, counted from 1.
            seconds: time of the step on this rank, without evaluations and saves.
        """

    def on_log(self, record: Record) -> None:
        """Called every `--log-interval` steps and after the last step; metrics are the largest over ranks."""

    def on_evaluate(self, record: Record) -> None:
        """Called after an evaluation, with `iteration`, `valid_loss`, `valid_ppl` and `valid_tokens`.

        With several validation sets there are also `valid_loss/NAME` and `valid_ppl/NAME` of each.
        """

    def on_save(self, iteration: int) -> None:
        """Called after a checkpoint is complete; all ranks wait for each other afterwards.

        A checkpoint that is written in the background is complete some steps after its own.
        """

    def close(self) -> None:
        """Called at the end of training: after the last step, a signal or an error."""
