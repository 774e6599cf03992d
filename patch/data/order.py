"""Which sample comes when: functions of seed, epoch and index alone, so that a resumed run needs no state."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

import numpy as np


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


class _Split(NamedTuple):
    """A node of the tree that divides samples among sets: some go to the left, the others to the right."""

    left: _Split | int
    """A node, or the index of a set."""
    right: _Split | int
    left_weight: int
    weight: int
    """That of both sides together."""

    def num_left(self, count: int) -> int:
        """How many of the first `count` samples go to the left: their share, rounded to nearest."""
        return (2 * count * self.left_weight + self.weight) // (2 * self.weight)


class WeightedTurns:
    """Divides samples among sets by weight: which set has sample k, as a function of weights and k alone.

    The first k samples are divided by a binary tree over the sets. Each node gives its left side the share of
    its samples, rounded to nearest, which is a number that never falls and never grows by more than one. All
    numbers are integers, so the shares are exact for ever. The rounding of a node reaches a set in the
    proportion of their weights, so the tree decides how far a set may be from its share: with up to four sets
    less than one sample, with more sets never 1.1 samples in thousands of random weightings.

    Args:
        weights: of each set, above 0; the decimal number that a float is written as counts, so 0.1 is 1/10.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        assert weights and all(weight > 0 for weight in weights), "parse_data lets only these through"
        exact = [Fraction(repr(weight)) for weight in weights]
        unit = math.lcm(*(weight.denominator for weight in exact))
        self._num_sets = len(weights)
        self._tree = _tree([int(weight * unit) for weight in exact])

    def turn(self, index: int) -> tuple[int, int]:
        """The set that has sample `index`, and how many samples that set had before."""
        node = self._tree
        while isinstance(node, _Split):
            before = node.num_left(index)
            is_left = node.num_left(index + 1) > before
            node, index = (node.left, before) if is_left else (node.right, index - before)
        return node, index

    def counts(self, count: int) -> list[int]:
        """How many of the first `count` samples each set has."""
        counts = [0] * self._num_sets
        nodes = [(self._tree, count)]
        while nodes:
            node, total = nodes.pop()
            if isinstance(node, _Split):
                on_left = node.num_left(total)
                nodes += [(node.left, on_left), (node.right, total - on_left)]
            else:
                counts[node] = total
        return counts


class _Candidate(NamedTuple):
    """The best tree over some neighbours in the order of weights."""

    node: _Split | int
    weight: int
    spreads: tuple[float, ...]
    """For each of its sets the sum of set's weight / node's weight, over the nodes above the set and itself.
    Half of the sum over a whole tree is the largest distance of the set from its share, in samples."""
    spread: float
    """The largest of them."""


def _tree(weights: list[int]) -> _Split | int:
    """The tree with the least spread among those whose nodes hold neighbours in the order of weights."""
    order = sorted(range(len(weights)), key=lambda index: -weights[index])
    best = {
        (position, position + 1): _Candidate(index, weights[index], (1.0,), 1.0)
        for position, index in enumerate(order)
    }
    for length in range(2, len(order) + 1):
        for first in range(len(order) - length + 1):
            last = first + length
            cuts = range(first + 1, last)
            cut = min(cuts, key=lambda at: max(best[first, at].spread, best[at, last].spread))
            left, right = best[first, cut], best[cut, last]
            weight = left.weight + right.weight
            spreads = tuple(
                spread + weights[index] / weight
                for spread, index in zip(left.spreads + right.spreads, order[first:last], strict=True)
            )
            node = _Split(left.node, right.node, left.weight, weight)
            best[first, last] = _Candidate(node, weight, spreads, max(spreads))
    return best[0, len(order)].node
