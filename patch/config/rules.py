"""The rules of a run that need arithmetic only. Each is a small function that returns or raises.

An error names the field, what was got, the legal values and the reason; `user_message` adds the flag and the
position.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

from patch.config.activation_layers import check_activation_choice, check_activation_layers
from patch.config.backends import backend_notes, backends_exist, gpus_can_be_used
from patch.config.columns import parse_columns
from patch.config.data_spec import split_shares
from patch.config.fields import FIELDS, Field, scalar_of, value_of
from patch.config.fp8_rules import fp8_fits, fp8_notes, loss_scale_fits, loss_scale_notes
from patch.config.pipeline_rules import (
    counted_layers,
    interleaving_has_enough_batches,
    layout_fits,
    messages_can_travel,
    micro_batch_groups_fit,
    pipeline_fits,
    pipeline_notes,
    rank_order_is_whole,
)
from patch.config.positions import length_text, refuse, where
from patch.config.schema import RunConfig
from patch.config.sharding_rules import (
    gradients_can_be_rounded,
    instances_share_states,
    sharding_is_said_once,
    sharding_notes,
)
from patch.config.unsupported import NOT_BUILT
from patch.device import MachineFacts
from patch.errors import ConfigError
from patch.families import family_of
from patch.storage.sizes import counted

Rule = Callable[[RunConfig, MachineFacts], None]


def _divisors(*numbers: int) -> str:
    """The common divisors of the numbers, as the legal values in a message."""
    common = math.gcd(*numbers)
    # A number above 1e10 is a typing error; some of its divisors are left out, since finding all takes long.
    small = [n for n in range(1, math.isqrt(min(common, 10**10)) + 1) if common % n == 0]
    return ", ".join(map(str, sorted({*small, *(common // n for n in small)})))


def only_what_is_built(config: RunConfig, machine: MachineFacts) -> None:
    """No value needs a feature that is not built yet."""
    for row in NOT_BUILT:
        if row.asks(value_of(config, row.field)):
            got = str(scalar_of(config, row.field)).lower()
            refuse(row.field, got, row.instead, f"{row.feature} is not built yet")


def columns_are_pairs(config: RunConfig, machine: MachineFacts) -> None:
    """The map of columns can be read, and its names are known."""
    parse_columns(config.data.columns)


def pretraining_reads_indexed_sets(config: RunConfig, machine: MachineFacts) -> None:
    """Pre-training reads .bin/.idx, SFT also raw rows."""
    if not config.training.sft and config.data.dataset_type == "raw":
        why = "pre-training reads .bin/.idx, which llama-patch preprocess makes from rows"
        refuse("dataset_type", "raw", "idxmap, or SFT=true", why)


def documents_are_pretraining(config: RunConfig, machine: MachineFacts) -> None:
    """What is done with documents fits together, and is asked for in pre-training only."""
    data = config.data
    for field in ("split", "reset_position_ids", "reset_attention_mask", "eod_mask_loss"):
        if config.training.sft and value_of(config, field):
            why = "it is about the documents of a pre-training set"
            refuse(field, str(scalar_of(config, field)).lower(), "none or false, or SFT=false", why)
    if data.reset_position_ids and not data.reset_attention_mask:
        why = "positions that begin again while attention goes on are not built; RoPE knows distances only"
        refuse("reset_position_ids", "true", "false, or --reset-attention-mask too", why)
    if data.split is None:
        return
    _, validation, _ = split_shares(data.split)
    if validation and data.valid_data_path is not None:
        why = "the split names the validation documents already"
        refuse("valid_data_path", data.valid_data_path, "none, or a --split without a second share", why)


def packing_has_conversations(config: RunConfig, machine: MachineFacts) -> None:
    """Conversations are packed; a pre-training sequence is full already."""
    if config.data.packing and not config.training.sft:
        why = "sequences of pre-training are full; --reset-attention-mask keeps their documents apart"
        refuse("packing", "true", "false, or SFT=true", why)


def numbers_are_in_range(config: RunConfig, machine: MachineFacts) -> None:
    """Every number is within the bounds that its field states."""
    for field in FIELDS.values():
        check_range(field, value_of(config, field.name))


def check_range(field: Field, value: Any) -> None:
    """Refuse a number that is not within the bounds of its field; other values pass."""
    if field.kind in (int, float) and value is not None and not field.bounds.hold(float(value)):
        refuse(field.name, value, str(field.bounds), field.help)


def offload_is_possible(config: RunConfig, machine: MachineFacts) -> None:
    """The policy `auto` needs a device whose memory it can watch."""
    optimizer = config.optimizer
    is_auto = optimizer.optimizer_offload_policy == "auto"
    if is_auto and not machine.cuda_devices and not optimizer.simulated_device_memory:
        expected = "false, static, or auto with --simulated-device-memory BYTES"
        refuse("optimizer_offload_policy", "auto", expected, "there is no GPU whose memory could be watched")


def heads_fit(config: RunConfig, machine: MachineFacts) -> None:
    """Every key/value group has the same number of query heads."""
    model = config.model
    if model.num_attention_heads % model.num_query_groups:
        legal = _divisors(model.num_attention_heads)
        why = f"{model.num_attention_heads} heads share the groups evenly"
        refuse("num_query_groups", model.num_query_groups, f"one of {legal}", why)


def window_is_causal(config: RunConfig, machine: MachineFacts) -> None:
    """A sliding window has tokens to the left only; a token must not attend to those it has to predict."""
    window = config.model.window_size
    if window is not None and window[1] != 0:
        got = scalar_of(config, "window_size")
        refuse("window_size", got, "none, or LEFT,0 such as 4095,0", "attention is causal")


def export_has_a_class(config: RunConfig, machine: MachineFacts) -> None:
    """A model can be exported only if transformers has a class for it."""
    if config.checkpoint.export_hf and family_of(config.model) is None:
        why = "no model of transformers has biases on q, k, v and norms of their heads"
        refuse("export_hf", "true", "one of --add-qkv-bias and --qk-layernorm left out, or no export", why)


def rope_scaling_is_asked_for(config: RunConfig, machine: MachineFacts) -> None:
    """A type of scaling is not named in vain."""
    model = config.model
    if model.rope_scaling_type != "llama3" and not model.use_rope_scaling:
        why = "without it the frequencies are not scaled"
        refuse("rope_scaling_type", model.rope_scaling_type, "--use-rope-scaling beside it", why)


def rope_scaling_is_ordered(config: RunConfig, machine: MachineFacts) -> None:
    """The band between the two borders of llama3's scaling, or YaRN's, is not empty; NTK's factor extends."""
    model = config.model
    if not model.use_rope_scaling:
        return
    factor = model.rope_scaling_factor
    match model.rope_scaling_type:
        case "llama3" if model.rope_low_freq_factor >= model.rope_high_freq_factor:
            expected = f"less than --rope-high-freq-factor {model.rope_high_freq_factor}"
            why = "wavelengths between are blended"
            refuse("rope_low_freq_factor", model.rope_low_freq_factor, expected, why)
        case "yarn" if model.yarn_beta_slow >= model.yarn_beta_fast:
            expected = f"less than --yarn-beta-fast {model.yarn_beta_fast}"
            refuse("yarn_beta_slow", model.yarn_beta_slow, expected, "channels between are blended")
        case "dynamic" if factor < 1 or model.kv_channels < 4:
            what = "the base grows with the context, by an exponent of the head size"
            if factor < 1:
                refuse("rope_scaling_factor", factor, "at least 1", what)
            refuse("kv_channels", model.kv_channels, "at least 4", what)


