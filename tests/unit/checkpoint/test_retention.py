"""Which checkpoints stay, and that a kill in the middle of a removal leaves only whole ones."""

import logging
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
from kills import killer_at
from megatron.core.dist_checkpointing.mapping import ShardedTensor

from patch.checkpoint import latest_iteration, load_checkpoint, save_checkpoint, weights_folder
from patch.checkpoint.folder import delete_removed
from patch.errors import CheckpointError
from patch.training.hooks.checkpoint_retention import Retention, mark_superseded_removed, update_link


def state(value: float) -> dict:
    tensor = torch.full((8, 4), value)
    return {"model": {"decoder.w": ShardedTensor.from_rank_offsets("decoder.w", tensor)}}


def save(root: Path, *iterations: int) -> None:
    for iteration in iterations:
        save_checkpoint(root, iteration, state(float(iteration)), {"iteration": iteration})


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if path.is_dir() and not path.is_symlink())


def iterations(root: Path) -> list[int]:
    return [int(name.removeprefix("iter_")) for name in names(root)]


KEPT = [
    (Retention(), None, [1, 2, 3, 4, 5, 6]),
    (Retention(last=1), None, [6]),
    (Retention(last=2), None, [5, 6]),
    (Retention(last=2), 1, [1, 5, 6]),
    (Retention(last=1, every=3), None, [3, 6]),
    (Retention(last=2, every=2), 3, [2, 3, 4, 5, 6]),
]


@pytest.mark.parametrize(("retention", "best", "expected"), KEPT)
def test_last_every_and_best_stay(one_process, tmp_path, retention, best, expected):
    for newest in range(1, 7):
        save(tmp_path, newest)
        known_best = best if best is not None and best <= newest else None
        mark_superseded_removed(tmp_path, retention, newest, known_best)
        delete_removed(tmp_path)
    assert iterations(tmp_path) == expected


def test_later_and_damaged_ones_stay_and_do_not_count(one_process, tmp_path):
    """A run went back to 2 because 4 lost a file; 1 was cut. What is whole may be needed."""
    save(tmp_path, 1, 2, 4, 3)
    (tmp_path / "iter_0000004" / "metadata.json").unlink()
    data = tmp_path / "iter_0000001" / "__0_0.distcp"
    data.write_bytes(data.read_bytes()[:-1])
    assert mark_superseded_removed(tmp_path, Retention(last=2), 3, None) == []
    assert mark_superseded_removed(tmp_path, Retention(last=1), 3, None) == [2]
    delete_removed(tmp_path)
    assert iterations(tmp_path) == [1, 3, 4]


def test_those_that_stay_anyway_are_not_looked_at(tmp_path, monkeypatch):
    """A save must not wait for a look at thousands of files of each of a hundred old checkpoints."""
    asked = []

    def is_whole(folder: Path) -> bool:
        asked.append(int(folder.name.removeprefix("iter_")))
        return asked[-1] != 11

    monkeypatch.setattr("patch.training.hooks.checkpoint_retention.has_saved_lengths", is_whole)
    for iteration in range(1, 13):
        (tmp_path / f"iter_{iteration:07d}").mkdir()
    assert mark_superseded_removed(tmp_path, Retention(last=2, every=2), 12, 3) == [1, 5, 7, 9]
    assert asked == [12, 11, 10, 9, 7, 5, 1]


def test_weights_alone_and_what_a_rollback_left_do_not_count(one_process, tmp_path):
    """A run that went back from 3 to 2, because 3 has a wrong byte, needs 2 until 4 is followed by 5."""
    save(tmp_path, 1, 2, 3, 4)
    assert mark_superseded_removed(tmp_path, Retention(last=2), 4, None, {3}) == [1, 3]
    save(tmp_path, 5)
    assert mark_superseded_removed(tmp_path, Retention(last=1), 5, None, {5}) == [2]
    delete_removed(tmp_path)
    assert iterations(tmp_path) == [4, 5]


@pytest.mark.parametrize("name", ["checksums.json", "metadata.json", "__0_0.distcp"])
def test_nothing_goes_while_the_newest_is_not_whole(one_process, tmp_path, caplog, name):
    save(tmp_path, 1, 2)
    (tmp_path / "iter_0000002" / name).unlink()
    assert mark_superseded_removed(tmp_path, Retention(last=1), 2, None) == []
    assert iterations(tmp_path) == [1, 2] and "iter_0000002 is not whole" in caplog.text


