"""Measures memory and time of the loss: output layer, cross entropy and their gradients.

    python -m toolkits.benchmarks.loss [--precision fp32|bf16] [--hidden-size N] [--quick] [--json FILE]

Two contenders in one process take turns: upstream's, which holds the logits of all tokens, and ours.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch

from patch.config.schema import RunConfig
from patch.device import DeviceContext
from patch.distributed.groups import initialize
from patch.model import LearnedTokens, build_llama_model, initialize_weights
from toolkits.benchmarks._contenders import run_config
from toolkits.benchmarks._measure import Columns, peak_bytes, time_in_turns
from toolkits.benchmarks._report import Aim, Panel, Report, run_benchmark
from toolkits.benchmarks._runner import job

_TOKENS, _VOCAB_SIZE = 8192, 128256
_MOST_MEMORY, _MOST_TIME = 1 / 8, 1.1
UPSTREAM, OURS = "upstream", "ours"


def main(argv: Sequence[str]) -> int:
    """Run the benchmark and report."""
    options: dict[str, dict[str, Any]] = {
        "--precision": {"choices": ("fp32", "bf16"), "default": "fp32", "help": "of weights and logits"},
        "--hidden-size": {"type": int, "default": 128, "help": "width of the model"},
    }
    return run_benchmark(_run, argv, rounds=(5, 1), options=options)


def _run(arguments: argparse.Namespace) -> Report:
    context = DeviceContext.select(0)
    with job(context):
        contenders = _contenders(arguments, context)
        peaks = {name: peak_bytes(run, context.device) for name, run in contenders.items()}
        rounds, kind, found = time_in_turns(contenders, arguments.rounds, context)
    aims = [
        Aim("peak memory, as a share of upstream's", peaks[OURS] / peaks[UPSTREAM], _MOST_MEMORY),
        Aim(f"{kind} time, as a share of upstream's", found.ratio(OURS, UPSTREAM), _MOST_TIME),
    ]
    columns: Columns = {
        "peak MiB": lambda name: f"{peaks[name] / 2**20:.0f}",
        "wall s": lambda name: f"{median(one.wall for one in rounds[name]):.2f}",
    }
    head = f"{_TOKENS} tokens x {_VOCAB_SIZE} words, width {arguments.hidden_size}, {arguments.precision}\n"
    bars = {name: [peak / 2**20] for name, peak in peaks.items()}
    eighth = {"1/8 of upstream": bars[UPSTREAM][0] * _MOST_MEMORY}
    panel = Panel("peak MiB of output layer, loss and gradients", bars, eighth)
    text = f"{head}\n{found.table(f'{kind} time', UPSTREAM, columns)}"
    return Report(text, aims, [panel], {"rounds": rounds, "peak_bytes": peaks})


def _contenders(arguments: argparse.Namespace, context: DeviceContext) -> dict[str, Callable[[], None]]:
    """Forward and backward from the same hidden states to the loss, and back."""
    config = _loss_run(arguments)
    groups = initialize(config, context)
    stages = build_llama_model(config.model, groups, context.device, config.execution)
    initialize_weights(stages, config.model, seed=1)
    (model,) = stages
    torch.manual_seed(0)
    weight = model.output_layer.weight
    hidden = torch.randn(_TOKENS, 1, arguments.hidden_size, dtype=weight.dtype)
    hidden = hidden.to(context.device).requires_grad_()
    labels = torch.randint(0, _VOCAB_SIZE, (1, _TOKENS)).to(context.device)
    learned = LearnedTokens(torch.ones_like(labels, dtype=torch.float32), 1 / _TOKENS)

    def upstream() -> torch.Tensor:
        """megatron-core's ColumnParallelLinear and vocabulary-parallel cross entropy."""
        logits, _ = model.output_layer(hidden)
        return (model.compute_language_model_loss(labels, logits) * learned.mask).sum()

    def both_ways(loss: Callable[[], torch.Tensor]) -> None:
        loss().div(_TOKENS).backward()
        hidden.grad = weight.grad = None

    ours = partial(model.summed_loss, hidden, labels, learned)
    return {UPSTREAM: partial(both_ways, upstream), OURS: partial(both_ways, ours)}


def _loss_run(arguments: argparse.Namespace) -> RunConfig:
    width = arguments.hidden_size
    return run_config(
        _TOKENS, num_layers=1, hidden_size=width, ffn_hidden_size=width, num_attention_heads=width // 64,
        num_query_groups=width // 64, kv_channels=64, vocab_size=_VOCAB_SIZE, precision=arguments.precision,
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
