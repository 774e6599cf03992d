"""One optimizer step and one evaluation pass on megatron-core's schedules.

The loss of a step is sum(loss * mask) / tokens, with `tokens` the learned tokens of the global batch,
counted over data-parallel ranks before the first forward. So micro-batch size, DP, PP and padding
change neither loss nor gradient beyond the order of summation, and a reduced gradient is final.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func

from patch.data import Batch
from patch.device import send
from patch.distributed.async_collectives import start_all_reduce
from patch.distributed.collectives import sum_over
from patch.errors import TrainingError
from patch.model import LlamaModel, sum_learned
from patch.optimizer import learning_rate
from patch.training.offload import place
from patch.training.oom_retry import Attempts
from patch.training.setup import Run, StepWork


class StepResult(NamedTuple):
    """What one optimizer step did; equal on all ranks of the last stage's data-parallel group."""

    loss: float
    """Mean over the learned tokens of the global batch; 0 on stages before the last."""
    grad_norm: float
    lr: float
    skipped: int
    """1 when fp16 gradients overflowed and nothing was updated."""
    comm_exposed_ms: float
    """How long this rank's compute waited for gradients, and for the weights of the step before."""


def train_step(run: Run, iteration: int) -> StepResult:
    """Forward, backward, reduction and update of one global batch.

    Args:
        iteration: counted from 0; it alone selects the samples.
    Raises:
        TrainingError: the gradient norm is not finite; nothing has been updated.
    """
    train_iters = run.config.training.train_iters
    work = run.upcoming
    if work is None or work.iteration != iteration:
        batches = run.train_reader.step(iteration)
        work = StepWork(iteration, batches, sum_over(run.groups.dp_cp, [_learned(batches)], run.device)[0])
    lr = learning_rate(iteration + 1, train_iters, run.config.optimizer)
    place(run.optimizer)
    attempts = Attempts(run.optimizer, f"step {iteration + 1}")
    while (reduced := _reduce(run, work, lr, attempts)) is None:
        pass
    loss, grad_norm = reduced
    is_finite = math.isfinite(grad_norm)
    if is_finite:
        run.optimizer.step(grad_norm)
    elif run.optimizer.loss_scale.can_shrink:
        run.optimizer.loss_scale.shrink()
    else:
        raise TrainingError(
            f"step {iteration + 1}: gradient norm {grad_norm}, expected a finite number; the weights are "
            "those of the step before. Lower --lr, raise --lr-warmup-iters, or look at this step's data"
        )
    run.optimizer.adam.record_memory("train")
    return StepResult(loss, grad_norm, lr, int(not is_finite), run.optimizer.clock.read_ms())


def _reduce(run: Run, work: StepWork, lr: float, attempts: Attempts) -> tuple[float, float] | None:
    """Forward, backward and reduction of a step, and what the next one trains on.

    Returns:
        loss and gradient norm; None where a rank ran out of memory, and all are to do it again.
    """
    losses = attempts.run(partial(_accumulate, run, work, lr), partial(_give_up, run, work))
    run.optimizer.flush_gradients()
    iteration = work.iteration + 1
    following = run.train_reader.step(iteration) if iteration < run.config.training.train_iters else []
    # Small sums travel behind the gradients; behind the weights they would wait for the last gather.
    sums = torch.zeros(2, dtype=torch.float64, device=run.device)  # from a list it would wait for backward
    sums[0] = torch.stack(losses).double().sum() if losses else 0.0
    sums[1] = _learned(following)
    pending = start_all_reduce(sums, run.groups.dp_cp)
    attempts.ask()
    run.optimizer.finish_gradients()
    grad_norm = run.optimizer.gradient_norm()
    pending.wait(run.optimizer.clock)
    loss, tokens = sums.tolist()
    run.upcoming = StepWork(iteration, following, tokens)
    return (loss, grad_norm) if attempts.are_over() else None


def _accumulate(run: Run, work: StepWork, lr: float) -> list[torch.Tensor]:
    """Forward and backward of a step, from its beginning."""
    run.optimizer.start_step(lr)
    return _run_schedule(run, work.batches, work.tokens, forward_only=False)


def _give_up(run: Run, work: StepWork) -> list[torch.Tensor]:
    """This rank's part in the messages of a step whose forward or backward ran out of memory; no losses."""
    run.optimizer.give_up(len(work.batches))
    return []


@torch.no_grad()
def evaluate(run: Run) -> float:
    """Token-weighted mean loss over the validation set, at most `--eval-iters` global batches.

    Returns:
        the loss on the last stage, 0 on the others.
    """
    assert run.valid_reader is not None
    for stage in run.stages:
        stage.eval()
    # Ranks start their gathers when their hosts have updated: never beside other messages of the same group.
    run.optimizer.wait_for_weights()
    total, tokens = 0.0, 0.0
    for index in range(min(run.config.data.eval_iters, len(run.valid_reader))):
        batches = run.valid_reader.step(index)
        (learned,) = sum_over(run.groups.dp_cp, [_learned(batches)], run.device)
        forward = partial(_run_schedule, run, batches, 1.0, forward_only=True)
        attempts = Attempts(run.optimizer, "the evaluation")
        is_over = False
        while not is_over:
            losses = attempts.run(forward, list[torch.Tensor])
            attempts.ask()
            is_over = attempts.are_over()
        total += sum_over(run.groups.dp_cp, [_total(losses)], run.device)[0]
        tokens += learned
    for stage in run.stages:
        stage.train()
    run.optimizer.adam.record_memory("evaluate")
    return total / max(tokens, 1.0)


def _learned(batches: list[Batch]) -> float:
    """Learned tokens of this rank's micro-batches."""
    return sum(batch.loss_mask.sum().item() for batch in batches)


def _total(losses: list[torch.Tensor]) -> float:
    return sum(loss.item() for loss in losses)


def _run_schedule(run: Run, batches: list[Batch], tokens: float, *, forward_only: bool) -> list[torch.Tensor]:
    """Run all micro-batches; on the last stage each one's summed loss over `tokens`, [] on the others."""
    pp_size, vp_size = run.groups.pp.size(), run.stages[0].config.virtual_pipeline_model_parallel_size
    return get_forward_backward_func(pp_size, vp_size)(
        forward_step_func=partial(_forward_step, run=run, divisor=max(tokens, 1.0)),
        data_iterator=[iter(batches) for _ in run.stages],
        model=run.stages,
        num_microbatches=len(batches),
        seq_length=run.config.sample_length,
        micro_batch_size=run.config.training.micro_batch_size,
        forward_only=forward_only,
    )


def _forward_step(
    batches: Iterator[Batch], model: LlamaModel, *, run: Run, divisor: float
) -> tuple[torch.Tensor, Any]:
    """Upstream's forward_step_func: the stage's output and how to make it a loss."""
    batch = next(batches)
    tokens, labels, mask = (send(tensor, run.device) for tensor in batch)
    # RoPE needs no position ids, causal attention no mask.
    output = model(tokens, None, None, labels=labels)
    run.optimizer.watch(output, model.vp_stage)
    is_aligned = run.config.model.precision_align is not None
    return output, partial(_masked_loss, mask=mask, divisor=divisor, is_aligned=is_aligned)


def _masked_loss(losses: torch.Tensor, *, mask: torch.Tensor, divisor: float, is_aligned: bool) -> tuple:
    """This micro-batch's share of the global mean; upstream's (loss, tokens, report) protocol."""
    loss = sum_learned(losses, mask, is_aligned=is_aligned) / divisor
    return loss, mask.sum().int(), loss.detach()
