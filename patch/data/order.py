"""Which sample comes when: of one set, of several, and in the micro-batches of each rank; read ahead, too.

All orders are functions of seed, epoch, index and weights alone. There is no state, so a resumed run needs
only its iteration, and skipping ahead costs nothing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
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
    """The order of one set's samples: sample k is number k mod N in the permutation of epoch k // N.

    Args:
        size: samples N of the set.
        seed: the run's seed.
        set_index: the set's index in a blend, so that sets of equal size have different orders. Set 0 has the
            order that a set has alone.
    """

    def __init__(self, size: int, seed: int, set_index: int = 0) -> None:
        self._size, self._entropy, self._set = size, seed, set_index
        self._permutation = lru_cache(maxsize=2)(self._permutation_of)

    def __getitem__(self, index: int) -> int:
        epoch, position = divmod(index, self._size)
        return int(self._permutation(epoch)[position])

    def _permutation_of(self, epoch: int) -> np.ndarray:
        """It uses RandomState, whose streams are frozen: a later NumPy gives a resumed run the same order."""
        entropy = (self._entropy, epoch, self._set) if self._set else (self._entropy, epoch)
        bits = np.random.MT19937(np.random.SeedSequence(entropy))
        return np.random.RandomState(bits).permutation(self._size)


class _Sets(ABC):
    """Several sets as one."""

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < len(self):
            raise IndexError(index)
        source, number = self._find(index)
        return source[number]

    def place(self, index: int) -> str:
        """See `SampleSource`."""
        source, number = self._find(index)
        return source.place(number)

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def _find(self, index: int) -> tuple[SampleSource, int]:
        """The set of a sample, and the sample's index in it."""


class Concatenation(_Sets):
    """Sets without weights: the samples of all, set after set. One epoch has each sample of each set once.

    Args:
        sources: the sets.
    """

    is_shuffled = False

    def __init__(self, sources: Sequence[SampleSource]) -> None:
        self._sources = sources
        self._ends = list(accumulate(len(source) for source in sources))

    def __len__(self) -> int:
        return self._ends[-1]

    def _find(self, index: int) -> tuple[SampleSource, int]:
        which = bisect_right(self._ends, index)
        source = self._sources[which]
        return source, index - self._ends[which] + len(source)


def weights_of(parts: Sequence[DataPart]) -> list[float] | None:
    """The weights of the sets, of which all have one or none."""
    return [part.weight for part in parts if part.weight is not None] or None


def passes_text(passes: float) -> str:
    """How often a set is read, with two digits that count: "9.6 passes", "0.0012 passes", "1 pass"."""
    number = f"{passes:.2g}" if passes < 99.5 else f"{passes:.0f}"
    return f"{number} pass" if number == "1" else f"{number} passes"


class Blend(_Sets):
    """Sets with weights: each has its share of the samples at any time, and epochs and orders of its own.

    Each sample comes from the set that lacks most of its share, by Megatron's rule for blended data sets. A
    small set with a large weight begins its next epoch while a large one is still in its first.

    Args:
        sources: the sets.
        weights: their shares of the samples, above 0; the sum may be any number.
        num_samples: samples N of the run; sample k does not depend on it.
        seed: decides the orders of the samples.
    """

    is_shuffled = True

    def __init__(
        self, sources: Sequence[SampleSource], weights: Sequence[float], *, num_samples: int, seed: int
    ) -> None:
        from megatron.core.datasets.helpers import build_blending_indices  # only blends need megatron-core

        self._sources = sources
        self._which, self._turns = np.zeros(num_samples, np.int16), np.zeros(num_samples, np.int64)
        """For each sample its set, and the number of samples of that set before it; [N]."""
        shares = np.array(weights) / sum(weights)
        build_blending_indices(self._which, self._turns, shares, len(sources), num_samples, False)
        self._orders = [ShuffledOrder(len(source), seed, index) for index, source in enumerate(sources)]

    def __len__(self) -> int:
        return len(self._which)

    def _find(self, index: int) -> tuple[SampleSource, int]:
        which = int(self._which[index])
        return self._sources[which], self._orders[which][int(self._turns[index])]

    def passes(self) -> list[float]:
        """How often the run goes over each set, in epochs of that set."""
        counts = np.bincount(self._which, minlength=len(self._sources)).tolist()
        return [count / len(source) for count, source in zip(counts, self._sources, strict=True)]


class BatchReader:
    """The micro-batches of one rank, by iteration.

    Micro-batch m of data-parallel rank r is micro-batch m * DP + r of the global batch, so the global batch
    consists of the same micro-batches at every DP.

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
        make_batch: makes a micro-batch of whole samples, of which the rank's part is then cut.
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
"""How long `read_ahead` waits for a read that has begun. A file system that hangs must not keep a run from
ending; the thread is a daemon, so the process can end without it."""


class StepReader(Protocol):
    """Reads the micro-batches of one rank by iteration, as `BatchReader` does."""

    def step(self, iteration: int) -> list[Batch]:
        """This rank's micro-batches of the step `iteration`, counted from 0."""


@contextmanager
def read_ahead(reader: StepReader, steps: range, num_ahead: int) -> Iterator[StepReader]:
    """A context with a reader whose batches a thread reads ahead; they are those of `reader`.

    Its `step` takes the steps in their order. It raises what `reader.step` raised for that step, and may be
    called again for the last step that was taken.

    Args:
        reader: reads one step. The thread calls it, so do not call it at the same time.
        steps: the steps that will be taken.
        num_ahead: how many steps are read ahead; 0: `reader` itself is given, without a thread.
    """
    if num_ahead == 0:
        yield reader
        return
    ahead = _AheadReader(reader, steps, num_ahead)
    try:
        yield ahead
    finally:
        ahead.close()


class _AheadReader:
    """Batches from a thread, or the error that ended it."""

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
        """The micro-batches of the next step, or again those of the last one."""
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
        """End the thread after the step that it reads now."""
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
