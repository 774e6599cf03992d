"""One optimizer step on megatron-core's schedules.

The loss of a step is divided by the objective's count over the global batch: by default the trained tokens,
so the loss is their mean. The count is summed over data- and context-parallel ranks before the first forward.
So micro-batch size, DP, CP, PP and padding change only the order of summation of loss and gradient. A reduced
gradient needs no rescaling.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func

from patch.checks.run_length import place_in_schedule
from patch.compat.corrections import last_sends_arrive
from patch.data import Batch
from patch.distributed.async_collectives import WaitClock, read_values, start_all_reduce
from patch.distributed.context_group import Zigzag
from patch.model import LlamaModel, PackedSequences, unchanged_weights
from patch.model.experts.layer import routers_of, update_expert_biases
from patch.optimizer import ParamGroup, learning_rate
from patch.training.guards.non_finite import handle_non_finite
from patch.training.guards.phases import Phase
from patch.training.run_state import unchanged_random_state
from patch.training.state_placement import OomRetry, apply_placement
from patch.training.step_data import NOISE_KEYS, NOISE_SCALES, StepBatches, next_step_batches, read_step

if TYPE_CHECKING:
    from patch.training.setup import Run

Report = Mapping[str, torch.Tensor]
"""The report of an objective on a micro-batch, detached from autograd."""


class StepResult(NamedTuple):
    """The result of one optimizer step; equal on all ranks of the last stage's data-parallel group."""

    loss: float
    """The loss of the global batch; -inf on stages before the last."""
    grad_norm: float
    lr: float
    """The learning rate of the run; parameter groups with a decoupled rate differ."""
    skipped: int
    """1 if nothing was updated, because fp16 gradients overflowed or --on-non-finite skips the step."""
    comm_exposed_ms: float
    """Time that this rank waited for gradients and for the updated weights of the previous step."""
    attended_pairs: float
    """The sum over the global batch, see `StepBatches`."""
    data_wait_ms: float
    """Time that this rank waited for the data of the next step; the first step includes its own data."""
    extra_metrics: Mapping[str, float]
    """Further metrics that the objective reports like the loss."""


def train_step(run: Run, iteration: int, before_change: Callable[[], None] = lambda: None) -> StepResult:
    """Run forward, backward, reduction and update of one global batch.

    Args:
        iteration: counted from 0; selects the samples.
        before_change: called before weights or states change, because a checkpoint may still be copying them.
    Raises:
        TrainingError: the gradient norm is not finite, and --on-non-finite is stop; nothing has been updated.
        DataError: on all ranks, if any rank cannot read the data of this step or of the next one.
    """
    optimizer = run.optimizer
    work, lr = next_step_batches(run, iteration), _rate_of(run, iteration)
    group_lrs = [_rate_of(run, iteration, group) for group in optimizer.param_groups]
    if optimizer.placement.is_offloading:  # states move, and updates on the host may begin in backward
        before_change()
    apply_placement(optimizer)
    run.data.objective.before_step(run, work.batches)
    retry = OomRetry(optimizer, f"step {iteration + 1}")
    for _ in retry.attempts():
        run.phases.enter(Phase.FORWARD)
        with retry.computing() as reports:
            optimizer.zero_grad(group_lrs)
            reports += run_schedule(run, work.batches, work.divisor, loss_scale=optimizer.loss_scale.value)
        if retry.ran_out():  # the other ranks wait for this rank in their collectives
            optimizer.abandon_backward(len(work.batches))
        run.phases.enter(Phase.REDUCTION)
        optimizer.start_grad_sync()
        # The next batch is read while gradients are reduced. The small sums follow the gradients:
        # queued after the all-gathers of parameters, they would wait for the last one.
        following = read_step(run, iteration + 1)
        read_sums = _start_sums(run, reports, following)
        run.phases.enter(Phase.REDUCTION)
        retry.start_agreement()
        optimizer.finish_grad_sync()
        optimizer.start_grad_norm()  # before the host waits for the agreement
    before_change()
    run.phases.enter(Phase.UPDATE)
    outcome = optimizer.step(skip_non_finite=True)
    means, counts = read_sums()
    if outcome.is_skipped and not outcome.is_overflow:
        losses = [report["loss"] for report in reports]
        repeat = partial(_has_finite_gradients, run, work, group_lrs)
        handle_non_finite(run, work, losses, outcome.grad_norm, repeat)
    else:
        run.num_skips = 0
    if not outcome.is_skipped:
        update_expert_biases(run.stages)
    run.data.upcoming = following.summed(run, *counts)
    optimizer.placement.record_memory("train")
    return StepResult(
        means.pop("loss"), outcome.grad_norm, lr, int(outcome.is_skipped),
        optimizer.exposed_communication_ms(), work.attended_pairs, run.data.clock.read_ms(), means,
    )  # fmt: skip


