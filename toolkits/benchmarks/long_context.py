"""Measures memory against tokens / CP, up to a step of 131072 tokens at CP 4.

    python -m toolkits.benchmarks.long_context [--quick] [--json FILE] [--plot FILE]

On the CPU, with a model so small that attention to 131072 tokens takes minutes. The ranks share the cores.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from statistics import median
from typing import Any, NamedTuple

import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection

from patch.config.schema import RunConfig
from patch.data.samples import cut_batch
from patch.device import DeviceContext
from patch.distributed.context_group import Zigzag
from patch.distributed.groups import initialize
from toolkits.benchmarks._contenders import OurTrainer, SameBatches, run_config
from toolkits.benchmarks._measure import over_ranks, peak_bytes
from toolkits.benchmarks._report import Aim, Panel, Report, run_benchmark, table
from toolkits.benchmarks._runner import CPU, run_ranks

SHAPE: dict[str, Any] = {
    "num_layers": 2, "hidden_size": 64, "ffn_hidden_size": 160, "num_attention_heads": 1,
    "num_query_groups": 1, "kv_channels": 32, "vocab_size": 512,
}  # fmt: skip
"""One small head, because attention to 131072 tokens is most of the time."""
_TOKENS, _QUICK_TOKENS = (8192, 16384, 32768, 65536, 131072), (2048, 4096)
_CP_SIZES = (1, 2, 4)
_MOST_ON_RANK = 65536
_MOST_ABOVE = 0.02
"""What does not grow with tokens is part of it. Less is possible: the loss of many tokens goes in chunks."""
_TIMEOUT_S = 1800


class Peak(NamedTuple):
    """The memory of a step."""

    tokens: int
    cp_size: int
    peak_bytes: int

    @property
    def bytes_a_token(self) -> float:
        """Bytes for each token of a rank."""
        return self.peak_bytes * self.cp_size / self.tokens


def main(argv: Sequence[str]) -> int:
    """Run the benchmark and report."""
    return run_benchmark(_run, argv, quick="up to 4096 tokens: a minute")


def _run(arguments: argparse.Namespace) -> Report:
    sizes = _QUICK_TOKENS if arguments.quick else _TOKENS
    peaks = [peak for cp_size in _CP_SIZES for peak in _measure(sizes, cp_size)]
    aims = [Aim("memory above proportional to tokens / CP, at most, CP > 1", _above(peaks), _MOST_ABOVE)]
    content = {"peaks": [peak._asdict() for peak in peaks]}
    curves = {
        f"CP {cp_size}": (
            [peak.tokens / cp_size for peak in peaks if peak.cp_size == cp_size],
            [peak.peak_bytes / 2**20 for peak in peaks if peak.cp_size == cp_size],
        )
        for cp_size in _CP_SIZES
    }
    panel = Panel("tokens of a rank", curves=curves, ylabel="peak MiB of a step")
    return Report(_table(peaks), aims, [panel], content)


def _measure(sizes: Sequence[int], cp_size: int) -> list[Peak]:
    """The peak bytes of a step on the worst rank, for each length that is not too long for one rank."""
    tokens = [size for size in sizes if size // cp_size <= _MOST_ON_RANK]
    found = run_ranks(measure, cp_size, _TIMEOUT_S, tokens=tokens)
    return [Peak(size, cp_size, peak) for size, peak in zip(tokens, found, strict=True)]


def _above(peaks: Sequence[Peak]) -> float:
    """How far the most bytes of a token are above their median, with CP; without it attention is another."""
    found = [peak.bytes_a_token for peak in peaks if peak.cp_size > 1]
    return max(found) / median(found) - 1


def _table(peaks: Sequence[Peak]) -> str:
    rows = [
        (peak.tokens, peak.cp_size, peak.tokens // peak.cp_size, f"{peak.peak_bytes / 2**20:.1f}",
         f"{peak.bytes_a_token:.0f}")
        for peak in peaks
    ]  # fmt: skip
    return table(("tokens", "CP", "tokens / CP", "peak MiB", "bytes a token"), rows)


def ring_run(tokens: int, cp_size: int) -> RunConfig:
    """A run of one sequence a step, over a ring."""
    way = "p2p" if cp_size > 1 else None
    return run_config(
        tokens, **SHAPE, nproc_per_node=cp_size, context_parallel_size=cp_size, cp_comm_type=way
    )


def step_peak_bytes(config: RunConfig, groups: ProcessGroupCollection) -> int:
    """The most bytes that the first step had allocated at once, beside weights and states, on the worst rank.

    Args:
        config: the run.
        groups: the process groups of this rank.
    """
    reader = SameBatches(config, 0)
    reader.batches = [cut_batch(batch, Zigzag.of(groups.cp)) for batch in reader.batches]
    trainer = OurTrainer(config, groups, CPU.device, reader)

    def step() -> None:
        trainer.step()
        trainer.settle()  # a profiler that stops meanwhile crashes gloo's threads

    return int(over_ranks(peak_bytes(step, CPU.device), CPU.device))


def measure(context: DeviceContext, tokens: Sequence[int]) -> list[int]:
    """See `step_peak_bytes`; of a step of one sequence of each length, equal on all ranks."""
    configs = [ring_run(length, dist.get_world_size()) for length in tokens]
    groups = initialize(configs[0], context)
    return [step_peak_bytes(config, groups) for config in configs]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
