"""Measure memory and time of the loss: output layer, cross entropy and their gradients.

    python -m toolkits.benchmarks loss [--precision fp32|bf16] [--quick] [--json FILE]

Two contenders in one process take turns: upstream's, which holds the logits of all tokens, and ours.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection

from patch.device import DeviceContext
from patch.model import LossMask
from toolkits.benchmarks._contenders import one_process, small_layer
from toolkits.benchmarks._measure import peak_bytes, time_in_turns
from toolkits.benchmarks._report import Aim, Report

_TOKENS, _VOCAB_SIZE, _WIDTH = 8192, 128256, 128
_MOST_MEMORY, _MOST_TIME = 1 / 8, 1.1
UPSTREAM, OURS = "upstream", "ours"
ROUNDS = (5, 1)
OPTIONS = {"--precision": {"choices": ("fp32", "bf16"), "default": "fp32", "help": "of weights and logits"}}


def run(arguments: argparse.Namespace) -> Report:
    """Measure and report."""
    with one_process() as (context, groups):
        contenders = _contenders(arguments.precision, groups, context)
        peaks = {name: peak_bytes(call, context.device) for name, call in contenders.items()}
        rounds, kind, found = time_in_turns(contenders, arguments.rounds, context)
    aims = [
        Aim("peak memory, as a share of upstream's", peaks[OURS] / peaks[UPSTREAM], _MOST_MEMORY),
        Aim(f"{kind} time, as a share of upstream's", found.ratio(OURS, UPSTREAM), _MOST_TIME),
    ]
    columns: dict[str, Callable[[str], str]] = {
        "peak MiB": lambda name: f"{peaks[name] / 2**20:.0f}",
        "wall s": lambda name: f"{median(one.wall for one in rounds[name]):.2f}",
    }
    head = f"{_TOKENS} tokens x {_VOCAB_SIZE} words, width {_WIDTH}, {arguments.precision}\n"
    text = f"{head}\n{found.table(f'{kind} time', UPSTREAM, columns)}"
    return Report(text, aims, {"rounds": rounds, "peak_bytes": peaks})


def _contenders(
    precision: str, groups: ProcessGroupCollection, context: DeviceContext
) -> dict[str, Callable[[], None]]:
    """Return functions that compute the loss from the same hidden states, and its gradients."""
    fields: dict[str, Any] = {"ffn_hidden_size": _WIDTH, "vocab_size": _VOCAB_SIZE, "precision": precision}
    model = small_layer(_WIDTH, _TOKENS, groups, context.device, **fields)
    torch.manual_seed(0)
    weight = model.output_layer.weight
    hidden = torch.randn(_TOKENS, 1, _WIDTH, dtype=weight.dtype)
    hidden = hidden.to(context.device).requires_grad_()
    labels = torch.randint(0, _VOCAB_SIZE, (1, _TOKENS)).to(context.device)
    learned = LossMask(torch.ones_like(labels, dtype=torch.float32), 1 / _TOKENS)

    def upstream() -> torch.Tensor:
        """megatron-core's ColumnParallelLinear and vocabulary-parallel cross entropy."""
        logits, _ = model.output_layer(hidden)
        return (model.compute_language_model_loss(labels, logits) * learned.mask).sum()

    def both_ways(loss: Callable[[], torch.Tensor]) -> None:
        loss().div(_TOKENS).backward()
        hidden.grad = weight.grad = None

    ours = partial(model.summed_loss, hidden, labels, learned)
    return {UPSTREAM: partial(both_ways, upstream), OURS: partial(both_ways, ours)}
