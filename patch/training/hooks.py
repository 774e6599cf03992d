"""What hangs on the training loop: metrics, plots, progress and whatever comes, each in a file of its own.

A new hook is a subclass of `TrainerHook` and a line in `worker.build_hooks`.
"""

from __future__ import annotations

from typing import Any

Record = dict[str, Any]
"""One object of log/metrics.jsonl."""


class TrainerHook:
    """Called by the trainer, on every rank that has it in its list; overrides the methods that it needs.

    Hooks are called in the order of the list. All ranks call the same methods at the same steps, with the
    same records. A hook that only writes is in the list of rank 0 alone; the other ranks wait for it after a
    save, and otherwise go on. A hook that needs a collective is in the list of every rank, and two such hooks
    have the same order there.
    """

    def on_step(self, iteration: int, seconds: float) -> None:
        """After every step.

        Args:
            iteration: steps that are done, counted from 1.
            seconds: this rank's, from the end of the step before; evaluations and saves between are left out.
        """

    def on_log(self, record: Record) -> None:
        """After a step that `--log-interval` names, and the last: its metrics, of the worst rank each."""

    def on_evaluate(self, record: Record) -> None:
        """After an evaluation: `iteration`, `valid_loss` and `valid_ppl`."""

    def on_save(self, iteration: int) -> None:
        """After a checkpoint was written and has its name; then all ranks wait for each other."""

    def close(self) -> None:
        """After the last step, a signal or an error."""
