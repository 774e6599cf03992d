"""One optimizer step on megatron-core's schedules.

The loss of a step is sum(loss * mask) / tokens, where `tokens` is the number of learned tokens in the global
batch, summed over data- and context-parallel ranks before the first forward. So micro-batch size, DP, CP, PP
and padding change loss and gradient only by the order of summation; a reduced gradient needs no rescaling.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func

from patch.checks.run_length import place_in_schedule
from patch.compat.corrections import last_sends_arrive
from patch.data import Batch
from patch.data.order import StepReader
from patch.data.samples import StepWork, learned_tokens
from patch.device import send
from patch.distributed.async_collectives import Pending, WaitClock, read_values, start_all_reduce
from patch.distributed.collectives import on_all_ranks, sum_over
from patch.distributed.context_group import Zigzag
from patch.errors import DataError
from patch.model import LearnedTokens, LlamaModel, PackedSequences, sum_aligned, unchanged_weights
from patch.optimizer import ParamGroup, learning_rate
from patch.plan.flops import attended_pairs
from patch.training.guards.non_finite import handle_non_finite
from patch.training.guards.phases import Phase
from patch.training.run_state import random_state, set_random_state
from patch.training.setup import Run
from patch.training.state_placement import OomRetry, apply_placement


class StepResult(NamedTuple):
    """The result of one optimizer step; equal on all ranks of the last stage's data-parallel group."""

    loss: float
    """Mean over the learned tokens of the global batch; 0 on stages before the last."""
    grad_norm: float
    lr: float
    """The run's; a parameter group with a decoupled rate has another."""
    skipped: int
    """1 when nothing was updated: fp16 gradients overflowed, or --on-non-finite skips the step."""
    comm_exposed_ms: float
    """Time that this rank waited for gradients and for the updated weights of the previous step."""
    attended_pairs: float
    """See `StepWork`."""
    data_wait_ms: float
    """Time that this rank waited for the data of the next step; in the first step for its own data too."""


class Reading(NamedTuple):
    """This rank's micro-batches of a step, or why they could not be read.

    An error of one rank is raised on all without a collective for it: the number of learned tokens is summed
    over ranks anyway, and a rank that cannot read its data adds NaN.
    """

    batches: list[Batch]
    error: Exception | None = None

    @property
    def learned(self) -> float:
        """Learned tokens of these micro-batches; NaN, which a sum over ranks keeps, after an error."""
        return math.nan if self.error is not None else learned_tokens(self.batches)

    def raise_together(self, learned: float, what: str, group: dist.ProcessGroup) -> None:
        """Raise on all ranks of a group if one of them could not read.

        Ranks of other groups read the same data, and so raise too, unless it is this machine that cannot.

        Args:
            learned: the sum of `learned` over the group.
            what: the step, for the message.
            group: the ranks that read different data.

        Raises:
            Exception: this rank's error.
            DataError: on the ranks that could read.
        """
        if not math.isnan(learned):
            return
        error = self.error or DataError(
            f"another rank cannot read the data of {what}; its own message says why"
        )
        raise on_all_ranks(error) if group.size() == dist.get_world_size() else error


def read_batches(reader: StepReader, iteration: int) -> Reading:
    """This rank's micro-batches of a step; an error is kept for `raise_together`.

    Args:
        reader: gives the micro-batches.
        iteration: counted from 0.
    """
    try:
        return Reading(reader.step(iteration))
    except Exception as error:  # noqa: BLE001 - the other ranks must learn of any error
        return Reading([], error)


