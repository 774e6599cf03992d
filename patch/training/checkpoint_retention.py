"""After each save: which checkpoint is the best, links to it and the last, removal of superseded ones.

A checkpoint that is removed first gets a hidden name that no reader looks for. A kill in the middle therefore
leaves each checkpoint whole, or not at all.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Collection, Iterable
from functools import partial
from pathlib import Path
from typing import NamedTuple

from patch.checkpoint.folder import delete_set_aside, set_aside
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
from patch.training.hooks import Record, TrainerHook
from patch.training.metrics import read_metrics

_logger = get_logger(__name__)

CLOSE_S = 60.0
"""Seconds that the end of a run waits for deletions: a scheduler may kill it a minute after its signal."""


class Retention(NamedTuple):
    """Which checkpoints stay; the best one always does."""

    last: int | None = None
    """Number of the newest ones that stay; None: all."""
    every: int | None = None
    """Checkpoints whose iteration is a multiple of this stay too; None: no more."""

    def superseded(
        self,
        iterations: Iterable[int],
        best: int | None,
        is_whole: Callable[[int], bool],
        uncounted: Collection[int] = (),
    ) -> list[int]:
        """The iterations, of these, whose checkpoints may go; in ascending order. The newest never is.

        Args:
            iterations: those of the checkpoints up to the newest one.
            best: the iteration of the best checkpoint; None if none is known.
            is_whole: whether a checkpoint is whole; others neither count nor go. Those that stay anyway are
                not asked for, because it takes a look at each file.
            uncounted: iterations that are none of the `last` ones.
        """
        if self.last is None:
            return []
        newest, *older = sorted(iterations, reverse=True)
        left, gone = self.last - (newest not in uncounted), []
        for iteration in older:
            is_counted = left > 0 and iteration not in uncounted
            is_kept = iteration == best or (self.every and iteration % self.every == 0)
            if (is_kept and not is_counted) or not is_whole(iteration):
                continue
            if is_counted:
                left -= 1
            else:
                gone.append(iteration)
        return gone[::-1]


class Measure(NamedTuple):
    """The metric of which the best checkpoint has the best value."""

    key: str
    """Its name in metrics.jsonl."""
    is_higher_better: bool


LOWEST_LOSS = Measure("valid_loss", False)


class CheckpointRetention(TrainerHook):
    """Marks the best checkpoint, moves the links, and removes superseded checkpoints in the background.

    So no step waits while files are deleted. In a store there are no links, and the checkpoints are also
    looked for in the background.

    The best one has the lowest validation loss, or the best score of a task; its number is in
    checkpoint/best_checkpointed_iteration.txt. A checkpoint counts if its step was evaluated; for a loss, on
    what the last evaluation took, known by its number of learned tokens: losses of other sets cannot be
    compared. On resume the values of earlier ones come from metrics.jsonl, so this hook is created after
    `MetricsLog`, which cuts the file back.

    Args:
        metrics: the run's metrics.jsonl.
        root: the folder of the run's checkpoints.
        retention: which of them stay.
        start_iteration: steps already done: those of the newest checkpoint, or 0.
        weights_only: the iteration whose checkpoint has no optimizer states, so that the last ones before it
            stay; None: there is none.
        measure: says which is the best.

    Raises:
        CheckpointError: the mark cannot be written.
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
        """Checkpoints of later steps, from before this run went back to an older checkpoint; perhaps they are
        damaged."""
        self._saved = {iteration for iteration in complete_iterations(root) if iteration <= start_iteration}
        self._values: dict[int, float] = {}
        """The values of evaluated steps."""
        self._num_tokens: float | None = None
        """Learned tokens of the last evaluation, and so of all losses that `_values` holds."""
        self._best: int | None = None
        self._has_links = isinstance(root, Path)
        self._removals: list[threading.Thread] = []
        for record in read_metrics(metrics):
            self._note(record)
        self._mark()
        if self._best is None:
            (root / BEST_TRACKER).unlink(missing_ok=True)
        self._point_links()
        self._in_background(partial(delete_set_aside, root))

    def on_evaluate(self, record: Record) -> None:
        """Note the metric; after a signal the checkpoint of this step was saved before."""
        if self._note(record):
            self._mark()
            self._point_links()

    def on_save(self, iteration: int) -> None:
        """Mark the best checkpoint, move the links, and remove what the new checkpoint supersedes."""
        self._newest = iteration
        self._saved.add(iteration)
        self._mark()
        self._point_links()
        self._abandoned.discard(iteration)
        delete = partial(delete_set_aside, self._root)
        if not isinstance(self._root, Path):
            self._in_background(lambda: self._superseded(iteration) and delete())
        elif self._superseded(iteration):
            self._in_background(delete)

    def _note(self, record: Record) -> bool:
        """Keep the metric; whether the record has it."""
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
        """Write the file if another checkpoint is the best one; the earlier one of two with equal values."""
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
            if isinstance(tracker, RemotePath):  # the next save will tell
                _logger.warning("%s was not written: %s", tracker, error.strerror)
                return
            raise CheckpointError(f"{tracker} was not written: {error}; free space, resume") from error
        self._best, value, key = best, self._values[best], self._measure.key
        name = "validation loss" if self._measure == LOWEST_LOSS else key
        _logger.info("the checkpoint of step %d is the best so far: %s %.4f", best, name, value)

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

    def _superseded(self, iteration: int) -> list[int]:
        uncounted = self._abandoned | self._weights_only
        return set_aside_superseded(self._root, self._retention, iteration, self._best, uncounted)

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

    def _point_links(self) -> None:
        if not self._has_links or not isinstance(self._root, Path):
            return
        try:
            point_link(self._root, LAST_LINK, self._newest)
            point_link(self._root, BEST_LINK, self._best)
        except OSError as error:
            self._has_links = False
            _logger.warning(
                "%s gets no links %s and %s (%s): the .txt files there name these checkpoints",
                self._root, LAST_LINK, BEST_LINK, error.strerror,
            )  # fmt: skip


