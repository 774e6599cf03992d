"""The rules of 8-bit products (`--precision fp8`), of blocks that share a scale, and of fp16's loss."""

from __future__ import annotations

from collections.abc import Sequence

from patch.config.backends import FP8_MULTIPLE, no_transformer_engine
from patch.config.choices import MOMENT_BLOCK
from patch.config.fields import FIELDS, scalar_of, value_of
from patch.config.positions import refuse, where
from patch.config.schema import RunConfig
from patch.device import MachineFacts
from patch.errors import ConfigError
from patch.families import WeightRow, weight_rows, widths
from patch.families.adapters import adapter_rows

_FLAGS = (
    "fp8_format", "fp8_recipe", "first_last_layers_bf16", "disable_parameter_transpose_cache",
    "fp8_param_gather",
)  # fmt: skip
_FIRST_CAPABILITY = (8, 9)
"""Compute capability of GPUs that have 8-bit products (Ada, Hopper and later)."""


def scaling_is_built(config: RunConfig, machine: MachineFacts) -> None:
    """8-bit numbers do not share a scale in a way that is not built yet."""
    recipe = config.training.fp8_recipe
    if recipe in ("rowwise", "mxfp8", "blockwise"):
        why = "a scale for each block of numbers is not built yet"
        why = "a scale for each row was removed; use tensorwise" if recipe == "rowwise" else why
        refuse("fp8_recipe", recipe, "tensorwise or delayed", why)


def eight_bits_fit(config: RunConfig, machine: MachineFacts) -> None:
    """8-bit products are asked for together with their flags, and device and model have them."""
    if not config.has_8_bits:
        for field in _FLAGS:
            if value_of(config, field) != FIELDS[field].default:
                expected = f"fp8 at {where('precision')} beside it"
                refuse(field, str(scalar_of(config, field)).lower(), expected, "it is about 8-bit products")
        return
    if machine.cuda_devices and machine.compute_capability < _FIRST_CAPABILITY:
        major, minor = machine.compute_capability
        why = f"the GPU has compute capability {major}.{minor}, 8-bit products need 8.9 (Ada, Hopper)"
        refuse("precision", "fp8", "bf16, fp16 or fp32", why)
    if config.model.precision_align is not None:
        why = "transformers computes no products of 8-bit factors"
        refuse("precision", "fp8", f"bf16, fp16 or fp32, or none at {where('precision_align')}", why)
    if config.training.fp8_recipe == "delayed":
        _delayed_scaling_fits(config, machine)
    if config.training.fp8_param_gather:
        _param_gather_fits(config)
    _widths_fit(config)
    _a_layer_is_left(config)


def _delayed_scaling_fits(config: RunConfig, machine: MachineFacts) -> None:
    """Only Transformer Engine's layers have delayed scaling, and all of a model's or none."""
    obstacle = no_transformer_engine(config, machine)
    if config.model.transformer_impl == "local":
        obstacle = f"our own layers ({where('transformer_impl')} local) make their scales anew"
    if obstacle:
        refuse("fp8_recipe", "delayed", "tensorwise", obstacle)
    if config.training.first_last_layers_bf16:
        why = "delayed scaling has no layers in bf16 (megatron-core)"
        refuse("first_last_layers_bf16", "true", f"false, or tensorwise at {where('fp8_recipe')}", why)


def _param_gather_fits(config: RunConfig) -> None:
    """A weight has one scale, which ranks find together when all of them have updated it."""
    flag = where("fp8_param_gather")
    policy = config.optimizer.optimizer_offload_policy
    if policy is not None:
        why = "scales are found when the GPU has updated; of what a host updates later they would be old ones"
        refuse("optimizer_offload_policy", policy, f"false beside {flag}", why)


def _widths_fit(config: RunConfig) -> None:
    """A rank's part of each weight has dimensions that CUDA's 8-bit products take."""
    model, tp_size = config.model, config.parallel.tensor_model_parallel_size
    attention = widths(model, "attention", tp_size)
    of_fields = {
        "hidden_size": (model.hidden_size, "the hidden width"),
        "kv_channels": (attention.taken, "a TP rank's width of the query heads"),
        "num_query_groups": (attention.given, "a TP rank's width of q, k and v"),
        "ffn_hidden_size": (widths(model, "mlp", tp_size).taken, "a TP rank's MLP width"),
    }
    for field, (width, what) in of_fields.items():
        if width % FP8_MULTIPLE:
            why = f"{what} is {width}, 8-bit products need a multiple of {FP8_MULTIPLE}"
            expected = f"another size or TP, or bf16 at {where('precision')}"
            refuse(field, value_of(config, field), expected, why)


def _a_layer_is_left(config: RunConfig) -> None:
    """Some layer has 8-bit products."""
    num_layers, fp8 = config.model.num_layers, config.training.fp8
    if not fp8.layers(num_layers):
        why = f"all {num_layers} layers of the model would stay in bf16"
        got = f"{fp8.num_first_in_bf16} first and {fp8.num_last_in_bf16} last"
        refuse("first_last_layers_bf16", got, f"fewer, or bf16 at {where('precision')}", why)


def moments_are_whole_blocks(config: RunConfig, machine: MachineFacts) -> None:
    """Each rank's rows of what trains are whole blocks of 8-bit moments."""
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
    """No rank's rows of some parameters end within a block.

    Args:
        config: the run.
        rows: the parameters; a vector is one row.
        block: neighbouring values of a row that share a scale.
        field: asks for such blocks.
        expected: its values without them.
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
            fitting = f"a size that divides {whole // block} beside {where(field)} {got}"
            refuse(size, parts, fitting, f"a row of {name} would be cut within a block of {block} values")


def loss_scale_fits(config: RunConfig, machine: MachineFacts) -> None:
    """The smallest scale of the loss is no larger than the first one."""
    first, smallest = config.optimizer.initial_loss_scale, config.optimizer.min_loss_scale
    if smallest > first:
        expected = f"at most {where('initial_loss_scale')} {first}"
        refuse("min_loss_scale", smallest, expected, "it starts there")


def gpus_can_be_used(config: RunConfig, machine: MachineFacts) -> None:
    """The machine's GPUs, if it has any, are not left idle without a word."""
    if machine.unusable_gpus:
        raise ConfigError(f"{machine.unusable_gpus}; CUDA_VISIBLE_DEVICES='' trains on the CPU")


def backends_exist(config: RunConfig, machine: MachineFacts) -> None:
    """Layers of Transformer Engine are asked for where they can be built."""
    if config.model.transformer_impl == "transformer_engine":
        obstacle = no_transformer_engine(config, machine)
        if obstacle:
            refuse("transformer_impl", "transformer_engine", "auto or local", obstacle)
