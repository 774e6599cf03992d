"""Truncates, splits or drops a conversation that is longer than a sample.

    cut-end      keep the first tokens
    cut-begin    keep the last turns that fit; if the last turn is too long, keep its last tokens
    split        make several samples of as many turns as fit; divide a turn that is too long
    drop         keep nothing

A turn is an answer with the text before it. A sample that begins later than its conversation gets the
conversation's begin-of-text token, if there is one. `split` trains every trained token exactly once. It fills
the room that is left in a sample with the text before, as context without a loss. This context is whole
turns, or the last tokens of a divided turn. No sample begins inside a header.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from patch.config.choices import LongSamples


class Tokens(NamedTuple):
    """Tokens of one sample, which may be too long."""

    ids: np.ndarray
    """int32 [n]."""
    learned: np.ndarray
    """bool [n]: whether the loss covers the token; the first value has no effect."""
    turns: Sequence[int] = (0,)
    """Begins of the turns, ascending; the first is 0."""


class Headers(NamedTuple):
    """Tokens that the template writes before the content of a message; 0 if unknown."""

    question: int = 0
    """At the begin of a turn."""
    answer: int = 0
    """Before the trained tokens of a turn."""


def cut(
    tokens: Tokens, length: int, rule: LongSamples, begin_of_text: int | None, headers: Headers
) -> list[Tokens]:
    """Return the samples of a conversation, of at most `length` + 1 ids each: the last id is only a label."""
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
        """Ends of the turns."""
        self._answers = np.flatnonzero(self._learned[1:] & ~self._learned[:-1]) + 1
        """Begins of the trained spans."""
        self._length, self._headers = length, headers
        has_prefix = length > 1 and begin_of_text is not None and self._ids[0] == begin_of_text
        self._prefix = self._ids[:1] if has_prefix else self._ids[:0]
        self._room = length + 1 - len(self._prefix)
        """Ids of the conversation for which a sample has room, if it begins inside a turn."""

    def last(self) -> Tokens:
        """Return the last turns that fit, or the end of the last turn."""
        size = len(self._ids)
        begin = self._first_turn(size)
        return self._part(self._clear(size - self._room) if begin is None else begin, 0, size)

    def split(self) -> list[Tokens]:
        """Return parts that together train all trained tokens."""
        parts: list[Tokens] = []
        done = 1
        for first in np.flatnonzero(self._learned).tolist():
            if first >= done:
                begin, done = self._next(first)
                parts.append(self._part(begin, first, done))
        return parts

    def _next(self, first: int) -> tuple[int, int]:
        """Return begin and end of the part that trains the id `first` and the ids after it."""
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
        if self._learned[first - 1]:  # its answer continues after the last trained id
            begin = first - 1
        else:  # its answer begins; half a sample is left for the end of the question
            begin = min(self._clear(first - self._room // 2), first - 1)
        end = min(begin + self._room, turn_end)
        return min(self._clear(end - self._room), begin), end

    def _first_turn(self, end: int) -> int | None:
        """Return the first turn from which everything up to `end` fits into a sample, or None."""
        place = bisect_left(self._turns, end - self._length - 1)
        candidates = self._turns[place : place + 2]  # the room of two turns differs by one id at most
        return next((turn for turn in candidates if turn < end <= turn + self._room_from(turn)), None)

    def _clear(self, begin: int) -> int:
        """Return `begin`, or the end of the header that it is in."""
        turn = self._turns[bisect_right(self._turns, begin) - 1]
        header = self._headers.question + (0 if turn else len(self._prefix))
        if turn < begin < turn + header:
            begin = turn + header
        following = self._answers[np.searchsorted(self._answers, begin) :][:1].tolist()
        return next((answer for answer in following if answer - self._headers.answer < begin), begin)

    def _part(self, begin: int, first: int, end: int) -> Tokens:
        """Return the sample of the ids from `begin` to `end`, with a loss from the id `first` on."""
        ids, learned = self._ids[begin:end], self._learned[begin:end].copy()
        learned[: max(1, first - begin)] = False  # the id at `begin` follows no other id
        if not self._has_own_prefix(begin):
            ids = np.concatenate((self._prefix, ids))
            learned = np.concatenate((np.zeros(len(self._prefix), bool), learned))
        return Tokens(ids, learned)

    def _room_from(self, turn: int) -> int:
        """Return the ids of the conversation for which a sample has room, if it begins with a turn."""
        return self._length + 1 if self._has_own_prefix(turn) else self._room

    def _has_own_prefix(self, begin: int) -> bool:
        """Return whether the id at `begin` is the prefix: some templates write it before every turn."""
        return begin == 0 or (begin in self._begins and self._ids[begin] in self._prefix)
