"""Saves checkpoints into a temporary folder, which is then renamed; errors leave earlier ones intact.

A save is planned by all ranks together; then a thread of each rank writes that rank's files, and at last a
thread of rank 0 writes the index and the checksums and renames the folder. Training may go on meanwhile.

A store has no renaming: the checksums, written last, publish a checkpoint there.
"""

from __future__ import annotations

import json
import pickle
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from patch.checkpoint.data_files import Value, WrittenFiles, data_file, write_data
from patch.checkpoint.folder import (
    delete_set_aside,
    iteration_folder,
    open_staging,
    publish,
    staged_checkpoint,
)
from patch.checkpoint.host_copies import HostCopies
from patch.checkpoint.manifest import write_manifest
from patch.checkpoint.sharded_tensors import bytes_to_write, copied, shards_of
from patch.compat.checkpoint_format import SavePlanner, StorageInfo
from patch.device import start_thread
from patch.distributed.collectives import all_gather_object, fail_together
from patch.errors import CheckpointError
from patch.logger import get_logger
from patch.memory import is_on_disk
from patch.numbers import size_text
from patch.storage.atomic import StagedFolder
from patch.storage.checksums import Checksum, SummedFile, write_summed
from patch.storage.lock import check_held
from patch.storage.names import METADATA_FILE
from patch.storage.places import AnyPath

_logger = get_logger(__name__)

_FOLDER_IS_SEEN_S = 90.0
"""For so long a machine may not see a folder that another one has created."""


def save_checkpoint(
    root: AnyPath, iteration: int, sharded_state: dict[str, Any], common: dict[str, Any]
) -> None:
    """Write one checkpoint with all ranks; its folder gets its name only when it is complete.

    Args:
        root: the folder of a run's checkpoints, shared by all ranks; created if missing.
        iteration: the number of finished optimizer steps. A checkpoint of the same iteration is replaced.
        sharded_state: sections of sharded state dicts ("model", "optimizer", "random"); it is not changed.
            The model's keys are upstream's; the keys of another section begin with the section's name.
        common: values of plain (JSON) types, the same on every rank; rank 0 writes them.

    Raises:
        CheckpointError: on all ranks, if any rank could not write; the new checkpoint is removed.
    """
    start_save(root, iteration, sharded_state, common).finish()


def start_save(
    root: AnyPath,
    iteration: int,
    sharded_state: dict[str, Any],
    common: dict[str, Any],
    host_copies: HostCopies | None = None,
) -> Save:
    """Plan a checkpoint and begin to write it; a collective.

    Args:
        root, iteration, sharded_state, common: see `save_checkpoint`.
        host_copies: where this rank's part is copied to, in the background. The state may be changed after
            `Save.wait_for_copies`; without copies, only after `Save.finish`.

    Raises:
        CheckpointError: on all ranks, if any rank could not begin.
    """
    assert not set(common) & set(sharded_state), "common keys and section names share one dict"
    target = iteration_folder(root, iteration)
    planner = SavePlanner()
    with _discarding(target):
        with fail_together(f"checkpoint {target} was not started", CheckpointError):
            json.dumps(common)
            num_bytes = bytes_to_write(shards_of(sharded_state))
        needed = sum(all_gather_object(num_bytes))
        with fail_together(f"checkpoint {target} was not started", CheckpointError):
            if dist.get_rank() == 0:
                check_held(target)  # what `open_staging` removes would be another run's
                open_staging(target)
                if isinstance(target, Path):
                    _check_space(target, needed)
        with fail_together(_failure(target), CheckpointError):
            planner.split({**copied(sharded_state), **common})
        with fail_together(_failure(target), CheckpointError):
            planner.plan()
    return Save(target, iteration, planner, host_copies)


class Writing(NamedTuple):
    """How far a rank is with writing a checkpoint; any progress changes it."""

    iteration: int
    is_publishing: bool
    """Whether only the last files of rank 0 are missing."""
    num_bytes: int
    """Written to this rank's data files so far."""


