"""Bytes of model state on one rank: weights, gradients, optimizer states. activations.py has activations.

`pp_rank` is a rank's place in the pipeline; None is that of the heaviest rank.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple

from patch.config import RunConfig
from patch.config.choices import PRECISIONS
from patch.device import MachineFacts
from patch.families.adapters import packed_bytes
from patch.layout.buckets import MAX_TRAVELLING, NUM_STAGING, NUM_WHOLE, ROUNDED_UNDER_WAY
from patch.plan.parameters import (
    Unit,
    element_bytes,
    freed_units,
    frozen_of,
    kept_parts,
    layer_kinds,
    matrices_per_rank,
    parameters_of,
    place_of,
)

_RESERVED_SHARE, _RESERVED_BYTES = 0.05, 2**30
"""Share and bytes of a GPU's memory: CUDA, NCCL and cuDNN, and what fragmentation loses."""


class RankBytes(NamedTuple):
    """Bytes of model state on one rank."""

    weights: int
    gradients: int
    optimizer: int
    """Moments, and masters as far as they are not the weights themselves; without what is offloaded."""

    @property
    def total(self) -> int:
        """Bytes of weights, gradients and optimizer states."""
        return self.weights + self.gradients + self.optimizer


def bytes_per_rank(config: RunConfig, pp_rank: int | None = None) -> RankBytes:
    """Weights, main gradients and optimizer states on the device of a rank, without staging buffers.

    Weights beside adapters have neither gradients nor states.

    Sharding divides the states over replicas (ZeRO-1), states and gradients (ZeRO-2), or the weights too
    (ZeRO-3); those of experts over the ranks that have the same experts. `whole_bytes` has the weights that
    are whole for a pass then.
    """
    every = all_bytes(config, pp_rank)
    on_host = _on_host(config, pp_rank, every)
    return RankBytes(*(all_ - there for all_, there in zip(every, on_host, strict=True)))


def host_bytes(config: RunConfig, pp_rank: int | None = None) -> RankBytes:
    """The same in host memory: states by `static` offload, freed weights and their gradients.

    No states with `auto`, which finds out during the first steps what fits on the device.
    """
    return _on_host(config, pp_rank, all_bytes(config, pp_rank))


def _on_host(config: RunConfig, pp_rank: int | None, every: RankBytes) -> RankBytes:
    optimizer, share = config.optimizer, weights_on_host(config)
    is_static = optimizer.optimizer_offload_policy == "static"
    return RankBytes(
        weights=int(_own_bytes(config, pp_rank) * share) if share else 0,
        gradients=int(every.gradients * share),
        optimizer=int(every.optimizer * optimizer.optimizer_offload_fraction) if is_static else 0,
    )


def weights_on_host(config: RunConfig) -> float:
    """The share of the freed weights, and of the gradients, in host memory; 1 while it is to be found."""
    fraction = config.optimizer.cpu_offloading_weights_fraction
    is_wanted = config.optimizer.cpu_offloading_weights and config.frees_weights
    return 0.0 if not is_wanted else 1.0 if fraction is None else fraction


def all_bytes(config: RunConfig, pp_rank: int | None) -> RankBytes:
    """The same wherever they lie, on the device or on the host."""
    frozen, units = frozen_of(config, pp_rank), sum(u.total for u in units_of(config, pp_rank))
    weights = gathered_bytes(config, pp_rank) + frozen.dense * element_bytes(config.training.precision)
    weights += packed_bytes(frozen.in_4_bits)
    main = element_bytes(config.optimizer.main_grads_dtype)
    return RankBytes(
        weights=weights - units + _own_bytes(config, pp_rank),
        gradients=kept_parts(config, pp_rank, main, is_shared=config.zero_stage.shares_gradients),
        optimizer=_state_bytes(config, pp_rank),
    )


