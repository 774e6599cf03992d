"""The automatic choices of a run, all of them, in the order in which they depend on each other."""

from __future__ import annotations

import dataclasses
from bisect import bisect_left
from collections.abc import Iterator
from typing import NamedTuple

from patch.checks.rules import is_legal
from patch.config import RunConfig, resolve_transformer_impl
from patch.config.choices import ContextCommunication, Sharding, ZeroStage
from patch.config.positions import where
from patch.device import MachineFacts
from patch.numbers import size_text
from patch.plan.activation_choice import resolve_activations
from patch.plan.fits import fit_of, heaviest_rank
from patch.plan.memory import (
    bytes_per_rank,
    device_memory,
    disk_bytes,
    gathered_bytes,
    host_bytes,
    units_of,
)
from patch.plan.parameters import element_bytes, parameters_of
from patch.plan.savings import Mix, share_on_host, with_mix
from patch.plan.timing.communication import sent_bytes
from patch.plan.timing.layer_time import tensor_ways, with_tensor_overlap
from patch.plan.timing.machine_presets import machines_of

_MIB = 2**20


def resolve_run(config: RunConfig, machine: MachineFacts) -> tuple[RunConfig, list[str]]:
    """Replace every `auto` of a run that has passed the rules.

    Args:
        config: the run.
        machine: where it runs; all are taken to be equal.
    Returns:
        the run, and lines about what was looked at and chosen.
    """
    config, tensor = resolve_tp_comm_overlap(config, machine)  # first: Transformer Engine's layers have none
    config, layers = resolve_transformer_impl(config, machine)
    config, sharding = resolve_sharding(config, machine)
    config, communication = resolve_cp_comm_type(config)
    config, eight_bit_weights = resolve_8_bit_weights(config, machine)
    config, activations = resolve_activations(config, machine)
    config, weights = resolve_weights(config, machine)
    chosen = tensor + layers + sharding + communication + eight_bit_weights + activations + weights
    return config, [*chosen, *_remarks(config, machine)]


def _remarks(config: RunConfig, machine: MachineFacts) -> Iterator[str]:
    """What a resolved run asks for that comes to nothing by its sizes."""
    optimizer = config.optimizer
    is_offloading = optimizer.offload_folder is not None and optimizer.optimizer_offload_policy is not None
    if is_offloading and not disk_bytes(config, machine):
        share = f"{where('optimizer_offload_host_share')} {optimizer.optimizer_offload_host_share:g}"
        yield f"{where('offload_folder')}: by plan host memory takes all states ({share}), and the disk none"
    if config.frees_weights and not any(map(any, units_of(config, None))):
        below = f"{where('param_persistence_threshold')} {optimizer.param_persistence_threshold}"
        yield f"{where('data_parallel_sharding')} parameters: all are below {below}, and stay whole"


def resolve_if_legal(config: RunConfig, machine: MachineFacts) -> RunConfig | None:
    """A run with its `auto` replaced; None if a rule refuses it.

    Args:
        config, machine: see `resolve_run`.
    """
    return resolve_run(config, machine)[0] if is_legal(config, machine) else None


class StageCost(NamedTuple):
    """Communication and memory of one ZeRO stage, on the heaviest rank."""

    moved: int
    """Bytes that a rank sends in one step: gradients and updated weights."""
    held: int
    """Bytes of weights, gradients and optimizer states in the rank's memory."""


def stage_cost(config: RunConfig, stage: ZeroStage) -> StageCost:
    """Communication and memory of one ZeRO stage.

    A ring collective over P ranks sends (P - 1) / P of its data, an all-reduce twice that. ZeRO-2 reduces in
    every micro-batch, ZeRO-3 also gathers in each forward and each backward, the other stages do it once a
    step. Several instances of the distributed optimizer share
    inside each of them, and sum the shards of all of them once a step.
    """
    config = with_sharding(config, stage)
    experts, copies = parameters_of(config, None, of_experts=True), config.num_expert_copies
    of_experts = experts * element_bytes(config.training.precision)
    others, weights = parameters_of(config, None) - experts, gathered_bytes(config) - of_experts
    freed, again = units_of(config, None), 2 * config.num_micro_batches - 1
    of_experts += again * sum(unit.experts for unit in freed)
    weights += again * sum(unit.others for unit in freed)
    sent = _sent(config, experts, of_experts, copies, copies)
    sent += _sent(config, others, weights, config.num_state_shares, config.num_weight_copies)
    return StageCost(sent, bytes_per_rank(config).total)


