"""Saves checkpoints into a temporary folder, which is then renamed; errors leave earlier checkpoints intact.

All ranks plan a save together. A thread of each rank writes the rank's files. Then a thread of rank 0 writes
the index and the checksums, and renames the folder. Training may continue meanwhile. A store cannot rename:
there the checksums, written last, publish a checkpoint.
"""

from __future__ import annotations

import json
import pickle
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from patch.checkpoint.data_files import Value, WrittenFiles, data_file, write_data
from patch.checkpoint.folder import (
    delete_removed,
    iteration_folder,
    open_staging,
    publish,
    staged_checkpoint,
)
from patch.checkpoint.host_copies import HostCopies
from patch.checkpoint.manifest import write_manifest
from patch.checkpoint.sharded_tensors import bytes_to_write, copied, shards_of
from patch.compat.checkpoint_format import SavePlanner, StorageInfo
from patch.device import device_setter
from patch.distributed.collectives import all_gather_object, fail_together
from patch.errors import CheckpointError
from patch.logger import get_logger
from patch.memory.disk import is_on_disk
from patch.storage.atomic import StagedFolder
from patch.storage.checksums import Checksum, SummedFile, write_summed
from patch.storage.lock import check_held
from patch.storage.names import METADATA_FILE
from patch.storage.places import AnyPath
from patch.text import size_text

_logger = get_logger(__name__)

_FOLDER_IS_SEEN_S = 90.0
"""Longest time until a host sees a folder that another host created."""


def save_checkpoint(
    root: AnyPath, iteration: int, sharded_state: dict[str, Any], common: dict[str, Any]
) -> None:
    """Write one checkpoint with all ranks; its folder gets its name only when it is complete.

    Args:
        root: the folder of a run's checkpoints, shared by all ranks; created if missing.
        iteration: number of finished optimizer steps. A checkpoint of the same iteration is replaced.
        sharded_state: sections of sharded state dicts ("model", "optimizer", "random"); not changed. Model
            keys are upstream's; keys of other sections begin with the section's name.
        common: values of plain (JSON) types, the same on every rank; rank 0 writes them.
    Raises:
        CheckpointError: on all ranks, if any rank could not write; the new checkpoint is removed.
    """
    Save(root, iteration, sharded_state, common).finish()


def _plan(target: AnyPath, sharded_state: dict[str, Any], common: dict[str, Any]) -> SavePlanner:
    """Create the temporary folder, and plan which rank writes what; a collective."""
    assert not set(common) & set(sharded_state), "common keys and section names share one dict"
    planner = SavePlanner()
    with _discarding(target):
        with fail_together(f"checkpoint {target} was not started", CheckpointError):
            json.dumps(common)
            num_bytes = bytes_to_write(shards_of(sharded_state))
        needed = sum(all_gather_object(num_bytes))
        with fail_together(f"checkpoint {target} was not started", CheckpointError):
            if dist.get_rank() == 0:
                check_held(target)  # else `open_staging` would remove files of another run
                open_staging(target)
                if isinstance(target, Path):
                    _check_space(target, needed)
        with fail_together(_failure(target), CheckpointError):
            planner.split({**copied(sharded_state), **common})
        with fail_together(_failure(target), CheckpointError):
            planner.plan()
    return planner


