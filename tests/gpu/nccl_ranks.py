"""One of two ranks over NCCL, which share a GPU where there is one: trains every layout, rank 0 tells.

python tests/gpu/nccl_ranks.py RANK FOLDER
"""

import hashlib
import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from packed_runs import PACKED, TalkReader
from small_runs import small_run
from training_runs import build_seeded_run

from patch.device import DeviceContext
from patch.distributed.collectives import max_over_world
from patch.distributed.registered_memory import RegisteredMemory
from patch.distributed.zigzag import Zigzag
from patch.training.run_state import Progress, resume, save
from patch.training.setup import Run
from patch.training.step import train_step

STEPS, SAVED = 5, 2
LEVELS = ("none", "optimizer", "gradients")
STATIC = {"optimizer_offload_policy": "static", "optimizer_offload_fraction": 0.5}
LAYOUTS: dict[str, dict[str, Any]] = {
    f"{level}, {policy}": {"dp": 2, "data_parallel_sharding": level, **changes}
    for level in LEVELS
    for policy, changes in (
        ("on the device", {}), ("half on the host", STATIC), ("registered", {"use_nccl_ub": True})
    )
} | {
    "tensor": {"tp": 2, "sequence_parallel": True},
    "tensor, overlap": {"tp": 2, "tp_comm_overlap": True},
    "tensor, overlap, SP": {"tp": 2, "tp_comm_overlap": True, "sequence_parallel": True},
    "pipeline": {"pp": 2},
    "interleaved": {"pp": 2, "stage": 1},
    "context, ring": {"cp": 2, "cp_comm_type": "p2p"},
    "context, all-to-all": {"cp": 2, "cp_comm_type": "a2a"},
    "pipeline by hand": {"pp": 2, "pipeline_model_parallel_layout": "E|ttttL"},
    "interleaved, by hand": {"pp": 2, "pipeline_model_parallel_layout": "E|ttt|t|L"},
    "interleaved, messages overlap at both ends": {
        "pp": 2, "stage": 1, "overlap_p2p_communication_warmup_flush": True,
    },
    "tensor, activations offloaded": {"tp": 2, "cpu_offloading": True},
    "replicas, activations offloaded and recomputed": {
        "dp": 2, "cpu_offloading": True, "recompute_granularity": "selective",
    },
    **{
        f"replicas, gradients travel as bf16 in padded buckets{words}": {
            "dp": 2, "data_parallel_sharding": "gradients", "grad_reduce_in_bf16": True,
            "ddp_pad_buckets_for_high_nccl_busbw": True, "use_nccl_ub": bool(words),
        }
        for words in ("", ", registered")
    },
    "pipeline, recomputed": {"pp": 2, "recompute_granularity": "full"},
}  # fmt: skip
WINDOW = {"window_size": "7,0"}
FP8 = {"precision": "fp8", "fp8_recipe": "tensorwise"}
OTHERS: dict[str, dict[str, Any]] = {
    "packed": {"dp": 2, **PACKED},
    "packed, all-to-all": {"cp": 2, "cp_comm_type": "a2a", **PACKED},
    "packed, ring": {"cp": 2, "cp_comm_type": "p2p", **PACKED},
    "window": {"dp": 2, **WINDOW},
    "window, all-to-all": {"cp": 2, "cp_comm_type": "a2a", **WINDOW},
    "window, ring": {"cp": 2, "cp_comm_type": "p2p", **WINDOW},
    "8 bits": {"dp": 2, **FP8},
    "8 bits, gathered": {
        "dp": 2,
        "data_parallel_sharding": "optimizer",
        "fp8_param_gather": True,
        **FP8,
    },
    "8 bits, tensor, SP": {"tp": 2, "sequence_parallel": True, **FP8},
    "8 bits, pipeline": {"pp": 2, **FP8},
    "8 bits, ring": {"cp": 2, "cp_comm_type": "p2p", **FP8},
}
"""Not what `LAYOUTS` learn: each is compared with the one that is named by the words before its comma."""
RESUMED: dict[str, dict[str, Any]] = {
    "tensor": {"tp": 2},
    "pipeline": {"pp": 2, "stage": 1},
    "context": {"cp": 2, "cp_comm_type": "p2p"},
    "gradients sharded, half on the host": {"dp": 2, "data_parallel_sharding": "gradients", **STATIC},
}
"""Each goes on with what the one before has saved; the first with what replicas have."""