def remove_until(root: Path, moment: int) -> None:
    """Remove all but the newest and the best; after so many file operations this process is killed."""
    killed_at = killer_at(moment)
    for name in ("rename", "fsync", "unlink", "rmdir"):
        setattr(os, name, killed_at(getattr(os, name)))
    mark_superseded_removed(root, Retention(last=1), 4, 1)
    delete_removed(root)


def test_kill_at_any_moment_leaves_whole_checkpoints(one_process, tmp_path):
    """Each one that is left holds its own values, and the space of the others is freed later."""
    save(tmp_path / "whole", 1, 2, 3, 4)
    moment, left = 0, set()
    while True:
        moment += 1
        root = shutil.copytree(tmp_path / "whole", tmp_path / str(moment))
        pid = os.fork()
        if pid == 0:
            remove_until(root, moment)
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        found = [int(name.removeprefix("iter_")) for name in names(root) if name.startswith("iter_")]
        left.add(tuple(found))
        assert latest_iteration(root) == 4
        for iteration in found:
            assert weights_folder(root / f"iter_{iteration:07d}")
            loaded = load_checkpoint(root, iteration, state(0.0))
            assert torch.equal(loaded["model"]["decoder.w"], torch.full((8, 4), float(iteration)))
        delete_removed(root)
        assert iterations(root) == found
        if code == 0:
            break
        assert code == -signal.SIGKILL
    assert left == {(1, 3, 4), (1, 4)} and moment > 14


def test_killed_removal_of_the_same_iteration_is_no_obstacle(one_process, tmp_path):
    save(tmp_path, 1, 2)
    mark_superseded_removed(tmp_path, Retention(last=1), 2, None)
    save(tmp_path, 1, 2)
    assert mark_superseded_removed(tmp_path, Retention(last=1), 2, None) == [1]
    delete_removed(tmp_path)
    assert iterations(tmp_path) == [2]


def test_checkpoint_that_cannot_be_removed_is_named_and_the_others_go(
    one_process, tmp_path, caplog, monkeypatch
):
    save(tmp_path, 1, 2, 3)
    rename = os.rename

    def refuse(source, target, **options):
        if "iter_0000001" in str(source):
            raise PermissionError(13, "Permission denied")
        rename(source, target, **options)

    monkeypatch.setattr(os, "rename", refuse)
    with caplog.at_level(logging.WARNING):
        assert mark_superseded_removed(tmp_path, Retention(last=1), 3, None) == [2]
    assert "iter_0000001 cannot be removed: Permission denied" in caplog.text
    delete_removed(tmp_path)
    assert iterations(tmp_path) == [1, 3]


def test_link_leads_to_a_checkpoint_wherever_the_folder_goes(one_process, tmp_path):
    root = tmp_path / "here"
    save(root, 1, 2)
    update_link(root, "last", 2)
    root = root.rename(tmp_path / "there")
    assert weights_folder(root / "last").samefile(root / "iter_0000002")
    update_link(root, "last", 1)
    assert (root / "last").samefile(root / "iter_0000001")
    update_link(root, "last", 7)
    assert not (root / "last").is_symlink()
    (root / "last").mkdir()
    with pytest.raises(OSError):
        update_link(root, "last", 1)
    assert sorted(path.name for path in root.iterdir() if not path.name.startswith("iter")) == [
        "last", "latest_checkpointed_iteration.txt",
    ]  # fmt: skip


def test_space_that_is_still_being_freed_counts_and_a_full_disk_names_the_flag(
    one_process, tmp_path, monkeypatch
):
    save(tmp_path, 1, 2)
    mark_superseded_removed(tmp_path, Retention(last=1), 2, None)
    usage = shutil.disk_usage

    def full_until_deleted(path):
        is_full = {".removed_iter_0000001", "iter_0000003"} & set(names(tmp_path))
        return usage(path)._replace(free=0) if is_full else usage(path)

    monkeypatch.setattr(shutil, "disk_usage", full_until_deleted)
    save(tmp_path, 3)
    assert iterations(tmp_path) == [2, 3]
    with pytest.raises(CheckpointError, match=r"has 0\.0.* free; remove older .*--save-retain-last"):
        save(tmp_path, 4)
    assert iterations(tmp_path) == [2, 3]
