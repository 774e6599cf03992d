"""Measure the experts of a rank against a dense MLP of the same FLOPs, and upstream's SequentialMLP.

    python -m toolkits.benchmarks experts [--tokens N] [--quick] [--json FILE]

Forward and backward of one layer, without router and dispatch. All experts have the same number of tokens. In
fp32, on a GPU in bf16.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP

from patch.device import DeviceContext
from toolkits.benchmarks._contenders import one_process, small_layer
from toolkits.benchmarks._measure import time_in_turns
from toolkits.benchmarks._report import Aim, Report

_EXPERTS, _WIDTH = 8, 512
"""Experts of the rank, and hidden size. The FFN size of an expert is twice the hidden size."""
DENSE, UPSTREAM, OURS = "dense", "upstream's experts", "experts"
ROUNDS = (15, 3)
OPTIONS = {"--tokens": {"type": int, "default": 256, "help": "of each expert"}}


def run(arguments: argparse.Namespace) -> Report:
    """Measure and report."""
    with one_process() as (context, groups):
        contenders = _contenders(arguments.tokens, groups, context)
        rounds, kind, found = time_in_turns(contenders, arguments.rounds, context)
    aims = [Aim(f"{kind} time of experts / of a dense MLP", found.ratio(OURS, DENSE), 1.15)]
    head = f"{_EXPERTS} experts, {arguments.tokens} tokens each, width {_WIDTH}\n"
    return Report(f"{head}\n{found.table(f'{kind} time', DENSE)}", aims, {"rounds": rounds})


def _contenders(
    tokens: int, groups: ProcessGroupCollection, context: DeviceContext
) -> dict[str, Callable[[], None]]:
    """Return functions that run forward and backward on the same rows."""
    width, rows = _WIDTH, _EXPERTS * tokens
    precision = "bf16" if context.is_cuda else "fp32"
    shape: dict[str, Any] = {"ffn_hidden_size": 2 * width, "vocab_size": 64, "precision": precision}
    mlp, mixed = (
        small_layer(width, rows, groups, context.device, **shape, **own).decoder.layers[0].mlp
        for own in ({}, {"num_experts": _EXPERTS})
    )
    ours = mixed.experts
    parts = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    upstream = SequentialMLP(_EXPERTS, mixed.config, parts, groups).to(context.device)
    upstream.load_state_dict(ours.state_dict())
    torch.manual_seed(0)
    dtype = next(mlp.parameters()).dtype
    hidden, gradient = (torch.randn(rows, 1, width, device=context.device, dtype=dtype) for _ in range(2))
    hidden.requires_grad_()
    weights = torch.rand(rows, device=context.device, requires_grad=True)
    sizes = torch.full((_EXPERTS,), tokens, device=context.device)

    def both_ways(compute: Callable[[], torch.Tensor], module: torch.nn.Module) -> None:
        compute().backward(gradient)
        hidden.grad = weights.grad = None
        module.zero_grad()

    def mixed_by(experts: SequentialMLP) -> torch.Tensor:
        return experts(hidden[:, 0], sizes, weights)[0].unsqueeze(1)

    return {
        DENSE: partial(both_ways, lambda: mlp(hidden)[0], mlp),
        UPSTREAM: partial(both_ways, partial(mixed_by, upstream), upstream),
        OURS: partial(both_ways, partial(mixed_by, ours), ours),
    }
