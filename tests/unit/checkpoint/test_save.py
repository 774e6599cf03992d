"""A save is whole or leaves no trace: one process; several are in tests/distributed."""

import psutil
import pytest
import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from refusals import refused

from patch.checkpoint import latest_iteration, load_checkpoint, save_checkpoint
from patch.checkpoint.save import start_save
from patch.errors import CheckpointError
from patch.storage.lock import hold_run

pytestmark = pytest.mark.usefixtures("one_process")


def state(value: float) -> dict:
    return {"model": {"w": ShardedTensor.from_rank_offsets("w", torch.full((4, 4), value))}}


def loaded_value(root, iteration: int) -> float:
    target = state(0.0)
    load_checkpoint(root, iteration, target)
    return float(target["model"]["w"].data[0, 0])


def test_save_of_the_same_iteration_replaces_it(tmp_path):
    for value in (1.0, 2.0):
        save_checkpoint(tmp_path, 3, state(value), {"iteration": 3})
    assert loaded_value(tmp_path, 3) == 2.0
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["iter_0000003", "latest_checkpointed_iteration.txt"]


def test_save_after_a_killed_one_clears_what_it_left(tmp_path):
    save_checkpoint(tmp_path, 1, state(1.0), {})
    killed = tmp_path / "iter_0000002.tmp"
    killed.mkdir()
    (killed / "__0_0.distcp").write_bytes(b"half")
    assert latest_iteration(tmp_path) == 1
    save_checkpoint(tmp_path, 2, state(2.0), {})
    assert not killed.exists()
    assert (loaded_value(tmp_path, 1), loaded_value(tmp_path, 2)) == (1.0, 2.0)


def test_save_without_space_is_refused_before_anything_is_written(tmp_path):
    save_checkpoint(tmp_path, 1, state(1.0), {})
    huge = torch.zeros(1).expand(1 << 50)
    with refused(CheckpointError, match=r"position 25 .*needs 4194304\.00 GiB"):
        save_checkpoint(tmp_path, 2, {"model": {"w": ShardedTensor.from_rank_offsets("w", huge)}}, {})
    assert not (tmp_path / "iter_0000002.tmp").exists()
    assert latest_iteration(tmp_path) == 1 and loaded_value(tmp_path, 1) == 1.0


def test_save_refuses_common_values_that_could_not_be_read_back(tmp_path):
    with pytest.raises(CheckpointError, match="not JSON serializable"):
        save_checkpoint(tmp_path, 1, state(1.0), {"optimizer": object()})


def test_save_and_load_do_not_change_the_shards(tmp_path):
    def stacked() -> ShardedTensor:
        return ShardedTensor.from_rank_offsets("w", torch.ones(4, 4), (0, 0, 1), prepend_axis_num=1)

    saved, loaded = {"model": {"w": stacked()}}, {"model": {"w": stacked()}}
    save_checkpoint(tmp_path, 1, saved, {"iteration": 1})
    load_checkpoint(tmp_path, 1, loaded)
    for given in (saved, loaded):
        assert set(given) == {"model"} and set(given["model"]) == {"w"}
        assert given["model"]["w"].data.shape == (4, 4)


def test_save_starts_no_process_that_stays(tmp_path):
    before = psutil.Process().children()
    save_checkpoint(tmp_path, 1, state(1.0), {})
    assert psutil.Process().children() == before


def test_run_whose_lock_was_taken_over_publishes_nothing(one_process, tmp_path):
    root = tmp_path / "checkpoint"
    with hold_run(tmp_path):
        save_checkpoint(root, 1, state(1.0), {"iteration": 1})
        (tmp_path / ".lock").write_text("process 1 on elsewhere since today\nanother token\n")
        with pytest.raises(CheckpointError, match="now belongs to process 1 on elsewhere since today"):
            save_checkpoint(root, 2, state(2.0), {"iteration": 2})
    assert latest_iteration(root) == 1
    assert sorted(path.name for path in root.glob("iter_*")) == ["iter_0000001"]


@pytest.mark.parametrize("is_lost_while_it_writes", [False, True])
def test_run_whose_lock_was_taken_over_removes_nothing_of_the_new_owner(
    one_process, tmp_path, is_lost_while_it_writes
):
    """Which writes the same checkpoint at the moment."""
    root = tmp_path / "checkpoint"
    theirs = root / "iter_0000002.tmp" / "__0_0.distcp"

    def lose() -> None:
        (tmp_path / ".lock").write_text("process 1 on elsewhere since today\nanother token\n")
        theirs.parent.mkdir(parents=True, exist_ok=True)
        theirs.write_bytes(b"theirs")

    with hold_run(tmp_path):
        if not is_lost_while_it_writes:
            lose()
        with pytest.raises(CheckpointError, match="now belongs to process 1 on elsewhere since today"):
            saving = start_save(root, 2, state(2.0), {"iteration": 2})
            lose()
            saving.finish()
    assert theirs.is_file() and latest_iteration(root) is None
