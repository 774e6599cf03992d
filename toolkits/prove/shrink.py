"""A run made small: every axis, layer and batch as few as keep its code paths; and the same in one process.

Nothing is chosen anew: a value of the run stays unless it is a size, a place, or bound to a GPU. The rules of
runs (`patch/checks`) decide whether a small run is possible.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from patch.checks.rules import RULES
from patch.config import RunConfig
from patch.config.choices import ZeroStage
from patch.config.fields import FIELDS, assemble, scalar_of, value_of
from patch.device import MachineFacts
from patch.errors import ConfigError
from patch.families import expert_layers, traits_of
from patch.families.layers import layers_text
from patch.layout.pipeline_stages import layout_text

STEPS = 2
"""Some faults show in the second step only: an adapter's B is zero in the first one."""
SHORTEST = 64
"""Tokens of a row, or a few more where the layout divides it; several short chats fit in it."""
PADDED, WHOLE = 300, 320
"""Words of a vocabulary with and without rows of padding."""
_HEAD_SIZES = (8, 16, 32, 64)
"""The rules take the first that divides as 8-bit products, or blocks of 4 bits, want it."""
_GIVEN_ANEW: dict[str, Any] = {
    **dict.fromkeys(["train_epochs", "load", "lora_load", "save", "save_retain_last", "save_retain_every"]),
    **dict.fromkeys(["profile", "stop_file", "log_dir", "min_nodes", "exit_duration_in_mins"]),
    **dict.fromkeys(["spike_factor", "columns", "chat_template", "split", "decoupled_min_lr"]),
    "simulated_device_memory": None,
    **dict.fromkeys(["save_interval", "log_interval", "nnodes", "eval_iters", "data_workers"], 1),
    **dict.fromkeys(["lr_warmup_iters", "lora_dropout", "max_restarts"], 0),
    **dict.fromkeys(["save_weights_only_at_end", "export_hf", "ddp_pad_buckets_for_high_nccl_busbw"], False),
    **dict.fromkeys(["eval_interval", "train_iters"], STEPS),
    "max_dropped_share": 1.0, "reduce_bucket_size": 20_000, "optimizer_offload_chunk_size": 1999,
    "lr": 5e-3, "min_lr": 3e-3, "adam_eps": 1e-3, "init_method_std": 0.05, "model_size": "auto",
    "make_vocab_size_divisible_by": 16,
}  # fmt: skip
"""Sizes and places that no proof depends on; a rate with which the second step's weights are others; and an
epsilon with which an update is no mere sign, that the rounding of a small gradient would turn."""
_ALONE: dict[str, Any] = {
    **{name: FIELDS[name].default for name in (
        "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size",
        "num_layers_per_virtual_pipeline_stage", "pipeline_model_parallel_layout",
        "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split",
        "overlap_p2p_communication", "overlap_p2p_communication_warmup_flush", "rank_order", "cp_comm_type",
        "microbatch_group_size_per_virtual_pipeline_stage", "sequence_parallel", "tp_comm_overlap",
        "use_distributed_optimizer", "overlapped_distributed_optimizer", "expert_model_parallel_size",
        "num_distributed_optimizer_instances", "expert_tensor_parallel_size", "moe_token_dispatcher_type",
        "recompute_granularity", "recompute_method", "recompute_num_layers", "cpu_offloading",
        "cpu_offloading_num_layers", "optimizer_offload_policy", "grad_reduce_in_bf16", "fp8_param_gather",
    )},
    "nproc_per_node": 1, "data_parallel_sharding": ZeroStage.NONE, "gradient_accumulation_fusion": False,
}  # fmt: skip
"""What one process has: no layout, nothing recomputed, offloaded or shared."""


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
        """All of them."""
        return self.tp * self.pp * self.cp * self.dp

    @classmethod
    def of(cls, run: RunConfig) -> Sizes:
        """Those of a run."""
        parallel = run.parallel
        return cls(
            parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size,
            parallel.context_parallel_size, run.data_parallel_size, run.experts.expert_model_parallel_size,
            run.etp_size, parallel.num_distributed_optimizer_instances,
        )  # fmt: skip


class Shrunk(NamedTuple):
    """A small run of the same code paths, and the same in one process."""

    layout: RunConfig
    one: RunConfig
    folded: list[str]
    """What has become smaller or is another, in words."""


