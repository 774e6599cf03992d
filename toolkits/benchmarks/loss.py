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

import torch

from patch.config.schema import RunConfig
from patch.device import DeviceContext
from patch.distributed.groups import initialize
from patch.model import LearnedTokens, LlamaModel, build_llama_model, initialize_weights
from toolkits.benchmarks._contenders import llama, run_config
from toolkits.benchmarks._measure import Seconds, peak_bytes, ratio, take_turns, time_call
from toolkits.benchmarks._report import Aim, Panel, Report, run_benchmark, table
from toolkits.benchmarks._runner import job

_TOKENS, _VOCAB_SIZE = 8192, 128256
_ROUNDS, _QUICK_ROUNDS = 5, 1
_MOST_MEMORY, _MOST_TIME = 1 / 8, 1.1
UPSTREAM, OURS = "upstream", "ours"


def main(argv: Sequence[str]) -> int:
    """Run the benchmark and report."""
    quick = f"{_QUICK_ROUNDS} round instead of {_ROUNDS}"
    return run_benchmark("loss", __doc__, argv, _run, quick, _add_options)


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32", help="of weights and logits")
    parser.add_argument("--hidden-size", type=int, default=128, help="width of the model")


def _run(arguments: argparse.Namespace) -> Report:
    context = DeviceContext.select(0)
    with job(context):
        contenders = _contenders(arguments, context)
        peaks = {name: peak_bytes(run, context.device) for name, run in contenders.items()}
        rounds = take_turns(
            {name: partial(time_call, run, context) for name, run in contenders.items()},
            _QUICK_ROUNDS if arguments.quick else _ROUNDS,
        )
    kind = "wall" if context.is_cuda else "cpu"
    ours, upstream = ([getattr(one, kind) for one in rounds[name]] for name in (OURS, UPSTREAM))
    aims = [
        Aim("peak memory, as a share of upstream's", peaks[OURS] / peaks[UPSTREAM], _MOST_MEMORY),
        Aim(f"{kind} time, as a share of upstream's", ratio(ours, upstream), _MOST_TIME),
    ]
    rows = []
    for name, found in rounds.items():
        times = (f"{median(getattr(one, kind) for one in found):.2f}" for kind in Seconds._fields)
        rows.append([name, f"{peaks[name] / 2**20:.0f}", *times])
    text = f"{_TOKENS} tokens x {_VOCAB_SIZE} words, width {arguments.hidden_size}, {arguments.precision}\n"
    bars = {name: [peak / 2**20] for name, peak in peaks.items()}
    eighth = {"1/8 of upstream": bars[UPSTREAM][0] * _MOST_MEMORY}
    panel = Panel("peak MiB of output layer, loss and gradients", bars, eighth)
    text = f"{text}\n{table(('', 'peak MiB', 'seconds', 'CPU seconds'), rows)}"
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
    hidden = torch.randn(_TOKENS, 1, arguments.hidden_size, dtype=weight.dtype).to(context.device)
    labels = torch.randint(0, _VOCAB_SIZE, (1, _TOKENS)).to(context.device)
    learned = LearnedTokens(torch.ones_like(labels, dtype=torch.float32), 1 / _TOKENS)

    def loss(name: str) -> None:
        leaf = hidden.requires_grad_()
        compute = _upstream_loss if name == UPSTREAM else _our_loss
        compute(model, leaf, labels, learned).div(_TOKENS).backward()
        leaf.grad = weight.grad = None

    return {UPSTREAM: lambda: loss(UPSTREAM), OURS: lambda: loss(OURS)}


def _upstream_loss(
    model: LlamaModel, hidden: torch.Tensor, labels: torch.Tensor, learned: LearnedTokens
) -> torch.Tensor:
    """megatron-core's ColumnParallelLinear and vocabulary-parallel cross entropy."""
    logits, _ = model.output_layer(hidden)
    return (model.compute_language_model_loss(labels, logits) * learned.mask).sum()


def _our_loss(
    model: LlamaModel, hidden: torch.Tensor, labels: torch.Tensor, learned: LearnedTokens
) -> torch.Tensor:
    return model.summed_loss(hidden, labels, learned)


def _loss_run(arguments: argparse.Namespace) -> RunConfig:
    width = arguments.hidden_size
    model = llama(
        _TOKENS, num_layers=1, hidden_size=width, ffn_hidden_size=width, num_attention_heads=width // 64,
        num_query_groups=width // 64, kv_channels=64, vocab_size=_VOCAB_SIZE,
    )  # fmt: skip
    return run_config(model, precision=arguments.precision)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
