"""Order of samples: in one data set, in several, and in the micro-batches of each rank; reading ahead.

All orders are pure functions of seed, epoch, index and weights. There is no state, so a resumed run needs
only its iteration, and skipping ahead costs nothing.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from functools import lru_cache
from itertools import accumulate
from queue import SimpleQueue
from threading import Semaphore
from typing import Protocol

import numpy as np
import torch

from patch.config.data_spec import DataPart
from patch.data.samples import Batch, Sample, SampleSource, collate, cut_batch
from patch.device import start_thread
from patch.distributed.context_group import WHOLE, Zigzag


class ShuffledOrder:
    """Order of one data set: sample k is entry k mod N of the permutation of epoch k // N.

    Args:
        size: N, samples of the set.
        set_index: index of the set in a blend, for orders that differ between sets of equal size; else 0.
    """

    def __init__(self, size: int, seed: int, set_index: int = 0) -> None:
        self._size, self._entropy, self._set = size, seed, set_index
        self._permutation = lru_cache(maxsize=2)(self._permutation_of)

    def __getitem__(self, index: int) -> int:
        epoch, position = divmod(index, self._size)
        return int(self._permutation(epoch)[position])

    def _permutation_of(self, epoch: int) -> np.ndarray:
        """Use RandomState, whose streams are frozen: a resumed run has the same order with a later NumPy."""
        entropy = (self._entropy, epoch, self._set) if self._set else (self._entropy, epoch)
        bits = np.random.MT19937(np.random.SeedSequence(entropy))
        return np.random.RandomState(bits).permutation(self._size)


class Concatenation:
    """Data sets without weights, one after another. One epoch has each sample of each set once."""

    is_shuffled = False

    def __init__(self, sources: Sequence[SampleSource]) -> None:
        self._sources = sources
        self._ends = list(accumulate(len(source) for source in sources))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < len(self):
            raise IndexError(index)
        source, number = self._find(index)
        return source[number]

    def place(self, index: int) -> str:
        """See `SampleSource`."""
        source, number = self._find(index)
        return source.place(number)

    def _find(self, index: int) -> tuple[SampleSource, int]:
        """Return the set of a sample, and the sample's index in the set."""
        which = bisect_right(self._ends, index)
        source = self._sources[which]
        return source, index - self._ends[which] + len(source)


def weights_of(parts: Sequence[DataPart]) -> list[float] | None:
    """Return the weights of the sets, or None if the sets have none. `parse_data` refuses a mixture."""
    return [part.weight for part in parts if part.weight is not None] or None


def format_passes(passes: float) -> str:
    """Return how often a set is read, with two significant digits: "9.6 passes", "0.0012 passes"."""
    number = f"{passes:.2g}" if passes < 99.5 else f"{passes:.0f}"
    return f"{number} pass" if number == "1" else f"{number} passes"


class Blend(Concatenation):
    """Data sets with weights. Each set has its share of the samples at any time, its own epochs and order.

    Each sample comes from the set that is most behind its share, by Megatron's rule for blended data sets. A
    small set with a large weight begins its next epoch while a large set is still in its first.

    Args:
        weights: shares of the samples, above 0; the sum may be any number.
        num_samples: N, samples of the run; sample k does not depend on N.
    """

    is_shuffled = True

    def __init__(
        self, sources: Sequence[SampleSource], weights: Sequence[float], *, num_samples: int, seed: int
    ) -> None:
        from megatron.core.datasets.helpers import build_blending_indices  # only blends need megatron-core

        super().__init__(sources)
        self._which, self._turns = np.zeros(num_samples, np.int16), np.zeros(num_samples, np.int64)
        """[N]: for each sample its set, and the number of earlier samples from that set."""
        shares = np.array(weights) / sum(weights)
        build_blending_indices(self._which, self._turns, shares, len(sources), num_samples, False)
        self._orders = [ShuffledOrder(len(source), seed, index) for index, source in enumerate(sources)]

    def __len__(self) -> int:
        return len(self._which)

    def _find(self, index: int) -> tuple[SampleSource, int]:
        which = int(self._which[index])
        return self._sources[which], self._orders[which][int(self._turns[index])]

    def passes(self) -> list[float]:
        """Return how often the run passes over each set, in epochs of that set."""
        counts = np.bincount(self._which, minlength=len(self._sources)).tolist()
        return [count / len(source) for count, source in zip(counts, self._sources, strict=True)]


