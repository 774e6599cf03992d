"""Evaluation: the token-weighted mean loss over each validation set, and over all of them."""

from __future__ import annotations

import math
from functools import partial

import torch

from patch.data import BatchReader
from patch.data.order import StepReader, read_ahead
from patch.data.samples import Batch, learned_tokens
from patch.distributed.collectives import max_over_world, sum_over
from patch.training.guards.phases import Phase
from patch.training.setup import Run
from patch.training.state_placement import OomRetry
from patch.training.step import read_batches, run_schedule

_LARGEST_EXPONENT = 700.0
"""exp of more is no float."""


@torch.no_grad()
def evaluate(run: Run) -> dict[str, float]:
    """Loss and perplexity of the validation sets, each once or at most `--eval-iters` global batches of it.

    Returns:
        `valid_loss` and `valid_ppl`: the mean over the learned tokens of all sets, or where position 21 has
        weights, the mean of the sets' losses by weight. With several sets also `valid_loss/NAME` and
        `valid_ppl/NAME` of each. `valid_tokens`: the learned tokens of all sets. The same on all ranks.
    Raises:
        DataError: on all ranks, if one of them cannot read its data.
    """
    assert run.valid_readers, "there is something to evaluate"
    for stage in run.stages:
        stage.eval()
    # Ranks start their gathers when their hosts have updated: never beside other messages of the same group.
    run.optimizer.finish_param_sync()
    sums = [_sum_over_set(run, name, reader) for name, reader in run.valid_readers.items()]
    for stage in run.stages:
        stage.train()
    run.optimizer.placement.record_memory("evaluate")
    losses = max_over_world([loss for loss, _ in sums], run.device)  # 0 on stages before the last
    return _record(run, losses, [tokens for _, tokens in sums])


def _record(run: Run, sums: list[float], tokens: list[float]) -> dict[str, float]:
    """The means of the sets' losses, from the sums over tokens and the numbers of tokens."""
    of_sets = [loss / max(count, 1.0) for loss, count in zip(sums, tokens, strict=True)]
    if run.valid_weights is None:
        mean = sum(sums) / max(sum(tokens), 1.0)
    else:
        weighted = zip(of_sets, run.valid_weights, strict=True)
        mean = sum(loss * weight for loss, weight in weighted) / sum(run.valid_weights)
    losses = {"": mean}
    if len(of_sets) > 1:
        losses |= {f"/{name}": loss for name, loss in zip(run.valid_readers, of_sets, strict=True)}
    record = {}
    for name, loss in losses.items():
        record[f"valid_loss{name}"] = loss
        record[f"valid_ppl{name}"] = math.exp(min(loss, _LARGEST_EXPONENT))
    return {**record, "valid_tokens": sum(tokens)}


def _sum_over_set(run: Run, name: str, reader: BatchReader) -> tuple[float, float]:
    """The summed loss of one set (0 on stages before the last), and its number of learned tokens."""
    limit = run.config.data.eval_iters
    steps = range(len(reader) if limit is None else min(limit, len(reader)))
    total, tokens = 0.0, 0.0
    with read_ahead(reader, steps, run.config.data.data_prefetch) as ahead:
        for index in steps:
            run.phases.enter(Phase.EVALUATION)
            batches, learned = _read(run, ahead, index, name)
            total += sum_over(run.groups.dp_cp, [_loss(run, batches)], run.device)[0]
            tokens += learned
    return total, tokens


def _read(run: Run, reader: StepReader, index: int, name: str) -> tuple[list[Batch], float]:
    """This rank's micro-batches of one global batch, and the learned tokens of all ranks.

    The last global batch of a set is filled up with samples without learned tokens. Micro-batches that have
    nothing else on any rank are left out; interleaved stages need the number that they were built for.
    """
    reading = read_batches(reader, index)
    of_batches = [learned_tokens([batch]) for batch in reading.batches]
    if reading.error is not None:
        of_batches = [math.nan] * run.config.num_micro_batches
    of_batches = sum_over(run.groups.dp_cp, of_batches, run.device)
    learned = sum(of_batches)
    reading.raise_together(learned, f"the validation set {name}", run.groups.dp_cp)
    if run.config.virtual_pipeline_size > 1:
        return reading.batches, learned
    num_needed = max((number for number, count in enumerate(of_batches, 1) if count), default=1)
    return reading.batches[:num_needed], learned


def _loss(run: Run, batches: list[Batch]) -> float:
    """The summed loss of these micro-batches; repeated if ranks ran out of memory."""
    forward = partial(run_schedule, run, batches, 1.0, loss_scale=None)
    retry = OomRetry(run.optimizer, "the evaluation")
    is_done = False
    while not is_done:
        losses = retry.attempt(forward, list[torch.Tensor])
        retry.start_agreement()
        is_done = retry.is_done()
    return sum(loss.item() for loss in losses)
