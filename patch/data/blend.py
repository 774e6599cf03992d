"""Several sets as one: one after the other, or blended by weight."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

from patch.data.order import ShuffledOrder, WeightedTurns
from patch.data.samples import Sample, SampleSource


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


def passes_text(passes: float) -> str:
    """How often a set is read, with two digits that count: "9.6 passes", "0.0012 passes", "1 pass"."""
    number = f"{passes:.2g}" if passes < 99.5 else f"{passes:.0f}"
    return f"{number} pass" if number == "1" else f"{number} passes"


class Blend(_Sets):
    """Sets with weights: each has its share of the samples at any time, and epochs and orders of its own.

    A small set with a large weight begins its next epoch while a large one is still in its first.

    Args:
        sources: the sets.
        weights: their shares of the samples, above 0; the sum may be any number.
        num_samples: samples of the run; sample k does not depend on it.
        seed: decides the orders of the samples.
    """

    is_shuffled = True

    def __init__(
        self, sources: Sequence[SampleSource], weights: Sequence[float], *, num_samples: int, seed: int
    ) -> None:
        assert len(sources) == len(weights)
        self._sources = sources
        self._turns = WeightedTurns(weights)
        self._orders = [ShuffledOrder(len(source), seed, index) for index, source in enumerate(sources)]
        self._num_samples = num_samples

    def __len__(self) -> int:
        return self._num_samples

    def _find(self, index: int) -> tuple[SampleSource, int]:
        which, turn = self._turns.turn(index)
        return self._sources[which], self._orders[which][turn]

    def passes(self) -> list[float]:
        """How often the run goes over each set, in epochs of that set."""
        counts = self._turns.counts(self._num_samples)
        return [count / len(source) for count, source in zip(counts, self._sources, strict=True)]
