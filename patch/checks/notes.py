"""Remarks on a run that the rules accept: values without effect, and surprising results."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from patch.checks.layout import SPLIT_ACCOUNTING_FLAGS
from patch.checks.precision import idle_flags
from patch.config.choices import PRECISIONS, ZeroStage
from patch.config.experts import ExpertsConfig
from patch.config.fields import FIELDS, scalar_of, value_of
from patch.config.positions import where
from patch.config.schema import RunConfig
from patch.device import MachineFacts
from patch.families import EXPERT_FIELDS
from patch.families.adapters import AdapterConfig
from patch.families.selection import trained_rows
from patch.families.weights import EMBEDDING_PARAMETER, TIED_OUTPUT
from patch.features.backends import no_transformer_engine
from patch.features.optimizers import OPTIMIZERS, optimizer_of
from patch.features.table import FEATURES, TP_OVERLAP, WITHOUT_TP_OVERLAP

_LOSS_SCALE = ("initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis")
_INTERLEAVING = (
    "overlap_p2p_communication",
    "overlap_p2p_communication_warmup_flush",
    "microbatch_group_size_per_virtual_pipeline_stage",
)
_OF_OFFLOAD = ("optimizer_offload_chunk_size", "optimizer_offload_streamed", "offload_folder")
_STAGES = (
    "pipeline_model_parallel_layout",
    *SPLIT_ACCOUNTING_FLAGS,
)


def notes(config: RunConfig, machine: MachineFacts) -> Iterator[str]:
    """Yield one line for each legal value that has no effect in this run, or is unusual."""
    for is_idle, fields, why in _idle(config, machine):
        for field in fields if is_idle else ():
            if value_of(config, field) != FIELDS[field].default:
                yield f"{where(field)} has no effect{why}"
    yield from _offload_remarks(config, machine)
    yield from _numerics_remarks(config, machine)
    untried = [each.name for each in FEATURES if each.proven in ("never run", "cpu") and each.is_on(config)]
    if untried and machine.cuda_devices:
        yield f"not tested on a GPU yet: {', '.join(untried)}"


def _idle(config: RunConfig, machine: MachineFacts) -> Iterator[tuple[bool, tuple[str, ...], str]]:
    """Yield (are the fields idle, the fields, end of the message)."""
    yield from _idle_layout(config)
    yield from _idle_kernels(config, machine)
    yield from _idle_data(config)
    optimizer = config.optimizer
    style, at_style = optimizer.lr_decay_style, where("lr_decay_style")
    of_decay = ("min_lr", "decoupled_min_lr", "lr_decay_iters")
    yield style == "constant", of_decay, f" with {at_style} constant"
    yield style != "WSD", ("lr_wsd_decay_style", "lr_wsd_decay_iters"), f" without {at_style} WSD"
    yield not optimizer.lr_warmup_iters, ("lr_warmup_init",), " without warm-up"


def _idle_layout(config: RunConfig) -> Iterator[tuple[bool, tuple[str, ...], str]]:
    parallel, training, optimizer = config.parallel, config.training, config.optimizer
    policy = optimizer.optimizer_offload_policy
    with_policy = f" with {where('optimizer_offload_policy')} {scalar_of(config, 'optimizer_offload_policy')}"
    has_one_stage = config.virtual_pipeline_size == 1
    kind, of_some = optimizer_of(optimizer), chain.from_iterable(each.fields for each in OPTIMIZERS.values())
    unread = tuple(field for field in dict.fromkeys(of_some) if field not in kind.fields)
    yield True, unread, f" with {where('optimizer')} {optimizer.optimizer}"
    ends = {EMBEDDING_PARAMETER, TIED_OUTPUT}
    trained = {row.name: row.is_matrix for row in trained_rows(config.model, config.selection)}
    yield ends.isdisjoint(trained), ("decoupled_lr", "decoupled_min_lr"), ": embedding and output are frozen"
    inner = (is_matrix for name, is_matrix in trained.items() if name not in ends)
    is_idle = kind.updates_whole_matrices and not config.adapter.is_on and not any(inner)
    yield is_idle, ("optimizer",), ": no matrix of a layer is trained, AdamW updates the rest"
    yield parallel.tensor_model_parallel_size == 1, ("sequence_parallel", "tp_comm_overlap"), " at TP=1"
    yield has_one_stage, ("num_layers_per_virtual_pipeline_stage",), ": a process has no more layers"
    yield parallel.pipeline_model_parallel_size == 1, _STAGES, " at PP=1"
    of_experts = (*sorted(EXPERT_FIELDS - {"num_experts"}), *ExpertsConfig.__slots__)
    yield not config.model.num_experts, of_experts, " without experts"
    has_bias = config.model.moe_router_enable_expert_bias and not config.adapter.is_on
    yield not has_bias, ("moe_router_bias_update_rate",), " without expert biases that train"
    yield not config.adapter.is_on, tuple(AdapterConfig.__slots__), " without adapters"
    yield has_one_stage, _INTERLEAVING, " without interleaved stages (MP_VP)"
    yield parallel.context_parallel_size == 1, ("cp_comm_type",), " at CP=1"
    of_replicas = ("grad_reduce_in_bf16", "ddp_pad_buckets_for_high_nccl_busbw")
    yield config.num_weight_copies == 1, of_replicas, " with one replica"
    yield policy != "static", ("optimizer_offload_fraction",), with_policy
    yield policy != "auto", ("optimizer_offload_auto_threshold",), with_policy
    yield policy is None, _OF_OFFLOAD, with_policy
    nothing = policy == "static" and optimizer.optimizer_offload_fraction == 0
    yield nothing, ("optimizer_offload_streamed",), f" with {where('optimizer_offload_fraction')} 0"
    without_folder = optimizer.offload_folder is None
    yield without_folder, ("optimizer_offload_host_share",), f" without {where('offload_folder')}"
    at_less = f" without {where('data_parallel_sharding')} parameters"
    keeps_whole = config.sharding not in ("auto", ZeroStage.PARAMETERS)
    yield keeps_whole, ("param_persistence_threshold",), at_less
    on_device = f" without {where('cpu_offloading_weights')}"
    yield not optimizer.cpu_offloading_weights, ("cpu_offloading_weights_fraction",), on_device
    of_full = ("recompute_method", "recompute_num_layers")
    yield training.recompute_granularity != "full", of_full, " without AC=full"
    offloading = f" without {where('cpu_offloading')}"
    yield not training.cpu_offloading, ("cpu_offloading_num_layers",), offloading


def _idle_kernels(config: RunConfig, machine: MachineFacts) -> Iterator[tuple[bool, tuple[str, ...], str]]:
    parallel, training, optimizer, model = config.parallel, config.training, config.optimizer, config.model
    is_cuda, wish = bool(machine.cuda_devices), model.attention_backend
    is_aligned, precision = model.precision_align is not None, training.precision
    aligned = f" with {where('precision_align')}"
    on_cpu = " on the CPU: attention is torch's SDPA either way"
    rings = parallel.cp_comm_type == "p2p" and parallel.context_parallel_size > 1 and not is_aligned
    yield not is_cuda and wish in ("flash", "unfused", "local"), ("attention_backend",), on_cpu
    yield is_cuda and is_aligned, ("attention_backend",), aligned
    ring = f" with {where('cp_comm_type')} p2p"
    yield is_cuda and rings and wish in ("fused", "unfused"), ("attention_backend",), ring
    for feature, end in WITHOUT_TP_OVERLAP.items():
        yield TP_OVERLAP.is_on(config) and feature.is_on(config), (TP_OVERLAP.field,), end
    fuses, fusion = bool(optimizer.gradient_accumulation_fusion), ("gradient_accumulation_fusion",)
    is_own = model.transformer_impl == "local" or bool(no_transformer_engine(config, machine))
    yield fuses and is_aligned, fusion, aligned
    on_engine = f" on Transformer Engine's layers with {where('cpu_offloading')}"
    yield fuses and training.cpu_offloading and not is_own, fusion, on_engine
    yield from idle_flags(config)
    without_fp16 = f" without fp16 at {where('precision')}"
    yield precision != "fp16", ("loss_scale", *_LOSS_SCALE), without_fp16
    constant = f" with {where('loss_scale')}"
    yield precision == "fp16" and optimizer.loss_scale is not None, _LOSS_SCALE, constant
    yield is_cuda, ("simulated_device_memory",), " beside a GPU"


def _idle_data(config: RunConfig) -> Iterator[tuple[bool, tuple[str, ...], str]]:
    is_indexed, training = config.data.dataset_type == "idxmap", config.training
    unsmoothed = training.dpo_loss_type == "robust" and not training.dpo_label_smoothing
    yield unsmoothed, ("dpo_loss_type",), " with --dpo-label-smoothing 0: the loss is that of sigmoid"
    is_shorter = config.data.max_padding_length != config.model.seq_length
    of_tokens = " on .bin/.idx"
    yield is_indexed and is_shorter, ("max_padding_length",), f"{of_tokens}: sequences are SEQ_LEN long"
    yield is_indexed, ("columns", "alpaca_input_join", "chat_template_kwargs"), of_tokens
    yield is_indexed, ("packing",), f"{of_tokens}: the set is packed, or not, as it was made"


def _offload_remarks(config: RunConfig, machine: MachineFacts) -> Iterator[str]:
    optimizer, policy = config.optimizer, config.optimizer.optimizer_offload_policy
    threshold, simulated = optimizer.optimizer_offload_auto_threshold, optimizer.simulated_device_memory
    if simulated is not None and policy is None and not machine.cuda_devices:
        yield (
            f"{where('simulated_device_memory')} is only planned for with "
            f"{where('optimizer_offload_policy')} false"
        )
    if policy == "auto" and optimizer.optimizer_offload_streamed is None and machine.cuda_devices:
        yield f"{where('optimizer_offload_streamed')} auto: not tested on a GPU yet; 0 turns it off"
    memory = machine.cuda_memory_bytes if machine.cuda_devices else simulated or 0
    if policy == "auto" and 0 < memory <= threshold:
        device = "a GPU" if machine.cuda_devices else where("simulated_device_memory")
        yield (
            f"{where('optimizer_offload_auto_threshold')}: keeps {threshold} bytes free, which is all the "
            f"{memory} of {device}: optimizer states never leave host memory"
        )


def _numerics_remarks(config: RunConfig, machine: MachineFacts) -> Iterator[str]:
    tp_size, precision = config.parallel.tensor_model_parallel_size, config.training.precision
    is_aligned = config.model.precision_align is not None
    if is_aligned and tp_size > 1:
        yield (
            f"{where('precision_align')}: equal to transformers to the bit at TP=1 only; TP={tp_size} sums "
            "in another order (logits: fp32 within 1e-5, bf16 cosine 0.999)"
        )
    if is_aligned and config.is_packed:
        yield (
            f"{where('packing')} with {where('precision_align')}: the order of operations is transformers', "
            "but a matmul of a whole pack has other bits than that of one sequence"
        )
    if precision != "fp32" and not machine.cuda_devices and not machine.multiplies_16_bits:
        yield (
            f"{where('precision')} {precision}: this CPU has no instructions for 16-bit matmuls, so a "
            "step may take 10 times as long as with fp32, and more"
        )
    if PRECISIONS[precision].has_casts and not machine.cuda_devices:
        yield (
            f"{where('precision')} {precision} is slower than bf16 on a CPU, which has no {precision} "
            "arithmetic"
        )
    if config.data.reset_attention_mask and not config.data.reset_position_ids:
        yield (
            f"{where('reset_attention_mask')}: positions also restart at each document; with RoPE this "
            "changes nothing, because RoPE uses only distances"
        )