def tensor_parallel_divides(config: RunConfig, machine: MachineFacts) -> None:
    """TP divides the number of query heads, of key/value groups and of MLP channels."""
    model, tp_size = config.model, config.parallel.tensor_model_parallel_size
    cuts = {
        "heads": model.num_attention_heads,
        "key/value groups": model.num_query_groups,
        "MLP channels": model.ffn_hidden_size,
    }
    if any(count % tp_size for count in cuts.values()):
        found = ", ".join(f"{count} {what}" for what, count in cuts.items())
        legal = _divisors(*cuts.values())
        why = f"it divides each of the model's {found}"
        refuse("tensor_model_parallel_size", tp_size, f"one of {legal}", why)


def interleaving_divides(config: RunConfig, machine: MachineFacts) -> None:
    """With interleaving every process has several stages, all with the same number of layers."""
    pp_size, field = config.parallel.pipeline_model_parallel_size, "num_layers_per_virtual_pipeline_stage"
    layers = config.parallel.num_layers_per_virtual_pipeline_stage
    if layers and pp_size == 1:
        refuse(
            field,
            layers,
            f"0, or {where('pipeline_model_parallel_size')} above 1",
            "one process has all layers",
        )
    num_layers = config.parallel.num_split_layers(config.model.num_layers)
    layers_per_process, remainder = divmod(num_layers, pp_size)
    if layers and remainder:
        expected = f"0, or stages by hand ({where('pipeline_model_parallel_layout')})"
        refuse(field, layers, expected, f"{counted_layers(config, num_layers)} do not divide by PP={pp_size}")
    if layers and layers_per_process % layers:
        expected = f"0 or one of {_divisors(layers_per_process)}"
        refuse(field, layers, expected, f"a process has {counted_layers(config, layers_per_process)}")


