"""Ranks over NCCL, of which two share a GPU where there is but one: they train layouts, rank 0 tells.

Each part has its own limit, and what it found is on the disk when it ends. After one that fails or hangs new
ranks go on with the next.
"""

import faulthandler
import json
import math
import os
import pkgutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gpu import runs
from gpu.run import nccl_version
from gpu.runs import digest_of
from megatron.core import parallel_state
from packed_runs import PACKED, talk_batches
from small_runs import ON_HOST
from training_runs import SeededReader, save

from patch.checkpoint.host_copies import HostCopies
from patch.checkpoint.save import Save
from patch.device import DeviceContext
from patch.distributed.collectives import all_gather_object, max_over_world
from patch.distributed.context_group import Zigzag
from patch.storage.atomic import write_atomically
from patch.training.run_state import Progress, resume, state_to_save
from patch.training.setup import Run
from patch.training.step import train_step

STEPS, SAVED = 5, 2
PART_S, GRACE_S = 60.0, 2.0
"""The limit of a part; and what the other ranks have after one has failed, to say what they know."""
FOUND = "found.json"
"""The names of all parts; and of those that ended, what was found and the seconds."""
SHARDS = {"data_parallel_sharding": "parameters", "param_persistence_threshold": 100}
LEVELS: dict[str, dict[str, Any]] = {
    level: {"data_parallel_sharding": level} for level in ("none", "optimizer", "gradients")
} | {"parameters": SHARDS}
STATIC = {"optimizer_offload_policy": "static", "optimizer_offload_fraction": 0.5}
ON_DISK = {"offload_folder": tempfile.gettempdir(), "optimizer_offload_host_share": 0.0}
RING = {"cp": 2, "cp_comm_type": "p2p"}
ALL_TO_ALL = {"cp": 2, "cp_comm_type": "a2a"}
LAYOUTS: dict[str, dict[str, Any]] = {
    f"{level}, {policy}": own | changes
    for level, own in LEVELS.items()
    for policy, changes in (("on the device", {}), ("half on the host", STATIC))
} | {
    "parameters, in host memory": ON_HOST,
    "gradients, on a disk": {**LEVELS["gradients"], **STATIC, **ON_DISK},
    "tensor": {"tp": 2, "sequence_parallel": True},
    "tensor, in host memory": {"tp": 2, "sequence_parallel": True, **ON_HOST},
    "tensor, no SP": {"tp": 2},
    "tensor, no SP, half on the host": {"tp": 2, **STATIC},
    "tensor, overlap": {"tp": 2, "tp_comm_overlap": True},
    "tensor, overlap, SP": {"tp": 2, "tp_comm_overlap": True, "sequence_parallel": True},
    "pipeline": {"pp": 2},
    "interleaved": {"pp": 2, "stage": 1},
    "interleaved, in host memory": {"pp": 2, "stage": 1, **ON_HOST},
    "context, ring": RING,
    "context, all-to-all": ALL_TO_ALL,
    "interleaved, messages overlap at both ends": {
        "pp": 2, "stage": 1, "overlap_p2p_communication_warmup_flush": True,
    },
    "tensor, activations offloaded": {"tp": 2, "cpu_offloading": True},
    "replicas, activations offloaded and recomputed": {
        "cpu_offloading": True, "recompute_granularity": "selective",
    },
    "replicas, gradients reduced as bf16 in padded buckets": {
        "data_parallel_sharding": "gradients", "grad_reduce_in_bf16": True,
        "ddp_pad_buckets_for_high_nccl_busbw": True,
    },
}  # fmt: skip
NUM_RANKS = max(2, torch.cuda.device_count() // 2 * 2)
"""One a GPU; pairs are needed, so of an odd number of GPUs one stays idle."""
if NUM_RANKS >= 4:  # an instance of one rank shards nothing
    LAYOUTS["two instances"] = {
        "data_parallel_sharding": "gradients", "num_distributed_optimizer_instances": 2
    }  # fmt: skip
WINDOW = {"window_size": "7,0"}
FP8 = {"precision": "fp8", "fp8_recipe": "tensorwise"}
BF16 = {"precision": "bf16"}
NARROW = {"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}
EXPERTS: dict[str, Any] = {
    "num_experts": 4, "moe_ffn_hidden_size": 48, "moe_layer_freq": "1", "moe_aux_loss_coeff": 0.05,
    "moe_router_load_balancing_type": "seq_aux_loss",
}  # fmt: skip
EP2 = {"expert_model_parallel_size": 2}
LORA = {"lora_rank": 3, "lora_alpha": 6}
SP = {"tp": 2, "sequence_parallel": True}
OTHERS: dict[str, dict[str, Any]] = {
    "packed": PACKED,
    "packed, all-to-all": ALL_TO_ALL | PACKED,
    "packed, ring": RING | PACKED,
    "window": WINDOW,
    "window, all-to-all": ALL_TO_ALL | WINDOW,
    "window, ring": RING | WINDOW,
    "16 bits": {"data_parallel_sharding": "gradients", **BF16},
    "16 bits, ring": RING | BF16,
    "16 bits, in shards": BF16 | SHARDS,
    "16 bits, in host memory": BF16 | ON_HOST,
    "moments": BF16 | NARROW,
    "moments, sharded, half on the host": BF16 | NARROW | SHARDS | STATIC,
    "moments, on a disk": BF16 | NARROW | STATIC | ON_DISK,
    "experts": EXPERTS,
    "experts, EP": EXPERTS | EP2 | {"data_parallel_sharding": "gradients"},
    "experts, EP over TP": EXPERTS | EP2 | SP | {"expert_tensor_parallel_size": 1},
    "experts, ETP": EXPERTS | SP,
    "experts, EP, in shards": EXPERTS | EP2 | SHARDS,
    "adapters": LORA,
    "adapters, sharded": LORA | STATIC | {"data_parallel_sharding": "gradients"},
    "adapters, in shards": LORA | SHARDS,
    "adapters, tensor, SP": LORA | SP,
    "adapters, interleaved": LORA | {"pp": 2, "stage": 1},
    "adapters, ring": LORA | RING,
    "8 bits": FP8,
    "8 bits, gathered": {"data_parallel_sharding": "optimizer", "fp8_param_gather": True, **FP8},
    "8 bits, in shards": SHARDS | FP8,
    "8 bits, gathered shards": SHARDS | FP8 | {"fp8_param_gather": True},
    "8 bits, tensor, SP": SP | FP8,
    "8 bits, pipeline": {"pp": 2, **FP8},
    "8 bits, ring": RING | FP8,
}
"""Not what `LAYOUTS` learn: each is compared with the one that is named by the words before its comma."""
_OF_8 = {
    "num_layers": 8, "num_attention_heads": 8, "num_query_groups": 8, "kv_channels": 8,
    "global_batch_size": 16,
}  # fmt: skip
_8_EXPERTS = _OF_8 | EXPERTS | {"num_experts": 8}
WIDE: dict[str, dict[str, Any]] = {
    "wide": _OF_8,
    "wide, tensor of 8, SP": _OF_8 | {"tp": 8, "sequence_parallel": True},
    "wide, pipeline of 4, interleaved": _OF_8 | {"pp": 4, "stage": 1},
    "wide, ring of 4": _OF_8 | RING | {"cp": 4},
    "wide, in shards": _OF_8 | SHARDS,
    "wide experts": _8_EXPERTS,
    "wide experts, EP of 8": _8_EXPERTS | {"expert_model_parallel_size": 8},
    "wide, tensor of 4, overlap": _OF_8 | {"tp": 4, "tp_comm_overlap": True},
    "wide, pipeline of 4": _OF_8 | {"pp": 4},
    "wide, all-to-all of 4": _OF_8 | ALL_TO_ALL | {"cp": 4},
}
"""Parts for 8 ranks. In a group of more than two, a rank sends to one rank and receives from another."""
if NUM_RANKS >= 8:
    OTHERS |= WIDE
RESUMED: dict[str, dict[str, Any]] = {
    "tensor": {"tp": 2},
    "pipeline": {"pp": 2, "stage": 1},
    "context": RING,
    "gradients sharded, half on the host": {"data_parallel_sharding": "gradients", **STATIC},
    "weights in shards": SHARDS,
    "weights in host memory": ON_HOST,
}
"""Each goes on with what the one before has saved; the first with what replicas have."""


def build(context: DeviceContext, **changes: Any) -> Run:
    num_ranks = int(os.environ["WORLD_SIZE"])
    model_ranks = math.prod(changes.get(name, 1) for name in ("tp", "pp", "cp"))
    own = {
        "dp": num_ranks // model_ranks, "global_batch_size": 4 * num_ranks, "train_iters": STEPS,
        "clip_grad": 0.5, "reduce_bucket_size": 40_000, "optimizer_offload_chunk_size": 9_999,
        "deterministic_mode": True, "distributed_timeout_minutes": 2,
    }  # fmt: skip
    run = runs.build(context, **own | changes)
    if run.config.data.packing:
        zigzag = Zigzag.of(run.groups.cp)
        run.data.train_reader = SeededReader(run.config, run.groups.dp.rank(), zigzag, talk_batches)
    return run


def steps_of(run: Run, steps: range) -> list[float]:
    """The losses of some steps, known on every rank."""
    return [max_over_world([train_step(run, step).loss], run.device)[0] for step in steps]


def train(context: DeviceContext, num_steps: int = STEPS, **changes: Any) -> list:
    """The losses of a few steps, and the digest of this rank's weights."""
    run = build(context, **changes | {"train_iters": num_steps})
    return [*steps_of(run, range(num_steps)), close(run)]


def other_contexts(context: DeviceContext, folder: Path, **changes: Any) -> list[list[int]]:
    """By rank: the other GPUs on which its process holds memory after a save in the background."""
    run = build(context, **changes)
    steps_of(run, range(1))
    sections, common = state_to_save(run, Progress(1, 1))
    Save(folder / "saved", 1, sections, common, HostCopies()).finish()
    close(run)
    others = range(torch.cuda.device_count()) if context.is_cuda else range(0)
    own = [gpu for gpu in others if gpu != context.device.index and torch._C._cuda_hasPrimaryContext(gpu)]
    return all_gather_object(own)


def close(run: Run) -> str:
    """End a run, with its communicators, each of which has memory; the digest of this rank's weights.

    A name that torch makes of the ranks would be given again, and a rank of the new group could meet what the
    store still has of the old one: groups with such names stay.
    """
    digest = digest_of(run)
    parallel_state.destroy_model_parallel()
    everyone = dist.distributed_c10d._get_default_group()
    for group in [group for group in dist.distributed_c10d._world.pg_map if group is not everyone]:
        if group.group_name.isdigit():
            dist.destroy_process_group(group)
    return digest


def carry_on(context: DeviceContext, folder: Path) -> dict[str, list]:
    """By layout of RESUMED: the losses after a resume from the layout before."""
    run = build(context, data_parallel_sharding="none")
    progress = Progress(SAVED, SAVED * run.config.training.global_batch_size)
    steps_of(run, range(SAVED))
    found = {}
    for number, name in enumerate(["unbroken", *RESUMED]):
        if number:
            run = build(context, **RESUMED[name])
            before = folder / str(number - 1)
            resume(run, before, progress)
        save(folder / str(number), progress, run)
        found[name] = steps_of(run, range(SAVED, STEPS))
        close(run)
    return found


def run_short(context: DeviceContext, is_short: bool) -> list:
    """Losses and digest where, if `is_short`, memory runs out on rank 1 in the forward of step 3."""
    run = build(context, **BF16, **STATIC)
    before = run.optimizer.adam.manager.offload_fraction
    turns = iter(range(10**6))

    def ask_for_too_much(*unused: Any) -> None:
        if next(turns) == 2 * run.config.num_micro_batches and is_short and dist.get_rank() == 1:
            torch.empty(1 << 50, dtype=torch.uint8, device=context.device)

    run.stages[0].register_forward_hook(ask_for_too_much)
    losses = steps_of(run, range(STEPS))
    (moved,) = max_over_world([run.optimizer.adam.manager.offload_fraction - before], context.device)
    return [*losses, close(run), moved > 0]


def all_layouts(context: DeviceContext, num_ranks: int, folder: Path) -> dict[str, Callable[[], Any]]:
    """Everything that pairs of ranks can do, or 8 ranks, what tells most first."""
    sharded = {"data_parallel_sharding": "gradients"}
    parts = wide_layouts(context, num_ranks, folder) if num_ranks % 8 == 0 else {}
    parts |= {
        "40 steps": partial(train, context, 40, **sharded),
        "40 steps, half on the host": partial(train, context, 40, **sharded, **STATIC),
        "other contexts": partial(other_contexts, context, folder, **sharded, **STATIC),
    }
    for name, changes in (LAYOUTS | OTHERS).items():
        parts.setdefault(name, partial(train, context, **changes))
    parts["resumed"] = partial(carry_on, context, folder)
    if context.is_cuda:
        parts["enough memory"] = partial(run_short, context, False)
        parts["short"] = partial(run_short, context, True)
    return parts | {"the job": partial(the_job, context)}


def wide_layouts(context: DeviceContext, num_ranks: int, folder: Path) -> dict[str, Callable[[], Any]]:
    """Return the parts for 8 ranks, by name."""
    return {name: partial(train, context, **changes) for name, changes in WIDE.items()}


def the_job(context: DeviceContext) -> list:
    """NCCL_ALGO, and the device to which the job's communicator is bound."""
    close(build(context))
    return [os.environ.get("NCCL_ALGO"), dist.distributed_c10d._get_default_group().bound_device_id]


def main(rank: int, num_ranks: int, folder: Path, which: str, first: int, part_s: float) -> None:
    """Do the parts from number `first` on; the first one joins the other ranks at MASTER_PORT, as a run does.

    Args:
        rank: of this process.
        num_ranks: of the job.
        folder: for files.
        which: MODULE:FUNCTION, which gives the parts.
        first: number of the first part.
        part_s: limit of each.
    """
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(num_ranks), "MASTER_ADDR": "127.0.0.1"}
    context = DeviceContext.select(rank % max(1, torch.cuda.device_count()))
    parts = pkgutil.resolve_name(which)(context, num_ranks, folder)
    found: dict[str, list] = {}
    for name in [*parts][first:]:
        if rank == 0:
            write_atomically(folder / FOUND, json.dumps([[*parts], found]))
        faulthandler.dump_traceback_later(part_s, exit=True)
        begin = time.monotonic()
        value = parts[name]()
        found[name] = [value, *max_over_world([time.monotonic() - begin], context.device)]
    if rank == 0:
        write_atomically(folder / FOUND, json.dumps([[*parts], found]))
    dist.destroy_process_group()


def is_possible() -> bool:
    """Whether two ranks can meet here."""
    devices = torch.cuda.device_count()
    return devices > 1 or (devices == 1 and nccl_version() >= (2, 30))


class Found(dict[str, Any]):
    """What rank 0 found, by part; a test that asks for a part that has not ended fails, and says why."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: dict[str, float] = {}
        self.failures: dict[str, str] = {}
        self.unreached = "not reached, the time was over"

    def __missing__(self, part: str) -> Any:
        pytest.fail(f"{part}: {self.failures.get(part, self.unreached)}", pytrace=False)

    def add(self, told: dict[str, list]) -> None:
        """Add values and seconds."""
        self.update({name: value for name, (value, _) in told.items()})
        self.seconds |= {name: round(seconds, 1) for name, (_, seconds) in told.items()}


def run_ranks(num_ranks: int, folder: Path, which: str, limit_s: float, part_s: float = PART_S) -> Found:
    """What rank 0 of so many processes found; for a test, in processes of their own.

    Args:
        num_ranks: processes; two share a GPU where there is but one.
        folder: for their files.
        which: the parts, see `main`.
        limit_s: of all together.
        part_s: of each part.
    """
    found, first, end = Found(), 0, time.monotonic() + limit_s
    while first is not None and time.monotonic() < end:
        (folder / FOUND).unlink(missing_ok=True)
        said = _launch(num_ranks, folder, [which, str(first), str(part_s)], end)
        if not (folder / FOUND).exists():
            found.unreached = said
            break
        names, told = json.loads((folder / FOUND).read_text())
        found.add(told)
        missing = [name for name in names[first:] if name not in told]
        if said:
            (blamed, *_) = missing or names[-1:]  # after the last one nothing but the end can fail
            found.pop(blamed, None)
            found.failures[blamed] = said
        first = names.index(missing[0]) + 1 if missing[1:] else None
    return found


def _launch(num_ranks: int, folder: Path, arguments: list[str], end: float) -> str:
    """Run ranks until all end, one fails, or the time is over; what they said, "" if all ended well."""
    repository = Path(__file__).parents[2]
    own_paths = [str(repository / name) for name in (".", "tests", "tests/support")]
    paths = os.pathsep.join([*own_paths, os.environ.get("PYTHONPATH", "")])
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    own = {
        "PYTHONPATH": paths, "MASTER_PORT": port, "NCCL_MULTI_RANK_GPU_ENABLE": "1",
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",  # as the launcher sets it
    }  # fmt: skip
    environment = {name: value for name, value in os.environ.items() if name != "NCCL_ALGO"} | own
    command = [sys.executable, "-W", "ignore", __file__]
    logs = [folder / f"{rank}.log" for rank in range(num_ranks)]
    ranks = []
    for rank, log in enumerate(logs):
        place = [str(rank), str(num_ranks), str(folder)]
        with log.open("w") as output:
            ranks.append(subprocess.Popen([*command, *place, *arguments], env=environment, stderr=output))
    last = end
    try:
        while None in (codes := [rank.poll() for rank in ranks]) and time.monotonic() < last:
            if any(codes):
                last = min(last, time.monotonic() + GRACE_S)
            time.sleep(0.1)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    if not any(rank.returncode for rank in ranks):
        return ""
    return ("the time of all parts was over\n" if time.monotonic() >= end else "") + "\n".join(
        f"rank {number} ended with {rank.returncode}:\n{log.read_text(errors='replace')[-3000:]}"
        for number, (rank, log) in enumerate(zip(ranks, logs, strict=True))
    )


if __name__ == "__main__":
    _rank, _num_ranks, _folder, _which, _first, _part_s = sys.argv[1:]
    main(int(_rank), int(_num_ranks), Path(_folder), _which, int(_first), float(_part_s))