def _sent(config: RunConfig, parameters: int, weight_bytes: int, shares: int, copies: int) -> int:
    """Bytes that a rank sends in a step for some of its parameters.

    Args:
        config: the run.
        parameters: how many.
        weight_bytes: of their values, as often as they are gathered.
        shares: ranks that share their states, if these are sharded.
        copies: ranks that have the same ones.
    """
    instances = copies // shares
    gradients = parameters * element_bytes(config.optimizer.main_grads_dtype)
    if not config.zero_stage.shares_states:
        return 2 * gradients * (copies - 1) // copies
    travelling = parameters * 2 if config.optimizer.grad_reduce_in_bf16 else gradients
    sent = (travelling * config.reductions_per_step + weight_bytes) * (shares - 1) // shares
    return sent + 2 * gradients * (instances - 1) // copies


def with_sharding(config: RunConfig, sharding: Sharding) -> RunConfig:
    """The same run with another ZeRO stage, or with `auto`."""
    return dataclasses.replace(
        config, parallel=dataclasses.replace(config.parallel, data_parallel_sharding=sharding)
    )


def resolve_sharding(config: RunConfig, machine: MachineFacts) -> tuple[RunConfig, list[str]]:
    """Replace `auto` by the ZeRO stage that suits the run.

    With one micro-batch a step it is ZeRO-2, which sends as much as ZeRO-1 and needs less memory. With
    several it is ZeRO-1, which reduces once a step, unless only ZeRO-2 fits the GPU. Where that does not fit
    either, or weights are to lie in host memory, it is ZeRO-3.

    Returns:
        the run with a stage instead of auto, and one line for each stage about its communication and memory.
    """
    if config.sharding != "auto":
        return config, []
    costs = {stage: stage_cost(config, stage) for stage in ZeroStage}
    chosen = ZeroStage.GRADIENTS if config.num_micro_batches == 1 else ZeroStage.OPTIMIZER
    if machine.cuda_memory_bytes and costs[chosen].held > machine.cuda_memory_bytes:
        chosen = ZeroStage.GRADIENTS
    if config.num_state_shares == 1:  # all stages need the same; take the one that DO allows
        chosen = ZeroStage.OPTIMIZER if config.parallel.use_distributed_optimizer else ZeroStage.NONE
    has_others = config.num_state_shares > 1 and _can_fit(config, ZeroStage.PARAMETERS, machine)
    if config.optimizer.cpu_offloading_weights or (
        has_others and not _can_fit(config, ZeroStage.GRADIENTS, machine)
    ):
        chosen = ZeroStage.PARAMETERS
    lines = [
        f"--data-parallel-sharding auto: {stage.name.lower()} moves {cost.moved / _MIB:.1f} MiB a step and "
        f"holds {cost.held / _MIB:.1f} MiB a rank" + (", chosen" if stage is chosen else "")
        for stage, cost in costs.items()
    ]
    return with_sharding(config, chosen), lines


def _can_fit(config: RunConfig, stage: ZeroStage, machine: MachineFacts) -> bool:
    """Whether the device has room at a stage; with AC=auto for all that it can do."""
    run = with_sharding(config, stage)
    is_auto = config.training.recompute_granularity == "auto"
    return fit_of(with_mix(run, Mix("full")) if is_auto else run, machine).is_on_device