def _rate_of(run: Run, iteration: int, group: ParamGroup | None = None) -> float:
    place = place_in_schedule(run.config, iteration, ahead=run.samples_ahead)
    highest, lowest = (group.max_lr, group.min_lr) if group is not None else (None, None)
    return learning_rate(*place, run.config.optimizer, max_lr=highest, min_lr=lowest)


def _start_sums(
    run: Run, reports: list[Report], following: StepBatches
) -> Callable[[], tuple[dict[str, float], tuple[float, float]]]:
    """Start the sum over data-parallel ranks of the reported values and of the next batch's counts.

    Return the function that waits for the sums and returns them.
    """
    names = run.data.objective.reported
    # On a GPU torch.tensor([...]) would wait for backward, and so would the assignment of a number.
    sums = torch.full((len(names) + 2,), -math.inf, dtype=torch.float64, device=run.device)
    for index, name in enumerate(names if reports else ()):
        sums[index] = torch.stack([report[name] for report in reports]).double().sum()
    for place, count in zip(sums[-2:], (following.divisor, following.attended_pairs), strict=True):
        place.fill_(count)
    pending = start_all_reduce(sums, run.groups.dp_cp)

    def read() -> tuple[dict[str, float], tuple[float, float]]:
        *means, divisor, pairs = read_values(sums, pending, WaitClock(run.device))
        metrics = run.data.objective.logged(dict(zip(names, means, strict=True)))
        return {**metrics}, (divisor, pairs)

    return read


@unchanged_random_state()
def _has_finite_gradients(run: Run, work: StepBatches, group_lrs: list[float]) -> bool:
    """Compute the step again without an update; return whether this rank's own gradients are finite."""
    optimizer = run.optimizer
    run.phases.enter(Phase.FORWARD)
    with optimizer.checking_local_gradients() as check:
        optimizer.zero_grad(group_lrs)
        run_schedule(run, work.batches, work.divisor, loss_scale=optimizer.loss_scale.value)
        optimizer.finish_grad_sync()
    return check.is_finite


def run_schedule(run: Run, batches: list[Batch], divisor: float, *, loss_scale: float | None) -> list[Report]:
    """Run all micro-batches; return the objective's report of each on the last stage, [] on other stages.

    Args:
        batches: this rank's micro-batches, all of the same shape.
        divisor: see `StepBatches`.
        loss_scale: the factor of the loss before backward, or None for forward only.
    """
    pp_size, vp_size = run.groups.pp.size(), run.stages[0].config.virtual_pipeline_model_parallel_size
    divisor, scale = max(divisor, 1.0), loss_scale or 1.0
    rows, length = batches[0].tokens.shape
    counts_experts = bool(run.config.model.num_experts) and loss_scale is not None
    for router in routers_of(run.stages) if counts_experts else ():
        router.counts.zero_()
    are_sends_dropped = loss_scale is None and run.stages[0].config.overlap_p2p_comm_warmup_flush
    try:
        with last_sends_arrive() if are_sends_dropped else nullcontext(), unchanged_weights(run.stages):
            return get_forward_backward_func(pp_size, vp_size)(
                forward_step_func=partial(_forward_step, run=run, divisor=divisor, scale=scale),
                data_iterator=[iter(batches) for _ in run.stages],
                model=run.stages,
                num_microbatches=len(batches),
                seq_length=length * run.groups.cp.size(),
                micro_batch_size=rows,
                forward_only=loss_scale is None,
            )
    finally:
        if run.activation_offload is not None:
            run.activation_offload.end_step()


def _forward_step(
    batches: Iterator[Batch], model: LlamaModel, *, run: Run, divisor: float, scale: float
) -> tuple[torch.Tensor, Any]:
    """Upstream's forward_step_func: return the stage's output and the function that computes the loss."""
    run.phases.go_on(Phase.FORWARD)
    objective, batch = run.data.objective, next(batches).to(run.device)
    packed = PackedSequences.of(batch.cu_seqlens, batch.tokens, run.device, Zigzag.of(run.groups.cp))

    def loss_of(output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Report]:
        report = objective.report(output, batch, divisor)
        detached = {name: each.detach() for name, each in report.items()}
        return report["loss"], batch.loss_mask.sum().int(), detached

    noise = model.embedding_noise
    noise.keys, noise.scales = (batch.extra_tensors.get(name) for name in (NOISE_KEYS, NOISE_SCALES))
    output = objective.forward(model, batch, packed, scale / divisor)
    noise.keys = noise.scales = None  # other forwards have no noise
    run.phases.go_on(Phase.BACKWARD)
    return output, loss_of
