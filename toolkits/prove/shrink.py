"""Shrink a run: the smallest axes, layers and batch that keep its code paths; and its single-process twin.

Every value of the run stays, unless it is a size, a path, or bound to a GPU. The rules of runs
(`patch/checks`) decide whether a shrunk run is possible.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from patch.checks.rules import RULES
from patch.config import RunConfig
from patch.config.choices import ZeroStage
from patch.config.fields import FIELDS, assemble, scalar_of, value_of, with_values
from patch.config.schema import CheckpointConfig, ParallelConfig
from patch.device import MachineFacts
from patch.errors import ConfigError
from patch.families import expert_layers
from patch.families.layers import layers_text
from patch.families.selection import Selection, check_selection
from patch.layout.pipeline_stages import layout_text

STEPS = 2
"""Number of steps. Some faults show only in the second one: an adapter's B is zero in the first step."""
SHORTEST = 64
"""Tokens of a row, rounded up so that the layout divides it. Several short chats fit in it."""
PADDED, WHOLE = 300, 320
"""Vocabulary sizes with and without padding rows."""
_HEAD_SIZES = (8, 16, 32, 64)
"""Head sizes to try. The rules take the first one that divides as fp8 products or nf4 blocks need."""
_GIVEN_ANEW: dict[str, Any] = {
    "train_iters": STEPS, "train_epochs": None, "exit_duration_in_mins": None,
    "model_size": "auto", "init_method_std": 0.05, "make_vocab_size_divisible_by": 16,
    "nnodes": 1, "min_nodes": None, "max_restarts": 0, "log_dir": None,
    "lora_load": None, "lora_dropout": 0.0,
    "lr": 5e-3, "min_lr": 3e-3, "decoupled_min_lr": None, "lr_warmup_iters": 0, "lr_warmup_init": 0.0,
    "lr_decay_iters": None, "adam_eps": 1e-3,
    "reduce_bucket_size": 20_000, "ddp_pad_buckets_for_high_nccl_busbw": False,
    "optimizer_offload_chunk_size": 1999, "simulated_device_memory": None,
    "columns": None, "chat_template": None, "chat_template_kwargs": None, "split": None,
    "max_dropped_share": 1.0, "data_workers": 1,
    "eval_interval": STEPS, "eval_iters": 1,
    **{name: each.default for name, each in FIELDS.items() if name.startswith(("eval_tasks", "distill"))},
}  # fmt: skip
"""New values: sizes and paths that do not matter for the comparison; a learning rate that changes the weights
by the second step; and an epsilon that keeps an update from being only the sign of a small gradient, which
rounding could flip."""


class Sizes(NamedTuple):
    """Processes of each axis."""

    tp: int
    pp: int
    cp: int
    dp: int
    ep: int
    etp: int
    instances: int

    @property
    def processes(self) -> int:
        """Number of processes."""
        return self.tp * self.pp * self.cp * self.dp

    @classmethod
    def of(cls, run: RunConfig) -> Sizes:
        """Return the axes of a run."""
        axes, ep_size = run.axes, run.experts.expert_model_parallel_size
        instances = run.parallel.num_distributed_optimizer_instances
        return cls(axes["tp"], axes["pp"], axes["cp"], axes["dp"], ep_size, run.etp_size, instances)


class Shrunk(NamedTuple):
    """A shrunk run with the same code paths, and its single-process twin."""

    layout: RunConfig
    one: RunConfig
    folded: list[str]
    """Changes that made the run small, in words."""


def shrink(run: RunConfig, machine: MachineFacts, most: int, folder: Path, *, is_for_gpus: bool) -> Shrunk:
    """Shrink a resolved run.

    Args:
        run: the run, resolved for its own machine.
        machine: the machine of the proof.
        most: largest number of processes.
        folder: folder of the proof; its subfolder `made` has tokenizer and data.
        is_for_gpus: whether the run is for GPUs. Then flags whose `auto` depends on a GPU are set explicitly.
    Raises:
        ConfigError: no shrunk run passes the rules.
    """
    whole, refusals, of_device = Sizes.of(run), list[ConfigError](), dict[str, Any]()
    if is_for_gpus and run.optimizer.gradient_accumulation_fusion is None:
        of_device["gradient_accumulation_fusion"] = True
    if is_for_gpus and run.parallel.tp_comm_overlap is None:
        of_device["tp_comm_overlap"] = False
    if not machine.cuda_devices:
        of_device["transformer_impl"] = "local"
    is_whole = 0 < whole.processes <= machine.cuda_devices
    candidates = [whole] if is_whole else sorted(_candidates(whole, most), key=partial(_cost, run, whole))
    for sizes, head_size in itertools.product(candidates, _HEAD_SIZES):
        values = {
            **_GIVEN_ANEW, **_layers(run, sizes), **_widths(run, sizes, head_size), **_batches(run, sizes),
            **_parallel(run, sizes), **_rest(run, sizes, folder / "made", machine), **of_device,
        }  # fmt: skip
        small = _with_patterns(assemble({name: value_of(run, name) for name in FIELDS} | values))
        layout = placed(small, folder, "layout")
        try:
            for rule in RULES:
                rule(layout, machine)
        except ConfigError as error:
            refusals.append(error)
            continue
        folded = [f"processes {run.world_size} -> {layout.world_size}", *changes(run, layout)]
        return Shrunk(layout, placed(alone(layout), folder, "one"), folded)
    raise refusals[0]


