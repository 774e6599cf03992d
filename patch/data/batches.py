"""Decides which samples each rank reads at each step, as a function of (seed, epoch, index) only.

There is no state, so a resumed run needs only its iteration, and skipping ahead costs nothing. order.py says
which sample is number k of the run. Micro-batch m of data-parallel rank r is micro-batch m * DP + r of the
global batch, so the global batch consists of the same micro-batches at every DP.
"""

from __future__ import annotations

import torch

from patch.data.order import ShuffledOrder
from patch.data.samples import Batch, Sample, SampleSource, collate, cut_batch
from patch.distributed.context_group import WHOLE, Zigzag


class BatchReader:
    """The micro-batches of one rank, by iteration.

    Args:
        source: the data set.
        micro_batch_size: samples of one forward pass.
        global_batch_size: samples of one step over all ranks.
        dp_rank: this rank's index among the replicas of the model.
        dp_size: number of replicas.
        seed: decides the order of the samples if `shuffle` is set.
        shuffle: True repeats the source without end, in a new order each epoch. False reads it once in its
            own order, and fills the last global batch with samples that have no learned tokens, so that
            evaluation counts each sample once.
        zigzag: this rank's part of each sample; ranks of a context-parallel group read the same samples.
        ahead: step k begins at sample k * global_batch_size + ahead. It is 0 unless the global batch size was
            changed on a resume.
    """

    def __init__(
        self,
        source: SampleSource,
        *,
        micro_batch_size: int,
        global_batch_size: int,
        dp_rank: int,
        dp_size: int,
        seed: int,
        shuffle: bool,
        zigzag: Zigzag = WHOLE,
        ahead: int = 0,
    ) -> None:
        assert global_batch_size % (micro_batch_size * dp_size) == 0, "validate_run lets only these through"
        self._source = source
        self._micro_batch_size = micro_batch_size
        self._global_batch_size, self._ahead = global_batch_size, ahead
        self._dp_rank, self._dp_size, self._zigzag = dp_rank, dp_size, zigzag
        self._order = ShuffledOrder(len(source), seed) if shuffle else None

    def __len__(self) -> int:
        """Steps of one pass over the source; the last one may be partial."""
        return -((self._ahead - len(self._source)) // self._global_batch_size)

    def step(self, iteration: int) -> list[Batch]:
        """This rank's micro-batches of one global batch.

        Args:
            iteration: counted from 0; without shuffle it must be below `len(self)`.
        """
        assert self._order is not None or iteration < len(self), "one pass does not wrap around"
        start = iteration * self._global_batch_size + self._ahead
        first = start + self._dp_rank * self._micro_batch_size
        stride = self._dp_size * self._micro_batch_size
        return [self._batch(index) for index in range(first, start + self._global_batch_size, stride)]

    def place(self, number: int) -> str:
        """Where a sample comes from, for people.

        Args:
            number: of the sample in the run, counted from 0 over all steps.
        """
        return self._source.place(number if self._order is None else self._order[number])

    def _batch(self, first: int) -> Batch:
        samples = [self._sample(index) for index in range(first, first + self._micro_batch_size)]
        return cut_batch(collate(samples), self._zigzag)

    def _sample(self, index: int) -> Sample:
        if self._order is not None:
            return self._source[self._order[index]]
        if index < len(self._source):
            return self._source[index]
        filler = self._source[0]
        return filler._replace(loss_mask=torch.zeros_like(filler.loss_mask))
