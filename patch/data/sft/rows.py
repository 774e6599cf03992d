"""Tokenizes one row: its format, its text, their ids, and samples that are not too long.

All of it runs in worker processes with bounded time and memory (see rendering/bounded_process.py).
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerBase

from patch.config.choices import RowKind
from patch.config.data_spec import parse_columns
from patch.config.schema import DataConfig
from patch.data.formats.keys import columns_in
from patch.data.formats.rows import read_row
from patch.data.formats.turns import Conversation, Text
from patch.data.rendering.chat import ChatRenderer
from patch.data.rendering.spans import Span, SpanEncoder
from patch.data.sft.truncation import Headers, Tokens, cut
from patch.errors import DataError

LONG_TEXT = 1 << 20
"""Characters. A longer sample that is truncated or dropped is encoded only as far as needed."""
_SPARE_TOKENS = 256
"""Tokens encoded beyond the needed ones, because truncating a text may change the tokens at its end."""
_NEAR = 4096
"""Characters before the end of a piece in which a blank is searched."""


class Item(NamedTuple):
    """Row as a worker receives it."""

    where: str
    place: str
    """Place in the report of the data set, without the name of the data set."""
    value: bytes
    """The pickled row."""


class TokenizedRow(NamedTuple):
    """Samples of a row, concatenated."""

    ids: bytes
    """Bytes of int32 [T]. Bytes go to another process faster than an array."""
    learned: bytes
    """Bytes of bool [T]. The first token of each sample is never trained: it has an unpaired row's label."""
    sizes: list[int]
    """Ids of each sample; the sum is T."""
    num_learned: int
    longest: int
    """Tokens of the row's longest sample before truncation, without the last token; 0 if no token is trained.
    A pair counts with both samples."""
    dropped: str | None
    """Reason why the row gives no sample, or None."""
    loses_learned: bool
    """Whether some trained token is in no sample."""
    is_special: bool
    """Whether its text spells out a special token."""
    is_partly_encoded: bool
    columns: frozenset[str]
    """Names in `--columns` whose column the row has."""