def recompute_divides(config: RunConfig, machine: MachineFacts) -> None:
    """Full recomputation divides a stage's layers into equal blocks."""
    block, stages = config.training.recompute_num_layers, sorted(set(config.stage_layers))
    is_uniform = config.training.recompute_method == "uniform"
    is_full = config.training.recompute_granularity == "full"
    if is_full and is_uniform and any(layers % block for layers in stages):
        why = f"a stage has {' or '.join(map(str, stages))} layers"
        refuse("recompute_num_layers", block, f"one of {_divisors(*stages)}", why)


def sequence_fits(config: RunConfig, machine: MachineFacts) -> None:
    """PAD_LEN <= SEQ_LEN <= the model's longest sequence; TP and CP cut it evenly."""
    model, padding = config.model, config.data.max_padding_length
    if padding > model.seq_length:
        expected = f"at most {model.seq_length}"
        refuse("max_padding_length", padding, expected, f"it cannot exceed {where('seq_length')}")
    longest = model.longest_sequence
    if model.seq_length > longest:
        expected = f"at most {longest} (or a larger --max-position-embeddings)"
        refuse("seq_length", model.seq_length, expected, "the model claims no longer sequence")
    _cuts_are_even(config)


def _cuts_are_even(config: RunConfig) -> None:
    """CP divides each sequence into 2 x CP chunks, and SP the part of a rank over TP."""
    tp_size, cp_size = config.parallel.tensor_model_parallel_size, config.parallel.context_parallel_size
    is_cut_over_tp = config.parallel.sequence_parallel and tp_size > 1
    chunks = math.lcm(2, tp_size if is_cut_over_tp else 1)
    unit, words, why = tp_size, f"TP={tp_size}", "SP=true cuts each sequence over TP"
    if cp_size > 1:
        unit, words = cp_size * chunks, f"{chunks} x CP={cp_size}"
        over_tp = f", and SP=true each rank's part over TP={tp_size}" if is_cut_over_tp else ""
        why = f"CP={cp_size} cuts each sequence in {2 * cp_size} chunks{over_tp}"
    if (cp_size > 1 or is_cut_over_tp) and config.sample_length % unit:
        field = "max_padding_length" if config.data.dataset_type == "raw" else "seq_length"
        refuse(field, config.sample_length, f"a multiple of {words}", why)


