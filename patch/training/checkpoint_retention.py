"""After each save: links to the last and the best checkpoint, and removal of those that need not stay."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from patch.checkpoint.manifest import has_saved_lengths
from patch.checkpoint.retention import (
    Retention,
    delete_set_aside,
    find_refused,
    point_link,
    remove_refused,
    set_aside_superseded,
)
from patch.device import start_thread
from patch.logger import get_logger
from patch.storage.names import (
    BEST_LINK,
    BEST_TRACKER,
    LAST_LINK,
    all_iterations,
    iteration_in,
    iteration_name,
)
from patch.storage.places import AnyPath
from patch.storage.remote import RemotePath
from patch.storage.text_files import read_small
from patch.training.hooks import Record, TrainerHook

_logger = get_logger(__name__)

CLOSE_S = 60.0
"""How long the end of a run waits for deletions: a scheduler may kill it a minute after its signal."""


class CheckpointRetention(TrainerHook):
    """Removes superseded checkpoints in the background, so that no step waits while files are deleted.

    In a store there are no links, and the checkpoints are also looked for in the background.

    It reads which checkpoint is the best from the file that `BestCheckpoint` writes, so it is called after
    that hook.

    Args:
        root: the folder of the run's checkpoints.
        disk: if that is in a store, the folder on the disk that gets those that the store refuses.
        retention: which of them stay.
        start_iteration: steps already done: those of the newest checkpoint, or 0.
        weights_only: the iteration whose checkpoint has no optimizer states, so that the last ones before it
            stay; None: there is none.
    """

    def __init__(
        self,
        root: AnyPath,
        disk: Path,
        retention: Retention,
        start_iteration: int,
        weights_only: int | None = None,
    ) -> None:
        self._root, self._disk, self._retention = root, disk, retention
        self._newest = start_iteration or None
        self._weights_only = set() if weights_only is None else {weights_only}
        self._abandoned = {iteration for iteration in all_iterations(root) if iteration > start_iteration}
        """Checkpoints of later steps, from before this run went back to an older checkpoint; perhaps they are
        damaged."""
        self._has_links = isinstance(root, Path)
        self._removals: list[threading.Thread] = []
        self._point_links()
        self._in_background(self._delete)

    def on_evaluate(self, record: Record) -> None:
        """A signal has a step evaluated after its checkpoint was saved."""
        self._point_links()

    def on_save(self, iteration: int) -> None:
        """Move the links, and remove what the new checkpoint supersedes."""
        self._newest = iteration
        self._point_links()
        self._abandoned.discard(iteration)
        if isinstance(self._root, Path):
            if self._set_aside(iteration):
                self._in_background(self._delete)
        else:
            self._in_background(partial(self._remove, self._root, iteration))

    def close(self) -> None:
        """Wait until what was removed is deleted, but not for ever: the next start deletes the rest."""
        deadline = time.monotonic() + CLOSE_S
        for removal in self._removals:
            removal.join(max(0.0, deadline - time.monotonic()))
        if any(removal.is_alive() for removal in self._removals):
            _logger.warning(
                "superseded checkpoints in %s are still being deleted after %.0f s: the next start of this "
                "run deletes the rest",
                self._root, CLOSE_S,
            )  # fmt: skip

    def _set_aside(self, iteration: int) -> bool:
        uncounted = self._abandoned | self._weights_only
        gone = set_aside_superseded(self._root, self._retention, iteration, self._best(), uncounted)
        if gone:
            _logger.info("removed the checkpoints of steps %s", ", ".join(map(str, gone)))
        return bool(gone)

    def _remove(self, root: RemotePath, iteration: int) -> None:
        self._remove_refused(root, iteration)
        if self._retention.last is not None and self._set_aside(iteration):
            self._delete()

    def _remove_refused(self, root: RemotePath, iteration: int) -> None:
        refused = find_refused(self._disk, iteration)
        if not refused or not has_saved_lengths(root / iteration_name(iteration)):
            return
        if gone := sorted(refused - {self._best()}):
            remove_refused(self._disk, gone)
            _logger.info(
                "%s has the checkpoint of step %d: removed those of steps %s, which it had refused, from %s",
                root, iteration, ", ".join(map(str, gone)), self._disk,
            )  # fmt: skip

    def _delete(self) -> None:
        for place in dict.fromkeys((self._root, self._disk)):
            delete_set_aside(place)

    def _in_background(self, work: Callable[[], object]) -> None:
        def guarded(before: list[threading.Thread]) -> None:
            try:
                for removal in before:
                    removal.join()
                work()
            except OSError as error:  # of a store; the next save tries again, and will tell if it is away
                _logger.warning("%s: superseded checkpoints stay for now: %s", self._root, error.strerror)

        self._removals = [removal for removal in self._removals if removal.is_alive()]
        self._removals.append(start_thread("remove checkpoints", partial(guarded, self._removals[-1:])))

    def _best(self) -> int | None:
        try:
            return iteration_in(read_small(self._root / BEST_TRACKER).decode().strip())
        except (FileNotFoundError, ValueError):
            return None

    def _point_links(self) -> None:
        if not self._has_links or not isinstance(self._root, Path):
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
