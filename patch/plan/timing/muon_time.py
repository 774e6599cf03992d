"""Muon's part of a step: Newton-Schulz iterations, and messages that gather whole matrices.

A matrix [n, m] with n <= m costs 4 n**2 m + 2 n**3 FLOPs in each iteration. Ranks that share states divide
the matrices of a pipeline rank; without sharding each rank computes all. Each TP rank computes whole
matrices. In float32, the directions of a matrix are reduced to its rank and gathered over TP, and the result
is broadcast.
"""

from __future__ import annotations

from collections.abc import Iterator

from patch.config import RunConfig
from patch.families.weights import WeightRow
from patch.plan.parameters import whole_matrices
from patch.plan.timing import communication as links
from patch.plan.timing.machine import Machine
from patch.text import scaled

_FP32 = 4


def orthogonalization_flops(config: RunConfig) -> float:
    """Return the FLOPs of a step's Newton-Schulz iterations on one rank; 0 without Muon."""
    flops = 0.0
    for row, number, owners in _matrices(config):
        for least, most in map(sorted, row.hf.values()):
            flops += number / owners.size * (4 * least**2 * most + 2 * least**3)
    return config.optimizer.muon_num_ns_steps * flops


def muon_parts(config: RunConfig, machine: Machine) -> Iterator[tuple[str, float, str]]:
    """Yield name, seconds and formula of Newton-Schulz iterations in bf16, and of messages, in a step."""
    if not (flops := orthogonalization_flops(config)):
        return
    rate = machine.peak_flops("bf16") * machine.gemm_share("bf16") * machine.sustained
    sent = 0.0
    for row, number, owners in _matrices(config):
        tp = links.group_of(config, "tp", of_experts=row.part == "expert")
        elements = row.num_elements / row.num_experts
        sent += number * links.ring(machine, owners, _FP32).twice.seconds(elements / tp.size)
        sent += number / owners.size * links.ring(machine, tp, _FP32).seconds(elements)
    steps = config.optimizer.muon_num_ns_steps
    text = f"{scaled(flops)}FLOP a rank: {steps} x (4 n n m + 2 n n n) of its share of matrices [n, m]"
    yield "Newton-Schulz of Muon", flops / rate, text
    yield "whole matrices for Muon", sent, ""


def _matrices(config: RunConfig) -> Iterator[tuple[WeightRow, float, links.Group]]:
    """Yield rows, parameters of each on the pipeline rank with most layers, and their owners."""
    parallel, layers = config.parallel, config.stage_layers
    pp_size, instances = parallel.pipeline_model_parallel_size, parallel.num_distributed_optimizer_instances
    share = max(sum(layers[rank::pp_size]) for rank in range(pp_size)) / sum(layers)
    for row in whole_matrices(config):
        is_expert = row.part == "expert"
        axes = ("dp",) if is_expert else ("dp", "cp")
        owners = links.group_of(config, *axes, instances=instances, of_experts=is_expert)
        number = len(row.layers) * row.num_experts * share
        number /= config.experts.expert_model_parallel_size if is_expert else 1
        yield row, number, owners if config.zero_stage.shards_states else links.Group(1, 1)