def _with_patterns(small: RunConfig) -> RunConfig:
    """Return the run without patterns of weights (--freeze) that do not fit its fewer layers."""
    for _ in Selection._fields:
        try:
            check_selection(small.model, small.selection)
        except ConfigError as error:
            values = {name: None if name == error.field else value_of(small, name) for name in FIELDS}
            small = assemble(values)
    return small


def changes(run: RunConfig, other: RunConfig) -> list[str]:
    """Return the flags whose values differ between two runs, with both values."""
    return [
        f"{field.flag} {before} -> {now}"
        for field in FIELDS.values()
        if field.section not in ("data", "checkpoint")
        and (before := scalar_of(run, field.name)) != (now := scalar_of(other, field.name))
    ]


def placed(run: RunConfig, folder: Path, name: str) -> RunConfig:
    """Return the run with its own output folder and cache. It saves after each step."""
    saves = CheckpointConfig(
        output_path=str(folder / name), save_interval=1, async_save=run.checkpoint.async_save,
        load=str(folder / "made" / "model") if run.adapter.quantize_base else None,
    )  # fmt: skip
    return with_values(replace(run, checkpoint=saves), cache_dir=str(folder / f"{name}-cache"))


def alone(layout: RunConfig) -> RunConfig:
    """Return the single-process run, without recomputation, offload and sharding.

    Its micro-batch is the whole batch, unless a loss is a mean over a micro-batch.
    """
    experts, training, size = layout.experts, layout.training, layout.training.global_batch_size
    if layout.model.num_experts and (experts.moe_aux_loss_coeff or experts.moe_z_loss_coeff):
        size = training.micro_batch_size
    parallel = ParallelConfig(nproc_per_node=1, data_parallel_sharding=ZeroStage.NONE)
    return with_values(
        replace(layout, parallel=parallel), micro_batch_size=size, recompute_granularity=None,
        recompute_method="uniform", cpu_offloading=False, cpu_offloading_num_layers=None,
        fp8_param_gather=False, optimizer_offload_policy=None, grad_reduce_in_bf16=False,
        gradient_accumulation_fusion=False, cpu_offloading_weights=False, expert_model_parallel_size=1,
        expert_tensor_parallel_size=None, moe_token_dispatcher_type="alltoall",
    )  # fmt: skip


def _candidates(whole: Sizes, most: int) -> Iterator[Sizes]:
    def choices(size: int, *smaller: int) -> list[int]:
        return sorted({number for number in (1, *smaller, size) if number <= min(size, most)})

    ways = (choices(size, 2, 4) for size in (whole.tp, whole.cp, whole.dp, whole.ep))
    for tp, cp, dp, ep, pp in itertools.product(*ways, choices(whole.pp, 2, 3, 4)):
        etp = tp if whole.etp == whole.tp else min(whole.etp, 2)
        sizes = Sizes(tp, pp, cp, dp, ep, etp, 2 if whole.instances > 1 and dp * cp % 4 == 0 else 1)
        if sizes.processes <= most and sizes.processes % (ep * etp * pp) == 0:
            yield sizes


def _cost(run: RunConfig, whole: Sizes, sizes: Sizes) -> tuple[int, ...]:
    """Return the lost code paths, the worst first: axes, replicas, a middle stage, a ring of three ranks."""
    lost = [size > 1 and now == 1 for size, now in zip(whole, sizes, strict=True)]
    replicas = lost.pop(Sizes._fields.index("dp"))
    middle = [whole.pp > 2 >= sizes.pp, run.parallel.cp_comm_type == "p2p" and whole.cp > 2 >= sizes.cp]
    return sum(lost) + (replicas and sizes.cp == 1), replicas, *middle, sizes.processes, *sizes


