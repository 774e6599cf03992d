"""Rules of fp8 matmuls (`--precision fp8`), of blocks that share a scale, and of fp16's loss scale."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from patch.config.choices import MOMENT_BLOCK, PRECISIONS
from patch.config.fields import value_of
from patch.config.positions import refuse, where
from patch.config.schema import RunConfig
from patch.device import MachineFacts
from patch.errors import ConfigError
from patch.families import WeightRow, weight_rows, widths
from patch.families.adapters import BLOCK, adapter_rows, base_rows, targets_are_there
from patch.features.backends import no_transformer_engine
from patch.features.table import FP8

_FIRST_CAPABILITY = (8, 9)
"""Lowest compute capability with fp8 matmuls (Ada, Hopper and later)."""


def scaling_is_built(config: RunConfig, machine: MachineFacts) -> None:
    """Refuse fp8 recipes that are not built."""
    recipe = config.training.fp8_recipe
    if recipe in ("rowwise", "mxfp8", "blockwise"):
        why = "a scale for each block of numbers is not supported yet"
        why = "a scale for each row was removed; use tensorwise" if recipe == "rowwise" else why
        refuse("fp8_recipe", recipe, "tensorwise or delayed", why)


def casts_fit(config: RunConfig, machine: MachineFacts) -> None:
    """Refuse fp8 without support by device or model."""
    if not FP8.is_on(config):
        return
    if machine.cuda_devices and machine.compute_capability < _FIRST_CAPABILITY:
        major, minor = machine.compute_capability
        why = f"the GPU has compute capability {major}.{minor}, fp8 matmuls need 8.9 (Ada, Hopper)"
        refuse("precision", "fp8", "bf16, fp16 or fp32", why)
    if config.training.fp8_recipe == "delayed":
        _delayed_scaling_fits(config, machine)
    _widths_fit(config)
    _a_layer_is_left(config)


def _delayed_scaling_fits(config: RunConfig, machine: MachineFacts) -> None:
    """Require Transformer Engine in all layers of a model for delayed scaling."""
    obstacle = no_transformer_engine(config, machine)
    if config.model.transformer_impl == "local":
        obstacle = f"our own layers ({where('transformer_impl')} local) compute new scales each time"
    if obstacle:
        refuse("fp8_recipe", "delayed", "tensorwise", obstacle)
    if config.training.first_last_layers_bf16:
        why = "delayed scaling has no layers in bf16 (megatron-core)"
        refuse("first_last_layers_bf16", "true", f"false, or tensorwise at {where('fp8_recipe')}", why)


def _widths_fit(config: RunConfig) -> None:
    model, tp_size = config.model, config.parallel.tensor_model_parallel_size
    multiple = PRECISIONS[config.training.precision].size_multiple
    attention = widths(model, "attention", tp_size)
    of_fields = {
        "hidden_size": (model.hidden_size, "the hidden width"),
        "kv_channels": (attention.in_features, "a TP rank's width of the query heads"),
        "num_query_groups": (attention.out_features, "a TP rank's width of q, k and v"),
        "ffn_hidden_size": (widths(model, "mlp", tp_size).in_features, "a TP rank's MLP width"),
    }
    for field, (width, what) in of_fields.items():
        if width % multiple:
            why = f"{what} is {width}, fp8 matmuls need a multiple of {multiple}"
            expected = f"another size or TP, or bf16 at {where('precision')}"
            refuse(field, value_of(config, field), expected, why)


def _a_layer_is_left(config: RunConfig) -> None:
    if sum(config.bf16_ends) >= config.model.num_layers:
        why = f"all {config.model.num_layers} layers of the model would stay in bf16"
        got = "{} first and {} last".format(*config.bf16_ends)
        refuse("first_last_layers_bf16", got, f"fewer, or bf16 at {where('precision')}", why)


def idle_flags(config: RunConfig) -> Iterator[tuple[bool, tuple[str, ...], str]]:
    """Yield flags of fp8 that may have no effect: whether so, the fields, and the end of the note."""
    sharded_by_none = config.sharding != "auto" and not config.casts.are_gathered
    yield sharded_by_none, ("fp8_param_gather",), ": no replicas share optimizer states"
    of_ends = ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16")
    without_ends = f" without {where('first_last_layers_bf16')}"
    yield not config.training.first_last_layers_bf16, of_ends, without_ends
    once = " with one micro-batch: fp8 weights are not kept then"
    yield config.num_micro_batches == 1, ("disable_parameter_transpose_cache",), once


def moments_are_whole_blocks(config: RunConfig, machine: MachineFacts) -> None:
    """Require whole blocks of 8-bit moments in each rank's rows of the trained weights."""
    expected, rank = "bf16 or fp32", config.adapter.lora_rank
    if rank and rank % MOMENT_BLOCK:
        expected += f", or a multiple of {MOMENT_BLOCK} at {where('lora_rank')}"
    trained = adapter_rows(config.model, config.adapter) or weight_rows(config.model)
    for field in ("exp_avg_dtype", "exp_avg_sq_dtype"):
        if value_of(config, field) == "8bit":
            rows_are_whole_blocks(config, trained, MOMENT_BLOCK, field, expected)


