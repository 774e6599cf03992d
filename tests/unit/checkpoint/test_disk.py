"""Disks that are full or become read-only, and what a crash of the machine would find on them."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from full_disk import SmallDisk, small_disk
from megatron.core.dist_checkpointing.mapping import ShardedTensor

from patch.checkpoint import latest_iteration, load_checkpoint, save_checkpoint
from patch.checkpoint.host_copies import HostCopies
from patch.checkpoint.save import Save
from patch.errors import CheckpointError
from patch.storage.names import TRACKER, iteration_name
from patch.training.hooks.checkpoint_retention import Retention, mark_superseded_removed

PAGE = 4096

pytestmark = pytest.mark.usefixtures("one_process")


def state(value: float) -> dict[str, Any]:
    """A tensor for each data file, of a page each."""
    names = ("a", "b")
    tensors = {name: torch.full((PAGE // 4,), float(value)) for name in names}
    return {"model": {name: ShardedTensor.from_rank_offsets(name, tensors[name]) for name in names}}


def begin(root: Path, iteration: int, *, is_async: bool) -> Save:
    return Save(root, iteration, state(iteration), {}, HostCopies() if is_async else None)


def loaded(root: Path, iteration: int) -> set[float]:
    target = state(-1.0)
    load_checkpoint(root, iteration, target)
    return {float(value) for shard in target["model"].values() for value in shard.data.unique()}


# What a crash of the machine would find.


class Probe:
    """Notes in their order: what gets a name, with what in it is not flushed; flushes of `root`."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[object] = []
        self._root = root
        self._flushed: dict[int, tuple[int, int]] = {}
        self._fsync = os.fsync
        monkeypatch.setattr(os, "fsync", self._flush)
        monkeypatch.setattr(os, "rename", self._naming(os.rename))
        monkeypatch.setattr(os, "replace", self._naming(os.replace))

    def _flush(self, descriptor: int) -> None:
        self._fsync(descriptor)
        there = os.fstat(descriptor)
        self._flushed[there.st_ino] = (there.st_size, there.st_mtime_ns)
        if there.st_ino == self._root.stat().st_ino:
            self.events.append("root")

    def _naming(self, rename: Callable[[Path, Path], None]) -> Callable[[Path, Path], None]:
        def named(source: Path, target: Path) -> None:
            lost = [path.name for path in [source, *source.rglob("*")] if not self._is_flushed(path)]
            self.events.append((target.name, lost))
            rename(source, target)

        return named

    def _is_flushed(self, path: Path) -> bool:
        """Whether nothing was written into the file, or entered in the folder, since it was flushed."""
        there = path.stat()
        return self._flushed.get(there.st_ino) == (there.st_size, there.st_mtime_ns)


@pytest.mark.parametrize("is_async", [False, True], ids=["waiting", "background"])
def test_nothing_gets_a_name_before_it_is_on_the_disk(tmp_path, monkeypatch, is_async):
    """And no name depends on a later one: folder, then tracker, then deletion of what is superseded."""
    save_checkpoint(tmp_path, 1, state(1.0), {})
    probe = Probe(tmp_path, monkeypatch)
    begin(tmp_path, 2, is_async=is_async).finish()
    assert probe.events == [(iteration_name(2), []), "root", (TRACKER, []), "root"]
    probe.events.clear()
    assert mark_superseded_removed(tmp_path, Retention(last=1), 2, None) == [1]
    (name, _), flush = probe.events
    assert (name, flush) == (f".removed_{iteration_name(1)}", "root")


# A small disk.


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    with small_disk(tmp_path, num_bytes=256 * PAGE, num_files=256) as made:
        yield made


@pytest.mark.parametrize("is_async", [False, True], ids=["waiting", "background"])
@pytest.mark.parametrize("what", ["pages", "files"])
def test_disk_that_is_full_at_any_moment_of_a_save_loses_nothing(disk, what, is_async):
    """With room for one page or file more each time: from the first file to the tracker, the last one."""
    save_checkpoint(disk.folder, 1, state(1.0), {})
    messages, iteration, room = [], 2, 0
    while True:
        disk.leave(**{what: room})
        try:
            begin(disk.folder, iteration, is_async=is_async).finish()
            break
        except CheckpointError as error:
            messages.append(str(error))
            assert error.exit_code == 4
        finally:
            disk.free()
        found = latest_iteration(disk.folder)
        is_whole = "is complete, but" in messages[-1]
        assert found == (iteration if is_whole else iteration - 1) and loaded(disk.folder, found) == {found}
        assert not list(disk.folder.glob("*.tmp"))
        iteration, room = found + 1, room + 1
    assert latest_iteration(disk.folder) == iteration and loaded(disk.folder, iteration) == {iteration}
    *others, last = messages
    assert "is complete, but" in last and TRACKER in last and "No space left" in last
    assert len(others) > 5, "data files, .metadata, common.pt, metadata.json, checksums.json"
    refused = [message for message in others if "was not started" in message or " free; " in message]
    written = [message for message in others if message not in refused]
    assert len(written) > 3 and all("earlier ones are untouched" in message for message in written)
    assert all("No space left" in message or "disk may be full" in message for message in written), written