def context_parallel_fits(config: RunConfig, machine: MachineFacts) -> None:
    """What several ranks that share a sequence cannot do."""
    cp_size, tp_size = config.parallel.context_parallel_size, config.parallel.tensor_model_parallel_size
    if cp_size == 1:
        return
    if config.model.precision_align is not None:
        expected = f"1, or none at {where('precision_align')}"
        why = "transformers sums the scores of a whole sequence in one process, parts of it have other bits"
        refuse("context_parallel_size", cp_size, expected, why)
    heads = config.model.num_attention_heads // tp_size
    if config.parallel.cp_comm_type == "a2a" and heads % cp_size:
        of_rank = f" of a TP={tp_size} rank" if tp_size > 1 else ""
        why = f"CP={cp_size} ranks cannot share the {heads} query heads{of_rank} evenly"
        refuse("cp_comm_type", "a2a", "p2p or auto", why)


def processes_fit(config: RunConfig, machine: MachineFacts) -> None:
    """The processes make up whole replicas, and on a machine with GPUs each process has its own GPU."""
    parallel = config.parallel
    sizes = (
        parallel.tensor_model_parallel_size,
        parallel.pipeline_model_parallel_size,
        parallel.context_parallel_size,
    )
    replica = math.prod(sizes)
    if config.world_size % replica:
        machines, processes = counted(parallel.nnodes, "machine"), counted(parallel.nproc_per_node, "process")
        why = f"{machines} x {processes} must make up whole replicas"
        expected = f"processes in all a multiple of {replica} (TP x PP x CP = {' x '.join(map(str, sizes))})"
        refuse("nproc_per_node", parallel.nproc_per_node, expected, why)
    if 0 < machine.cuda_devices < parallel.nproc_per_node:
        expected = f"at most {machine.cuda_devices}"
        refuse("nproc_per_node", parallel.nproc_per_node, expected, "each process needs its own GPU")


def global_batch_divides(config: RunConfig, machine: MachineFacts) -> None:
    """Every replica computes the same number of whole micro-batches."""
    batch, micro = config.training.global_batch_size, config.training.micro_batch_size
    unit = micro * config.data_parallel_size
    if batch % unit:
        below = batch // unit * unit
        near = f"{below} or {below + unit}" if below else str(unit)
        why = f"BATCH_SIZE {micro} x {config.data_parallel_size} data-parallel replicas"
        refuse("global_batch_size", batch, f"a multiple of {unit} such as {near}", why)


def run_has_steps(config: RunConfig, machine: MachineFacts) -> None:
    """The run has at least one step, or a number of epochs."""
    training = config.training
    if training.train_iters < 1 and training.train_epochs is None:
        refuse("train_iters", training.train_iters, "at least 1, or --train-epochs", "steps of the run")


def retained_are_saved(config: RunConfig, machine: MachineFacts) -> None:
    """The checkpoints that are to stay are saved at all."""
    every, interval = config.checkpoint.save_retain_every, config.checkpoint.save_interval
    if every and every % interval:
        why = "a checkpoint stays only if it is saved"
        refuse("save_retain_every", every, f"a multiple of {where('save_interval')} {interval}", why)


def warmup_fits(config: RunConfig) -> None:
    """The warm-up is shorter than the run, whose steps are known."""
    warmup, iters = config.optimizer.lr_warmup_iters, config.training.train_iters
    if warmup >= iters:
        got, expected = length_text(config, warmup), length_text(config, iters)
        refuse("lr_warmup_iters", got, f"less than the run's {expected}", "the warm-up is part of the run")


