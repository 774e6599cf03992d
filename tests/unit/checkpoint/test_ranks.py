"""Two processes: when one fails to write or to read, both say so, and the earlier checkpoint still loads."""

import resource
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from distributed_runner import run_distributed
from full_disk import disk_full_after
from megatron.core.dist_checkpointing.mapping import ShardedTensor

from patch import compat
from patch.checkpoint import latest_iteration, load_checkpoint, save_checkpoint
from patch.checkpoint import save as save_module
from patch.checkpoint.folder import iteration_folder
from patch.checkpoint.manifest import write_manifest
from patch.errors import CheckpointError
from patch.storage.checksums import write_summed

ROWS = 256
FULL_DISK_S = 30


def state(rank: int, world_size: int, value: float, parts: int | None = None) -> dict:
    tensor = torch.full((ROWS, 1024), value + rank)
    return {"model": {"w": ShardedTensor.from_rank_offsets("w", tensor, (0, rank, parts or world_size))}}


def outcome(action: Callable[[], object]) -> str:
    """The message of the CheckpointError that `action` ends with, or "done"."""
    begin = time.monotonic()
    try:
        action()
    except CheckpointError as error:
        assert time.monotonic() - begin < FULL_DISK_S
        return str(error)
    finally:
        dist.barrier()
    return "done"


def processes() -> tuple[list, int]:
    """Children that run, and memory pages that ended ones have touched."""
    return psutil.Process().children(), resource.getrusage(resource.RUSAGE_CHILDREN).ru_minflt


def run_failures(rank: int, world_size: int, folder: str) -> dict[str, object]:
    compat.apply(cuda=False)
    root = Path(folder)
    report: dict[str, object] = {}

    def save(iteration: int, common: dict | None = None) -> str:
        return outcome(
            lambda: save_checkpoint(root, iteration, state(rank, world_size, float(iteration)), common or {})
        )

    before = processes()
    assert save(1) == "done"
    report["started"] = processes() != before
    with disk_full_after(64 * 1024 if rank == 1 else resource.RLIM_INFINITY):
        report["data"] = save(2)
    with disk_full_after(2 * 2**20 if rank == 0 else resource.RLIM_INFINITY):
        report["common"] = save(3, {"config": "x" * 4 * 2**20})
    with_hole = state(rank, world_size, 5.0, parts=3)
    report["hole"] = outcome(lambda: save_checkpoint(root, 5, with_hole, {}))
    save_module._FOLDER_IS_SEEN_S = 1.0
    mine = root if rank == 0 else root.with_name("seen_later")
    report["not shared"] = outcome(lambda: save_checkpoint(mine, 6, state(rank, world_size, 6.0), {}))
    report["names"] = sorted(path.name for path in root.iterdir())
    report["latest"] = latest_iteration(root)
    target = state(rank, world_size, 0.0)
    load_checkpoint(root, 1, target)
    report["value"] = float(target["model"]["w"].data.mean())
    report["after"] = save(4)
    report["final"] = latest_iteration(root)
    if rank == 1:
        threading.Timer(0.5, mine.symlink_to, (root,)).start()
    report["seen later"] = outcome(lambda: save_checkpoint(mine, 4, state(rank, world_size, 4.0), {}))
    if rank == 0:
        data = iteration_folder(root, 4) / "__1_0.distcp"
        data.write_bytes(data.read_bytes()[:-1])
    dist.barrier()
    report["truncated"] = outcome(lambda: load_checkpoint(root, 4, state(rank, world_size, 0.0)))
    one_misfit = state(rank, world_size, 0.0)
    if rank == 1:
        one_misfit["model"]["w"].dtype = torch.bfloat16
    report["misfit"] = outcome(lambda: load_checkpoint(root, 1, one_misfit))
    return report


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    return run_distributed(run_failures, 2, str(tmp_path_factory.mktemp("ranks")), timeout_s=100)


@pytest.mark.parametrize(
    "step, reason",
    [
        ("data", "OSError: [Errno 27] File too large"),
        ("common", "OSError: [Errno 27] File too large"),
        ("hole", "Invalid access pattern"),
        ("not shared", "all ranks must share the folder"),
    ],
)
def test_error_on_one_rank_fails_both_and_is_named(reports, step, reason):
    for report in reports:
        assert "was not written" in report[step] and reason in report[step], report[step]


def test_failed_save_leaves_no_trace_and_the_previous_checkpoint_loads(reports):
    for rank, report in enumerate(reports):
        assert report["names"] == ["iter_0000001", "latest_checkpointed_iteration.txt"]
        assert report["latest"] == 1 and report["value"] == 1.0 + rank


def test_later_saves_work_and_what_one_rank_cannot_load_is_refused_on_both(reports):
    """Over NFS a machine remembers for a while that a name was not there: it is waited for."""
    for report in reports:
        assert report["after"] == report["seen later"] == "done" and report["final"] == 4
        assert "__1_0.distcp is truncated" in report["truncated"]
        assert "w is torch.float32, this run expects torch.bfloat16" in report["misfit"]
        assert not report["started"], "the first save starts no process"


def look_through_rank_0(rank: int, world_size: int, folder: str) -> list:
    mine = Path(folder) if rank == 0 else Path(folder) / "not_seen_here"
    return [latest_iteration(mine), outcome(lambda: latest_iteration(mine / "damaged"))]


def test_newest_checkpoint_is_the_one_that_rank_0_sees(tmp_path):
    folder = iteration_folder(tmp_path, 5)
    (tmp_path / "damaged" / "iter_0000001").mkdir(parents=True)
    folder.mkdir()
    write_manifest(folder, 5, {"weights": write_summed(folder / "weights", b"5")})
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("5")
    for found, refusal in run_distributed(look_through_rank_0, 2, str(tmp_path)):
        assert found == 5 and "is whole: " in refusal
