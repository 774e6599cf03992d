"""The rules of a model's shape, and of the length of its sequences."""

from __future__ import annotations

import math

from patch.config.fields import scalar_of
from patch.config.positions import refuse, where
from patch.config.schema import RunConfig
from patch.device import MachineFacts
from patch.families import (
    ALIBI_POSITIONS,
    LATENT_FIELDS,
    UNUSED_ROTARY_BASE,
    family_of,
    no_class,
    traits_of,
)


def divisors(*numbers: int) -> str:
    """The common divisors of the numbers, as the legal values in a message."""
    common = math.gcd(*numbers)
    # A number above 1e10 is a typing error; some of its divisors are left out, since finding all takes long.
    small = [n for n in range(1, math.isqrt(min(common, 10**10)) + 1) if common % n == 0]
    return ", ".join(map(str, sorted({*small, *(common // n for n in small)})))


def heads_fit(config: RunConfig, machine: MachineFacts) -> None:
    """Every key/value group has the same number of query heads."""
    model = config.model
    if model.num_attention_heads % model.num_query_groups:
        legal = divisors(model.num_attention_heads)
        why = f"{model.num_attention_heads} heads share the groups evenly"
        refuse("num_query_groups", model.num_query_groups, f"one of {legal}", why)


_HEADS = ("qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")


def latent_attention_is_whole(config: RunConfig, machine: MachineFacts) -> None:
    """Latent attention has all of its sizes, and each head a key and a value; another has none of them."""
    model = config.model
    if model.kv_lora_rank is None:
        for field in sorted(LATENT_FIELDS):
            if getattr(model, field) is not None:
                refuse(field, getattr(model, field), "0", f"only latent attention ({_LATENT}) has it")
        return
    for field in _HEADS:
        if getattr(model, field) is None:
            refuse(field, 0, "at least 1", f"latent attention ({_LATENT}) has it")
    parts = (model.qk_head_dim or 0) + (model.qk_pos_emb_head_dim or 0)
    if model.kv_channels != parts:
        why = f"a head of latent attention has {model.qk_head_dim} + {model.qk_pos_emb_head_dim} channels"
        refuse("kv_channels", model.kv_channels, f"{parts}", why)
    if model.value_channels > parts:
        refuse("v_head_dim", model.v_head_dim, f"at most {parts}", "a value is no wider than a key")
    if model.num_query_groups != model.num_attention_heads:
        why = "each head of latent attention has a key and a value"
        refuse("num_query_groups", model.num_query_groups, f"{model.num_attention_heads}", why)
    is_yarn = model.use_rope_scaling and model.rope_scaling_type == "yarn"
    if model.use_rope_scaling and not is_yarn:
        why = "latent attention has no other scaling of RoPE yet"
        refuse("rope_scaling_type", model.rope_scaling_type, "yarn", why)
    for field in ("mscale", "mscale_all_dim"):
        if getattr(model, field) is not None and not is_yarn:
            refuse(
                field, getattr(model, field), f"yarn at {where('rope_scaling_type')}", "it is a part of YaRN"
            )


_LATENT = where("kv_lora_rank")


def latent_attention_is_possible(config: RunConfig, machine: MachineFacts) -> None:
    """Refuse what is not built for latent attention."""
    model, traits = config.model, traits_of(config.model)
    if model.kv_lora_rank is None:
        return
    if not traits.is_llama_like:
        why = f"{model.model_type}'s layers have no RoPE that could be a part of a head"
        refuse("kv_lora_rank", model.kv_lora_rank, "0", why)
    why = f"it is not built for latent attention ({_LATENT})"
    for field in ("add_qkv_bias", "qk_layernorm"):
        if getattr(model, field):
            refuse(field, "true", "false", why)
    if model.window_size is not None:
        refuse("window_size", scalar_of(config, "window_size"), "none", why)
    if config.has_8_bits:
        refuse("precision", "fp8", "bf16, fp16 or fp32", "latent attention has no 8-bit products yet")


def export_has_a_class(config: RunConfig, machine: MachineFacts) -> None:
    """A model can be exported only if transformers has a class for it."""
    if config.checkpoint.export_hf and family_of(config.model) is None:
        why, cure = no_class(config.model)
        refuse("export_hf", "true", f"{cure}, or no export", why)


def flags_are_of_the_layers(config: RunConfig, machine: MachineFacts) -> None:
    """Layers that are not like LLaMA's are asked for nothing that only those have."""
    model, traits = config.model, traits_of(config.model)
    if traits.is_llama_like:
        return
    its = f"{model.model_type}'s layers have"
    if not traits.has_rope:
        why = f"{its} ALiBi instead of RoPE"
        if model.use_rope_scaling:
            refuse("use_rope_scaling", "true", "false", why)
        if model.rotary_base != UNUSED_ROTARY_BASE:
            refuse("rotary_base", model.rotary_base, f"{UNUSED_ROTARY_BASE:g}, which nothing reads", why)
        if model.max_position_embeddings > ALIBI_POSITIONS:
            why = f"{its} ALiBi, whose further positions are not exact in 16 bits"
            expected = f"at most {ALIBI_POSITIONS}"
            refuse("max_position_embeddings", model.max_position_embeddings, expected, why)
    for field, what in (("add_qkv_bias", "biases anyway"), ("qk_layernorm", "no RMSNorm of heads")):
        if getattr(model, field):
            refuse(field, "true", "false", f"{its} {what}")
    if model.precision_align is not None and not traits.is_bloom_like:
        why = f"{its} one order of operations, within 1e-4 of transformers' logits in fp32"
        refuse("precision_align", model.precision_align, "none", why)
    if model.precision_align == "sdpa":
        why = f"transformers computes {model.model_type}'s attention in one way"
        refuse("precision_align", "sdpa", "eager or none", why)


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