class Save:
    """A checkpoint that is being written. All ranks call its collective methods at the same points.

    Args:
        target: the checkpoint's folder.
        iteration: its iteration.
        planner: holds what is to be written.
        host_copies: see `start_save`.
    """

    def __init__(
        self,
        target: AnyPath,
        iteration: int,
        planner: SavePlanner,
        host_copies: HostCopies | None,
    ) -> None:
        self.iteration = iteration
        self._target = target
        self._planner = planner
        self._written: WrittenFiles | None = None
        self._is_publishing = False
        self._files: list[SummedFile] = []
        self._error: Exception | None = None
        self._cancelled, self._copied = threading.Event(), threading.Event()
        self._reads_disk = any(map(is_on_disk, planner.values))
        """Whether values lie on a disk, of which there are no copies: the state may change once all is
        written."""
        self._copy: Callable[[], list[Value]] | None = None
        if host_copies is not None:
            self._copy = host_copies.prepare(planner.values)
        elif any(isinstance(value, torch.Tensor) and value.is_cuda for value in planner.values):
            torch.cuda.synchronize()  # the thread reads on another stream
        self._begin = time.perf_counter()
        self.seconds = 0.0
        """From the start until the checkpoint was complete; known on rank 0 once it is."""
        self._thread: threading.Thread | None = None
        self._start(self._write)

    @property
    def _partial(self) -> AnyPath:
        return staged_checkpoint(self._target).partial

    @property
    def is_busy(self) -> bool:
        """Whether this rank still writes; not a collective."""
        thread = self._thread
        return thread is not None and thread.is_alive()

    def progress(self) -> Writing | None:
        """How far this rank is; None if it writes nothing at present. Not a collective, and of any thread."""
        if not self.is_busy:
            return None
        return Writing(self.iteration, self._is_publishing, sum(file.tell() for file in self._files))

    def wait_for_copies(self) -> None:
        """Wait until the state may be changed, or the copies have failed; not a collective."""
        self._copied.wait()

    def advance(self) -> bool:
        """Go on when no rank is busy any more, or else wait for that; a collective.

        Returns:
            whether the checkpoint is complete; if not, call it again later.

        Raises:
            CheckpointError: on all ranks, if any rank could not write; the new checkpoint is removed.
        """
        with _discarding(self._target), fail_together(_failure(self._target), CheckpointError):
            self._join()
            if self._error is not None:
                raise self._error
        if self._is_publishing:
            _logger.info("saved %s", self._target)
            return True
        self._is_publishing = True
        is_first = dist.get_rank() == 0
        by_rank: list[Any] | None = [None] * dist.get_world_size() if is_first else None
        dist.gather_object(self._written, by_rank)
        self._planner.values = []
        if by_rank is not None:
            written: list[WrittenFiles] = by_rank
            self._start(lambda: self._publish(written))
        return False

    def finish(self) -> None:
        """Wait until the checkpoint is complete; a collective.

        Raises:
            CheckpointError: see `advance`.
        """
        while not self.advance():
            pass

    def abandon(self) -> None:
        """Give the checkpoint up, for a run that fails; not a collective. Its folder stays, unpublished."""
        self._cancelled.set()
        self._join()

    def _start(self, work: Callable[[], None]) -> None:
        def guarded() -> None:
            try:
                work()
            except Exception as error:  # noqa: BLE001 - `advance` raises it on all ranks
                self._error = error

        self._thread = start_thread("checkpoint", guarded, daemon=False)

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _write(self) -> None:
        values = self._planner.values
        try:
            if self._copy is not None:
                values = self._copy()
                self._planner.values = []
            if not self._reads_disk:
                self._copied.set()
            partial = self._partial
            if isinstance(partial, Path):
                _wait_for_folder(partial, self._cancelled)
            self._written = write_data(partial, dist.get_rank(), values, self._cancelled, self._files)
        finally:
            self._copied.set()

    def _publish(self, by_rank: list[WrittenFiles]) -> None:
        """Write the index and the checksums, and publish the folder; in a thread of rank 0."""
        contents = {name: value for written in by_rank for name, value in written.contents.items()}
        contents[METADATA_FILE] = self._write_index([written.places for written in by_rank])
        for name, data in self._planner.small_files.items():
            contents[name] = write_summed(self._partial / name, data)
        check_held(self._target)  # in a store, the next line publishes
        write_manifest(self._partial, self.iteration, contents)
        check_held(self._target)
        publish(self._target)
        self.seconds = time.perf_counter() - self._begin

    def _write_index(self, places_by_rank: list[np.ndarray]) -> Checksum:
        index = self._planner.index
        assert index is not None, "rank 0 has planned"
        index.storage_data = {
            key: StorageInfo(data_file(rank, number), begin, length)
            for rank, places in enumerate(places_by_rank)
            for key, (number, begin, length) in zip(
                self._planner.keys_by_rank[rank], places.tolist(), strict=True
            )
        }
        return write_summed(self._partial / METADATA_FILE, pickle.dumps(index))


def _wait_for_folder(folder: Path, cancelled: threading.Event) -> None:
    """Wait until this machine sees the folder that rank 0 has created.

    Over NFS a machine may remember for 30 to 60 s that something was not there.

    Raises:
        CheckpointError: it does not see it.
    """
    begin = time.monotonic()
    while not folder.is_dir() and not cancelled.is_set():
        if time.monotonic() - begin > _FOLDER_IS_SEEN_S:
            raise CheckpointError(
                f"{folder} was not written: {socket.gethostname()} does not see that rank 0 has created it; "
                "all ranks must share the folder of the run",
                field="output_path",
            )
        cancelled.wait(0.2)


@contextmanager
def _discarding(target: AnyPath) -> Iterator[None]:
    """A context of all ranks: on a CheckpointError rank 0 removes what was written of the checkpoint.

    Not if another run has taken the lock over, which may write the same checkpoint; and in a store the next
    save does it, because the store may be the reason of the error.
    """
    try:
        yield
    except CheckpointError:
        staged = staged_checkpoint(target)
        if dist.get_rank() == 0 and isinstance(staged, StagedFolder):
            with suppress(CheckpointError):
                check_held(target)
                staged.discard()
        raise


def _failure(target: AnyPath) -> str:
    return f"checkpoint {target} was not written, earlier ones are untouched"


def _check_space(target: Path, needed: int) -> None:
    free = shutil.disk_usage(target.parent).free
    if free < needed:  # what the last save superseded is still being deleted, perhaps
        delete_set_aside(target.parent)
        free = shutil.disk_usage(target.parent).free
    if free < needed:
        raise CheckpointError(
            f"checkpoint {target} needs {size_text(needed)}, {target.parent} has {size_text(free)} free; "
            "remove older checkpoints there (--save-retain-last does so after each save) or choose another "
            "folder",
            field="output_path",
        )