def shrink(
    run: RunConfig, machine: MachineFacts, most: int, folder: Path, *, is_for_gpus: bool
) -> Shrunk:
    """Make a resolved run small.

    Args:
        run: resolved for the machine that it is for.
        machine: the one that the proof runs on.
        most: processes at most.
        folder: of the proof; `made` in it has tokenizer and data.
        is_for_gpus: what `auto` means on them is asked for by name.
    Raises:
        ConfigError: no small run of it passes the rules.
    """
    whole, refusals, of_device = Sizes.of(run), list[ConfigError](), dict[str, Any]()
    if is_for_gpus and run.optimizer.gradient_accumulation_fusion is None:
        of_device["gradient_accumulation_fusion"] = True
    if is_for_gpus and run.parallel.tp_comm_overlap is None:
        of_device["tp_comm_overlap"] = False
    is_whole = 0 < whole.processes <= machine.cuda_devices
    candidates = [whole] if is_whole else sorted(_candidates(whole, most), key=partial(_cost, run, whole))
    for sizes in candidates:
        for head_size in _HEAD_SIZES:
            layout = _with(run, _values(run, sizes, head_size, folder, machine) | of_device)
            try:
                for rule in RULES:
                    rule(layout, machine)
            except ConfigError as error:
                refusals.append(error)
                continue
            places = {"output_path": str(folder / "one"), "cache_dir": str(folder / "one-cache")}
            one = _with(layout, _ALONE | _batch_of_one(layout) | places)
            return Shrunk(layout, one, _told(run, layout))
    raise refusals[0]


def _with(run: RunConfig, values: dict[str, Any]) -> RunConfig:
    return assemble({name: value_of(run, name) for name in FIELDS} | values)


def _candidates(whole: Sizes, most: int) -> Iterator[Sizes]:
    def choices(size: int, smaller: tuple[int, ...] = (2, 4)) -> list[int]:
        return sorted({1, *(number for number in (*smaller, size) if number <= min(size, most))})

    axes = (choices(whole.tp), choices(whole.pp, (2, 3, 4)), choices(whole.cp), choices(whole.dp))
    for tp, pp, cp, dp, ep in itertools.product(*axes, choices(whole.ep)):
        etp = tp if whole.etp == whole.tp else min(whole.etp, 2)
        instances = 2 if whole.instances > 1 and dp * cp % 4 == 0 else 1
        sizes = Sizes(tp, pp, cp, dp, ep, etp, instances)
        if sizes.processes <= most and sizes.processes % (ep * etp * pp) == 0:
            yield sizes


def _cost(run: RunConfig, whole: Sizes, sizes: Sizes) -> tuple[int, ...]:
    """What is lost, the worst first: an axis; replicas; a middle stage; a ring with two neighbours."""
    is_lost = [size > 1 and now == 1 for size, now in zip(whole, sizes, strict=True)]
    replicas = is_lost.pop(Sizes._fields.index("dp"))
    has_copies = sizes.dp * sizes.cp > 1
    is_ring = run.parallel.cp_comm_type == "p2p"
    middle = [whole.pp > 2 >= sizes.pp, is_ring and whole.cp > 2 >= sizes.cp]
    return sum(is_lost) + (replicas and not has_copies), replicas, *middle, sizes.processes, *sizes


def _values(
    run: RunConfig, sizes: Sizes, head_size: int, folder: Path, machine: MachineFacts
) -> dict[str, Any]:
    made = folder / "made"
    kind = "raw" if run.training.sft else "idxmap"
    rows = made / ("text" if kind == "idxmap" else "rows.jsonl")
    optimizer, training = run.optimizer, run.training
    values: dict[str, Any] = {
        **_GIVEN_ANEW, **_layers(run, sizes), **_widths(run, sizes, head_size), **_batches(run, sizes),
        "tensor_model_parallel_size": sizes.tp, "pipeline_model_parallel_size": sizes.pp,
        "context_parallel_size": sizes.cp, "nproc_per_node": sizes.processes,
        "expert_model_parallel_size": sizes.ep, "num_distributed_optimizer_instances": sizes.instances,
        "expert_tensor_parallel_size": run.experts.expert_tensor_parallel_size and sizes.etp,
        "output_path": str(folder / "layout"), "cache_dir": str(folder / "layout-cache"),
        "tokenizer_name_or_path": str(made / "tokenizer"), "train_data_path": str(rows),
        "valid_data_path": str(rows), "dataset_type": kind, "decoupled_lr": optimizer.decoupled_lr and 2e-3,
        "initial_loss_scale": min(optimizer.initial_loss_scale, 1024.0),
        "min_loss_scale": min(optimizer.min_loss_scale, 1.0),
    }  # fmt: skip
    if sizes.cp == 1:
        values["cp_comm_type"] = None
    if sizes.tp == 1:
        values |= {"sequence_parallel": False, "tp_comm_overlap": None}
    if optimizer.optimizer_offload_policy == "auto":
        values |= {"optimizer_offload_policy": "static", "optimizer_offload_fraction": 0.5}
    if not machine.cuda_devices:
        values["transformer_impl"] = "local"
        if training.fp8_recipe == "delayed":
            values["fp8_recipe"] = "tensorwise"
        if sizes.ep > 1 and sizes.etp > 1:
            values["moe_token_dispatcher_type"] = "allgather"
    return values