class RowTokenizer:
    """Makes samples of at most `data.max_padding_length` tokens from rows."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, data: DataConfig, row_kind: RowKind) -> None:
        self.renderer = ChatRenderer(tokenizer, data)
        self._encoder = SpanEncoder(tokenizer, data.allow_special_tokens)
        self._name = tokenizer.name_or_path
        self._begin_of_text = tokenizer.bos_token_id
        self._end_of_text = tokenizer.eos_token or ""
        self._data, self._length = data, data.max_padding_length
        self._kind = row_kind

    def __call__(self, item: Item) -> TokenizedRow:
        """Return the samples of one row.

        Raises:
            DataError: the row has no known format, or cannot be rendered or encoded.
        """
        value = pickle.loads(item.value)
        rows, label = read_row(self._kind, value, item.where, self._data)
        is_special, is_partly_encoded = any(map(self.renderer.holds_special_token, rows)), False
        whole: list[Tokens] = []
        samples = [spans for row in rows for spans in self.renderer.samples(row)]
        for spans in samples:
            tokens, is_whole = self._encode(spans, item.where)
            is_partly_encoded |= not is_whole
            whole.append(tokens)
        num_learned = sum(map(_num_learned, whole))
        sizes = [len(tokens.ids) - 1 for tokens in whole if _num_learned(tokens)]
        if self._kind != "conversation" and len(whole) > len(rows):
            raise DataError(
                f"{rows[0].where}: the chat template writes earlier answers differently after later turns, "
                "expected one sequence per answer; set --train-on last",
                field="train_on",
            )
        if self._kind == "pair":
            longest = sum(sizes) if len(sizes) == len(rows) else 0
            kept = self._cut_pair(whole, rows) if longest else []
        else:
            longest = max(sizes, default=0)
            kept = [part for tokens in whole for part in self._cut(tokens, rows[0], self._length)]
            kept = [tokens for tokens in kept if _num_learned(tokens)]
        num_kept = sum(map(_num_learned, kept))
        for tokens in kept:
            tokens.learned[0] = label
        return TokenizedRow(
            b"".join(tokens.ids.tobytes() for tokens in kept),
            b"".join(tokens.learned.tobytes() for tokens in kept),
            [len(tokens.ids) for tokens in kept],
            num_kept,
            longest,
            None if kept else self._why_dropped(longest),
            num_kept < num_learned,
            is_special,
            is_partly_encoded,
            columns_in(value, parse_columns(self._data.columns)),
        )

    def _cut(self, tokens: Tokens, row: Conversation | Text, length: int) -> list[Tokens]:
        if len(tokens.ids) <= length + 1:
            return [tokens]
        headers = Headers() if isinstance(row, Text) else self._headers
        return cut(tokens, length, self._data.long_samples, self._begin_of_text, headers)

    def _cut_pair(self, whole: list[Tokens], rows: Sequence[Conversation | Text]) -> list[Tokens]:
        """Return both sequences if they fit into one sample and both have trained tokens, else none. If they
        are too long, truncate both to half a sample, or one to the room that the shorter one leaves."""
        sizes = [len(tokens.ids) - 1 for tokens in whole]
        if sum(sizes) > self._length:
            most = max(self._length - min(sizes), self._length // 2)
            parts = [self._cut(tokens, row, most) for tokens, row in zip(whole, rows, strict=True)]
            whole = [part for of_one in parts for part in of_one]
            if self._data.long_samples == "drop":
                return []
        return whole if all(map(_num_learned, whole)) else []

    @cached_property
    def _headers(self) -> Headers:
        before = Span(self._end_of_text, False)
        ids = self._encoder.encode([[before, Span(header, False)] for header in self.renderer.headers])
        return Headers(*(len(of_header) for _, of_header in ids))

    def _why_dropped(self, longest: int) -> str:
        if not longest:
            return "nothing to learn" + (" in an answer of the pair" if self._kind == "pair" else "")
        if self._data.long_samples == "drop":
            return f"over {self._length} tokens"
        return f"nothing to learn in the {self._length} tokens that are kept"

    def _encode(self, spans: list[Span], where: str) -> tuple[Tokens, bool]:
        """Return the tokens of a sample, and whether they are complete."""
        try:
            ids, is_whole = self._ids(spans)
        except Exception as error:  # noqa: BLE001 - tokenizers raises plain Exception
            reason = str(error) or type(error).__name__
            raise DataError(f"{where}: tokenizer {self._name} cannot encode it: {reason:.500}") from error
        tokens = np.array([token for part in ids for token in part], np.int32)
        learned = np.zeros(len(tokens), bool)
        turns = [0]
        begin, was_learned = 0, False
        for span, part in zip(spans, ids, strict=True):
            if span.begins_user_turn or (was_learned and not span.learned):
                turns.append(begin)
            end = begin + len(part)
            learned[begin:end] = was_learned = span.learned
            begin = end
        return Tokens(tokens, learned, turns), is_whole

    def _ids(self, spans: list[Span]) -> tuple[list[list[int]], bool]:
        """Return the ids of each span of a sample, and whether they are complete."""
        total = sum(len(span.text) for span in spans)
        if total <= LONG_TEXT:
            return self._encoder.encode([spans])[0], True
        if self._data.long_samples == "split":
            return self._ids_of_pieces(spans), True
        size = LONG_TEXT
        while size < total:
            if self._data.long_samples == "cut-begin":
                ids = self._ids_at_end(spans, size)
            else:
                ids = self._encoder.encode([_clipped(spans, size)])[0]
            if sum(map(len, ids)) >= self._length + 1 + _SPARE_TOKENS:
                return ids + [[]] * (len(spans) - len(ids)), False
            size *= 2
        return self._encoder.encode([spans])[0], True

    def _ids_at_end(self, spans: list[Span], size: int) -> list[list[int]]:
        """Return the first id, which may be begin-of-text, and the ids of the last `size` characters."""
        end = _clipped(spans, size, at_end=True)
        skipped = len(spans) - len(end)
        ids = self._encoder.encode([end])[0]
        head = self._encoder.encode([_clipped(spans, _SPARE_TOKENS)])[0][0][:1]
        at_end: list[list[int]] = [[]] * skipped + [ids[0][_SPARE_TOKENS:], *ids[1:]]
        return [head + at_end[0], *at_end[1:]]

    def _ids_of_pieces(self, spans: list[Span]) -> list[list[int]]:
        """Return all ids of long spans, encoded in pieces, so that no piece needs much memory and time."""
        pieces = [_pieces(span) for span in spans]
        encoded = iter(self._encoder.encode([[piece for of_span in pieces for piece in of_span]])[0])
        return [[token for _ in of_span for token in next(encoded)] for of_span in pieces]


def _num_learned(tokens: Tokens) -> int:
    return int(np.count_nonzero(tokens.learned[1:]))


def _clipped(spans: list[Span], size: int, *, at_end: bool = False) -> list[Span]:
    taken: list[Span] = []
    for span in reversed(spans) if at_end else spans:
        taken.append(span._replace(text=span.text[-size:] if at_end else span.text[:size]))
        size -= len(span.text)
        if size <= 0:
            break
    return taken[::-1] if at_end else taken


def _pieces(span: Span) -> list[Span]:
    """Split a long span into pieces that end at a blank, if there is one near."""
    pieces: list[Span] = []
    begin = 0
    while len(span.text) - begin > LONG_TEXT:
        most = begin + LONG_TEXT
        blank = max(span.text.rfind(mark, most - _NEAR, most) for mark in ("\n", " "))
        end = most if blank < 0 else blank
        pieces.append(span._replace(text=span.text[begin:end], begins_text=span.begins_text and not pieces))
        begin = end
    return [*pieces, span._replace(text=span.text[begin:], begins_text=span.begins_text and not pieces)]