def rows_are_whole_blocks(
    config: RunConfig, rows: Sequence[WeightRow], block: int, field: str, expected: str
) -> None:
    """Refuse a split in which a rank's rows of some parameters end within a block.

    Args:
        rows: the parameters; a vector is one row.
        block: adjacent values of a row that share a scale.
        field: the field that needs such blocks.
        expected: legal values of the field without such blocks.
    """
    got = value_of(config, field)
    for row in rows:
        is_expert, name = row.part == "expert", next(iter(row.hf))
        parts = config.etp_size if is_expert else config.parallel.tensor_model_parallel_size
        whole, own = (row.shard_shape(number)[-1] for number in (1, parts))
        if whole % block:
            refuse(field, got, expected, f"a row of {name} has {whole} values, no whole blocks of {block}")
        if own % block:
            has_own = is_expert and config.experts.expert_tensor_parallel_size
            size = "expert_tensor_parallel_size" if has_own else "tensor_model_parallel_size"
            fitting = f"a size that divides {whole // block}" if whole > block else "1"
            fitting += f" beside {where(field)} {got}"
            refuse(size, parts, fitting, f"a row of {name} would be cut within a block of {block} values")


def adapters_are_possible(config: RunConfig, machine: MachineFacts) -> None:
    """Require at least one adapted layer, and whole nf4 blocks in each rank's rows."""
    if config.adapter.is_on:
        targets_are_there(config.model, config.adapter)
    if config.adapter.quantize_base:
        rows_are_whole_blocks(config, base_rows(config.model), BLOCK, "quantize_base", "none")


def loss_scale_fits(config: RunConfig, machine: MachineFacts) -> None:
    """Require a smallest loss scale that is no larger than the first one."""
    first, smallest = config.optimizer.initial_loss_scale, config.optimizer.min_loss_scale
    if smallest > first:
        expected = f"at most {where('initial_loss_scale')} {first}"
        refuse("min_loss_scale", smallest, expected, "it starts there")


def gpus_can_be_used(config: RunConfig, machine: MachineFacts) -> None:
    """Refuse a silent CPU run on a machine whose GPUs cannot be used."""
    if machine.unusable_gpus:
        raise ConfigError(f"{machine.unusable_gpus}; CUDA_VISIBLE_DEVICES='' trains on the CPU")


def backends_exist(config: RunConfig, machine: MachineFacts) -> None:
    """Refuse Transformer Engine's layers if they cannot be built."""
    if config.model.transformer_impl == "transformer_engine":
        obstacle = no_transformer_engine(config, machine)
        if obstacle:
            refuse("transformer_impl", "transformer_engine", "auto or local", obstacle)
