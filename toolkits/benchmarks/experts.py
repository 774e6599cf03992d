"""Measure the experts of a rank against a dense MLP of the same FLOPs, and upstream's SequentialMLP.

    python -m toolkits.benchmarks experts [--tokens N] [--quick] [--json FILE]

Forward and backward of one layer, without router and dispatch. All experts have the same number of tokens. In
fp32, on a GPU in bf16.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP

from patch import compat
from patch.device import DeviceContext
from patch.distributed.groups import alone
from patch.model import build_llama_model, initialize_weights
from toolkits.benchmarks._contenders import run_config
from toolkits.benchmarks._measure import time_in_turns
from toolkits.benchmarks._report import Aim, Report

_EXPERTS, _WIDTH = 8, 512
"""Experts of the rank, and hidden size. The FFN size of an expert is twice the hidden size."""
DENSE, UPSTREAM, OURS = "dense", "upstream's experts", "experts"
ROUNDS = (15, 3)
OPTIONS = {"--tokens": {"type": int, "default": 256, "help": "of each expert"}}


def run(arguments: argparse.Namespace) -> Report:
    """Measure and report."""
    context = DeviceContext.select(0)
    torch.set_num_threads(1)
    compat.apply(cuda=context.is_cuda)
    with alone(context) as groups:
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
    shape = {
        "num_layers": 1, "hidden_size": width, "ffn_hidden_size": 2 * width, "vocab_size": 64,
        "num_attention_heads": width // 64, "num_query_groups": width // 64, "kv_channels": 64,
        "precision": "bf16" if context.is_cuda else "fp32",
    }  # fmt: skip
    dense, mixed = (run_config(rows, **shape, **own) for own in ({}, {"num_experts": _EXPERTS}))
    layers = []
    for config in (dense, mixed):
        stages = build_llama_model(config, groups, context.device)
        initialize_weights(stages, config.model, seed=1)
        layers.append(stages[0].decoder.layers[0].mlp)
    mlp, ours = layers[0], layers[1].experts
    parts = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    upstream = SequentialMLP(_EXPERTS, layers[1].config, parts, groups).to(context.device)
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
