"""Checkpoints in a store, which has no renaming: whole or not there, one process, in fsspec's memory."""

import json
import re
from dataclasses import asdict

import pytest
import torch
from failing_store import answer, die, failing_store
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from small_runs import small_run

from patch.checkpoint import (
    latest_iteration,
    load_checkpoint,
    read_common,
    save_checkpoint,
    weights_folder,
)
from patch.checkpoint.compare import compare
from patch.checkpoint.folder import NoWholeCheckpointError, delete_removed
from patch.checkpoint.host_copies import HostCopies
from patch.checkpoint.inspect import find_stored, inspect
from patch.checkpoint.save import Save
from patch.checkpoint.stored import TorchDistReader
from patch.config import to_yaml
from patch.errors import CheckpointError
from patch.storage.lock import hold_run
from patch.storage.remote import RemotePath
from patch.training.hooks.checkpoint_retention import Retention, mark_superseded_removed

pytestmark = pytest.mark.usefixtures("one_process")


@pytest.fixture
def root(request: pytest.FixtureRequest) -> RemotePath:
    return RemotePath(f"memory://{request.node.name}")


def state(value: float) -> dict:
    return {"model": {"w": ShardedTensor.from_rank_offsets("w", torch.arange(12.0).view(4, 3) + value)}}


def loaded(root, iteration: int) -> float:
    target = state(-1.0)
    load_checkpoint(root, iteration, target)
    return float(target["model"]["w"].data[0, 0])


def save(root, iteration: int, value: float) -> None:
    save_checkpoint(
        root, iteration, state(value), {"iteration": iteration, "consumed_samples": 4 * iteration}
    )


def test_checkpoint_in_a_store_has_the_files_of_one_on_the_disk(root, tmp_path) -> None:
    for place in (root, tmp_path):
        save(place, 7, 1.0)
    files = {path.name: path.read_bytes() for path in (tmp_path / "iter_0000007").iterdir()}
    assert {name: (root / "iter_0000007" / name).read_bytes() for name in files} == files
    assert {"latest_checkpointed_iteration.txt", *(f"iter_0000007/{name}" for name in files)} == {
        *root.files()
    }
    assert latest_iteration(root) == 7 and loaded(root, 7) == 1.0 and read_common(root, 7)["iteration"] == 7


def test_same_iteration_is_replaced_and_remains_of_a_killed_save_go(root) -> None:
    save(root, 1, 1.0)
    save(root, 2, 2.0)
    for name in (".unfinished", "__0_0.distcp", "__9_0.distcp"):  # of a run with more processes
        (root / "iter_0000003" / name).write_bytes(b"half")
    (root / "iter_0000001" / ".unfinished").write_bytes(b"")  # killed after it was complete
    assert latest_iteration(root) == 2
    save(root, 2, 5.0)
    assert loaded(root, 2) == 5.0 and loaded(root, 1) == 1.0
    assert root.folders() == ["iter_0000001", "iter_0000002"]
    assert not (root / "iter_0000001" / ".unfinished").exists()


def test_damage_is_found_and_other_checkpoints_are_taken(root, logged) -> None:
    assert latest_iteration(root) is None
    for iteration in (1, 2, 3):
        save(root, iteration, float(iteration))
    data = root / "iter_0000003" / "__0_0.distcp"
    content = bytearray(data.read_bytes())
    content[-700] ^= 1
    data.write_bytes(bytes(content))
    (root / "iter_0000002" / "checksums.json").unlink()
    assert latest_iteration(root) == 1
    assert any("DAMAGED CHECKPOINT" in message and "__0_0.distcp has CRC-32" in message for message in logged)
    with pytest.raises(CheckpointError, match="the newest checkpoint is not what was saved"):
        weights_folder(root)
    assert weights_folder(root / "iter_0000001") == root / "iter_0000001"
    (root / "iter_0000001" / "metadata.json").unlink()
    with pytest.raises(NoWholeCheckpointError, match="no checkpoint below"):
        latest_iteration(root)