def units_of(config: RunConfig, pp_rank: int | None, *, as_kept: bool = False) -> list[Unit]:
    """Units that a rank frees between passes, in the order of forward; none unless weights are sharded.

    Args:
        config: the run.
        pp_rank: the rank's place in the pipeline; None: the heaviest one.
        as_kept: in the weights' own type, in which shards lie, also where they travel in 8 bits.
    """
    if not config.frees_weights:
        return []
    if as_kept:
        config = replace(config, training=replace(config.training, fp8_param_gather=False))
    place, pp_size = place_of(config, pp_rank), config.parallel.pipeline_model_parallel_size
    return [unit for stage in freed_units(config)[place::pp_size] for unit in stage]


def _own_bytes(config: RunConfig, pp_rank: int | None) -> int:
    """Bytes of this rank's shards of what it frees."""
    if not (units := units_of(config, pp_rank, as_kept=True)):
        return 0
    others, experts = sum(unit.others for unit in units), sum(unit.experts for unit in units)
    return others // config.num_state_shares + experts // config.num_expert_copies


def whole_bytes(config: RunConfig, pp_rank: int | None = None) -> int:
    """Bytes of freed weights that are whole at once: of neighbouring modules, while one of them computes."""
    units, training, number = units_of(config, pp_rank), config.training, NUM_WHOLE
    if config.recompute == "full" and training.recompute_method == "uniform":  # a block is whole again
        number += training.recompute_num_layers - 1
    wholes = (sum(unit.total for unit in units[first : first + number]) for first in range(len(units)))
    return max(wholes, default=0)


def gathered_bytes(config: RunConfig, pp_rank: int | None = None) -> int:
    """Bytes of the weights that a rank trains, as its layers read them, and as replicas gather them."""
    weights = parameters_of(config, pp_rank) * element_bytes(config.training.precision)
    return weights - (_elements_in_8_bits(config, pp_rank) if config.gathers_8_bit_weights else 0)


def disk_bytes(config: RunConfig, machine: MachineFacts, pp_rank: int | None = None) -> int:
    """Bytes of optimizer states in --offload-folder for a rank; an update reads and writes them once.

    With `auto` those of the first steps, when no states are on the device. The folder needs half as much more
    for speculative updates.
    """
    is_auto = config.optimizer.optimizer_offload_policy == "auto"
    off_device = _state_bytes(config, pp_rank) if is_auto else host_bytes(config, pp_rank).optimizer
    share = machine.host_memory_bytes // config.parallel.nproc_per_node
    return max(0, off_device - config.optimizer.host_state_bytes(share))


