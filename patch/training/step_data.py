"""The data of a step, read and counted while the previous step ends; read errors are raised on all ranks."""

from __future__ import annotations

import math
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from patch.data import Batch
from patch.data.order import StepReader
from patch.distributed.collectives import on_all_ranks, sum_over
from patch.distributed.context_group import Zigzag
from patch.errors import DataError
from patch.plan.flops import mean_pairs
from patch.training.guards.phases import Phase

if TYPE_CHECKING:
    from patch.training.setup import Run

NOISE_KEYS, NOISE_SCALES = "noise keys", "noise scales"
"""Names of the values that `with_noise` adds to the tokens of a batch."""


class StepBatches(NamedTuple):
    """The data of one step, with the counts of this rank or, after `summed`, of the global batch."""

    iteration: int
    """Counted from 0."""
    batches: list[Batch]
    """This rank's micro-batches."""
    divisor: float
    """The objective's count; NaN if a rank could not read its data."""
    attended_pairs: float
    """Attended pairs of the packed sequences (`patch.plan`); 0 without packing."""
    error: Exception | None = None
    """This rank's error of reading."""

    def summed(self, run: Run, divisor: float, attended_pairs: float) -> StepBatches:
        """Return the same with these counts, which are summed over the data-parallel ranks.

        Raises:
            DataError: on all ranks, if any rank could not read its data.
        """
        raise_on_all_ranks(self.error, divisor, f"step {self.iteration + 1}", run.groups.dp_cp)
        return self._replace(divisor=divisor, attended_pairs=attended_pairs)


def raise_on_all_ranks(error: Exception | None, count: float, what: str, group: dist.ProcessGroup) -> None:
    """Raise on all ranks of a group if any of them could not read.

    This needs no additional collective: counts are summed over ranks anyway, and a rank that cannot read its
    data contributes NaN. Ranks of other groups read the same data. So they raise too, unless the failure is
    local to a machine.

    Args:
        error: this rank's error of reading, or None.
        count: a sum over the group; NaN if a rank could not read.
        what: name of the step, for the message.
        group: the ranks that read different data.
    Raises:
        Exception: this rank's error.
        DataError: on the ranks that could read.
    """
    if not math.isnan(count):
        return
    error = error or DataError(f"another rank cannot read the data of {what}; its own message says why")
    raise on_all_ranks(error) if group.size() == dist.get_world_size() else error


def with_noise(batch: Batch, run: Run, first_sample: int) -> Batch:
    """Return a micro-batch with key and largest noise of each token, for NEFTune.

    A key is a hash of the run's seed, the sample's number in the run, and the token's place in its row. So it
    is the same in every layout. An unpacked row is one sequence, padding included, as in transformers.
    """
    training, zigzag = run.config.training, Zigzag.of(run.groups.cp)
    (num_rows, own_length), hidden = batch.tokens.shape, run.config.model.hidden_size
    length = own_length * zigzag.size
    samples = np.arange(first_sample, first_sample + num_rows, dtype=np.uint64)[:, None]
    of_samples = _mixed(_mixed(np.full(1, training.seed, np.uint64)) + samples)
    keys = torch.from_numpy(_mixed(of_samples + np.arange(length, dtype=np.uint64)).view(np.int64))
    sizes = torch.tensor([length] * num_rows) if batch.cu_seqlens is None else batch.cu_seqlens.diff().long()
    scales = (training.neftune_noise_alpha or 0.0) / (sizes * hidden).float().sqrt()
    scales = scales.repeat_interleave(sizes).view(num_rows, length)
    added = {name: zigzag.cut(each, 1) for name, each in ((NOISE_KEYS, keys), (NOISE_SCALES, scales))}
    return batch._replace(extra_tensors={**batch.extra_tensors, **added})


def _mixed(values: np.ndarray) -> np.ndarray:
    """Hash uint64 (the last step of SplitMix64: Steele, Lea and Flood, OOPSLA 2014)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def read_batches(reader: StepReader, iteration: int) -> tuple[list[Batch], Exception | None]:
    """Read this rank's micro-batches of a step; an error is kept for `raise_on_all_ranks`."""
    try:
        return reader.step(iteration), None
    except Exception as error:  # noqa: BLE001 - the other ranks must learn of any error
        return [], error


def read_step(run: Run, iteration: int) -> StepBatches:
    """Read and count this rank's micro-batches of a step, counted from 0; none after the last step."""
    batches, error = list[Batch](), None
    if iteration < run.config.training.train_iters:
        run.phases.enter(Phase.READING)
        with run.data.clock.waiting():
            batches, error = read_batches(run.data.train_reader, iteration)
    if run.config.training.neftune_noise_alpha is not None:
        size, dp = run.config.training.micro_batch_size, run.groups.dp
        first = run.consumed_samples(iteration) + dp.rank() * size
        numbers = range(first, first + len(batches) * dp.size() * size, dp.size() * size)
        batches = [with_noise(batch, run, number) for batch, number in zip(batches, numbers, strict=True)]
    divisor = math.nan if error is not None else sum(map(run.data.objective.count, batches))
    packed = [batch.cu_seqlens.diff().tolist() for batch in batches if batch.cu_seqlens is not None]
    pairs = mean_pairs(chain(*packed), run.config.model)
    # A context-parallel rank has a part of each row's tokens, but the lengths of all sequences.
    return StepBatches(iteration, batches, divisor, pairs / run.groups.cp.size(), error)


def next_step_batches(run: Run, iteration: int) -> StepBatches:
    """Return the data of a step, counted from 0; read it unless it was read ahead.

    Raises:
        DataError: on all ranks, if any rank cannot read it.
    """
    if run.data.upcoming is not None and run.data.upcoming.iteration == iteration:
        return run.data.upcoming
    own = read_step(run, iteration)
    sums = sum_over(run.groups.dp_cp, [own.divisor, own.attended_pairs], run.device)
    return own.summed(run, *sums)
