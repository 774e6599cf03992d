"""Bytes of model state on one rank: weights, gradients, optimizer states. activations.py has activations.

`pp_rank` is a pipeline rank, or None for the heaviest one.
"""

from __future__ import annotations

from typing import NamedTuple

from patch.config import RunConfig
from patch.config.choices import PRECISIONS
from patch.device import MachineFacts
from patch.features.optimizers import bytes_saved_in_matrices, moment_bytes
from patch.layout.buckets import (
    CHUNK_UNITS,
    MAX_IN_FLIGHT,
    NUM_BF16_SENDS_IN_FLIGHT,
    NUM_GATHERED_UNITS,
    NUM_STAGING,
    NUM_STREAMED,
    chunk_unit,
)
from patch.plan import parameters
from patch.plan.parameters import Amount, element_bytes, parameters_of, place_of

_RESERVED_SHARE, _RESERVED_BYTES = 0.05, 2**30
"""Share and bytes of a GPU's memory reserved for CUDA, cuDNN, fragmentation and two NCCL communicators."""
_COMMUNICATOR_BYTES = 700_000_000
"""Device memory of each further communicator, not measured here: 544 to 688 MB in NVIDIA/nccl#964."""


class RankBytes(NamedTuple):
    """Bytes of model state on one rank."""

    weights: int
    gradients: int
    optimizer: int
    """Moments, and master weights beyond the weights themselves, without offloaded states."""

    @property
    def total(self) -> int:
        """Sum of all fields."""
        return self.weights + self.gradients + self.optimizer


def bytes_per_rank(config: RunConfig, pp_rank: int | None = None) -> RankBytes:
    """Return weights, main gradients and optimizer states on a rank's device, without staging buffers.

    Frozen weights beside adapters have neither gradients nor states. Replicas share the states (ZeRO-1), also
    the gradients (ZeRO-2), also the weights (ZeRO-3). Expert-data-parallel ranks share experts.
    `gathered_unit_bytes` counts the gathered weights of ZeRO-3.
    """
    both = zip(all_bytes(config, pp_rank), host_bytes(config, pp_rank), strict=True)
    return RankBytes(*(every - there for every, there in both))


def host_bytes(config: RunConfig, pp_rank: int | None = None) -> RankBytes:
    """Return the same in host memory: states by `static` offload, freed weights and their gradients.

    States with `auto` are not counted: the first steps find out which fit on the device.
    """
    optimizer, share, every = config.optimizer, weights_on_host(config), all_bytes(config, pp_rank)
    is_static = optimizer.optimizer_offload_policy == "static"
    return RankBytes(
        weights=int(_own_bytes(config, pp_rank) * share) if share else 0,
        gradients=int(every.gradients * share),
        optimizer=int(every.optimizer * optimizer.optimizer_offload_fraction) if is_static else 0,
    )


