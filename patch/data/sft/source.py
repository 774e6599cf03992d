"""Fine-tuning sets from raw JSON: each row becomes one padded sequence; the assistant's words are learned."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase

from patch.config.data_spec import files_of
from patch.data.formats import Conversation, Text, to_conversation
from patch.data.readers import read_rows
from patch.data.rendering.chat import ChatRenderer, Span
from patch.data.samples import Sample
from patch.data.tokenizer import ensure_chat_template, padding_id
from patch.errors import DataError
from patch.logger import get_logger

_logger = get_logger(__name__)

_ROWS_AT_ONCE = 1000
_CHARACTERS_AT_ONCE = 1 << 25
"""Limits of one batch. The tokenizer encodes a batch in parallel; larger ones only need more memory."""

_LONG_TEXT = 1 << 20
"""Characters. Of a longer text only the beginning is encoded, as far as a sample needs it."""
_SPARE_TOKENS = 256
"""Tokens encoded beyond the last one needed, because cutting the text may change the tokens at its end."""


class SftSource(Dataset[Sample]):
    """Tokenized conversations in three flat arrays, 5 bytes for each token. A sample is padded when read.

    Args:
        ids: int32 [T], the tokens of all conversations, concatenated.
        learned: bool [T], whether the loss covers the token.
        ends: int64 [N], where each conversation ends in `ids`.
        length: tokens S of one sample.
        padding: the token id of padding. The loss mask excludes padding by position, so any id can be used.
    """

    is_shuffled = False

    def __init__(
        self, ids: np.ndarray, learned: np.ndarray, ends: np.ndarray, *, length: int, padding: int
    ) -> None:
        self._ids, self._learned = ids, learned
        self._offsets = np.concatenate(([0], ends))
        self._length, self.padding = length, padding
        self.sizes = np.diff(self._offsets) - 1
        """int64 [N]: tokens of each conversation, without the last one, which is only a label."""
        self.num_learned = int(learned.sum()) - int(learned[self._offsets[:-1]].sum())
        """Tokens that the loss covers. A first token is never a label."""

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, index: int) -> Sample:
        conversation, learned = self.conversation(index)
        ids = torch.from_numpy(conversation.astype(np.int64))
        count = len(ids) - 1
        tokens = torch.full((self._length,), self.padding)
        labels = torch.full((self._length,), self.padding)
        loss_mask = torch.zeros(self._length)
        tokens[:count], labels[:count] = ids[:-1], ids[1:]
        loss_mask[:count] = torch.from_numpy(learned[1:].astype(np.float32))
        return Sample(tokens, labels, loss_mask)

    def conversation(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Token ids int32 [size + 1] of a conversation, and bool [size + 1], whether each is learned."""
        part = slice(self._offsets[index], self._offsets[index + 1])
        return self._ids[part], self._learned[part]


@dataclass
class _Report:
    """Counts and positions of rows that are reported in the log."""

    rows: int = 0
    dropped: list[str] = field(default_factory=list)
    truncated: list[str] = field(default_factory=list)
    unlearned: int = 0
    """Number of truncated rows that lost learned tokens."""
    longest: int = 0
    """Tokens of the longest row that has learned tokens."""
    special: list[str] = field(default_factory=list)
    long: list[str] = field(default_factory=list)

    def log(self, path: Path, source: SftSource, learned: int, tokens: int, length: int) -> None:
        share = 100 * learned / tokens
        _logger.info(
            "%s: %d samples, %d of %d tokens learned (%.1f %%)", path, len(source), learned, tokens, share
        )
        for places, what in (
            (
                self.truncated,
                f"cut to {length} tokens, {self.unlearned} of them in an answer; the longest row has "
                f"{self.longest} (PAD_LEN)",
            ),
            (self.long, f"with a text over {_LONG_TEXT} characters, whose end was not encoded nor counted"),
            (self.dropped, "dropped: nothing to learn"),
            (self.special, "with special tokens spelled out in a message, which are encoded as such"),
        ):
            if places:
                _logger.warning(
                    "%s: %d of %d rows %s: %s", path, len(places), self.rows, what, _first(places)
                )