class BatchReader:
    """Micro-batches of one rank, by iteration.

    Micro-batch m of data-parallel rank r is micro-batch m * DP + r of the global batch. The global batch
    therefore consists of the same micro-batches at every DP.

    Args:
        micro_batch_size: samples of one forward pass.
        global_batch_size: samples of one step over all ranks.
        shuffle: True repeats the source without end, in a new order each epoch. False reads it once in its
            own order. The last global batch is then filled with samples without a loss, so that evaluation
            counts each sample once.
        zigzag: this rank's part of each sample. The ranks of a context-parallel group read the same samples.
        ahead: step k begins at sample k * global_batch_size + ahead; 0 unless a resume has changed the size.
        make_batch: makes a micro-batch of whole samples, before the rank's part is taken.
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
        make_batch: Callable[[Sequence[Sample]], Batch] = collate,
    ) -> None:
        assert global_batch_size % (micro_batch_size * dp_size) == 0, "validate_run lets only these through"
        self._source = source
        self._micro_batch_size = micro_batch_size
        self._global_batch_size, self._ahead = global_batch_size, ahead
        self._dp_rank, self._dp_size, self._zigzag = dp_rank, dp_size, zigzag
        self._make_batch = make_batch
        self._order = ShuffledOrder(len(source), seed) if shuffle else None

    def __len__(self) -> int:
        """Return the steps of one pass over the source; the last step may be partial."""
        return -((self._ahead - len(self._source)) // self._global_batch_size)

    def step(self, iteration: int) -> list[Batch]:
        """Return this rank's micro-batches of an iteration, from 0; without shuffle, below `len(self)`."""
        assert self._order is not None or iteration < len(self), "one pass does not wrap around"
        start = iteration * self._global_batch_size + self._ahead
        first = start + self._dp_rank * self._micro_batch_size
        stride = self._dp_size * self._micro_batch_size
        return [self._batch(index) for index in range(first, start + self._global_batch_size, stride)]

    def place(self, number: int) -> str:
        """Return the place of sample `number` of the run, counted from 0 over all steps, for messages."""
        return self._source.place(number if self._order is None else self._order[number])

    def _batch(self, first: int) -> Batch:
        samples = [self._sample(index) for index in range(first, first + self._micro_batch_size)]
        return cut_batch(self._make_batch(samples), self._zigzag)

    def _sample(self, index: int) -> Sample:
        if self._order is not None:
            return self._source[self._order[index]]
        if index < len(self._source):
            return self._source[index]
        filler = self._source[0]
        of_sequences = {name: torch.zeros_like(tensor) for name, tensor in filler.of_sequences.items()}
        return filler._replace(loss_mask=torch.zeros_like(filler.loss_mask), of_sequences=of_sequences)


_END_S = 5.0
"""Seconds that `read_ahead` waits for a read in progress. A hanging file system must not keep a run from
ending: the thread is a daemon, so the process can end without it."""


class StepReader(Protocol):
    """Reader of one rank's micro-batches by iteration, such as `BatchReader`."""

    def step(self, iteration: int) -> list[Batch]:
        """Return this rank's micro-batches of the step `iteration`, counted from 0."""


def read_ahead(reader: StepReader, steps: range, num_ahead: int) -> AbstractContextManager[StepReader]:
    """Return the context of a reader that returns the batches of `reader`, which a thread reads ahead.

    Take the steps in order; the last step may be taken again. A step raises the error of `reader.step`.

    Args:
        reader: the thread calls it, so do not call it at the same time.
        num_ahead: steps to read ahead; 0 is the context of `reader` itself, without a thread.
    """
    return closing(_AheadReader(reader, steps, num_ahead)) if num_ahead else nullcontext(reader)


class _AheadReader:
    """Batches from a thread, or the error that ended the thread."""

    def __init__(self, reader: StepReader, steps: range, num_ahead: int) -> None:
        self._reader, self._steps = reader, steps
        self._room = Semaphore(num_ahead)
        self._outcomes: SimpleQueue[list[Batch] | Exception] = SimpleQueue()
        self._next = steps.start
        self._outcome: list[Batch] | Exception = []
        """Outcome of the step before `_next`."""
        self._is_closed = False
        self._thread = start_thread("read ahead", self._read_all)

    def step(self, iteration: int) -> list[Batch]:
        """Return the micro-batches of the next step, or those of the last step again."""
        if iteration == self._next and not isinstance(self._outcome, Exception):
            assert iteration in self._steps, "only these steps are read"
            self._outcome = self._outcomes.get()
            self._next += 1
            self._room.release()
        assert iteration == self._next - 1, "steps are taken in their order"
        if isinstance(self._outcome, Exception):
            raise self._outcome
        return self._outcome

    def close(self) -> None:
        self._is_closed = True
        self._room.release()
        self._thread.join(_END_S)

    def _read_all(self) -> None:
        for iteration in self._steps:
            self._room.acquire()
            if self._is_closed:
                return
            try:
                self._outcomes.put(self._reader.step(iteration))
            except Exception as error:  # noqa: BLE001 - it is raised in the step that needs the data
                self._outcomes.put(error)
                return