def train_step(run: Run, iteration: int) -> StepResult:
    """Forward, backward, reduction and update of one global batch.

    Args:
        run: this rank's parts of the run.
        iteration: counted from 0; selects the samples.
    Raises:
        TrainingError: the gradient norm is not finite, and --on-non-finite is stop; nothing has been updated.
        DataError: on all ranks, if one of them cannot read the data of this step or of the next one.
    """
    optimizer = run.optimizer
    work, lr = _work_of(run, iteration), _rate_of(run, iteration)
    group_lrs = [_rate_of(run, iteration, group) for group in optimizer.param_groups]
    if optimizer.placement.is_offloading:  # states move, and updates on the host may begin in backward
        run.before_change()
    apply_placement(optimizer)
    retry = OomRetry(optimizer, f"step {iteration + 1}")
    is_done = False
    while not is_done:
        losses = retry.attempt(partial(_accumulate, run, work, group_lrs), partial(_abandon, run, work))
        run.phases.enter(Phase.REDUCTION)
        optimizer.start_grad_sync()
        # The next batch is read while gradients are reduced. The small sums follow the gradients; after the
        # parameters they would wait for the last all-gather.
        following = _read(run, iteration + 1)
        sums, pending = _start_sums(run, losses, following)
        run.phases.enter(Phase.REDUCTION)
        retry.start_agreement()
        optimizer.finish_grad_sync()
        is_done = retry.is_done()
    run.before_change()
    run.phases.enter(Phase.UPDATE)
    outcome = optimizer.step(skip_non_finite=True)
    loss, *counts = read_values(sums, pending, WaitClock(run.device))
    if outcome.is_skipped and not outcome.is_overflow:
        repeat = partial(_has_finite_gradients, run, work, group_lrs)
        handle_non_finite(run, work, losses, outcome.grad_norm, repeat)
    else:
        run.num_skips = 0
    following.raise_together(counts[0], f"step {iteration + 2}", run.groups.dp_cp)
    run.upcoming = StepWork(iteration + 1, following.batches, *counts)
    optimizer.placement.record_memory("train")
    waited_ms = optimizer.exposed_communication_ms()
    data_wait_ms = run.data_clock.read_ms()
    is_skipped = int(outcome.is_skipped)
    return StepResult(loss, outcome.grad_norm, lr, is_skipped, waited_ms, work.attended_pairs, data_wait_ms)


def _work_of(run: Run, iteration: int) -> StepWork:
    """The batches of a step, from `run.upcoming` if they were read before, otherwise read now."""
    if run.upcoming is not None and run.upcoming.iteration == iteration:
        return run.upcoming
    reading = _read(run, iteration)
    counts = sum_over(run.groups.dp_cp, _counts(run, reading), run.device)
    reading.raise_together(counts[0], f"step {iteration + 1}", run.groups.dp_cp)
    return StepWork(iteration, reading.batches, *counts)


def _rate_of(run: Run, iteration: int, group: ParamGroup | None = None) -> float:
    place = place_in_schedule(run.config, iteration, ahead=run.samples_ahead)
    return learning_rate(*place, run.config.optimizer, group)


def _read(run: Run, iteration: int) -> Reading:
    """This rank's micro-batches of a step; none after the last step."""
    if iteration >= run.config.training.train_iters:
        return Reading([])
    run.phases.enter(Phase.READING)
    with run.data_clock.waiting():
        return read_batches(run.train_reader, iteration)


def _counts(run: Run, reading: Reading) -> list[float]:
    """Learned tokens and attended pairs of these micro-batches, for a StepWork."""
    packed = [batch.cu_seqlens.diff().tolist() for batch in reading.batches if batch.cu_seqlens is not None]
    pairs = attended_pairs(chain(*packed), run.config.model.window_size)
    # A context-parallel rank has its part of each row's tokens, but the lengths of all sequences.
    return [reading.learned, pairs / run.groups.cp.size()]


def _start_sums(run: Run, losses: list[torch.Tensor], following: Reading) -> tuple[torch.Tensor, Pending]:
    """Start the sum over data-parallel ranks of the losses and of the next batch's counts."""
    # On a GPU torch.tensor([...]) would wait for backward.
    sums = torch.zeros(3, dtype=torch.float64, device=run.device)
    sums[0] = torch.stack(losses).double().sum() if losses else 0.0
    sums[1], sums[2] = _counts(run, following)
    return sums, start_all_reduce(sums, run.groups.dp_cp)