def staging_bytes(config: RunConfig, pp_rank: int, *, cuda: bool) -> int:
    """Bytes of gradients beside the main gradients, at most, on a rank.

    Staging buffers of ZeRO-2, of which one is that of norms where these alone stay whole; of NCCL's bf16
    messages what one sends and one receives; over gloo what all that travel receive, and send as bf16; zeros
    for autograd where layers add up gradients themselves.
    """
    stand_ins = _stand_in_bytes(config, cuda=cuda)
    shares, optimizer = config.num_state_parts, config.optimizer
    if shares == 1 and not config.frees_weights:
        return stand_ins
    types = optimizer.main_grads_dtype, config.training.precision
    (element, weight), parameters = map(element_bytes, types), parameters_of(config, pp_rank)
    units = [unit.total // weight for unit in units_of(config, pp_rank, as_kept=True)]  # no bucket spans two
    bucket = min(optimizer.reduce_bucket_size, parameters, max(units, default=0) or parameters)
    is_staged = config.num_gradient_parts > 1 or config.frees_weights
    others = max(0, parameters - sum(units))
    buffers = (NUM_STAGING - 1) * bucket + min(bucket, others or bucket)
    staged = buffers * element if is_staged else 0
    rounded = element_bytes("bf16") if optimizer.grad_reduce_in_bf16 else 0
    if cuda:
        return stand_ins + staged + 2 * ROUNDED_UNDER_WAY * bucket * rounded
    travelling = min(buffers if is_staged else (MAX_TRAVELLING + 1) * bucket, parameters)
    # Of the only micro-batch one part is received where the sum is to be.
    sources = shares - 1 - (is_staged and not rounded and config.num_micro_batches == 1)
    received = travelling * (rounded or element) * sources // shares
    return stand_ins + staged + travelling * rounded + received


def _stand_in_bytes(config: RunConfig, *, cuda: bool) -> int:
    """Bytes of the dummy weight gradient that is returned with --gradient-accumulation-fusion."""
    is_fused, model = config.optimizer.gradient_accumulation_fusion, config.model
    is_wanted = cuda if is_fused is None else is_fused
    is_plain = model.precision_align is not None or config.adapter.lora_rank
    if not is_wanted or is_plain:
        return 0
    largest = max(max(matrices_per_rank(kind)) for kind in layer_kinds(config))
    return largest * element_bytes(config.training.precision)


def eight_bit_bytes(config: RunConfig, pp_rank: int) -> int:
    """Bytes of the 8-bit weights that a rank keeps during a step; 0 if it keeps none.

    Each matrix of a layer is there twice, for products that sum along its rows and along its columns; the
    first is the weight itself where replicas gather it in 8 bits.
    """
    if not config.keeps_8_bit_weights:
        return 0
    return (1 if config.gathers_8_bit_weights else 2) * _elements_in_8_bits(config, pp_rank)


def _elements_in_8_bits(config: RunConfig, pp_rank: int | None) -> int:
    """Elements of the weights of a rank's 8-bit products, but those that are too small to be freed."""
    below = config.optimizer.param_persistence_threshold if config.frees_weights else 0
    in_8_bits = config.training.fp8.layers(config.model.num_layers)
    ends = list(accumulate(config.stage_layers))
    own = [
        range(max(end - count, in_8_bits.start), min(end, in_8_bits.stop))
        for end, count in zip(ends, config.stage_layers, strict=True)
    ][place_of(config, pp_rank) :: config.parallel.pipeline_model_parallel_size]
    return sum(map(len, own)) * sum(each for each in matrices_per_rank(config) if each >= below)


def usable_device_memory(config: RunConfig, machine: MachineFacts) -> int:
    """The part of `device_memory` that a run may plan with, at least 1; 0 if there is none."""
    if not (usable := device_memory(config, machine)):
        return 0
    if machine.cuda_devices:
        usable -= int(usable * _RESERVED_SHARE) + _RESERVED_BYTES
    if config.optimizer.optimizer_offload_policy == "auto":
        usable -= config.optimizer.optimizer_offload_auto_threshold
    return max(usable, 1)


def device_memory(config: RunConfig, machine: MachineFacts) -> int:
    """Bytes of the device that a process computes on, a GPU or a simulated one; 0 if there is none."""
    simulated = config.optimizer.simulated_device_memory
    return machine.cuda_memory_bytes if machine.cuda_devices else simulated or 0


def needed_bytes(config: RunConfig, machine: MachineFacts) -> tuple[int, int]:
    """Bytes of model state on the device of one process, and in the host memory of one machine.

    States that `auto` places are in neither number, because their place is not known yet.
    """
    on_host = host_bytes(config).total + (0 if machine.cuda_devices else bytes_per_rank(config).total)
    if config.optimizer.optimizer_offload_policy == "static":
        on_host -= disk_bytes(config, machine)
    return state_on_device(config), on_host * config.parallel.nproc_per_node


def state_on_device(config: RunConfig, pp_rank: int | None = None) -> int:
    """Bytes of model state that are on a rank's device in any case: not of states that `auto` places."""
    state, is_auto = bytes_per_rank(config, pp_rank), config.optimizer.optimizer_offload_policy == "auto"
    return state.total - (state.optimizer if is_auto else 0)


def _state_bytes(config: RunConfig, pp_rank: int | None) -> int:
    extra = 0
    if config.gathers_8_bit_weights and not config.frees_weights:  # whose shards these are
        # The high halves of masters, which layers do not read then.
        extra = _elements_in_8_bits(config, pp_rank) * element_bytes("bf16")
    of_element, is_shared = state_bytes(config), config.zero_stage.shares_states
    return kept_parts(config, pp_rank, of_element, is_shared=is_shared, extra=extra)


def state_bytes(config: RunConfig) -> float:
    """Bytes of a parameter's states: its moments, and what a float32 master has beyond the weight."""
    return PRECISIONS[config.training.precision].state_bytes - config.optimizer.saved_moment_bytes