def kept_weight_bytes(config: RunConfig, machine: MachineFacts, pp_rank: int | None = None) -> int:
    """Return the bytes of weights that the host keeps beside the states that it updates in its memory.

    A step then copies no weights to the host. They take at most half of the host memory that states leave.
    With `auto` they are not counted, like its states; fp16 has its masters among the states.
    """
    optimizer, precision = config.optimizer, config.training.precision
    weights, gradients, states = host_bytes(config, pp_rank)
    if precision == "fp16" or not states:
        return 0
    share = max(0.0, optimizer.optimizer_offload_fraction - weights_on_host(config))
    share *= 1 - (optimizer.optimizer_offload_streamed or 0)
    share *= 1 - disk_bytes(config, machine, pp_rank) / states
    numel = parameters_of(config, pp_rank).trained.kept(config, is_shared=config.zero_stage.shards_states)
    kept, limit = int(numel * share) * element_bytes(precision), machine.host_memory_bytes
    limit //= config.parallel.nproc_per_node
    states = min(_state_bytes(config, pp_rank), optimizer.host_state_bytes(limit))
    return min(kept, max(0, limit - weights - gradients - states) // 2) if limit else kept


def weights_on_host(config: RunConfig) -> float:
    """Return the share of freed weights and their gradients in host memory; 1 while it is undecided."""
    fraction = config.optimizer.cpu_offloading_weights_fraction
    is_wanted = config.optimizer.cpu_offloading_weights and config.gathers_weights_per_pass
    return 0.0 if not is_wanted else 1.0 if fraction is None else fraction


def all_bytes(config: RunConfig, pp_rank: int | None) -> RankBytes:
    """Return the model state on device and host together."""
    own, units = parameters_of(config, pp_rank), sum(unit.total for unit in units_of(config, pp_rank))
    weights = gathered_bytes(config, pp_rank) + own.dense * element_bytes(config.training.precision)
    weights += own.packed.total
    main, is_shared = element_bytes(config.optimizer.main_grads_dtype), config.zero_stage.shards_gradients
    gradients = own.trained.kept(config, main, is_shared=is_shared)
    return RankBytes(weights - units + _own_bytes(config, pp_rank), gradients, _state_bytes(config, pp_rank))


def units_of(config: RunConfig, pp_rank: int | None, *, as_kept: bool = False) -> list[Amount]:
    """Return the units that a rank frees between passes, in the order of forward; none without ZeRO-3.

    If `as_kept`, count in the dtype of the shards, even if weights are gathered in fewer bytes.
    """
    if not config.gathers_weights_per_pass:
        return []
    place, pp_size = place_of(config, pp_rank), config.parallel.pipeline_model_parallel_size
    stages = parameters.freed_units(config, as_kept=as_kept)[place::pp_size]
    return [unit for stage in stages for unit in stage]


def _own_bytes(config: RunConfig, pp_rank: int | None) -> int:
    units = units_of(config, pp_rank, as_kept=True)
    whole = Amount(sum(unit.others for unit in units), sum(unit.experts for unit in units))
    return whole.kept(config, is_shared=True)


def gathered_unit_bytes(config: RunConfig, pp_rank: int | None = None) -> int:
    """Return the bytes of freed weights that are gathered at once: neighbouring units, while one computes."""
    units, training, number = units_of(config, pp_rank), config.training, NUM_GATHERED_UNITS
    if config.recompute == "full" and training.recompute_method == "uniform":  # a whole block is gathered
        number += training.recompute_num_layers - 1
    wholes = (sum(unit.total for unit in units[first : first + number]) for first in range(len(units)))
    return max(wholes, default=0)


def gathered_bytes(config: RunConfig, pp_rank: int | None = None) -> int:
    """Return the bytes of the trained weights as layers read them, and as replicas gather them."""
    sizes = PRECISIONS[config.training.precision]
    saved = (sizes.weight_bytes - sizes.factor_bytes) * _gathered_casts(config, pp_rank)
    return parameters_of(config, pp_rank).trained.total * sizes.weight_bytes - saved


def disk_bytes(config: RunConfig, machine: MachineFacts, pp_rank: int | None = None) -> int:
    """Return bytes of a rank's optimizer states in --offload-folder; an update reads and writes them once.

    With `auto`: in the first steps. The folder needs half as much again for speculative updates.
    """
    is_auto = config.optimizer.optimizer_offload_policy == "auto"
    off_device = _state_bytes(config, pp_rank) if is_auto else host_bytes(config, pp_rank).optimizer
    share = machine.host_memory_bytes // config.parallel.nproc_per_node
    return max(0, off_device - config.optimizer.host_state_bytes(share))


def _streaming_bytes(config: RunConfig, pp_rank: int) -> int:
    """Return the bytes of buffers for chunks of the largest size that may be chosen."""
    optimizer = config.optimizer
    if not (optimizer.optimizer_offload_policy and optimizer.optimizer_offload_streamed):
        return 0
    numel = parameters_of(config, pp_rank).trained.kept(config, is_shared=config.zero_stage.shards_states)
    chunk = optimizer.optimizer_offload_chunk_size or CHUNK_UNITS[-1] * chunk_unit(numel)
    return int(NUM_STREAMED * chunk * state_bytes(config))


def staging_bytes(config: RunConfig, pp_rank: int, *, cuda: bool) -> int:
    """Return the peak bytes of gradients on a rank beside the main gradients.

    These are: ZeRO-2's staging buffers (one has the size of the norms' bucket if only norms stay whole); sent
    and received bf16 messages with NCCL; with gloo the buffers of messages in flight; dummy gradients for
    autograd if layers accumulate the main gradients; buffers of streamed states.
    """
    dummy_wgrads = _dummy_wgrad_bytes(config, cuda=cuda) + _streaming_bytes(config, pp_rank)
    stage, optimizer = config.zero_stage, config.optimizer
    shares = config.state_group_size if stage.shards_states else 1
    if shares == 1 and not config.gathers_weights_per_pass:
        return dummy_wgrads
    types = optimizer.main_grads_dtype, config.training.precision
    (element, weight), count = map(element_bytes, types), parameters_of(config, pp_rank).trained.total
    units = [unit.total // weight for unit in units_of(config, pp_rank, as_kept=True)]  # no bucket spans two
    bucket = min(optimizer.reduce_bucket_size, count, max(units, default=0) or count)
    is_staged = (stage.shards_gradients and shares > 1) or config.gathers_weights_per_pass
    others = max(0, count - sum(units))
    buffers = (NUM_STAGING - 1) * bucket + min(bucket, others or bucket)
    staged = buffers * element if is_staged else 0
    rounded = element_bytes("bf16") if optimizer.grad_reduce_in_bf16 else 0
    if cuda:
        return dummy_wgrads + staged + 2 * NUM_BF16_SENDS_IN_FLIGHT * bucket * rounded
    in_flight = min(buffers if is_staged else (MAX_IN_FLIGHT + 1) * bucket, count)
    # With a single micro-batch one part is received directly into the sum.
    sources = shares - 1 - (is_staged and not rounded and config.num_micro_batches == 1)
    received = in_flight * (rounded or element) * sources // shares
    return dummy_wgrads + staged + in_flight * rounded + received


def _dummy_wgrad_bytes(config: RunConfig, *, cuda: bool) -> int:
    is_plain = config.model.precision_align is not None or config.adapter.is_on
    if is_plain or not config.optimizer.fuses_gradients(cuda=cuda):
        return 0
    largest = max(max(parameters.matrices_per_rank(kind)) for kind in parameters.layer_kinds(config))
    return largest * element_bytes(config.training.precision)


def cast_weight_bytes(config: RunConfig, pp_rank: int) -> int:
    """Return the bytes of cast weights (`Casts`) that a rank keeps during a step.

    Each matrix exists twice, for products along rows and along columns; a gathered cast is one of them.
    """
    if not config.casts.are_kept:
        return 0
    copies = 2 * _cast_elements(config, pp_rank) - _gathered_casts(config, pp_rank)
    return copies * PRECISIONS[config.training.precision].factor_bytes


def _gathered_casts(config: RunConfig, pp_rank: int | None) -> int:
    return _cast_elements(config, pp_rank) if config.casts.are_gathered else 0


def _cast_elements(config: RunConfig, pp_rank: int | None) -> int:
    """Elements of the weights that a rank's layers cast, without weights too small to be freed."""
    below, layers = config.optimizer.param_persistence_threshold, config.casts.layers
    below = below if config.gathers_weights_per_pass else 0
    is_cast = (layer in layers for layer in range(config.model.num_layers))
    of_rank = slice(place_of(config, pp_rank), None, config.parallel.pipeline_model_parallel_size)
    number = sum(map(sum, parameters.by_stage(is_cast, config.stage_layers)[of_rank]))
    return number * sum(each for each in parameters.matrices_per_rank(config) if each >= below)


def usable_device_memory(config: RunConfig, machine: MachineFacts) -> int:
    """Return the part of `device_memory` that a run may plan with, at least 1; 0 if there is no device."""
    if not (usable := device_memory(config, machine)):
        return 0
    if machine.cuda_devices:
        usable -= int(usable * _RESERVED_SHARE) + _RESERVED_BYTES
        usable -= max(0, _communicators(config) - 2) * _COMMUNICATOR_BYTES
    if config.optimizer.optimizer_offload_policy == "auto":
        usable -= config.optimizer.optimizer_offload_auto_threshold
    return max(usable, 1)


def _communicators(config: RunConfig) -> int:
    """NCCL communicators of a rank: of all ranks, of groups, and one for each neighbouring stage."""
    parallel, experts = config.parallel, config.experts.expert_model_parallel_size * config.etp_size
    groups = [config.world_size, config.num_weight_copies, parallel.tensor_model_parallel_size]
    groups += [parallel.context_parallel_size]
    if config.model.num_experts:
        groups += [experts, config.num_expert_copies]
    if config.gathers_weights_per_pass:  # gathers have their own
        groups.append(config.num_weight_copies)
    return sum(size > 1 for size in groups) + min(parallel.pipeline_model_parallel_size - 1, 2)


def device_memory(config: RunConfig, machine: MachineFacts) -> int:
    """Return the bytes of a process's GPU or simulated device, or 0 if there is none."""
    simulated = config.optimizer.simulated_device_memory
    return machine.cuda_memory_bytes if machine.cuda_devices else simulated or 0


def needed_bytes(config: RunConfig, machine: MachineFacts) -> tuple[int, int]:
    """Return bytes of model state on the device of one process, and in the host memory of one machine.

    Neither number has the states that `auto` places, because their place is not known yet. Weights that the
    host keeps beside its states are not needed.
    """
    on_host = host_bytes(config).total + (0 if machine.cuda_devices else bytes_per_rank(config).total)
    if config.optimizer.optimizer_offload_policy == "static":
        on_host -= disk_bytes(config, machine)
    return state_on_device(config), on_host * config.parallel.nproc_per_node


def state_on_device(config: RunConfig, pp_rank: int | None = None) -> int:
    """Return bytes of model state on a rank's device, without states that `auto` places."""
    state, is_auto = bytes_per_rank(config, pp_rank), config.optimizer.optimizer_offload_policy == "auto"
    return state.total - (state.optimizer if is_auto else 0)


def _state_bytes(config: RunConfig, pp_rank: int | None) -> int:
    extra = 0
    if not config.gathers_weights_per_pass:  # else they are the weight shards
        # The high halves of master weights, which layers do not read if casts are gathered.
        extra = _gathered_casts(config, pp_rank) * element_bytes(config.training.precision)
    own, is_shared = parameters_of(config, pp_rank), config.zero_stage.shards_states
    kept = own.trained.kept(config, state_bytes(config), is_shared=is_shared, extra=extra)
    return kept - own.matrices.kept(config, bytes_saved_in_matrices(config.optimizer), is_shared=is_shared)


def state_bytes(config: RunConfig) -> float:
    """Return the state bytes of a parameter: moments, and a float32 master's bytes beyond the weight."""
    return PRECISIONS[config.training.precision].master_bytes + moment_bytes(config.optimizer)
