"""All rules that need arithmetic only, in order. Each rule is a small function that returns or raises.

An error names the field, the value, the legal values and the reason. `user_message` adds flag and position.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from patch.checks import activations, experts, layout, model, needs, precision, run_length
from patch.config.fields import FIELDS, Field, value_of
from patch.config.positions import refuse
from patch.config.schema import RunConfig
from patch.device import MachineFacts
from patch.errors import ConfigError
from patch.features.table import features_agree

Rule = Callable[[RunConfig, MachineFacts], None]


def only_what_is_built(config: RunConfig, machine: MachineFacts) -> None:
    """Refuse values that need a feature that is not built yet."""
    if not config.checkpoint.distributed_checkpointing:
        why = "a checkpoint written by one rank alone is not supported yet"
        refuse("distributed_checkpointing", "false", "true", why)


def numbers_are_in_range(config: RunConfig, machine: MachineFacts) -> None:
    """Require every number to be within the bounds of its field."""
    for field in FIELDS.values():
        check_range(field, value_of(config, field.name))


def check_range(field: Field, value: Any) -> None:
    """Refuse a number outside the bounds of its field; values of other types pass."""
    if field.kind in (int, float) and value is not None and not field.bounds.hold(float(value)):
        refuse(field.name, value, str(field.bounds), field.help)


RULES: tuple[Rule, ...] = (
    precision.gpus_can_be_used,
    precision.scaling_is_built,
    only_what_is_built,
    run_length.columns_are_pairs,
    run_length.objective_is_of_its_kind,
    needs.needs_of_data_are_met,
    run_length.pairs_are_rows,
    run_length.validation_is_named_once,
    run_length.best_checkpoint_has_scores,
    numbers_are_in_range,
    needs.needs_are_met,
    activations.auto_has_a_device,
    activations.weight_offload_is_possible,
    model.heads_fit,
    model.latent_attention_is_whole,
    model.export_has_a_class,
    model.flags_are_of_the_layers,
    model.layer_parts_fit,
    model.rope_scaling_is_ordered,
    layout.tensor_parallel_divides,
    layout.layout_fits,
    layout.pipeline_fits,
    layout.interleaving_divides,
    activations.check_activation_layers,
    activations.recompute_divides,
    precision.backends_exist,
    precision.casts_fit,
    precision.loss_scale_fits,
    model.sequence_fits,
    layout.context_parallel_fits,
    layout.processes_fit,
    layout.rank_order_is_whole,
    experts.experts_are_possible,
    experts.experts_are_distributed,
    experts.experts_share_pipelines,
    features_agree,
    precision.adapters_are_possible,
    model.frozen_weights_are_there,
    precision.moments_are_whole_blocks,
    run_length.global_batch_divides,
    layout.interleaving_has_enough_batches,
    layout.micro_batch_groups_fit,
    layout.p2p_overlap_is_possible,
    layout.sharding_flags_agree,
    layout.instances_share_states,
    layout.gradients_can_be_rounded,
    run_length.run_has_steps,
    run_length.retained_are_saved,
    run_length.schedule_fits,
)
"""All rules in the order in which they are checked; later rules may rely on earlier ones."""


def is_legal(config: RunConfig, machine: MachineFacts) -> bool:
    """Return whether no rule refuses the run."""
    try:
        for rule in RULES:
            rule(config, machine)
    except ConfigError:
        return False
    return True
