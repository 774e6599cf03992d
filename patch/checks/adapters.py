"""The rules of adapters (LoRA): what belongs together, and what cannot be done beside them yet."""

from __future__ import annotations

from patch.config.positions import refuse, where
from patch.config.schema import RunConfig
from patch.device import MachineFacts
from patch.families.adapters import targets_are_there


def adapters_are_asked_for(config: RunConfig, machine: MachineFacts) -> None:
    """A run with a factor of adapters has adapters."""
    adapter = config.adapter
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
    if config.model.precision_align is not None:
        why = "adapters are not computed in transformers' order of operations yet"
        refuse("precision_align", config.model.precision_align, f"none {beside}", why)
    if config.training.fp8_param_gather:
        why = "no weight travels that has 8-bit products: they stay as they are"
        refuse("fp8_param_gather", "true", f"false {beside}", why)
    if config.optimizer.decoupled_lr is not None:
        why = "embedding and output layer are not trained"
        refuse("decoupled_lr", config.optimizer.decoupled_lr, f"none {beside}", why)
