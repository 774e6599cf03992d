"""Cuts, splits or drops a conversation that is longer than a sample.

    cut-end      its first tokens are kept
    cut-begin    its last turns are kept, as many as fit; of a last turn that is too long, the last tokens
    split        it becomes several samples of as many turns as fit; a turn that is too long is divided
    drop         nothing is kept

A turn is what comes before an answer, and the answer. A sample that does not begin where the conversation
began gets its begin-of-text token, if there is one. `split` learns every learned token exactly once, and
fills what is left of a sample with what comes before, which is only context there: whole turns, or of a turn
that is divided its last tokens. No sample begins inside a header.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
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


class Headers(NamedTuple):
    """Tokens that the template writes before the content of a message; 0 if that is unknown."""

    question: int = 0
    """At the begin of a turn."""
    answer: int = 0
    """Before what is learned of a turn."""


def cut(
    tokens: Tokens, length: int, rule: LongSamples, begin_of_text: int | None, headers: Headers
) -> list[Tokens]:
    """The samples of a conversation, of at most `length` + 1 ids each: the last id is only a label.

    Args:
        tokens: the whole conversation.
        length: tokens of a sample.
        rule: what becomes of one that is longer.
        begin_of_text: the id of the begin-of-text token; None if there is none.
        headers: of its turns.
    """
    size = len(tokens.ids)
    if size <= length + 1:
        return [tokens]
    if rule == "drop":
        return []
    if rule == "cut-end":
        return [Tokens(tokens.ids[: length + 1], tokens.learned[: length + 1])]
    parts = _Parts(tokens, length, begin_of_text, headers)
    return [parts.last()] if rule == "cut-begin" else parts.split()


class _Parts:
    """Parts of one conversation that fit into a sample."""

    def __init__(self, tokens: Tokens, length: int, begin_of_text: int | None, headers: Headers) -> None:
        self._ids, self._learned, self._turns = tokens
        self._begins = frozenset(self._turns)
        self._borders = [*self._turns[1:], len(self._ids)]
        """Where turns end."""
        self._answers = np.flatnonzero(self._learned[1:] & ~self._learned[:-1]) + 1
        """Where what is learned begins."""
        self._length, self._headers = length, headers
        has_prefix = length > 1 and begin_of_text is not None and self._ids[0] == begin_of_text
        self._prefix = self._ids[:1] if has_prefix else self._ids[:0]
        self._room = length + 1 - len(self._prefix)
        """Ids of the conversation that a sample has room for, if it begins inside a turn."""

    def last(self) -> Tokens:
        """The last turns that fit, or the end of the last one."""
        size = len(self._ids)
        begin = self._first_turn(size)
        return self._part(self._clear(size - self._room) if begin is None else begin, 0, size)

    def split(self) -> list[Tokens]:
        """Parts that together learn all that is learned."""
        parts: list[Tokens] = []
        done = 1
        for first in np.flatnonzero(self._learned).tolist():
            if first >= done:
                begin, done = self._next(first)
                parts.append(self._part(begin, first, done))
        return parts

    def _next(self, first: int) -> tuple[int, int]:
        """Begin and end of the part that learns the id `first` and what follows."""
        place = bisect_right(self._turns, first) - 1
        turn, turn_end = self._turns[place], self._borders[place]
        most = turn + self._room_from(turn)
        if turn_end <= most:
            end = self._borders[bisect_right(self._borders, most) - 1]
            begin = self._first_turn(end)
            assert begin is not None, "at least this turn fits"
            return begin, end
        if first - turn <= self._room // 2:
            return turn, most
        if self._learned[first - 1]:  # its answer goes on, after the last id that was learned
            begin = first - 1
        else:  # its answer begins, after as much of the question as half a sample takes
            begin = min(self._clear(first - self._room // 2), first - 1)
        end = min(begin + self._room, turn_end)
        return min(self._clear(end - self._room), begin), end

    def _first_turn(self, end: int) -> int | None:
        """The first turn from which on all up to `end` fits into a sample; None if no turn does."""
        place = bisect_left(self._turns, end - self._length - 1)
        candidates = self._turns[place : place + 2]  # the room of two turns differs by one id at most
        return next((turn for turn in candidates if turn < end <= turn + self._room_from(turn)), None)

    def _clear(self, begin: int) -> int:
        """`begin`, or where the header ends in which it is."""
        turn = self._turns[bisect_right(self._turns, begin) - 1]
        header = self._headers.question + (0 if turn else len(self._prefix))
        if turn < begin < turn + header:
            begin = turn + header
        following = self._answers[np.searchsorted(self._answers, begin) :][:1].tolist()
        return next((answer for answer in following if answer - self._headers.answer < begin), begin)

    def _part(self, begin: int, first: int, end: int) -> Tokens:
        """The sample of the ids from `begin` to `end`, which learns from the id `first` on."""
        ids, learned = self._ids[begin:end], self._learned[begin:end].copy()
        learned[: max(1, first - begin)] = (
            False  # nothing comes before the id at `begin` that it could follow
        )
        if not self._has_own_prefix(begin):
            ids = np.concatenate((self._prefix, ids))
            learned = np.concatenate((np.zeros(len(self._prefix), bool), learned))
        return Tokens(ids, learned)

    def _room_from(self, turn: int) -> int:
        """Ids of the conversation that a sample has room for, if it begins with a turn."""
        return self._length + 1 if self._has_own_prefix(turn) else self._room

    def _has_own_prefix(self, begin: int) -> bool:
        """Whether the id at `begin` is the prefix: some templates write it before every turn."""
        return begin == 0 or (begin in self._begins and self._ids[begin] in self._prefix)
