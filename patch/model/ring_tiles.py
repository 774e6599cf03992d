"""Which keys of a passing piece this rank's queries see: the tiles that ring attention computes. No tensors.

The keys and values of a rank are a piece. A tile is a rectangle of queries and keys for one call of an
attention kernel. Without windows a sequence has at most one tile a piece: zigzag leaves it either the causal
triangle (the rank's own piece), all queries times the early chunk (a piece of an earlier rank), or the late
queries times all keys (of a later one). Tokens of a packed sequence are neighbours on each rank, so the same
holds for each of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby, product
from typing import NamedTuple

from patch.distributed.context_group import TokenSpan, Zigzag


class PlacedSequence(NamedTuple):
    """One sequence of a micro-batch."""

    rows: slice
    """The rows that have it; several if each row is one sequence."""
    begin: int
    """Its first position in the row."""
    end: int
    """The position after its last one."""


class Band(NamedTuple):
    """Which of a tile's keys a query sees: those at most `window` - 1 positions before it, and itself."""

    offset: int
    """Position of the tile's first query less that of its first key."""
    window: int


class Tile(NamedTuple):
    """Queries and keys for one call of a kernel, by their places on the rank and in the piece."""

    rows: slice
    queries: slice
    keys: slice
    is_causal: bool = False
    """Query i sees keys 0 to i; else all queries see all keys, or those in the band."""
    band: Band | None = None


def tiles_of_piece(
    sequences: Sequence[PlacedSequence], zigzag: Zigzag, source: int, length: int, window: int | None
) -> Iterator[Tile]:
    """The tiles of one piece.

    Args:
        sequences: of the micro-batch.
        zigzag: this rank's part.
        source: the rank whose piece it is.
        length: S, tokens of a whole row.
        window: how many tokens a token attends to, including itself; None: all before it.
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
    """Chunks of another rank are wholly before or wholly after ours."""

    def earlier(query: TokenSpan) -> list[TokenSpan]:
        return [key for key in keys if key.position < query.position]

    for seen, seers in groupby(queries, earlier):
        if seen:
            yield Tile(rows, _indices(list(seers)), _indices(seen))


def _tiles_of_window(rows: slice, query: TokenSpan, key: TokenSpan, window: int) -> Iterator[Tile]:
    """Tiles of at most `window` queries times 2 * `window` keys, so that no mask is larger.

    Every query of a tile sees at least one of its keys: the last one or itself.
    """
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
    """Spans that follow each other on their rank."""
    return slice(spans[0].offset, spans[-1].offset + spans[-1].length)


def _shifted(span: TokenSpan, begin: int, end: int) -> slice:
    """The indices of the positions from `begin` to before `end`, which are within the span."""
    shift = span.offset - span.position
    return slice(begin + shift, end + shift)
