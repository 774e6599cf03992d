"""After each save: choose the best checkpoint, link the best and the last, remove superseded checkpoints.

A removal first renames the checkpoint to a hidden name that no reader looks for. So a kill in the middle
leaves each checkpoint either whole or gone.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import NamedTuple

from patch.checkpoint.folder import delete_removed, mark_removed
from patch.checkpoint.manifest import has_saved_lengths
from patch.device import start_thread
from patch.errors import CheckpointError
from patch.logger import get_logger
from patch.storage.atomic import write_atomically
from patch.storage.names import (
    BEST_LINK,
    BEST_TRACKER,
    LAST_LINK,
    all_iterations,
    complete_iterations,
    iteration_name,
)
from patch.storage.places import AnyPath
from patch.storage.remote import RemotePath
from patch.training.hooks.hook import Record, TrainerHook
from patch.training.hooks.metrics import read_metrics

_logger = get_logger(__name__)

CLOSE_S = 60.0
"""Seconds that the end of a run waits for deletions: schedulers may kill it a minute after their signal."""


class Retention(NamedTuple):
    """The rule for checkpoints that stay; the best checkpoint always stays."""

    last: int | None = None
    """Number of newest checkpoints that stay, at least 1, or None for all."""
    every: int | None = None
    """Checkpoints whose iteration is a multiple of this stay too; None for no additional checkpoints."""


class Measure(NamedTuple):
    """The metric that decides which checkpoint is the best."""

    key: str
    """Name of the metric in metrics.jsonl."""
    is_higher_better: bool


LOWEST_LOSS = Measure("valid_loss", False)


class CheckpointRetention(TrainerHook):
    """Marks the best checkpoint, updates the links, and removes superseded checkpoints in the background.

    No step waits for deletions. A store has no links; its checkpoints are also listed in the background.

    The best checkpoint has the lowest validation loss, or the best score of a task; its iteration is in
    checkpoint/best_checkpointed_iteration.txt. Only checkpoints of evaluated steps count. Losses of different
    validation sets cannot be compared, so only losses with the last evaluation's number of learned tokens
    count. On resume, earlier values come from metrics.jsonl. So create this hook after `MetricsLog`, which
    truncates that file.

    Args:
        start_iteration: iteration of the newest checkpoint, or 0.
        weights_only: iteration of the checkpoint without optimizer states, or None. This checkpoint does not
            count, so that the last resumable checkpoints stay.
    Raises:
        CheckpointError: best_checkpointed_iteration.txt cannot be written.
    """

    def __init__(
        self,
        metrics: Path,
        root: AnyPath,
        retention: Retention,
        start_iteration: int,
        weights_only: int | None = None,
        measure: Measure = LOWEST_LOSS,
    ) -> None:
        self._measure = measure
        self._root, self._retention = root, retention
        self._newest = start_iteration or None
        self._weights_only = set() if weights_only is None else {weights_only}
        self._abandoned = {iteration for iteration in all_iterations(root) if iteration > start_iteration}
        """Later, perhaps damaged checkpoints, saved before this run went back to an older checkpoint."""
        self._saved = {iteration for iteration in complete_iterations(root) if iteration <= start_iteration}
        self._values: dict[int, float] = {}
        """Metric value of each evaluated step."""
        self._num_tokens: float | None = None
        """Learned tokens of the last evaluation; all losses in `_values` have this number."""
        self._best: int | None = None
        self._has_links = isinstance(root, Path)
        self._removal: threading.Thread | None = None
        """The last removal, which begins after the removals before it."""
        for record in read_metrics(metrics):
            self._note(record)
        self._mark()
        if self._best is None:
            (root / BEST_TRACKER).unlink(missing_ok=True)
        self._update_links()
        self._in_background(partial(delete_removed, root))

    def on_evaluate(self, record: Record) -> None:
        """Record the metric; after a stop request, the checkpoint of this step is already saved."""
        if self._note(record):
            self._mark()
            self._update_links()

    def on_save(self, iteration: int) -> None:
        """Mark the best checkpoint, update the links, and remove superseded checkpoints."""
        self._newest = iteration
        self._saved.add(iteration)
        self._mark()
        self._update_links()
        self._abandoned.discard(iteration)
        delete = partial(delete_removed, self._root)
        if not isinstance(self._root, Path):
            self._in_background(lambda: self._superseded(iteration) and delete())
        elif self._superseded(iteration):
            self._in_background(delete)

    def _note(self, record: Record) -> bool:
        """Keep the metric; return whether the record has it."""
        value = record.get(self._measure.key)
        if value is None:
            return False
        if self._measure == LOWEST_LOSS and record.get("valid_tokens") != self._num_tokens:
            self._values.clear()
            self._num_tokens = record.get("valid_tokens")
        if not math.isnan(value):
            self._values[record["iteration"]] = value
        return True

    def _mark(self) -> None:
        """Write the tracker file if the best checkpoint changed; of equal values, the earlier step wins."""
        candidates = sorted(self._saved & self._values.keys())
        if not candidates:
            return
        choose = max if self._measure.is_higher_better else min
        best = choose(candidates, key=self._values.__getitem__)
        if best == self._best:
            return
        tracker = self._root / BEST_TRACKER
        try:
            write_atomically(tracker, f"{best}\n")
        except OSError as error:
            if isinstance(tracker, RemotePath):  # the next save reports a lost store
                _logger.warning("%s was not written: %s", tracker, error.strerror)
                return
            raise CheckpointError(f"{tracker} was not written: {error}; free space, resume") from error
        self._best, value, key = best, self._values[best], self._measure.key
        name = "validation loss" if self._measure == LOWEST_LOSS else key
        _logger.info("the checkpoint of step %d is the best so far: %s %.4f", best, name, value)

    def close(self) -> None:
        """Wait at most CLOSE_S seconds for deletions; the next start deletes the rest."""
        assert self._removal is not None, "the start removes what an earlier run left"
        self._removal.join(CLOSE_S)
        if self._removal.is_alive():
            _logger.warning(
                "superseded checkpoints in %s are still being deleted after %.0f s: the next start of this "
                "run deletes the rest",
                self._root, CLOSE_S,
            )  # fmt: skip

    def _superseded(self, iteration: int) -> list[int]:
        uncounted = self._abandoned | self._weights_only
        return mark_superseded_removed(self._root, self._retention, iteration, self._best, uncounted)

    def _in_background(self, work: Callable[[], object]) -> None:
        def guarded(before: threading.Thread | None) -> None:
            try:
                if before is not None:
                    before.join()
                work()
            except OSError as error:  # from a store; the next save tries again, and reports a lost store
                _logger.warning("%s: superseded checkpoints stay for now: %s", self._root, error.strerror)

        self._removal = start_thread("remove checkpoints", partial(guarded, self._removal))

    def _update_links(self) -> None:
        if not self._has_links or not isinstance(self._root, Path):
            return
        try:
            update_link(self._root, LAST_LINK, self._newest)
            update_link(self._root, BEST_LINK, self._best)
        except OSError as error:
            self._has_links = False
            _logger.warning(
                "%s gets no links %s and %s (%s): the .txt files there name these checkpoints",
                self._root, LAST_LINK, BEST_LINK, error.strerror,
            )  # fmt: skip


def mark_superseded_removed(
    root: AnyPath, retention: Retention, newest: int, best: int | None, uncounted: Collection[int] = ()
) -> list[int]:
    """Rename superseded checkpoints and return their iterations, ascending; `delete_removed` then frees their
    space.

    Call this in one process, after `newest` was published; it always stays. Checkpoints of later iterations,
    which exist after a resume from an older checkpoint, are not touched; damaged checkpoints neither count
    nor go. A checkpoint that stays anyway is not examined, because that looks at every file. Only file
    lengths are compared: reading all contents again after each save would take longer than the save itself.

    `uncounted` iterations do not count among the `last` ones, because no run can resume from them or they
    were saved before this run went back to an older checkpoint.
    """
    if retention.last is None:
        return []

    def is_whole(iteration: int) -> bool:
        return has_saved_lengths(root / iteration_name(iteration))

    if not is_whole(newest):
        _logger.warning("%s is not whole: no older checkpoint is removed", root / iteration_name(newest))
        return []
    left, superseded, gone = retention.last - (newest not in uncounted), [], []
    for iteration in sorted((each for each in all_iterations(root) if each < newest), reverse=True):
        is_counted = left > 0 and iteration not in uncounted
        is_kept = iteration == best or (retention.every and iteration % retention.every == 0)
        if (is_kept and not is_counted) or not is_whole(iteration):
            continue
        if is_counted:
            left -= 1
        else:
            superseded.append(iteration)
    for iteration in reversed(superseded):
        folder = root / iteration_name(iteration)
        try:
            mark_removed(folder)
        except OSError as error:
            _logger.warning("%s cannot be removed: %s", folder, error.strerror)
        else:
            gone.append(iteration)
    if gone:
        _logger.info("removed the checkpoints of steps %s", ", ".join(map(str, gone)))
    return gone


def update_link(root: Path, name: str, iteration: int | None) -> None:
    """Point the link `name` in `root` atomically to a checkpoint; remove the link if there is no checkpoint.

    Raises:
        OSError: the file system has no symbolic links, or another file has this name.
    """
    link = root / name
    if iteration is None or not (root / iteration_name(iteration)).is_dir():
        if link.is_symlink():
            link.unlink()
        return
    if link.is_symlink() and link.readlink().name == iteration_name(iteration):
        return
    draft = root / f".{name}.tmp"
    try:
        draft.unlink(missing_ok=True)
        draft.symlink_to(iteration_name(iteration), target_is_directory=True)
        draft.replace(link)
    finally:
        draft.unlink(missing_ok=True)