def _accumulate(run: Run, work: StepWork, group_lrs: list[float]) -> list[torch.Tensor]:
    """Forward and backward of a whole step; the losses of the micro-batches."""
    run.phases.enter(Phase.FORWARD)
    run.optimizer.zero_grad(group_lrs)
    return run_schedule(run, work.batches, work.tokens, loss_scale=run.optimizer.loss_scale.value)


def _has_finite_gradients(run: Run, work: StepWork, group_lrs: list[float]) -> bool:
    """Whether this rank's own gradients are finite when the step is computed again, without an update."""
    before = random_state()
    with run.optimizer.checking_local_gradients() as check:
        _accumulate(run, work, group_lrs)
        run.optimizer.finish_grad_sync()
    set_random_state(before)
    return check.is_finite


def _abandon(run: Run, work: StepWork) -> list[torch.Tensor]:
    """Take part in the collectives of a step that ran out of memory on this rank; there are no losses."""
    run.optimizer.abandon_backward(len(work.batches))
    return []


def run_schedule(
    run: Run, batches: list[Batch], tokens: float, *, loss_scale: float | None
) -> list[torch.Tensor]:
    """Run all micro-batches; the last stage returns the summed loss of each over `tokens`, the others [].

    Args:
        run: this rank's parts of the run.
        batches: its micro-batches.
        tokens: learned tokens of the global batch.
        loss_scale: the factor of the loss before backward; None: forward only.
    """
    pp_size, vp_size = run.groups.pp.size(), run.stages[0].config.virtual_pipeline_model_parallel_size
    divisor, scale = max(tokens, 1.0), loss_scale or 1.0
    are_sends_dropped = loss_scale is None and run.stages[0].config.overlap_p2p_comm_warmup_flush
    try:
        with last_sends_arrive() if are_sends_dropped else nullcontext(), unchanged_weights(run.stages):
            return get_forward_backward_func(pp_size, vp_size)(
                forward_step_func=partial(_forward_step, run=run, divisor=divisor, scale=scale),
                data_iterator=[iter(batches) for _ in run.stages],
                model=run.stages,
                num_microbatches=len(batches),
                seq_length=run.config.sample_length,
                micro_batch_size=run.config.training.micro_batch_size,
                forward_only=loss_scale is None,
            )
    finally:
        if run.activation_offload is not None:
            run.activation_offload.end_step()


def _forward_step(
    batches: Iterator[Batch], model: LlamaModel, *, run: Run, divisor: float, scale: float
) -> tuple[torch.Tensor, Any]:
    """Upstream's forward_step_func: the stage's output and the function that computes the loss from it.

    Args:
        batches: this rank's micro-batches. model: the stage. run: this rank's parts of the run.
        divisor: learned tokens of the global batch.
        scale: the factor of the loss before backward.
    """
    run.phases.go_on(Phase.FORWARD)
    batch = next(batches)
    tokens, labels, mask = (send(tensor, run.device) for tensor in batch[:3])
    packed = PackedSequences.of(batch.cu_seqlens, batch.tokens, run.device, Zigzag.of(run.groups.cp))
    is_aligned = run.config.model.precision_align is not None
    learned = None if is_aligned else LearnedTokens(mask, scale / divisor)
    # RoPE needs no position ids, causal attention no mask.
    output = model(tokens, None, None, labels=labels, loss_mask=learned, packed_seq_params=packed)
    run.phases.go_on(Phase.BACKWARD)
    return output, partial(_masked_loss, mask=mask, divisor=divisor, is_aligned=is_aligned)


def _masked_loss(output: torch.Tensor, *, mask: torch.Tensor, divisor: float, is_aligned: bool) -> tuple:
    """This micro-batch's share of the global mean; upstream's (loss, tokens, report) protocol.

    Args:
        output: the summed loss; aligned: the losses [B, S], for Hugging Face's order of summation.
        mask: [B, S]. divisor: learned tokens of the global batch.
        is_aligned: whether the run has `--precision-align`.
    """
    loss = (sum_aligned(output, mask) if is_aligned else output) / divisor
    return loss, mask.sum().int(), loss.detach()
