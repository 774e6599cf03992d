"""What a save leaves alone: the shards it was given, and what a new owner of its lock writes."""

import pytest
import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor

from patch.checkpoint import latest_iteration, load_checkpoint, save_checkpoint
from patch.checkpoint.save import start_save
from patch.errors import CheckpointError
from patch.storage.lock import hold_run

pytestmark = pytest.mark.usefixtures("one_process")


def state(value: float) -> dict:
    return {"model": {"w": ShardedTensor.from_rank_offsets("w", torch.full((4, 4), value))}}


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
