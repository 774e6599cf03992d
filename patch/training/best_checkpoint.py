"""Marks the checkpoint with the lowest validation loss: checkpoint/best_checkpointed_iteration.txt."""

from __future__ import annotations

import math
from pathlib import Path

from patch.errors import CheckpointError
from patch.logger import get_logger
from patch.storage.atomic import write_atomically
from patch.storage.names import BEST_TRACKER, CHECKPOINT_FOLDER, METRICS_FILE, complete_iterations
from patch.storage.places import AnyPath
from patch.storage.remote import RemotePath
from patch.training.hooks import Record, TrainerHook
from patch.training.metrics import read_metrics

_logger = get_logger(__name__)


class BestCheckpoint(TrainerHook):
    """Keeps the number of the best checkpoint in a file beside the checkpoints.

    A checkpoint counts if its step was evaluated on what the last evaluation took, known by its number of
    learned tokens: losses of other sets cannot be compared. On resume the losses of earlier ones come from
    metrics.jsonl, so this hook is created after `MetricsLog`, which cuts the file back.

    Args:
        output: the run's folder.
        start_iteration: steps already done; later checkpoints do not count.
        root: the folder of the run's checkpoints; None: it is in `output`.

    Raises:
        CheckpointError: the file cannot be written.
    """

    def __init__(self, output: Path, start_iteration: int, root: AnyPath | None = None) -> None:
        self._file = (root or output / CHECKPOINT_FOLDER) / BEST_TRACKER
        self._losses: dict[int, float] = {}
        self._num_tokens: float | None = None
        """Learned tokens of the last evaluation, and so of all that `_losses` holds."""
        for record in read_metrics(output / METRICS_FILE):
            if record.get("valid_loss") is not None:
                self._note(record)
        complete = complete_iterations(self._file.parent)
        self._saved = {iteration for iteration in complete if iteration <= start_iteration}
        self._best: int | None = None
        self._mark()
        if self._best is None:
            self._file.unlink(missing_ok=True)

    def on_evaluate(self, record: Record) -> None:
        """Note the validation loss; the checkpoint of this step may be saved before or after."""
        self._note(record)
        self._mark()

    def on_save(self, iteration: int) -> None:
        """Note that there is a checkpoint of this step."""
        self._saved.add(iteration)
        self._mark()

    def _note(self, record: Record) -> None:
        if record.get("valid_tokens") != self._num_tokens:
            self._losses.clear()
            self._num_tokens = record.get("valid_tokens")
        if not math.isnan(record["valid_loss"]):
            self._losses[record["iteration"]] = record["valid_loss"]

    def _mark(self) -> None:
        """Write the file if another checkpoint is the best one; the earlier one of two with equal losses."""
        candidates = sorted(self._saved & self._losses.keys())
        if not candidates:
            return
        best = min(candidates, key=self._losses.__getitem__)
        if best == self._best:
            return
        try:
            write_atomically(self._file, f"{best}\n")
        except OSError as error:
            if isinstance(self._file, RemotePath):  # the next save will tell, and has a way out
                _logger.warning("%s was not written: %s", self._file, error.strerror)
                return
            raise CheckpointError(f"{self._file} was not written: {error}; free space, resume") from error
        self._best, loss = best, self._losses[best]
        _logger.info("the checkpoint of step %d is the best so far: validation loss %.4f", best, loss)
