"""The rules of adapters (LoRA): what belongs together, and what cannot be done beside them yet."""

from __future__ import annotations

from patch.checks.precision import rows_are_whole_blocks
from patch.config.positions import refuse, where
from patch.config.schema import RunConfig
from patch.device import MachineFacts
from patch.families.adapters import BLOCK, adapts_experts, base_rows, targets_are_there


def adapters_are_asked_for(config: RunConfig, machine: MachineFacts) -> None:
    """A run with a factor of adapters, or a base beside them in 4 bits, has adapters."""
    adapter = config.adapter
    if adapter.quantize_base and not adapter.lora_rank:
        why = "weights in 4 bits do not train"
        refuse("quantize_base", adapter.quantize_base, f"none, or a rank at {where('lora_rank')}", why)
    if adapter.lora_alpha is not None and not adapter.lora_rank:
        why = "a run without adapters trains all weights"
        refuse("lora_alpha", adapter.lora_alpha, f"0, or a rank at {where('lora_rank')}", why)


def adapters_are_possible(config: RunConfig, machine: MachineFacts) -> None:
    """Some layers get adapters, and nothing is asked for that is not built for them."""
    rank = config.adapter.lora_rank
    if not rank:
        return
    targets_are_there(config.model, config.adapter)
    beside = f"beside {where('lora_rank')} {rank}"
    if config.model.precision_align is not None and adapts_experts(config.model, config.adapter):
        why = "PEFT adds adapters of experts to their weights: they have no products of their own"
        expected = f"none, or targets at {where('lora_target_modules')} that are not of experts"
        refuse("precision_align", config.model.precision_align, expected, why)
    if config.training.fp8_param_gather:
        why = "no weight travels that has 8-bit products: they stay as they are"
        refuse("fp8_param_gather", "true", f"false {beside}", why)
    if config.optimizer.decoupled_lr is not None:
        why = "embedding and output layer are not trained"
        refuse("decoupled_lr", config.optimizer.decoupled_lr, f"none {beside}", why)


def base_can_have_4_bits(config: RunConfig, machine: MachineFacts) -> None:
    """Each rank's rows of a matrix in 4 bits are whole blocks; nothing is asked for that is not built."""
    base, model = config.adapter.quantize_base, config.model
    if not base:
        return
    if model.precision_align is not None:
        why = "a matrix in 4 bits is made dense for each of our products"
        refuse("precision_align", model.precision_align, f"none beside {where('quantize_base')} {base}", why)
    if config.has_8_bits:
        expected = f"bf16, fp16 or fp32 beside {where('quantize_base')} {base}"
        refuse("precision", "fp8", expected, "a matrix in 4 bits is multiplied in 16 or 32")
    if model.kv_lora_rank is not None:
        why = f"it is not built for latent attention ({where('kv_lora_rank')})"
        refuse("quantize_base", base, "none", why)
    rows_are_whole_blocks(config, base_rows(model), BLOCK, "quantize_base", "none")
