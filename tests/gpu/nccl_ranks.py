"""One of two ranks over NCCL, which share a GPU where there is one: trains every layout, rank 0 tells.

python tests/gpu/nccl_ranks.py RANK FOLDER
"""

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from small_runs import small_run
from training_runs import build_seeded_run

from patch.device import DeviceContext
from patch.distributed.collectives import max_over_world
from patch.training.step import train_step

STEPS = 5
LEVELS = ("none", "optimizer", "gradients")
STATIC = {"optimizer_offload_policy": "static", "optimizer_offload_fraction": 0.5}
LAYOUTS: dict[str, dict[str, Any]] = {
    f"{level}, {policy}": {"dp": 2, "data_parallel_sharding": level, **changes}
    for level in LEVELS
    for policy, changes in (("on the device", {}), ("half on the host", STATIC))
} | {
    "tensor": {"tp": 2, "sequence_parallel": True},
    "tensor, overlap": {"tp": 2, "tp_comm_overlap": True},
    "tensor, overlap, SP": {"tp": 2, "tp_comm_overlap": True, "sequence_parallel": True},
    "pipeline": {"pp": 2},
    "interleaved": {"pp": 2, "stage": 1},
    "context, ring": {"cp": 2, "cp_comm_type": "p2p"},
    "context, all-to-all": {"cp": 2, "cp_comm_type": "a2a"},
}


def train(context: DeviceContext, **changes: Any) -> list:
    """The losses of a few steps, and the digest of this rank's weights."""
    run = build_seeded_run(
        small_run(
            train_iters=STEPS, global_batch_size=8, clip_grad=0.5, reduce_bucket_size=40_000,
            optimizer_offload_chunk_size=9_999, deterministic_mode=True, distributed_timeout_minutes=2,
            **changes,
        ),
        context=context,
    )  # fmt: skip
    losses = [max_over_world([train_step(run, step).loss], context.device)[0] for step in range(STEPS)]
    run.optimizer.finish_param_sync()
    digest = hashlib.sha256()
    for stage in run.stages:
        for parameter in stage.parameters():
            digest.update(parameter.detach().contiguous().view(torch.uint8).cpu().numpy())
    parallel_state.destroy_model_parallel()
    return [*losses, digest.hexdigest()]


def main(rank: int, folder: Path) -> None:
    """Train; the first layout joins the other rank at MASTER_PORT, as a run does."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    context = DeviceContext.select(rank % torch.cuda.device_count())
    found: dict[str, list] = {name: train(context, **changes) for name, changes in LAYOUTS.items()}
    job = dist.distributed_c10d._get_default_group()
    found["the job"] = [os.environ.get("NCCL_ALGO"), job.bound_device_id]
    if rank == 0:
        (folder / "found.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
