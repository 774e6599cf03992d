"""Rules of a model's shape, and of the length of its sequences."""

from __future__ import annotations

import math

from patch.config.positions import refuse, where
from patch.config.schema import RunConfig
from patch.device import MachineFacts
from patch.families import (
    ALIBI_POSITIONS,
    UNUSED_ROTARY_BASE,
    family_of,
    is_llama_like,
    layers_with_rope,
    layers_with_window,
    reason_without_hf_class,
    traits_of,
)
from patch.families.selection import check_selection
from patch.features.table import LATENTS


def divisors(*numbers: int) -> str:
    """Return the common divisors of the numbers, as the legal values in a message."""
    common = math.gcd(*numbers)
    # A number above 1e10 is a typo. Some of its divisors are omitted, because finding all takes long.
    small = [n for n in range(1, math.isqrt(min(common, 10**10)) + 1) if common % n == 0]
    return ", ".join(map(str, sorted({*small, *(common // n for n in small)})))


def heads_fit(config: RunConfig, machine: MachineFacts) -> None:
    """Require the same number of query heads in every key/value group."""
    model = config.model
    if model.num_attention_heads % model.num_query_groups:
        legal = divisors(model.num_attention_heads)
        why = f"{model.num_attention_heads} heads share the groups evenly"
        refuse("num_query_groups", model.num_query_groups, f"one of {legal}", why)


_HEADS = ("qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")


def latent_attention_is_whole(config: RunConfig, machine: MachineFacts) -> None:
    """Require all sizes of latent attention, and a key and value per head."""
    model = config.model
    if not model.is_latent:
        return
    for field in _HEADS:
        if getattr(model, field) is None:
            refuse(field, 0, "at least 1", f"latent attention ({where(LATENTS.field)}) has it")
    parts = (model.qk_head_dim or 0) + (model.qk_pos_emb_head_dim or 0)
    if model.kv_channels != parts:
        why = f"a head of latent attention has {model.qk_head_dim} + {model.qk_pos_emb_head_dim} channels"
        refuse("kv_channels", model.kv_channels, f"{parts}", why)
    if model.value_channels > parts:
        refuse("v_head_dim", model.v_head_dim, f"at most {parts}", "a value is no wider than a key")
    if model.num_query_groups != model.num_attention_heads:
        why = "each head of latent attention has a key and a value"
        refuse("num_query_groups", model.num_query_groups, f"{model.num_attention_heads}", why)
    if model.use_rope_scaling and model.rope_scaling_type != "yarn":
        why = "latent attention has no other scaling of RoPE yet"
        refuse("rope_scaling_type", model.rope_scaling_type, "yarn", why)


def frozen_weights_are_there(config: RunConfig, machine: MachineFacts) -> None:
    """Require --freeze and --train-only to name whole parameters, and to leave some to train."""
    check_selection(config.model, config.selection)


def export_has_a_class(config: RunConfig, machine: MachineFacts) -> None:
    """Refuse the export of a model without a class in transformers."""
    if config.checkpoint.export_hf and family_of(config.model) is None:
        why, cure = reason_without_hf_class(config.model)
        refuse("export_hf", "true", f"{cure}, or no export", why)


def flags_are_of_the_layers(config: RunConfig, machine: MachineFacts) -> None:
    """Refuse settings of LLaMA-like layers for layers that are not like LLaMA's."""
    model, traits = config.model, traits_of(config.model)
    if is_llama_like(model):
        return
    its = f"{model.model_type}'s layers have"
    if not traits.has_rope:
        why = f"{its} ALiBi instead of RoPE"
        if model.rotary_base != UNUSED_ROTARY_BASE and model.position_embedding_type is None:
            refuse("rotary_base", model.rotary_base, f"{UNUSED_ROTARY_BASE:g}, which nothing reads", why)
        if model.max_position_embeddings > ALIBI_POSITIONS:
            why = f"{its} ALiBi, whose further positions are not exact in 16 bits"
            expected = f"at most {ALIBI_POSITIONS}"
            refuse("max_position_embeddings", model.max_position_embeddings, expected, why)
    if model.precision_align == "sdpa" and traits.is_bloom_like:
        why = f"transformers computes {model.model_type}'s attention in one way"
        refuse("precision_align", "sdpa", "eager or none", why)


def layer_parts_fit(config: RunConfig, machine: MachineFacts) -> None:
    """Refuse lists of layers that cannot be read, and parts that do not fit together."""
    model, traits = config.model, traits_of(config.model)
    layers_with_rope(model), layers_with_window(model)
    if not traits.has_rope and traits.qk_norm_of == "all heads":
        refuse("position_embedding_type", "alibi", "rope", "norms over all heads are built for RoPE only")
    if model.rotary_channels % 2 or model.rotary_channels < 2:
        why = f"RoPE rotates pairs of a head's {model.kv_channels} channels"
        refuse("rotary_percent", model.rotary_percent, "a share with an even number of channels", why)
    if model.llama_4_scaling_beta is not None:
        others = {"rotary_base_local", "rotary_percent", "no_rope_freq"}.intersection(model.own_fields)
        for field in sorted(others):
            why = f"RoPE scales queries, all of them without {where(field)}"
            refuse("llama_4_scaling_beta", model.llama_4_scaling_beta, "0", why)


def rope_scaling_is_ordered(config: RunConfig, machine: MachineFacts) -> None:
    """Require a band between the borders of llama3's scaling, YaRN's in order, and an NTK factor >= 1."""
    model = config.model
    if not model.use_rope_scaling:
        return
    factor = model.rope_scaling_factor
    match model.rope_scaling_type:
        case "llama3" if model.rope_low_freq_factor >= model.rope_high_freq_factor:
            expected = f"less than --rope-high-freq-factor {model.rope_high_freq_factor}"
            why = "wavelengths between are blended"
            refuse("rope_low_freq_factor", model.rope_low_freq_factor, expected, why)
        case "yarn" if model.yarn_beta_slow > model.yarn_beta_fast:
            expected = f"at most --yarn-beta-fast {model.yarn_beta_fast}"
            refuse("yarn_beta_slow", model.yarn_beta_slow, expected, "channels between are blended")
        case "dynamic" if factor < 1 or model.kv_channels < 4:
            what = "the base grows with the context, by an exponent of the head size"
            if factor < 1:
                refuse("rope_scaling_factor", factor, "at least 1", what)
            refuse("kv_channels", model.kv_channels, "at least 4", what)


def sequence_fits(config: RunConfig, machine: MachineFacts) -> None:
    """Require PAD_LEN <= SEQ_LEN <= the model's longest sequence, and even splits by TP and CP."""
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
    """Require CP to divide each sequence into 2 x CP chunks, and SP to divide a rank's part over TP."""
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