def build(context: DeviceContext, **changes: Any) -> Run:
    own = {
        "global_batch_size": 8, "clip_grad": 0.5, "reduce_bucket_size": 40_000,
        "optimizer_offload_chunk_size": 9_999, "deterministic_mode": True, "distributed_timeout_minutes": 2,
    }  # fmt: skip
    run = build_seeded_run(small_run(**own | changes | {"train_iters": STEPS}), context=context)
    if run.config.data.packing:
        zigzag = Zigzag.of(run.groups.cp)
        run.train_reader = TalkReader(run.config, run.groups.dp.rank(), zigzag)  # type: ignore[assignment]
    return run


def steps_of(run: Run, steps: range) -> list[float]:
    """The losses of some steps, known on every rank."""
    return [max_over_world([train_step(run, step).loss], run.device)[0] for step in steps]


def train(context: DeviceContext, **changes: Any) -> list:
    """The losses of a few steps, and the digest of this rank's weights."""
    run = build(context, **changes)
    return [*steps_of(run, range(STEPS)), close(run)]


def close(run: Run) -> str:
    """End a run; the digest of this rank's weights."""
    run.optimizer.finish_param_sync()
    digest = hashlib.sha256()
    for stage in run.stages:
        for parameter in stage.parameters():
            digest.update(parameter.detach().contiguous().view(torch.uint8).cpu().numpy())
    RegisteredMemory.release_all()
    parallel_state.destroy_model_parallel()
    return digest.hexdigest()


def carry_on(context: DeviceContext, folder: Path) -> dict[str, list]:
    """By layout of RESUMED: the losses after a resume from the layout before."""
    progress = Progress(SAVED, 8 * SAVED)
    run = build(context, dp=2, data_parallel_sharding="none")
    steps_of(run, range(SAVED))
    found = {}
    for number, name in enumerate(["unbroken", *RESUMED]):
        if number:
            run = build(context, **RESUMED[name])
            before = folder / str(number - 1)
            resume(before, progress, run.stages, run.optimizer, run.config.training.seed)
        save(folder / str(number), progress, run.stages, run.optimizer, "")
        found[name] = steps_of(run, range(SAVED, STEPS))
        close(run)
    return found


def run_short(context: DeviceContext, is_short: bool) -> list:
    """Losses and digest where, if `is_short`, memory runs out on rank 1 in the forward of step 3."""
    run = build(context, dp=2, precision="bf16", **STATIC)
    before = run.optimizer.adam.manager.offload_fraction
    turns = iter(range(10**6))

    def ask_for_too_much(*unused: Any) -> None:
        if next(turns) == 2 * run.config.num_micro_batches and is_short and dist.get_rank() == 1:
            torch.empty(1 << 50, dtype=torch.uint8, device=context.device)

    run.stages[0].register_forward_hook(ask_for_too_much)
    losses = steps_of(run, range(STEPS))
    (moved,) = max_over_world([run.optimizer.adam.manager.offload_fraction - before], context.device)
    return [*losses, close(run), moved > 0]


def main(rank: int, folder: Path) -> None:
    """Train; the first layout joins the other rank at MASTER_PORT, as a run does."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    context = DeviceContext.select(rank % max(1, torch.cuda.device_count()))
    parts: dict[str, Any] = {
        name: partial(train, context, **changes) for name, changes in (LAYOUTS | OTHERS).items()
    }
    parts["resumed"] = partial(carry_on, context, folder)
    if context.is_cuda:
        parts |= {
            "enough memory": partial(run_short, context, False),
            "short": partial(run_short, context, True),
        }
    found = {name: part() for name, part in parts.items()}
    job = dist.distributed_c10d._get_default_group()
    found["the job"] = [os.environ.get("NCCL_ALGO"), job.bound_device_id]
    if rank == 0:
        (folder / "found.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