def resolve_cp_comm_type(config: RunConfig) -> tuple[RunConfig, list[str]]:
    """Replace `auto` by the way that suits the run; without context parallelism there is nothing to choose.

    It is a2a where CP divides the query heads of a TP rank and either a2a sends no more, or sequences are
    packed or have a window: then most of what travels around a ring is for ranks that do not need it, and
    the work of the ranks is not even. Otherwise it is p2p, which hides what it sends behind attention.

    Returns:
        the run with a way instead of auto, and a line about the choice.
    """
    parallel = config.parallel
    if parallel.cp_comm_type is not None or parallel.context_parallel_size == 1:
        return config, []
    model = config.model
    heads = model.num_attention_heads // parallel.tensor_model_parallel_size
    sent = {way: sent_bytes(config, way) for way in ("p2p", "a2a")}
    has_parts = config.is_packed or config.data.reset_attention_mask or model.window_size is not None
    is_possible = config.heads_divide_by_cp
    chosen: ContextCommunication = "p2p"
    if is_possible and (has_parts or sent["a2a"] <= sent["p2p"]):
        chosen = "a2a"
    a2a = f"a2a {sent['a2a'] / _MIB:.1f} MiB" if is_possible else f"a2a cannot share {heads} heads"
    line = (
        f"--cp-comm-type auto: for a layer and micro-batch a rank sends by p2p {sent['p2p'] / _MIB:.1f} MiB, "
        f"by {a2a}; {chosen} is chosen"
    )
    resolved = dataclasses.replace(parallel, cp_comm_type=chosen)
    return dataclasses.replace(config, parallel=resolved), [line]


def resolve_tp_comm_overlap(config: RunConfig, machine: MachineFacts) -> tuple[RunConfig, list[str]]:
    """Replace `auto` on GPUs of known speed by what takes less time; elsewhere only CPUs overlap.

    In pieces layers are our own. In bf16 they are as fast as Transformer Engine's, which wait for messages.

    Returns:
        the run with a choice instead of auto, and a line about it.
    """
    device, asked = machines_of(config, machine), config
    if config.training.recompute_granularity == "auto":  # decided later, for these layers
        asked = with_mix(config, Mix())
    ways = {} if device is None else tensor_ways(asked, device)
    if config.parallel.tp_comm_overlap is not None or not ways:
        return config, []
    chosen = ways[True] < ways[False]
    line = (
        f"--tp-comm-overlap auto: by the plan a layer takes {1e3 * ways[True]:.2f} ms with messages in "
        f"pieces of products, {1e3 * ways[False]:.2f} without; they are {'' if chosen else 'not '}chosen"
    )
    return with_tensor_overlap(config, chosen), [line]


def resolve_8_bit_weights(config: RunConfig, machine: MachineFacts) -> tuple[RunConfig, list[str]]:
    """Keep no 8-bit weights where there is no memory for them; call before `resolve_activations`.

    With AC=auto there must be room while all activations are kept: recomputing a layer costs more than making
    its 8-bit weights again.

    Returns:
        the run with `--disable-parameter-transpose-cache` if they do not fit, and a line that says so.
    """
    if not config.keeps_8_bit_weights:
        return config, []
    is_auto = config.training.recompute_granularity == "auto"
    run = with_mix(config, Mix()) if is_auto else config
    fit, has_device = fit_of(run, machine), device_memory(config, machine) > 0
    if fit.is_on_device if has_device else fit.is_on_host:
        return config, []
    rank = heaviest_rank(run, cuda=bool(machine.cuda_devices))
    training = dataclasses.replace(config.training, disable_parameter_transpose_cache=True)
    line = (
        f"8-bit weights are made in each micro-batch: there is no room to keep {size_text(rank.eight_bits)} "
        f"beside the {size_text(rank.total - rank.eight_bits)} of a rank"
    )
    return dataclasses.replace(config, training=training), [line]


def resolve_weights(config: RunConfig, machine: MachineFacts) -> tuple[RunConfig, list[str]]:
    """Put as few weights into host memory as let the run fit; call after all that makes room on the device.

    Returns:
        the run with a share in place of `auto`, in hundredths, and a line about it.
    """
    optimizer = config.optimizer
    if not optimizer.cpu_offloading_weights or optimizer.cpu_offloading_weights_fraction is not None:
        return config, []

    def with_share(hundredths: int) -> RunConfig:
        chosen = dataclasses.replace(optimizer, cpu_offloading_weights_fraction=hundredths / 100)
        return dataclasses.replace(config, optimizer=chosen)

    most = int(round(100 * share_on_host(config), 6))  # of 0.57 it is 57
    least = bisect_left(range(most), True, key=lambda each: fit_of(with_share(each), machine).is_on_device)
    run = with_share(least)
    there = host_bytes(run)
    line = (
        f"--cpu-offloading-weights-fraction auto: {least / 100:g}, with {size_text(there.weights)} of a "
        f"rank's weights and {size_text(there.gradients)} of gradients in host memory"
    )
    return run, [line]
