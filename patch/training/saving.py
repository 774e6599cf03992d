"""The saves of a run: written in the background during training, if host memory has room for copies.

The collective of every step also tells all ranks when no rank writes any more, so no rank waits for a file.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from patch.checkpoint.host_copies import HostCopies
from patch.checkpoint.save import Save
from patch.checkpoint.sharded_tensors import bytes_to_write, shards_of
from patch.convert.live_adapters import export_adapter
from patch.device import usable_memory
from patch.distributed.collectives import all_gather_object
from patch.logger import get_logger
from patch.memory.disk import is_on_disk
from patch.preflight.checkpoint_places import checkpoint_root
from patch.preflight.model_of_folder import is_hf_folder
from patch.storage.names import ADAPTER_FOLDER
from patch.text import size_text
from patch.training.run_state import Progress, state_to_save
from patch.training.setup import Run

_logger = get_logger(__name__)

_SHARE_OF_FREE_MEMORY = 0.5


class CheckpointSaver:
    """Saver of checkpoints; every rank calls the same methods at the same steps.

    `on_save` is called with the iteration of each complete checkpoint.
    """

    def __init__(self, run: Run, on_save: Callable[[int], None]) -> None:
        self._run, self._on_save = run, on_save
        self._copies = HostCopies() if run.config.checkpoint.async_save else None
        self._is_decided = False
        self.pending: Save | None = None
        """The checkpoint that is incomplete, on all ranks, or None."""
        self._stall_s = self._write_s = 0.0

    def measured(self) -> dict[str, float]:
        """Return metrics since the last `clear`: time that training waited for saves, and the write time."""
        return {"save_stall_ms": self._stall_s * 1e3, "save_write_s": self._write_s}

    def clear(self) -> None:
        """Reset the metrics after they were logged."""
        self._stall_s = self._write_s = 0.0

    @contextmanager
    def _stalling(self) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        self._stall_s += time.perf_counter() - begin

    def save(self, iteration: int, *, is_end: bool) -> None:
        """Complete the previous checkpoint, then start this one; if `is_end`, complete it too. A collective.

        Raises:
            CheckpointError: on all ranks, if this or the previous checkpoint cannot be written.
        """
        with self._stalling():
            self._finish()
            self._start(iteration, is_end=is_end)

    def _start(self, iteration: int, *, is_end: bool) -> None:
        run = self._run
        is_last = iteration == run.config.training.train_iters
        weights_only = is_last and run.config.checkpoint.save_weights_only_at_end
        progress = Progress(iteration, run.consumed_samples(iteration))
        state, common = state_to_save(run, progress, weights_only=weights_only)
        if self._copies is not None and not self._is_decided and not is_end:
            self._is_decided = True
            copied = [shard for shard in shards_of(state) if not is_on_disk(shard.data)]
            if not _have_room(bytes_to_write(copied)):
                self._copies = None
        copies = None if is_end else self._copies
        self.pending = Save(checkpoint_root(run.config), iteration, state, common, copies)
        run.phases.writing = self.pending.progress
        if run.config.adapter.is_on:
            write_adapters(run, iteration)
        run.optimizer.placement.record_memory("save")
        if copies is None:
            self._finish()

    def wait_for_copies(self) -> None:
        """Wait until the weights and states are copied and may change; not a collective."""
        if self.pending is not None:
            with self._stalling():
                self.pending.wait_for_copies()

    def go_on(self) -> None:
        """Advance the pending checkpoint after all ranks have written it; a collective.

        Raises:
            CheckpointError: on all ranks, if any rank could not write it.
        """
        with self._stalling():
            self._advance()

    def complete(self) -> None:
        """Complete the pending checkpoint, because all ranks end with an error; a collective.

        A failure is only logged, so that it does not hide the original error.
        """
        try:
            self._finish()
        except Exception as error:  # noqa: BLE001 - a rank may end meanwhile, a file may not be written
            _logger.error("%s", error)

    def abandon(self) -> None:
        """Abandon the checkpoint that is being written, because this rank fails; not a collective."""
        if self.pending is not None:
            said = "the checkpoint of step %d is abandoned, because this rank failed"
            _logger.warning(said, self.pending.iteration)
            self.pending.abandon()
            self.pending = None

    def _finish(self) -> None:
        while self.pending is not None:
            self._advance()

    def _advance(self) -> None:
        pending, self.pending = self.pending, None  # stays None after an error
        assert pending is not None
        if not pending.advance():
            self.pending = pending
            return
        self._write_s = pending.seconds
        self._on_save(pending.iteration)


def write_adapters(run: Run, iteration: int) -> None:
    """Export the current adapters to the run's PEFT folder, replacing its contents; a collective.

    A save calls this before its checkpoint is complete. A resume calls it at once, because the run may have
    gone back to an older checkpoint. So the folder never has adapters of another step.
    """
    load = run.config.checkpoint.load
    with run.optimizer.full_weights(frozen=False):
        export_adapter(
            run.stages,
            Path(run.config.checkpoint.output_path) / ADAPTER_FOLDER,
            run.config.model,
            run.config.adapter,
            run.groups,
            base=load if load is not None and is_hf_folder(load) else None,
            tokenizer=run.tokenizer,
            step=iteration,
        )


def _have_room(num_bytes: int) -> bool:
    """Return whether all hosts have room for copies of their ranks' states; a collective."""
    process = (socket.gethostname(), num_bytes, psutil.Process().memory_info().rss)
    free = psutil.virtual_memory().available
    everywhere = all_gather_object((*process, free, usable_memory()))
    for host in sorted({name for name, *_ in everywhere}):
        here = [facts for name, *facts in everywhere if name == host]
        needed, used = (sum(facts[column] for facts in here) for column in (0, 1))
        room = int(_SHARE_OF_FREE_MEMORY * min(here[0][2], here[0][3] - used))
        if needed > room:
            _logger.warning(
                "training waits while checkpoints are written: copies of the states on %s take %s, and of "
                "the free host memory at most %s is used for them",
                host, size_text(needed), size_text(max(0, room)),
            )  # fmt: skip
            return False
    _logger.info("checkpoints are written in the background, from copies of %s a rank", size_text(num_bytes))
    return True