def load_sft(path: Path, tokenizer: PreTrainedTokenizerBase, sequence_length: int) -> SftSource:
    """Read and tokenize a set of conversations: a file, or the files of a folder or a glob.

    A conversation longer than `sequence_length` tokens is truncated at its end. A conversation with nothing
    to learn (after truncation, or because the assistant never speaks) is dropped, counted and named in the
    log. The time for each row is bounded, however long the row is.

    Args:
        path: rows (see `files_of`) with alpaca's keys or OpenAI's messages (see `to_conversation`).
        tokenizer: renders and encodes the rows; a LLaMA-3 tokenizer without a chat template gets a plain one.
        sequence_length: tokens of one sample; the labels are shifted by one token.

    Raises:
        DataError: see `read_rows`, `to_conversation`, `ChatRenderer`; the tokenizer fails; or no row has
            anything to learn.
    """
    ensure_chat_template(tokenizer)
    renderer = ChatRenderer(tokenizer)
    report = _Report()
    kept: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    for batch, rendered in renderer.render_all(_batches(path, renderer, report)):
        places = [conversation.where.removeprefix(f"{path}: ") for conversation in batch]
        report.long += [place for place, spans in zip(places, rendered, strict=True) if _has_long_text(spans)]
        kept.append(
            _pack(places, _encode(tokenizer, rendered, sequence_length, path), sequence_length, report)
        )
    ids, learned, sizes = (np.concatenate(parts) for parts in zip(*kept, strict=True))
    if not len(sizes):
        raise DataError(
            f"{path}: none of {report.rows} rows has anything to learn within {sequence_length} tokens: "
            f"{_first(report.dropped)}; expected answers that begin before PAD_LEN (--max-padding-length)"
            + (f"; the longest row with one has {report.longest} tokens" if report.longest else "")
        )
    source = SftSource(ids, learned, np.cumsum(sizes), length=sequence_length, padding=padding_id(tokenizer))
    report.log(path, source, int(learned.sum()), len(ids), sequence_length)
    return source


def _batches(path: Path, renderer: ChatRenderer, report: _Report) -> Iterator[list[Conversation]]:
    """The rows' conversations in batches of `_ROWS_AT_ONCE`, or fewer if they are long."""
    batch: list[Conversation] = []
    num_characters = 0
    for file, row in ((name, row) for name in files_of(str(path)) for row in read_rows(name)):
        conversation = to_conversation(row.value, f"{file}: {row.place}")
        if isinstance(conversation, Text):
            raise DataError(f"{conversation.where}: rows of text alone cannot be learned yet")
        report.rows += 1
        if renderer.holds_special_token(conversation.messages):
            report.special.append(f"{file}: {row.place}".removeprefix(f"{path}: "))
        batch.append(conversation)
        num_characters += sum(len(message["content"]) for message in conversation.messages)
        if len(batch) >= _ROWS_AT_ONCE or num_characters >= _CHARACTERS_AT_ONCE:
            yield batch
            batch, num_characters = [], 0
    if batch:
        yield batch


def _has_long_text(spans: list[Span]) -> bool:
    return any(len(span.text) > _LONG_TEXT for span in spans)


def _encode(
    tokenizer: PreTrainedTokenizerBase, conversations: list[list[Span]], length: int, path: Path
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Ids and learned flags of each conversation; each span is encoded on its own."""
    texts = [span.text for spans in conversations for span in spans]
    try:
        encoded = iter(_encode_texts(tokenizer, texts, length + 1 + _SPARE_TOKENS))
    except Exception as error:  # noqa: BLE001 - tokenizers raises plain Exception
        raise DataError(
            f"{path}: tokenizer {tokenizer.name_or_path} cannot encode its rows: {error!s:.500}"
        ) from error
    for spans in conversations:
        parts = [next(encoded) for _ in spans]
        ids = np.array([token for part in parts for token in part], dtype=np.int32)
        yield ids, np.repeat([span.learned for span in spans], [len(part) for part in parts]).astype(bool)


def _encode_texts(tokenizer: PreTrainedTokenizerBase, texts: list[str], needed: int) -> list[list[int]]:
    """The ids of each text; for a text over `_LONG_TEXT` characters only the first `needed` ids or more."""

    def encode(texts: list[str]) -> list[list[int]]:
        # The template has already written the special tokens. transformers refuses an empty list.
        return tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"] if texts else []

    encoded = encode([text[:_LONG_TEXT] for text in texts])
    for index, text in enumerate(texts):
        size = _LONG_TEXT
        while size < len(text) and len(encoded[index]) < needed:
            size *= 2
            encoded[index] = encode([text[:size]])[0]
    return encoded


def _pack(
    places: list[str], encoded: Iterator[tuple[np.ndarray, np.ndarray]], length: int, report: _Report
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Ids, learned flags and sizes of the conversations that have something to learn, concatenated."""
    kept_ids, kept_learned = [np.empty(0, np.int32)], [np.empty(0, bool)]
    for place, (ids, learned) in zip(places, encoded, strict=True):
        # `length` tokens take one id more: the first id is only a token, the last one only a label.
        if learned[1:].any():
            report.longest = max(report.longest, len(ids) - 1)
        if not learned[1 : length + 1].any():
            report.dropped.append(place)
            continue
        if len(ids) > length + 1:
            report.truncated.append(place)
            report.unlearned += bool(learned[length + 1 :].any())
        kept_ids.append(ids[: length + 1])
        kept_learned.append(learned[: length + 1])
    sizes = np.array([len(ids) for ids in kept_ids[1:]], dtype=np.int64)
    return np.concatenate(kept_ids), np.concatenate(kept_learned), sizes


def _first(places: list[str], count: int = 5) -> str:
    return ", ".join(places[:count]) + (", ..." if len(places) > count else "")
