"""Measure sharded weights (ZeRO-3) beside torch's FSDP2 (`fully_shard`): overlap, and peak memory.

    python -m toolkits.benchmarks sharded_weights [--quick] [--json FILE]

Two ranks in network namespaces (needs root and iproute2) with layers that wait, as in `overlap`, one
micro-batch per step. Peak memory is measured with real layers: resident memory from the construction of the
model on. torch's profiler would miss memory that gloo's threads free.
"""

from __future__ import annotations

import argparse
import gc
import os
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from patch.config.choices import ZeroStage
from patch.device import DeviceContext
from patch.distributed.async_collectives import start_reduce_scatter
from patch.distributed.collectives import max_over_world, sum_over
from patch.distributed.groups import initialize
from patch.plan.resolve import with_sharding
from toolkits.benchmarks._contenders import Contender, LlamaTrainer, OurTrainer, masked_mean, run_config
from toolkits.benchmarks._measure import run_ranks
from toolkits.benchmarks._report import COMPUTE, Aim, Report, Rounds
from toolkits.benchmarks._rig import connected, let_layers_wait
from toolkits.benchmarks.overlap import WAIT_S, ComputeAlone, communicate, compare, sharded_run

OURS, FSDP, FSDP_EXCHANGE = "ours", "fully_shard", "fully_shard, sums by exchange"
_RANKS, _TIMEOUT_S = 2, 1200
_STEPS = 2
"""Timed steps per round."""
ROUNDS = (7, 2)
_MEMORY_SHAPE: dict[str, Any] = {
    "num_layers": 8, "hidden_size": 512, "ffn_hidden_size": 1536, "num_attention_heads": 8,
    "num_query_groups": 4, "kv_channels": 64, "vocab_size": 2048,
}  # fmt: skip


def run(arguments: argparse.Namespace) -> Report:
    """Measure and report."""
    with connected(_RANKS) as namespaces:
        measured = run_ranks(measure, _RANKS, _TIMEOUT_S, namespaces=namespaces, rounds=arguments.rounds)
    # Freed memory returns to the system at once, so that resident memory is memory in use.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    peaks = run_ranks(measure_memory, _RANKS, _TIMEOUT_S, environment=environment)
    found = Rounds(measured["rounds"])
    rival = found.best(FSDP)
    title = f"DP={_RANKS}, accumulation 1, a cable of {measured['mbit']:.0f} Mbit/s each way"
    lines = [f"{name}: peak {peak / 2**20:.1f} MiB" for name, peak in peaks.items()]
    print(found.table(title, rival), *lines, sep="\n", flush=True)
    aims = [
        Aim(f"{OURS} / max(compute, communication)", found.over_bound(OURS), 1.08),
        Aim(f"{OURS} / {rival}", found.ratio(OURS, rival), 1.0),
        Aim(f"{OURS} / {FSDP}, peak memory", peaks[OURS] / peaks[FSDP], 1.0),
    ]
    return Report("", aims, {"overlap": measured, "peaks": peaks})


class _ExchangedSums:
    """FSDP's reduce-scatter as an all-to-all, which moves half the bytes of gloo's reduce-scatter."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return a buffer for messages."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, op: Any,
        async_op: bool = False,
    ) -> None:  # fmt: skip
        start_reduce_scatter(input_tensor, output_tensor, group).wait()
        if op == dist.ReduceOp.AVG:
            output_tensor /= group.size()


class FsdpTrainer(LlamaTrainer):
    """torch's FSDP2: fp32 shards, all-gathered as bf16, gradients summed in fp32, fused AdamW.

    Args:
        of_model, more: see LlamaTrainer.
        is_exchanging: whether `_ExchangedSums` sums the gradients.
        is_waiting: whether layers wait. Then forward prefetches the next layer, as an accelerator's host does
            by running ahead.
    """

    def __init__(
        self, *of_model: Any, is_exchanging: bool = False, is_waiting: bool = False, **more: Any
    ) -> None:
        super().__init__(*of_model, **more)
        model, device, optimizer = self.stages[0].float(), self.device, self.config.optimizer
        self._model = model
        mesh = dist.init_device_mesh(device.type, (dist.get_world_size(),))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        layers = model.get_submodule("decoder.layers")
        units = [fully_shard(module, mesh=mesh, mp_policy=policy) for module in (*layers.children(), model)]
        for unit, following in pairwise(units[:-1] if is_waiting else ()):
            unit.set_modules_to_forward_prefetch([following])
        if is_exchanging:
            for unit in units:
                unit.set_custom_reduce_scatter(_ExchangedSums())
        self._adam = torch.optim.AdamW(
            model.parameters(), lr=optimizer.lr, weight_decay=optimizer.weight_decay, eps=optimizer.adam_eps,
            betas=(optimizer.adam_beta1, optimizer.adam_beta2), fused=True,
        )  # fmt: skip

    def step(self) -> float:
        """Take one optimizer step; return the mean loss over ranks."""
        (batch,) = self.batches
        losses = self._model(batch.tokens, None, None, labels=batch.labels)
        loss, _ = masked_mean(losses, mask=batch.loss_mask)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), self.config.optimizer.clip_grad)
        self._adam.step()
        self._adam.zero_grad()
        return sum_over(self.groups.dp_cp, [loss.item()], self.device)[0] / dist.get_world_size()


def measure(context: DeviceContext, rounds: int) -> dict[str, Any]:
    """Return the cable's speed and the seconds of all contenders, equal on all ranks."""
    device, config = context.device, sharded_run(_RANKS, 1)
    groups = initialize(config, context)
    wait = partial(let_layers_wait, wait_s=WAIT_S, rank=dist.get_rank())
    ours = OurTrainer(with_sharding(config, ZeroStage.PARAMETERS), groups, device, change=wait)
    contenders: dict[str, Contender] = {
        COMPUTE: ComputeAlone(with_sharding(config, ZeroStage.OPTIMIZER), groups, device, change=wait),
        OURS: ours,
        FSDP: FsdpTrainer(config, groups, device, wait, is_waiting=True),
        FSDP_EXCHANGE: FsdpTrainer(config, groups, device, wait, is_waiting=True, is_exchanging=True),
    }
    messages = partial(communicate, ours.run.optimizer, num_gathers=2)
    return compare(contenders, messages, rounds, _STEPS, context)


def measure_memory(context: DeviceContext) -> dict[str, float]:
    """Return contender -> peak resident bytes of construction and three steps, on the rank with the most."""
    device, config = context.device, run_config(
        64, **_MEMORY_SHAPE, nproc_per_node=_RANKS, global_batch_size=_RANKS, precision="bf16",
    )  # fmt: skip
    groups = initialize(config, context)
    sharded = with_sharding(config, ZeroStage.PARAMETERS)
    builds: dict[str, Callable[[], Contender]] = {
        OURS: partial(OurTrainer, sharded, groups, device),
        FSDP: partial(FsdpTrainer, config, groups, device),
    }
    return {name: max_over_world([_resident_peak(build)], device)[0] for name, build in builds.items()}


def _resident_peak(build: Callable[[], Contender]) -> int:
    """Return the largest growth of this process in bytes. It trains twice, first without measuring."""

    def train() -> None:
        contender = build()
        for _ in range(3):
            contender.step()
        contender.settle()

    train()
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # reset the peak counter
    before = _status_bytes("VmRSS")
    train()
    return _status_bytes("VmHWM") - before


def _status_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))