def _layers(run: RunConfig, sizes: Sizes) -> dict[str, Any]:
    """Stages, their layers, and what becomes of each: one layer a stage, two where some of it differ."""
    parallel, training, model = run.parallel, run.training, run.model
    with_experts = [layer in expert_layers(model) for layer in range(model.num_layers)]
    is_by_hand = parallel.pipeline_model_parallel_layout is not None
    interleaved = min(run.virtual_pipeline_size, 2) if sizes.pp > 1 else 1
    stages = sizes.pp * interleaved
    extra = parallel.account_for_embedding_in_pipeline_split + parallel.account_for_loss_in_pipeline_split
    has_mix = training.recompute_granularity == "full" or training.cpu_offloading or len({*with_experts}) > 1
    has_ends = training.first_last_layers_bf16
    own = (3 if has_ends else 2) if stages == 1 else 2 if has_mix or has_ends or extra else 1
    num_layers = own * stages - extra
    is_even = parallel.num_split_layers(model.num_layers) % (run.virtual_pipeline_size * sizes.pp) == 0
    values: dict[str, Any] = {"num_layers_per_virtual_pipeline_stage": None}
    if is_by_hand:
        layers = _sample(run.stage_layers, stages)
        fewest = min(filter(None, layers))
        layers = [0 if not count else own + (count > fewest) for count in layers]
        num_layers = sum(layers)
        values["pipeline_model_parallel_layout"] = layout_text(layers)
    elif interleaved > 1:
        values["num_layers_per_virtual_pipeline_stage"] = own
    elif not is_even and sizes.pp > 1:
        num_layers += 1
    block = training.recompute_num_layers if training.recompute_method == "uniform" else 1
    values |= {
        "num_layers": num_layers,
        "recompute_num_layers": 2 if block > 1 and own == 2 and is_even and not (is_by_hand or extra) else 1,
        "cpu_offloading_num_layers": training.cpu_offloading_num_layers and 1,
        "num_layers_at_start_in_bf16": min(training.num_layers_at_start_in_bf16, 1),
        "num_layers_at_end_in_bf16": min(training.num_layers_at_end_in_bf16, 1),
    }
    if model.num_experts:
        kinds = with_experts[:num_layers] if any(with_experts[:num_layers]) else [False, True]
        kinds += [True] * (num_layers - len(kinds))
        values["moe_layer_freq"] = layers_text([n for n, each in enumerate(kinds) if each], num_layers)
    return values


