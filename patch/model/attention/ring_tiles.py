"""The tiles that ring attention computes: which keys of a piece the queries of this rank see. No tensors.

A piece is the keys and values of a rank. A tile is a rectangle of queries and keys for one kernel call.
Without a window a sequence has at most one tile per piece, because of the zigzag split: the causal triangle
(the rank's own piece), all queries times the early chunk (an earlier rank's piece), or the late queries times
all keys (a later rank's piece). This also holds for packed sequences, whose tokens are contiguous on each
rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby, product
from typing import NamedTuple

from patch.distributed.context_group import TokenSpan, Zigzag


class PlacedSequence(NamedTuple):
    """The place of a sequence in a micro-batch."""

    rows: slice
    """The rows of the sequence; several rows if each row is one sequence."""
    begin: int
    """The first position in the row."""
    end: int
    """The position after the last token."""


class Band(NamedTuple):
    """The keys of a tile that a query sees: itself and the `window` - 1 positions before it."""

    offset: int
    """Position of the tile's first query minus position of its first key."""
    window: int


class Tile(NamedTuple):
    """Queries and keys for one kernel call, as slices of the rank's tokens and of the piece."""

    rows: slice
    queries: slice
    keys: slice
    is_causal: bool = False
    """Whether query i sees keys 0 to i; otherwise it sees all keys or the keys in the band."""
    band: Band | None = None


def tiles_of_piece(
    sequences: Sequence[PlacedSequence], zigzag: Zigzag, source: int, length: int, window: int | None
) -> Iterator[Tile]:
    """Yield the tiles of the piece of rank `source`, for rows of `length` tokens.

    `window` counts the tokens that a token attends to, including itself; None means all earlier tokens.
    """
    for rows, begin, end in sequences:
        queries = zigzag.spans_within(length, begin, end)
        keys = Zigzag(source, zigzag.size).spans_within(length, begin, end)
        if window is not None and window < end - begin:
            for pair in product(queries, keys):
                yield from _tiles_of_window(rows, *pair, window)
        elif source != zigzag.rank:
            yield from _tiles_of_earlier_keys(rows, queries, keys)
        elif queries:
            yield Tile(rows, _indices(queries), _indices(keys), is_causal=True)


def _tiles_of_earlier_keys(rows: slice, queries: list[TokenSpan], keys: list[TokenSpan]) -> Iterator[Tile]:
    """Yield tiles of another rank's chunks, each of which is wholly before or wholly after ours."""

    def earlier(query: TokenSpan) -> list[TokenSpan]:
        return [key for key in keys if key.position < query.position]

    for seen, seers in groupby(queries, earlier):
        if seen:
            yield Tile(rows, _indices(list(seers)), _indices(seen))


def _tiles_of_window(rows: slice, query: TokenSpan, key: TokenSpan, window: int) -> Iterator[Tile]:
    """Yield tiles of at most `window` queries times 2 * `window` keys, which limits the mask."""
    # Every query of a tile sees at least one of its keys: the last key or itself.
    first = max(query.position, key.position)
    last = min(query.position + query.length, key.position + key.length - 1 + window)
    for begin in range(first, last, window):
        end = min(begin + window, last)
        first_key = max(key.position, begin - window + 1)
        last_key = min(key.position + key.length, end)
        is_whole = last_key <= begin + 1 and end - first_key <= window
        yield Tile(
            rows,
            _shifted(query, begin, end),
            _shifted(key, first_key, last_key),
            band=None if is_whole else Band(begin - first_key, window),
        )


def _indices(spans: list[TokenSpan]) -> slice:
    """Return the slice of spans that are contiguous on their rank."""
    return slice(spans[0].offset, spans[-1].offset + spans[-1].length)


def _shifted(span: TokenSpan, begin: int, end: int) -> slice:
    shift = span.offset - span.position
    return slice(begin + shift, end + shift)