def test_store_that_does_not_answer_is_no_damage() -> None:
    """An older checkpoint would be taken for it."""
    with failing_store():
        root = RemotePath("failing://run")
        for iteration in (1, 2):
            save(root, iteration, 1.0)
        for working in range(0, 12, 2):
            die(working)
            with pytest.raises(CheckpointError, match="failing://run.* no answer"):
                latest_iteration(root)
        answer(())
        assert latest_iteration(root) == 2


def test_retention_removes_the_marker_first_and_finishes_what_was_interrupted(root) -> None:
    for iteration in range(1, 6):
        save(root, iteration, float(iteration))
    assert mark_superseded_removed(root, Retention(2), 5, best=1) == [2, 3]
    assert not (root / "iter_0000002" / "checksums.json").exists() and latest_iteration(root) == 5
    delete_removed(root)
    assert root.folders() == ["iter_0000001", "iter_0000004", "iter_0000005"]


def test_inspection_and_comparison_of_a_store_with_the_disk(root, tmp_path) -> None:
    for place in (root, tmp_path):
        save(place, 1, 1.0)
        save(place, 2, 2.0)
    found = find_stored(root)
    assert found == root / "iter_0000002" and find_stored(found) == found
    inspection, reader = inspect(found, lambda num_bytes: None)
    theirs, other = inspect(tmp_path / "iter_0000002", lambda num_bytes: None)
    assert reader is not None and other is not None and not inspection.complaints
    for field in ("files", "facts", "tensors", "neighbours"):
        assert getattr(inspection, field) == getattr(theirs, field)
    assert json.dumps(asdict(inspection))
    assert compare(reader, other, lambda num_bytes: None).is_equal
    older = TorchDistReader(root / "iter_0000001")
    assert [each.largest for each in compare(older, other, lambda num_bytes: None).differences] == [1.0]


@pytest.mark.parametrize("in_background", [False, True])
def test_store_that_dies_at_any_moment_of_a_save_leaves_the_checkpoint_before(in_background) -> None:
    for working in range(0, 60, 3):
        with failing_store():
            root = RemotePath("failing://run")
            save(root, 1, 1.0)
            die(working)
            try:
                Save(root, 2, state(2.0), {}, HostCopies() if in_background else None).finish()
                break  # a save has fewer requests
            except CheckpointError as error:
                assert re.search(r"run/iter_0000002 (was not|is complete, but) .*no answer", str(error))
            finally:
                answer(())
            newest = latest_iteration(root)
            assert newest == 1 or loaded(root, 2) == 2.0, "it was published before the tracker was written"
            save(root, 3, 3.0)
            assert latest_iteration(root) == 3 and loaded(root, 3) == 3.0
            assert ".unfinished" not in {name.partition("/")[2] for name in root.files()}
    assert working > 18


@pytest.mark.parametrize("is_whole", [True, False])
def test_run_that_has_lost_its_lock_touches_nothing_of_the_new_owner(root, is_whole) -> None:
    """Whether that one has written it, or still writes."""
    save(root, 1, 1.0)
    with hold_run(root):
        lock = (root / ".lock").read_bytes()
        (root / ".lock").write_bytes(b"process 1 on elsewhere since today\nanother token\n")
        theirs = RemotePath(f"{root}-theirs")
        save(theirs, 2, 2.0)
        for name in theirs.files():
            if is_whole or not name.endswith("checksums.json"):
                (root / name).write_bytes((theirs / name).read_bytes())
        (root / "iter_0000002" / ".unfinished").write_bytes(b"")
        before = root.files()
        with pytest.raises(CheckpointError, match="now belongs to process 1 on elsewhere") as lost:
            save(root, 2, 99.0)
        assert lost.value.field == "save"
        assert root.files() == before
        (root / ".lock").write_bytes(lock)
    assert latest_iteration(root) == (2 if is_whole else 1)
    assert not is_whole or loaded(root, 2) == 2.0


def test_folder_of_a_run_that_saved_to_a_store_names_the_store(tmp_path) -> None:
    for url in ("s3://bucket/run", None):
        (tmp_path / "config.yaml").write_text(to_yaml(small_run(save=url)))
        for find in (weights_folder, find_stored):
            with pytest.raises(CheckpointError, match="has no checkpoint, expected") as failed:
                find(tmp_path)
            assert ("the run there saved to s3://bucket/run: give that" in str(failed.value)) is bool(url)
