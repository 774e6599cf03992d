"""What becomes of a conversation that is longer than a sample.

    cut-end      its first tokens are kept
    cut-begin    its last turns are kept, as many as fit; of a last turn that is too long, the last tokens
    split        it becomes several samples of as many turns as fit; a turn that is too long is divided
    drop         nothing is kept

A turn is what comes before an answer, and the answer. A sample that does not begin where the conversation
began gets its begin-of-text token, if there is one. A sample that begins inside a turn does not learn its
first token of that turn, which has no context; `split` also gives it to the sample before, which learns it.
So `split` learns every learned token exactly once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from patch.config.choices import LongSamples


class Tokens(NamedTuple):
    """The tokens of one sample, or of one that may be too long."""

    ids: np.ndarray
    """int32 [n]."""
    learned: np.ndarray
    """bool [n]: whether the loss covers the token; that of the first one has no effect."""
    turns: Sequence[int] = (0,)
    """Where turns begin, ascending; the first is 0."""


def cut(tokens: Tokens, length: int, rule: LongSamples, begin_of_text: int | None) -> list[Tokens]:
    """The samples of a conversation, of at most `length` + 1 ids each: the last id is only a label.

    Args:
        tokens: the whole conversation.
        length: tokens of a sample.
        rule: what becomes of one that is longer.
        begin_of_text: the id of the begin-of-text token; None if there is none.
    """
    size = len(tokens.ids)
    if size <= length + 1:
        return [tokens]
    if rule == "drop":
        return []
    if rule == "cut-end":
        return [Tokens(tokens.ids[: length + 1], tokens.learned[: length + 1])]
    parts = _Parts(tokens, length, begin_of_text)
    if rule == "cut-begin":
        fitting = (turn for turn in tokens.turns if turn and size - turn <= parts.room(turn))
        begin = next(fitting, None)
        return [parts.part(size - parts.room(None) if begin is None else begin, size)]
    return parts.split()


class _Parts:
    """Parts of one conversation that fit into a sample."""

    def __init__(self, tokens: Tokens, length: int, begin_of_text: int | None) -> None:
        self._tokens = tokens
        self._length = length
        self._turns = frozenset(tokens.turns)
        has_prefix = length > 1 and begin_of_text is not None and tokens.ids[0] == begin_of_text
        self._prefix = tokens.ids[:1] if has_prefix else tokens.ids[:0]

    def room(self, begin: int | None) -> int:
        """Ids of the conversation that a sample from `begin` on has room for; None: from inside a turn."""
        return (
            self._length + 1 - (0 if begin is not None and self._has_own_prefix(begin) else len(self._prefix))
        )

    def part(self, begin: int, end: int) -> Tokens:
        """The sample of the ids from `begin` to `end`."""
        ids, learned = self._tokens.ids[begin:end], self._tokens.learned[begin:end].copy()
        if begin not in self._turns:
            learned[0] = False
        if not self._has_own_prefix(begin):
            ids = np.concatenate((self._prefix, ids))
            learned = np.concatenate((np.zeros(len(self._prefix), bool), learned))
        return Tokens(ids, learned)

    def split(self) -> list[Tokens]:
        """All parts, each with as many turns as fit."""
        size = len(self._tokens.ids)
        parts: list[Tokens] = []
        begin = 0
        while True:
            most = begin + self.room(begin)
            if most >= size:
                return [*parts, self.part(begin, size)]
            end = max((turn for turn in self._tokens.turns if begin < turn <= most), default=None)
            parts.append(self.part(begin, most if end is None else end))
            begin = most - 1 if end is None else end

    def _has_own_prefix(self, begin: int) -> bool:
        """Whether the id at `begin` is the prefix: some templates write it before every turn."""
        return begin == 0 or (begin in self._turns and self._tokens.ids[begin] in self._prefix)