def _sample(counts: list[int], number: int) -> list[int]:
    """So many of the counts, the first and the last among them."""
    if number == 1:
        return [sum(counts)]
    return [counts[place * (len(counts) - 1) // (number - 1)] for place in range(number)]


def _widths(run: RunConfig, sizes: Sizes, head_size: int) -> dict[str, Any]:
    """Widths that TP, CP and EP divide as they divide the run's."""
    model, ways = run.model, run.parallel.context_parallel_size
    shared = sizes.cp if ways > 1 and run.heads_divide_by_cp else 1
    own_groups = model.num_query_groups // run.parallel.tensor_model_parallel_size
    groups = max(sizes.tp * (shared if own_groups % ways == 0 else 1), 2)
    heads = 2 * math.lcm(groups, sizes.tp * shared)
    if model.num_query_groups in (1, model.num_attention_heads):
        groups = 1 if model.num_query_groups == 1 < model.num_attention_heads else heads
    width = heads * head_size
    is_wide = model.hidden_size == model.num_attention_heads * model.kv_channels or model.kv_lora_rank
    is_padded = run.padded_vocab_size != model.vocab_size
    hidden = width if is_wide else max(width // 2, 16 * sizes.tp)
    values: dict[str, Any] = {
        "num_attention_heads": heads, "num_query_groups": groups, "kv_channels": head_size,
        "hidden_size": hidden, "ffn_hidden_size": 2 * hidden, "vocab_size": PADDED if is_padded else WHOLE,
    }  # fmt: skip
    if model.kv_lora_rank:
        values |= {
            "kv_lora_rank": 2 * head_size, "q_lora_rank": model.q_lora_rank and 3 * head_size,
            "qk_head_dim": head_size, "qk_pos_emb_head_dim": head_size // 2, "v_head_dim": head_size,
            "kv_channels": head_size * 3 // 2, "num_query_groups": heads,
        }  # fmt: skip
    if run.adapter.lora_rank:
        values["lora_rank"] = min(run.adapter.lora_rank, 4)
    if model.num_experts:
        is_grouped = model.moe_router_num_groups
        values |= {
            "num_experts": min(model.num_experts, 2 * max(sizes.ep, 2)),
            "moe_router_topk": min(model.moe_router_topk, 2),
            "moe_ffn_hidden_size": model.moe_ffn_hidden_size and 3 * head_size,
            "moe_shared_expert_intermediate_size":
                model.moe_shared_expert_intermediate_size and 4 * head_size,
            "moe_router_num_groups": is_grouped and 2, "moe_router_group_topk": is_grouped and 1,
            "moe_expert_capacity_factor": run.experts.moe_expert_capacity_factor and 2.0 * max(sizes.ep, 2),
        }  # fmt: skip
    return values


def _batches(run: RunConfig, sizes: Sizes) -> dict[str, Any]:
    """A short sequence that the layout divides, and as few micro-batches as fill the pipeline."""
    model, parallel = run.model, run.parallel
    unit = 2 * sizes.cp * (sizes.tp if parallel.sequence_parallel else 1)
    length = -(-SHORTEST // unit) * unit
    count, size = min(run.num_micro_batches, max(2, sizes.pp)), min(run.training.micro_batch_size, 2)
    group = parallel.microbatch_group_size_per_virtual_pipeline_stage
    values: dict[str, Any] = {
        "seq_length": length, "max_padding_length": length, "micro_batch_size": size,
        "global_batch_size": size * count * sizes.dp,
        "microbatch_group_size_per_virtual_pipeline_stage": group and sizes.pp,
    }  # fmt: skip
    if model.window_size is not None and model.window_size[0] < run.sample_length:
        values["window_size"] = (length // 4 - 1, 0)
    is_extended = traits_of(model).has_rope and model.seq_length > model.max_position_embeddings
    values["max_position_embeddings"] = (
        length // 2 if is_extended else max(model.max_position_embeddings, length)
    )
    return values


def _batch_of_one(layout: RunConfig) -> dict[str, Any]:
    """The whole batch at once; micro by micro where a loss is a mean over a micro-batch."""
    experts, training = layout.experts, layout.training
    has_means = layout.model.num_experts and (experts.moe_aux_loss_coeff or experts.moe_z_loss_coeff)
    return {} if has_means else {"micro_batch_size": training.global_batch_size}


_SHOWN = (
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "num_layers_per_virtual_pipeline_stage",
    "pipeline_model_parallel_layout", "context_parallel_size", "expert_model_parallel_size",
    "expert_tensor_parallel_size", "num_distributed_optimizer_instances", "num_layers", "hidden_size",
    "num_attention_heads", "num_query_groups", "vocab_size", "num_experts", "seq_length", "micro_batch_size",
    "global_batch_size", "recompute_num_layers", "moe_token_dispatcher_type", "fp8_recipe",
    "optimizer_offload_policy", "dataset_type", "lora_rank", "lora_dropout", "moe_expert_capacity_factor",
    "transformer_impl",
)  # fmt: skip


def _told(run: RunConfig, layout: RunConfig) -> list[str]:
    pairs: list[tuple[str, Any, Any]] = [
        ("processes", run.world_size, layout.world_size),
        ("replicas (DP)", run.data_parallel_size, layout.data_parallel_size),
        *((FIELDS[name].flag, scalar_of(run, name), scalar_of(layout, name)) for name in _SHOWN),
    ]
    return [f"{name} {before} -> {now}" for name, before, now in pairs if before != now]