def _parallel(run: RunConfig, sizes: Sizes) -> dict[str, Any]:
    values: dict[str, Any] = {
        "tensor_model_parallel_size": sizes.tp, "pipeline_model_parallel_size": sizes.pp,
        "context_parallel_size": sizes.cp, "nproc_per_node": sizes.processes,
        "expert_model_parallel_size": sizes.ep, "num_distributed_optimizer_instances": sizes.instances,
        "expert_tensor_parallel_size": run.experts.expert_tensor_parallel_size and sizes.etp,
    }  # fmt: skip
    if sizes.cp == 1:
        values["cp_comm_type"] = None
    if sizes.tp == 1:
        values |= {"sequence_parallel": False, "tp_comm_overlap": None}
    return values


def _rest(run: RunConfig, sizes: Sizes, made: Path, machine: MachineFacts) -> dict[str, Any]:
    """Return the fields of data, of fp16 loss scaling, of what a CPU lacks, and of comparable moments."""
    kind, optimizer = "raw" if run.training.sft else "idxmap", run.optimizer
    rows = str(made / ("text" if kind == "idxmap" else "rows.jsonl"))
    values: dict[str, Any] = {
        "tokenizer_name_or_path": str(made / "tokenizer"), "train_data_path": rows, "valid_data_path": rows,
        "dataset_type": kind, "decoupled_lr": optimizer.decoupled_lr and 4e-3,
        "lr_wsd_decay_iters": optimizer.lr_wsd_decay_iters and 1,
        "initial_loss_scale": min(optimizer.initial_loss_scale, 1024.0),
        "min_loss_scale": min(optimizer.min_loss_scale, 1.0),
        "param_persistence_threshold": min(optimizer.param_persistence_threshold, 256),  # norms stay whole
    }  # fmt: skip
    # 8-bit moments: an infinitely small difference may change a code, so no bound can compare them.
    moments = ("exp_avg_dtype", "exp_avg_sq_dtype")
    values |= {name: "fp32" for name in moments if value_of(run, name) == "8bit"}
    if optimizer.cpu_offloading_weights_fraction is None:
        values["cpu_offloading_weights_fraction"] = 0.5
    if optimizer.optimizer_offload_policy == "auto":
        values |= {"optimizer_offload_policy": "static", "optimizer_offload_fraction": 0.5}
    if not machine.cuda_devices and run.training.fp8_recipe == "delayed":
        values["fp8_recipe"] = "tensorwise"
    if not machine.cuda_devices and sizes.ep > 1 and sizes.etp > 1:
        values["moe_token_dispatcher_type"] = "allgather"
    return values


def _layers(run: RunConfig, sizes: Sizes) -> dict[str, Any]:
    """Return the fields of stages and layers: one layer per stage, two if layers of a stage must differ."""
    parallel, training, model = run.parallel, run.training, run.model
    with_experts = [layer in expert_layers(model) for layer in range(model.num_layers)]
    interleaved = min(run.virtual_pipeline_size, 2) if sizes.pp > 1 else 1
    stages = sizes.pp * interleaved
    extra = parallel.account_for_embedding_in_pipeline_split + parallel.account_for_loss_in_pipeline_split
    has_mix = training.recompute_granularity == "full" or training.cpu_offloading or len({*with_experts}) > 1
    has_ends = training.first_last_layers_bf16
    own = 2 + has_ends if stages == 1 else 2 if has_mix or has_ends or extra else 1
    is_uneven = parallel.num_split_layers(model.num_layers) % len(run.stage_layers) > 0
    layers, is_by_hand = [own] * stages, parallel.pipeline_model_parallel_layout is not None
    if is_by_hand:
        counts = _sample(run.stage_layers, stages)
        layers = [own + (count > min(filter(None, counts))) if count else 0 for count in counts]
    num_layers = sum(layers) - extra + (is_uneven and stages > 1)
    in_blocks = training.recompute_method == "uniform" and training.recompute_num_layers > 1
    values = {
        "num_layers": num_layers,
        "pipeline_model_parallel_layout": layout_text(layers) if is_by_hand else None,
        "num_layers_per_virtual_pipeline_stage": own if interleaved > 1 and not is_by_hand else None,
        "recompute_num_layers": 2 if in_blocks and num_layers == own * stages == 2 * stages else 1,
        "cpu_offloading_num_layers": training.cpu_offloading_num_layers and 1,
        "num_layers_at_start_in_bf16": min(training.num_layers_at_start_in_bf16, 1),
        "num_layers_at_end_in_bf16": min(training.num_layers_at_end_in_bf16, 1),
    }
    if model.num_experts:
        kinds = with_experts[:num_layers] if any(with_experts[:num_layers]) else [False, True]
        kinds += [True] * (num_layers - len(kinds))
        values["moe_layer_freq"] = layers_text([n for n, each in enumerate(kinds) if each], num_layers)
    return values