def set_aside_superseded(
    root: AnyPath, retention: Retention, newest: int, best: int | None, uncounted: Collection[int] = ()
) -> list[int]:
    """Take the names of the checkpoints that may go; `delete_set_aside` then frees their space.

    Call it in one process, after `newest` was published. Checkpoints of later iterations, which a resume from
    an older one left, are not touched, and damaged ones neither count nor go. Only the lengths of files are
    compared: the contents were summed while they were written, and to read them all again after each save
    would take one process longer than the save.

    Args:
        root: the folder of a run's checkpoints.
        retention: what stays.
        newest: the iteration of the checkpoint that was just saved.
        best: the iteration of the best checkpoint; None if none is known.
        uncounted: iterations that are none of the `last` ones: no run can resume from them, or they are from
            before this run went back to an older one.

    Returns:
        The iterations of the checkpoints that are gone.
    """
    if retention.last is None:
        return []

    def is_whole(iteration: int) -> bool:
        return has_saved_lengths(root / iteration_name(iteration))

    if not is_whole(newest):
        _logger.warning("%s is not whole: no older checkpoint is removed", root / iteration_name(newest))
        return []
    gone = []
    candidates = [iteration for iteration in all_iterations(root) if iteration <= newest]
    for iteration in retention.superseded(candidates, best, is_whole, uncounted):
        folder = root / iteration_name(iteration)
        try:
            set_aside(folder)
        except OSError as error:
            _logger.warning("%s cannot be removed: %s", folder, error.strerror)
        else:
            gone.append(iteration)
    if gone:
        _logger.info("removed the checkpoints of steps %s", ", ".join(map(str, gone)))
    return gone


def point_link(root: Path, name: str, iteration: int | None) -> None:
    """Let the link `name` in `root` lead to a checkpoint; it is replaced atomically.

    Args:
        root: the folder of a run's checkpoints.
        name: the name of the link.
        iteration: that of the checkpoint; None, or one without a checkpoint: the link goes.

    Raises:
        OSError: the file system has no symbolic links, or something else has this name.
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
