"""The side of megatron-core 0.16.1 in `prove --against upstream`: what it can train on a CPU.

What it lacks is refused; what it has wrong or otherwise is left out on both sides; what changes no number
(layouts that ask for Transformer Engine, recomputation) it does without. The faults: guides/upstream.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any

from patch.config import RunConfig
from patch.config.fields import FIELDS, assemble, value_of
from patch.errors import ConfigError
from patch.families import traits_of
from toolkits.prove.shrink import WHOLE, Shrunk, alone, changes, placed

_rope = attrgetter(
    "rope_scaling_type", "rope_low_freq_factor", "rope_high_freq_factor", "rope_original_max_position"
)
_Predicate = Callable[[RunConfig], bool]
_LACKS: dict[str, _Predicate] = {
    "adapters (--lora-rank)": lambda run: bool(run.adapter.lora_rank),
    "this objective (--objective)": lambda run: run.training.objective not in ("default", "sft", "pretrain"),
    "multi-latent attention without Transformer Engine": lambda run: bool(run.model.kv_lora_rank),
    "positions without RoPE, norms of embeddings": lambda run: not traits_of(run.model).has_rope,
}
"""What its model has not."""
_LEFT_OUT: list[tuple[_Predicate, dict[str, Any]]] = [
    (lambda run: run.padded_vocab_size != run.model.vocab_size, {"vocab_size": WHOLE}),
    (lambda run: bool(run.model.num_experts), {"moe_aux_loss_coeff": 0.0, "moe_z_loss_coeff": 0.0}),
    (lambda run: _rope(run.model) != ("llama3", 1.0, 4.0, 8192), {"use_rope_scaling": False}),
    (lambda run: run.is_packed, {"window_size": None}),
]
"""On both sides. Rows that pad the vocabulary have a part in its loss; its routers' losses depend on layout,
rows and masks; its RoPE has three numbers for all models; its windows forget any other mask."""


def against_upstream(small: Shrunk, folder: Path) -> Shrunk:
    """The small run, and in the place of one process upstream's in the same layout, as far as it has that.

    Args:
        small: a small run. folder: of the proof.
    Raises:
        ConfigError: upstream cannot train this.
    """
    run = small.layout
    for what, is_asked_for in _LACKS.items():
        if is_asked_for(run):
            raise ConfigError(
                f"--against upstream: megatron-core 0.16.1 has no model with {what}; prove this run against "
                "one process, without the flag"
            )
    for is_wrong, values in _LEFT_OUT:
        if is_wrong(run):
            run = assemble({name: value_of(run, name) for name in FIELDS} | values)
    theirs = _upstreams(run)
    said = [
        *(f"left out on both sides: {each}" for each in changes(small.layout, run)),
        *(f"upstream: {each}" for each in changes(run, theirs)),
    ]
    return Shrunk(run, placed(theirs, folder, "upstream"), small.folded + said)


def _upstreams(run: RunConfig) -> RunConfig:
    """What upstream does without.

    Without Transformer Engine its attention knows no CP, its norms no SP, without which its experts have no
    TP, its products no 8 bits; of sharded gradients and weights it has ZeRO-1.
    """
    parallel, experts, training = run.parallel, run.experts, run.training
    processes, tp_size = run.data_parallel_size * parallel.pipeline_model_parallel_size, 1
    if run.model.num_experts:
        ep_size = math.gcd(experts.expert_model_parallel_size, run.data_parallel_size)
        experts = replace(experts, expert_model_parallel_size=ep_size, expert_tensor_parallel_size=None)
    else:
        tp_size = parallel.tensor_model_parallel_size
    return replace(
        run,
        parallel=replace(
            parallel, tensor_model_parallel_size=tp_size, context_parallel_size=1, cp_comm_type=None,
            sequence_parallel=False, nproc_per_node=processes * tp_size,
            num_distributed_optimizer_instances=1,
            data_parallel_sharding=None, use_distributed_optimizer=run.zero_stage.shares_states,
            overlapped_distributed_optimizer=False,
        ),
        training=replace(
            alone(run).training, micro_batch_size=training.micro_batch_size,
            precision="bf16" if training.precision == "fp8" else training.precision,
        ),
        optimizer=replace(run.optimizer, optimizer_offload_policy=None, grad_reduce_in_bf16=False),
        experts=experts,
    )  # fmt: skip
