"""An error on one rank while upstream saves is raised on all ranks, and nobody waits for ever."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from distributed_runner import run_distributed
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import check_is_distributed_checkpoint
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from torch.distributed.checkpoint import CheckpointException

from patch import compat


def state(rank: int, world_size: int, holes: bool = False) -> dict:
    shards = world_size + 1 if holes else world_size
    shard = ShardedTensor.from_rank_offsets("w", torch.full((4, 4), float(rank)), (0, rank, shards))
    return {"w": shard, "iteration": 1}


def block_name(folder: Path, rank: int, name: str) -> None:
    """Put a folder where rank 0 wants to write a file."""
    if rank == 0:
        (folder / name / "taken").mkdir(parents=True)
    dist.barrier()


def save_with_obstacles(rank: int, world_size: int, root: str) -> dict[str, str]:
    compat.apply(cuda=False)
    raised = {}
    for name in (".metadata", "common.pt", "__1_0.distcp", "holes"):
        folder = Path(root) / f"blocked_{name}"
        block_name(folder, rank, name)
        try:
            dist_checkpointing.save(state(rank, world_size, holes=name == "holes"), str(folder))
        except CheckpointException as error:
            raised[name] = str(error)
        dist.barrier()
    folder = Path(root) / "no_config"
    block_name(folder, rank, "metadata.json")
    dist_checkpointing.save(state(rank, world_size), str(folder))
    folder = Path(root) / "whole"
    block_name(folder, rank, "unrelated")
    dist_checkpointing.save(state(rank, world_size), str(folder))
    return raised


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, str]]]:
    root = tmp_path_factory.mktemp("saves")
    return root, run_distributed(save_with_obstacles, 2, str(root), timeout_s=90)


@pytest.mark.parametrize(
    "name, reason",
    [
        (".metadata", "Is a directory"),
        ("common.pt", "Is a directory"),
        ("__1_0.distcp", "Is a directory"),
        ("holes", "Invalid access pattern"),
    ],
)
def test_save_raises_on_both_ranks_when_one_fails(saved, name, reason):
    for raised in saved[1]:
        assert reason in raised[name]


def test_save_without_metadata_json_leaves_no_checkpoint_and_no_hang(saved):
    assert (saved[0] / "no_config" / "metadata.json").is_dir()


def test_save_without_obstacles_leaves_a_checkpoint(saved):
    assert check_is_distributed_checkpoint(str(saved[0] / "whole"))


def test_apply_refuses_to_start_without_psutil():
    script = (
        "import sys; sys.modules['psutil'] = None\nfrom patch import compat\n"
        "with compat.quick_start():\n    compat.apply(cuda=False)"
    )
    repository = Path(__file__).parents[3]
    ended = subprocess.run([sys.executable, "-c", script], cwd=repository, capture_output=True, text=True)
    assert ended.returncode == 1 and "CheckpointError: saving a checkpoint needs psutil" in ended.stderr