def schedule_fits(config: RunConfig, machine: MachineFacts) -> None:
    """The warm-up ends within the run, and the last learning rate is not above the highest one."""
    optimizer = config.optimizer
    if config.training.train_epochs is None:
        warmup_fits(config)
    if optimizer.min_lr > optimizer.lr:
        refuse("min_lr", optimizer.min_lr, f"at most LR {optimizer.lr}", "the cosine ends below its top")
    decoupled, decoupled_min = optimizer.decoupled_lr, optimizer.decoupled_min_lr
    if decoupled is None:
        if decoupled_min is not None:
            refuse("decoupled_min_lr", decoupled_min, "none", "it goes with --decoupled-lr, which is none")
    elif decoupled < (optimizer.min_lr if decoupled_min is None else decoupled_min):
        expected = "at least --decoupled-min-lr, or without it --min-lr"
        refuse("decoupled_lr", decoupled, expected, "the cosine ends below its top")


RULES: tuple[Rule, ...] = (
    gpus_can_be_used,
    only_what_is_built,
    columns_are_pairs,
    pretraining_reads_indexed_sets,
    documents_are_pretraining,
    packing_has_conversations,
    numbers_are_in_range,
    offload_is_possible,
    heads_fit,
    window_is_causal,
    export_has_a_class,
    rope_scaling_is_asked_for,
    rope_scaling_is_ordered,
    tensor_parallel_divides,
    layout_fits,
    pipeline_fits,
    interleaving_divides,
    check_activation_choice,
    check_activation_layers,
    recompute_divides,
    backends_exist,
    fp8_fits,
    loss_scale_fits,
    sequence_fits,
    context_parallel_fits,
    processes_fit,
    rank_order_is_whole,
    global_batch_divides,
    interleaving_has_enough_batches,
    micro_batch_groups_fit,
    messages_can_travel,
    sharding_is_said_once,
    instances_share_states,
    gradients_can_be_rounded,
    run_has_steps,
    retained_are_saved,
    schedule_fits,
)
"""All rules in the order in which they are checked; later rules may rely on earlier ones."""


def is_legal(config: RunConfig, machine: MachineFacts) -> bool:
    """Whether no rule refuses the run."""
    try:
        for rule in RULES:
            rule(config, machine)
    except ConfigError:
        return False
    return True


def notes(config: RunConfig, machine: MachineFacts) -> Iterator[str]:
    """One line for each value that is legal but has no effect in this run."""
    if config.parallel.sequence_parallel and config.parallel.tensor_model_parallel_size == 1:
        yield f"{where('sequence_parallel')} has no effect at TP=1"
    if config.parallel.tp_comm_overlap is not None and config.parallel.tensor_model_parallel_size == 1:
        yield f"{where('tp_comm_overlap')} has no effect at TP=1"
    if config.parallel.num_layers_per_virtual_pipeline_stage and config.virtual_pipeline_size == 1:
        yield f"{where('num_layers_per_virtual_pipeline_stage')} has no effect: a process has no more layers"
    yield from pipeline_notes(config, machine)
    yield from _offload_notes(config, machine)
    if config.model.precision_align is not None:
        yield from _alignment_notes(config, machine)
    yield from _context_parallel_notes(config, machine)
    if config.training.precision != "fp32" and not machine.cuda_devices and not machine.multiplies_16_bits:
        yield (
            f"{where('precision')} {config.training.precision}: this CPU has no instructions for products in "
            "16 bits, so a step may take 10 times as long as with fp32, and more"
        )
    yield from backend_notes(config, machine)
    yield from fp8_notes(config, machine)
    yield from loss_scale_notes(config)
    yield from _activation_notes(config)
    yield from sharding_notes(config)
    yield from _data_notes(config)


def _activation_notes(config: RunConfig) -> Iterator[str]:
    """Flags about recomputed and offloaded layers, where none are."""
    training = config.training
    if training.recompute_granularity != "full":
        for field in ("recompute_method", "recompute_num_layers"):
            if value_of(config, field) != FIELDS[field].default:
                yield f"{where(field)} has no effect without AC=full"
    if training.cpu_offloading_num_layers and not training.cpu_offloading:
        yield f"{where('cpu_offloading_num_layers')} has no effect without {where('cpu_offloading')}"


