"""Measures memory and time of the loss: output layer, cross entropy and their gradients.

    python -m toolkits.benchmarks.loss [--precision fp32|bf16] [--hidden-size N] [--quick] [--json FILE]

Two contenders in one process take turns: upstream's, which holds the logits of all tokens, and ours.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

import torch

from patch.config.schema import RunConfig
from patch.device import DeviceContext
from patch.distributed.groups import initialize
from patch.model import LearnedTokens, LlamaModel, build_llama_model, initialize_weights
from toolkits.benchmarks._allocated import peak_bytes
from toolkits.benchmarks._rank import Seconds, job, time_call
from toolkits.benchmarks._report import Aim, aim_lines, argument_parser, write_json
from toolkits.benchmarks._run_config import llama, run_config

_TOKENS, _VOCAB_SIZE = 8192, 128256
_ROUNDS, _QUICK_ROUNDS = 5, 1
_MOST_MEMORY, _MOST_TIME = 1 / 8, 1.1
UPSTREAM, OURS = "upstream", "ours"


def main(argv: Sequence[str]) -> int:
    """Run the benchmark and report."""
    arguments = _parse(argv)
    context = DeviceContext.select(0)
    with job(context):
        contenders = _contenders(arguments, context)
        peaks = {name: peak_bytes(run, context.device) for name, run in contenders.items()}
        rounds = []
        for index in range(_QUICK_ROUNDS if arguments.quick else _ROUNDS):
            names = (UPSTREAM, OURS) if index % 2 else (OURS, UPSTREAM)
            rounds.append({name: time_call(contenders[name], context) for name in names})
    kind = "wall" if context.is_cuda else "cpu"
    aims = [
        Aim("peak memory, as a share of upstream's", peaks[OURS] / peaks[UPSTREAM], _MOST_MEMORY),
        Aim(f"{kind} time, as a share of upstream's", _time_share(rounds, kind), _MOST_TIME),
    ]
    print(f"{_TOKENS} tokens x {_VOCAB_SIZE} words, width {arguments.hidden_size}, {arguments.precision}\n")
    print(_table(peaks, rounds))
    print("\n".join(aim_lines(aims)))
    if arguments.json:
        write_json(arguments.json, aims, rounds=rounds, peak_bytes=peaks)
    _plot(arguments.plot, peaks)
    print(f"plot: {arguments.plot}")
    return 0


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argument_parser("loss", __doc__, f"{_QUICK_ROUNDS} round instead of {_ROUNDS}")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32", help="of weights and logits")
    parser.add_argument("--hidden-size", type=int, default=128, help="width of the model")
    return parser.parse_args(argv)


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


def _time_share(rounds: Sequence[dict[str, Seconds]], kind: str) -> float:
    return median(getattr(times[OURS], kind) / getattr(times[UPSTREAM], kind) for times in rounds)


def _table(peaks: dict[str, int], rounds: Sequence[dict[str, Seconds]]) -> str:
    lines = [f"{'':<10}{'peak MiB':>10}{'seconds':>10}{'CPU seconds':>13}"]
    for name in (UPSTREAM, OURS):
        wall, cpu = (median(getattr(times[name], kind) for times in rounds) for kind in Seconds._fields)
        lines.append(f"{name:<10}{peaks[name] / 2**20:>10.0f}{wall:>10.2f}{cpu:>13.2f}")
    return "\n".join(lines) + "\n"


def _plot(file: Path, peaks: dict[str, int]) -> None:
    """Bars of peak memory, and an eighth of upstream's."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    canvas, axis = pyplot.subplots(figsize=(8, 2), layout="constrained")
    for name in (OURS, UPSTREAM):
        axis.barh(name, peaks[name] / 2**20)
    axis.axvline(
        peaks[UPSTREAM] * _MOST_MEMORY / 2**20, color="gray", linestyle="--", label="1/8 of upstream"
    )
    axis.set(xlabel="peak MiB of output layer, loss and gradients")
    axis.legend()
    canvas.savefig(file, dpi=120)
    pyplot.close(canvas)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