class Save:
    """A checkpoint that is being written. All ranks call its collective methods at the same points.

    Its creation plans the checkpoint and starts to write it: a collective with the arguments of
    `save_checkpoint`.

    Args:
        host_copies: the buffer for background copies of this rank's part. The state may be changed after
            `wait_for_copies`; without copies, only after `finish`.
    Raises:
        CheckpointError: on all ranks, if any rank could not begin.
    """

    def __init__(
        self,
        root: AnyPath,
        iteration: int,
        sharded_state: dict[str, Any],
        common: dict[str, Any],
        host_copies: HostCopies | None = None,
    ) -> None:
        self.iteration, self._target = iteration, iteration_folder(root, iteration)
        planner = self._planner = _plan(self._target, sharded_state, common)
        self._written: WrittenFiles | None = None
        self._is_publishing = False
        self._files: list[SummedFile] = []
        self._cancelled = threading.Event()
        reads_disk = any(map(is_on_disk, planner.values))
        self._pool = ThreadPoolExecutor(1, "checkpoint", initializer=device_setter())
        self._copying: Future[list[Value]] | None = None
        if host_copies is not None:
            self._copying = self._pool.submit(host_copies.prepare(planner.values))
        elif any(isinstance(value, torch.Tensor) and value.is_cuda for value in planner.values):
            torch.cuda.synchronize()  # the thread reads on another stream
        self._begin = time.perf_counter()
        self.seconds = 0.0
        """Seconds from start to completion; set on rank 0."""
        self._work: Future[None] = self._pool.submit(self._write)
        # Values on disk are not copied, so the state may change only after the write.
        self._before_change: Future[Any] = self._work if reads_disk else self._copying or self._work

    @property
    def _partial(self) -> AnyPath:
        return staged_checkpoint(self._target).partial

    @property
    def is_busy(self) -> bool:
        """Whether this rank still writes; not a collective."""
        return not self._work.done()

    def progress(self) -> object:
        """Return a value that changes with any progress of this rank; None if it writes nothing.

        Not a collective; any thread may call this.
        """
        if not self.is_busy:
            return None
        return self.iteration, self._is_publishing, sum(file.tell() for file in self._files)

    def wait_for_copies(self) -> None:
        """Wait until the state may be changed, or the copies have failed; not a collective."""
        wait([self._before_change])

    def advance(self) -> bool:
        """Wait for the current phase on all ranks and start the next one; a collective.

        Returns:
            whether the checkpoint is complete; if not, call again later.
        Raises:
            CheckpointError: on all ranks, if any rank could not write; the new checkpoint is removed.
        """
        with _discarding(self._target), fail_together(_failure(self._target), CheckpointError):
            self._work.result()
        if self._is_publishing:
            self._pool.shutdown()
            _logger.info("saved %s", self._target)
            return True
        self._is_publishing = True
        is_first = dist.get_rank() == 0
        by_rank: list[Any] | None = [None] * dist.get_world_size() if is_first else None
        dist.gather_object(self._written, by_rank)
        self._planner.values = []
        if by_rank is not None:
            self._work = self._pool.submit(self._publish, by_rank)
        return False

    def finish(self) -> None:
        """Wait until the checkpoint is complete; a collective that raises the errors of `advance`."""
        while not self.advance():
            pass

    def abandon(self) -> None:
        """Stop the save of a run that fails; not a collective. The folder stays, unpublished."""
        self._cancelled.set()
        self._pool.shutdown()

    def _write(self) -> None:
        values, partial = self._planner.values, self._partial
        if self._copying is not None:
            values = self._copying.result()
        if isinstance(partial, Path):
            _wait_for_folder(partial, self._cancelled)
        self._written = write_data(partial, dist.get_rank(), values, self._cancelled, self._files)

    def _publish(self, by_rank: list[WrittenFiles]) -> None:
        """Write the index and the checksums, and publish the folder; runs in a thread of rank 0."""
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
    """Wait until this host sees the folder of rank 0; NFS may cache its absence for 30 to 60 s."""
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
    """Let rank 0 remove the partial checkpoint after a CheckpointError on all ranks.
    Skip it if another run took the lock, or in a store, which may be the cause: its next save removes it.
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
    if free < needed:  # a superseded checkpoint may still be being deleted
        delete_removed(target.parent)
        free = shutil.disk_usage(target.parent).free
    if free < needed:
        raise CheckpointError(
            f"checkpoint {target} needs {size_text(needed)}, {target.parent} has {size_text(free)} free; "
            "remove older checkpoints there (--save-retain-last does so after each save) or choose another "
            "folder",
            field="output_path",
        )