def _sample(counts: Sequence[int], number: int) -> list[int]:
    """Return this number of the counts, including the first and the last."""
    if number == 1:
        return [sum(counts)]
    return [counts[place * (len(counts) - 1) // (number - 1)] for place in range(number)]


def _widths(run: RunConfig, sizes: Sizes, head_size: int) -> dict[str, Any]:
    """Return widths with the divisibility by TP, CP and EP that the run has."""
    model, ways = run.model, run.parallel.context_parallel_size
    shared = sizes.cp if ways > 1 and run.heads_divide_by_cp else 1
    own_groups = model.num_query_groups // run.parallel.tensor_model_parallel_size
    groups = max(sizes.tp * (shared if own_groups % ways == 0 else 1), 2)
    heads = 2 * math.lcm(groups, sizes.tp * shared)
    if model.num_query_groups in (1, model.num_attention_heads):
        groups = 1 if model.num_query_groups == 1 < model.num_attention_heads else heads
    is_wide = model.hidden_size == model.num_attention_heads * model.kv_channels or model.kv_lora_rank
    hidden = heads * head_size if is_wide else max(heads * head_size // 2, 16 * sizes.tp)
    values: dict[str, Any] = {
        "num_attention_heads": heads, "num_query_groups": groups, "kv_channels": head_size,
        "hidden_size": hidden, "ffn_hidden_size": 2 * hidden,
        "vocab_size": WHOLE if run.padded_vocab_size == model.vocab_size else PADDED,
        "lora_rank": run.adapter.lora_rank and min(run.adapter.lora_rank, 4),
    }  # fmt: skip
    if model.kv_lora_rank:
        values |= {
            "kv_lora_rank": 2 * head_size, "q_lora_rank": model.q_lora_rank and 3 * head_size,
            "qk_head_dim": head_size, "qk_pos_emb_head_dim": head_size // 2, "v_head_dim": head_size,
            "kv_channels": head_size * 3 // 2,
        }  # fmt: skip
    if model.num_experts:
        shared_width, number = model.moe_shared_expert_intermediate_size, 2 * max(sizes.ep, 2)
        values |= {
            "num_experts": min(model.num_experts, number), "moe_router_topk": min(model.moe_router_topk, 2),
            "moe_ffn_hidden_size": model.moe_ffn_hidden_size and 3 * head_size,
            "moe_shared_expert_intermediate_size": shared_width and 6 * head_size,
            "moe_router_num_groups": model.moe_router_num_groups and 2,
            "moe_router_group_topk": model.moe_router_group_topk and 1,
            "moe_expert_capacity_factor": run.experts.moe_expert_capacity_factor and float(number),
        }  # fmt: skip
    return values


def _batches(run: RunConfig, sizes: Sizes) -> dict[str, Any]:
    """Return a short sequence that the layout divides, and enough micro-batches to fill the pipeline."""
    model, parallel = run.model, run.parallel
    unit = 2 * sizes.cp * (sizes.tp if parallel.sequence_parallel else 1)
    # Rounding routes a token with nearly equal experts differently. More tokens make its share small.
    has_ties = model.num_experts and run.training.precision != "fp32"
    length = -(-SHORTEST * (4 if has_ties else 1) // unit) * unit
    count, size = min(run.num_micro_batches, max(2, sizes.pp)), min(run.training.micro_batch_size, 2)
    is_extended, longest = model.seq_length > model.max_position_embeddings, model.max_position_embeddings
    has_window = model.window_size is not None and model.window_size[0] < run.sample_length
    group = parallel.microbatch_group_size_per_virtual_pipeline_stage
    return {
        "seq_length": length, "max_padding_length": length, "micro_batch_size": size,
        "global_batch_size": size * count * sizes.dp,
        "microbatch_group_size_per_virtual_pipeline_stage": group and sizes.pp,
        "max_position_embeddings": length // 2 if is_extended else max(longest, length),
        "window_size": (length // 4 - 1, 0) if has_window else model.window_size,
    }  # fmt: skip
