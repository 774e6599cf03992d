"""Measures memory against tokens / CP, and trains a step of 131072 tokens at CP 4 by the launcher.

    python -m toolkits.benchmarks.long_context [--quick] [--json FILE] [--plot FILE]

On the CPU, with a model so small that attention to 131072 tokens takes minutes. The ranks share the cores.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection

from patch.config.schema import ParallelConfig, RunConfig
from patch.data.samples import cut_batch
from patch.device import DeviceContext
from patch.distributed.context_group import Zigzag
from patch.distributed.groups import initialize
from toolkits.benchmarks._contenders import OurTrainer, SameBatches, llama, run_config
from toolkits.benchmarks._measure import peak_bytes
from toolkits.benchmarks._report import Aim, Panel, Report, run_benchmark, table
from toolkits.benchmarks._runner import run_ranks
from toolkits.quickstart.seed_model import write_tokenizer

SHAPE: dict[str, Any] = {
    "num_layers": 2, "hidden_size": 64, "ffn_hidden_size": 160, "num_attention_heads": 1,
    "num_query_groups": 1, "kv_channels": 32, "vocab_size": 512,
}  # fmt: skip
"""One small head, because attention to 131072 tokens is most of the time."""
_TOKENS, _QUICK_TOKENS = (8192, 16384, 32768, 65536, 131072), (2048, 4096)
_CP_SIZES = (1, 2, 4)
_MOST_ON_RANK = 65536
_LARGEST_CP = max(_CP_SIZES)
_MOST_ABOVE = 0.02
"""What does not grow with tokens is part of it. Less is possible: the loss of many tokens goes in chunks."""
_TIMEOUT_S = 1800
_SCRIPT = Path(__file__).parents[2] / "examples" / "llama3_1" / "run_mcore_llama.sh"


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
    return run_benchmark("long_context", __doc__, argv, _run, "up to 4096 tokens: a minute")


def _run(arguments: argparse.Namespace) -> Report:
    sizes = _QUICK_TOKENS if arguments.quick else _TOKENS
    peaks = [peak for cp_size in _CP_SIZES for peak in _measure(sizes, cp_size)]
    print(_table(peaks), flush=True)
    trained = _train(max(sizes))
    text = (
        f"{max(sizes)} tokens at CP {_LARGEST_CP} by the launcher: loss {trained['loss']:.3f}, step "
        f"{trained['step_time_ms'] / 1e3:.0f} s, {trained['peak_memory_gib']:.2f} GiB a process with torch\n"
    )
    aims = [Aim("memory above proportional to tokens / CP, at most, CP > 1", _above(peaks), _MOST_ABOVE)]
    content = {"peaks": [peak._asdict() for peak in peaks], "trained": trained}
    curves = {}
    for cp_size in _CP_SIZES:
        own = [peak for peak in peaks if peak.cp_size == cp_size]
        curves[f"CP {cp_size}"] = (
            [peak.tokens / cp_size for peak in own],
            [peak.peak_bytes / 2**20 for peak in own],
        )
    panel = Panel("tokens of a rank", curves=curves, ylabel="peak MiB of a step")
    return Report(text, aims, [panel], content)


def _measure(sizes: Sequence[int], cp_size: int) -> list[Peak]:
    """The peak bytes of a step on the worst rank, for each length that is not too long for one rank."""
    tokens = [size for size in sizes if size // cp_size <= _MOST_ON_RANK]
    found = run_ranks(measure, cp_size, _TIMEOUT_S, on_cpu=True, tokens=tokens)
    return [Peak(size, cp_size, peak) for size, peak in zip(tokens, found, strict=True)]


def _train(tokens: int) -> dict[str, Any]:
    """Train one step on one text of more than `tokens` tokens, as a user does; the step's metrics."""
    with tempfile.TemporaryDirectory() as folder:
        words = " ".join(f"word{number}" for number in range(tokens // 2))
        write_tokenizer(Path(folder) / "tokenizer", [words[:10000]], SHAPE["vocab_size"])
        data, output = Path(folder) / "data.jsonl", Path(folder) / "run"
        data.write_text(json.dumps({"text": words}) + "\n", encoding="utf-8")
        positions = [
            "dsw", "tiny", 1, 1, 1e-4, 1e-5, tokens, tokens, "fp32", 1, 1, _LARGEST_CP, "false", "true",
            "true", "true", "none", "false", 1, data, "none", "none", 1, 0, output,
        ]  # fmt: skip
        flags = [f"--{name.replace('_', '-')}={value}" for name, value in SHAPE.items()]
        flags += [f"--max-position-embeddings={tokens}", "--cp-comm-type=p2p", f"--cache-dir={folder}/cache"]
        environment = {
            "PYTHON": sys.executable, "MP_DATASET_TYPE": "raw", "TOKENIZER_PATH": f"{folder}/tokenizer",
            "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "",
        }  # fmt: skip
        subprocess.run(
            ["bash", str(_SCRIPT), *map(str, positions), *flags],
            env={**os.environ, **environment}, check=True, timeout=_TIMEOUT_S, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        lines = (output / "log" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return json.loads(lines[0])


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
    parallel = ParallelConfig(
        nproc_per_node=cp_size, context_parallel_size=cp_size, cp_comm_type="p2p" if cp_size > 1 else None
    )
    return run_config(llama(tokens, **SHAPE), parallel)


def step_peak_bytes(config: RunConfig, groups: ProcessGroupCollection) -> int:
    """The most bytes that the first step had allocated at once, beside weights and states, on the worst rank.

    Args:
        config: the run.
        groups: the process groups of this rank.
    """
    device, reader = torch.device("cpu"), SameBatches(config, 0)
    reader.batches = [cut_batch(batch, Zigzag.of(groups.cp)) for batch in reader.batches]
    trainer = OurTrainer(config, groups, device, reader)

    def step() -> None:
        trainer.step()
        trainer.run.optimizer.finish_param_sync()  # a profiler that stops meanwhile crashes gloo's threads

    peak = torch.tensor(peak_bytes(step, device))
    dist.all_reduce(peak, op=dist.ReduceOp.MAX)
    return int(peak)


def measure(context: DeviceContext, tokens: Sequence[int]) -> list[int]:
    """See `step_peak_bytes`; of a step of one sequence of each length, equal on all ranks."""
    configs = [ring_run(length, dist.get_world_size()) for length in tokens]
    groups = initialize(configs[0], context)
    return [step_peak_bytes(config, groups) for config in configs]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
