"""Evaluation: the token-weighted mean loss over a validation set."""

from __future__ import annotations

from functools import partial

import torch

from patch.data.samples import learned_tokens
from patch.distributed.collectives import sum_over
from patch.training.oom_retry import OomRetry
from patch.training.setup import Run
from patch.training.step import run_schedule


@torch.no_grad()
def evaluate(run: Run) -> float:
    """Token-weighted mean loss over the validation set, at most `--eval-iters` global batches.

    Returns:
        the loss on the last stage, 0 on other stages.
    """
    assert run.valid_reader is not None
    for stage in run.stages:
        stage.eval()
    # Ranks start their gathers when their hosts have updated: never beside other messages of the same group.
    run.optimizer.finish_param_sync()
    total, tokens = 0.0, 0.0
    for index in range(min(run.config.data.eval_iters, len(run.valid_reader))):
        batches = run.valid_reader.step(index)
        (learned,) = sum_over(run.groups.dp_cp, [learned_tokens(batches)], run.device)
        forward = partial(run_schedule, run, batches, 1.0, forward_only=True)
        retry = OomRetry(run.optimizer, "the evaluation")
        is_done = False
        while not is_done:
            losses = retry.attempt(forward, list[torch.Tensor])
            retry.start_agreement()
            is_done = retry.is_done()
        total += sum_over(run.groups.dp_cp, [_total(losses)], run.device)[0]
        tokens += learned
    for stage in run.stages:
        stage.train()
    run.optimizer.record_memory("evaluate")
    return total / max(tokens, 1.0)


def _total(losses: list[torch.Tensor]) -> float:
    return sum(loss.item() for loss in losses)
