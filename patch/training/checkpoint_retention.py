"""After each save: links to the last and the best checkpoint, and removal of those that need not stay."""

from __future__ import annotations

import threading
from pathlib import Path

from patch.checkpoint.retention import Retention, delete_set_aside, point_link, set_aside_superseded
from patch.logger import get_logger
from patch.storage.names import BEST_LINK, BEST_TRACKER, LAST_LINK, all_iterations
from patch.training.hooks import Record, TrainerHook

_logger = get_logger(__name__)


class CheckpointRetention(TrainerHook):
    """Removes superseded checkpoints in the background, so that no step waits while files are deleted.

    It reads which checkpoint is the best from the file that `BestCheckpoint` writes, so it is called after
    that hook.

    Args:
        root: the folder of the run's checkpoints.
        retention: which of them stay.
        start_iteration: steps already done: those of the newest checkpoint, or 0.
        weights_only: the iteration whose checkpoint has no optimizer states, so that the last ones before it
            stay; None: there is none.
    """

    def __init__(
        self, root: Path, retention: Retention, start_iteration: int, weights_only: int | None = None
    ) -> None:
        self._root, self._retention = root, retention
        self._newest = start_iteration or None
        self._weights_only = set() if weights_only is None else {weights_only}
        self._abandoned = {iteration for iteration in all_iterations(root) if iteration > start_iteration}
        """Of later steps, from before this run went back to an older checkpoint; perhaps they are damaged."""
        self._has_links = True
        self._deletion: threading.Thread | None = None
        self._point_links()
        self._delete_in_background()

    def on_evaluate(self, record: Record) -> None:
        """A signal has a step evaluated after its checkpoint was saved."""
        self._point_links()

    def on_save(self, iteration: int) -> None:
        """Move the links, and remove what the new checkpoint supersedes."""
        self._newest = iteration
        self._point_links()
        self._abandoned.discard(iteration)
        uncounted = self._abandoned | self._weights_only
        gone = set_aside_superseded(self._root, self._retention, iteration, self._best(), uncounted)
        if gone:
            _logger.info("removed the checkpoints of steps %s", ", ".join(map(str, gone)))
            self._delete_in_background()

    def close(self) -> None:
        """Wait until the removed checkpoints are deleted."""
        if self._deletion is not None:
            self._deletion.join()

    def _delete_in_background(self) -> None:
        self.close()
        self._deletion = threading.Thread(target=delete_set_aside, args=(self._root,), daemon=True)
        self._deletion.start()

    def _best(self) -> int | None:
        try:
            return int((self._root / BEST_TRACKER).read_text(encoding="ascii"))
        except (FileNotFoundError, ValueError):
            return None

    def _point_links(self) -> None:
        if not self._has_links:
            return
        try:
            point_link(self._root, LAST_LINK, self._newest)
            point_link(self._root, BEST_LINK, self._best())
        except OSError as error:
            self._has_links = False
            _logger.warning(
                "%s gets no links %s and %s (%s): the .txt files there name these checkpoints",
                self._root, LAST_LINK, BEST_LINK, error.strerror,
            )  # fmt: skip
