"""Notes the last saved checkpoint in log/last_saved_iteration.txt: whether a run gets on, for a job's script.

The tracker does not tell: with --save URL it is in the store, and the one on the disk is of a copy that the
store once refused.
"""

from __future__ import annotations

from pathlib import Path

from patch.logger import get_logger
from patch.storage.atomic import write_atomically
from patch.storage.names import LAST_SAVED_FILE
from patch.training.hooks import TrainerHook

_logger = get_logger(__name__)


class LastSaved(TrainerHook):
    """Writes the number of each checkpoint that is complete, wherever it is; created after `MetricsLog`.

    Args:
        output: the run's folder.
    """

    def __init__(self, output: Path) -> None:
        self._file = output / LAST_SAVED_FILE

    def on_save(self, iteration: int) -> None:
        """Write the file; a failure is only logged, because the checkpoint itself is there."""
        try:
            write_atomically(self._file, f"{iteration}\n")
        except OSError as error:
            _logger.warning("%s was not written: %s", self._file, error.strerror)