def _context_parallel_notes(config: RunConfig, machine: MachineFacts) -> Iterator[str]:
    """Flags that have no effect without context parallelism, or with its ring."""
    way = config.parallel.cp_comm_type
    if way is not None and config.parallel.context_parallel_size == 1:
        yield f"{where('cp_comm_type')} has no effect at CP=1"


def _data_notes(config: RunConfig) -> Iterator[str]:
    """What the data decides instead of a flag, and flags that have no effect on its kind."""
    if config.data.dataset_type == "idxmap" and config.data.max_padding_length != config.model.seq_length:
        yield f"{where('max_padding_length')} has no effect on .bin/.idx: sequences are SEQ_LEN long"
    if config.data.dataset_type == "idxmap":
        for field in ("columns", "alpaca_input_join"):
            if value_of(config, field) != FIELDS[field].default:
                yield f"{where(field)} has no effect on .bin/.idx"
    if config.data.dataset_type == "idxmap" and config.training.sft and config.data.packing:
        yield f"{where('packing')} has no effect on .bin/.idx: the set is packed, or not, as it was made"
    if config.data.reset_attention_mask and not config.data.reset_position_ids:
        yield (
            f"{where('reset_attention_mask')}: positions begin again at each document too, which RoPE, which "
            "knows distances only, does not notice"
        )


_PLANNED = ("simulated_device_memory",)
"""Fields that the plan reads in any case: it warns of memory that is too small, and chooses for AC=auto."""


def _offload_notes(config: RunConfig, machine: MachineFacts) -> Iterator[str]:
    """Flags of optimizer offload that have no effect with this policy, and a threshold above all memory."""
    policy = config.optimizer.optimizer_offload_policy
    policies_that_read = {
        "optimizer_offload_fraction": ("static",),
        "optimizer_offload_auto_threshold": ("auto",),
        "optimizer_offload_chunk_size": ("static", "auto"),
        "simulated_device_memory": () if machine.cuda_devices else ("static", "auto"),
    }
    for field, policies in policies_that_read.items():
        if policy not in policies and value_of(config, field) != FIELDS[field].default:
            word = scalar_of(config, "optimizer_offload_policy")
            where_not = f"with {where('optimizer_offload_policy')} {word}" if policies else "beside a GPU"
            what = "is only planned for" if policies and field in _PLANNED else "has no effect"
            yield f"{where(field)} {what} {where_not}"

    optimizer = config.optimizer
    threshold, simulated = optimizer.optimizer_offload_auto_threshold, optimizer.simulated_device_memory
    memory = machine.cuda_memory_bytes if machine.cuda_devices else simulated or 0
    if policy == "auto" and 0 < memory <= threshold:
        device = "a GPU" if machine.cuda_devices else where("simulated_device_memory")
        yield (
            f"{where('optimizer_offload_auto_threshold')}: keeps {threshold} bytes free, which is all the "
            f"{memory} of {device}: optimizer states never leave host memory"
        )


def _alignment_notes(config: RunConfig, machine: MachineFacts) -> Iterator[str]:
    """What `--precision-align` cannot do in this run, and which flag has no effect with it."""
    tp_size = config.parallel.tensor_model_parallel_size
    if tp_size > 1:
        yield (
            f"{where('precision_align')}: equal to transformers to the bit at TP=1 only; TP={tp_size} sums "
            "in another order (logits: fp32 within 1e-5, bf16 cosine 0.999)"
        )
        if config.parallel.tp_comm_overlap:
            yield f"{where('tp_comm_overlap')} has no effect with {where('precision_align')}"
    if config.optimizer.gradient_accumulation_fusion:
        yield f"{where('gradient_accumulation_fusion')} has no effect with {where('precision_align')}"
    if config.data.packing:
        yield (
            f"{where('packing')} with {where('precision_align')}: the order of operations is transformers', "
            "but a product of a whole pack has other bits than that of one sequence"
        )
