"""Rules of what a run trains: adapters (LoRA) and frozen weights."""

from __future__ import annotations

from patch.checks.precision import rows_are_whole_blocks
from patch.config.schema import RunConfig
from patch.device import MachineFacts
from patch.families.adapters import BLOCK, base_rows, targets_are_there
from patch.families.selection import check_selection


def adapters_are_possible(config: RunConfig, machine: MachineFacts) -> None:
    """Require at least one adapted layer, and whole nf4 blocks in each rank's rows."""
    if config.adapter.is_on:
        targets_are_there(config.model, config.adapter)
    if config.adapter.quantize_base:
        rows_are_whole_blocks(config, base_rows(config.model), BLOCK, "quantize_base", "none")


def frozen_weights_are_there(config: RunConfig, machine: MachineFacts) -> None:
    """Require --freeze and --train-only to name whole parameters, and to leave some to train."""
    check_selection(config.model, config.selection)
