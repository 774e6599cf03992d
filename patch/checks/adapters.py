"""Rules of what a run trains: adapters (LoRA) and frozen weights."""

from __future__ import annotations

from patch.checks.precision import rows_are_whole_blocks
from patch.config.positions import refuse, where
from patch.config.schema import RunConfig
from patch.device import MachineFacts
from patch.families.adapters import BLOCK, base_rows, targets_are_there
from patch.families.selection import check_selection


def adapters_are_asked_for(config: RunConfig, machine: MachineFacts) -> None:
    """Require adapters in a run with --lora-alpha or an nf4 base."""
    adapter = config.adapter
    if adapter.quantize_base and not adapter.is_on:
        why = "nf4 weights are frozen, so the run needs adapters"
        refuse("quantize_base", adapter.quantize_base, f"none, or a rank at {where('lora_rank')}", why)
    if adapter.lora_alpha is not None and not adapter.is_on:
        why = "a run without adapters trains all weights"
        refuse("lora_alpha", adapter.lora_alpha, f"0, or a rank at {where('lora_rank')}", why)


def adapters_are_possible(config: RunConfig, machine: MachineFacts) -> None:
    """Require at least one adapted layer, and whole nf4 blocks in each rank's rows."""
    if config.adapter.is_on:
        targets_are_there(config.model, config.adapter)
    if config.adapter.quantize_base:
        rows_are_whole_blocks(config, base_rows(config.model), BLOCK, "quantize_base", "none")


def frozen_weights_are_there(config: RunConfig, machine: MachineFacts) -> None:
    """Require --freeze and --train-only to name whole parameters, and to leave some to train."""
    check_selection(config.model, config.selection)
