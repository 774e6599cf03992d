"""Encodes rows as documents, in this process or in several, in the order of the rows."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
from megatron.core.datasets.indexed_dataset import DType
from transformers import PreTrainedTokenizerBase

from patch.data.formats.keys import missing_keys
from patch.data.readers.rows import Row, SetReader
from patch.data.rendering.bounded_process import BoundedMap, ChildEndedError
from patch.data.tokenizer import special_tokens, vocabulary_size
from patch.errors import DataError

Document = list[str]
"""Sentences of a document, which Megatron-LM's index lists one by one. Most documents are one text."""
_ROWS_AT_ONCE = 1000
_CHARACTERS_AT_ONCE = 1 << 20


def document_reader(
    files: Sequence[Path], keys: Sequence[str], *, splits_text: bool = False
) -> SetReader[tuple[Document, ...]]:
    """Return a reader of the documents of all rows, one per key, in batches of about equal work."""

    def documents(file: Path, row: Row) -> tuple[tuple[Document, ...], int]:
        found = tuple(_document(row, key, f"{file}: {row.place}") for key in keys)
        return found, sum(len(sentence) for document in found for sentence in document)

    return SetReader(files, documents, _ROWS_AT_ONCE, _CHARACTERS_AT_ONCE, splits_text)


def _document(row: Row, key: str, where: str) -> Document:
    if key not in row.value:
        raise DataError(f"{where}: {missing_keys(row.value, f'{key} (--json-keys)', [key])}")
    text = row.value[key]
    sentences = text if isinstance(text, list) else [text]
    if not all(isinstance(sentence, str) for sentence in sentences):
        raise DataError(f"{where}: {key}: got {text!r:.60}, expected text, or a list of texts")
    return sentences


class EncodedBatch(NamedTuple):
    """Documents of some rows, for one key."""

    ids: np.ndarray
    """Ids of all documents, concatenated, in the dtype of the .bin."""
    lengths: list[list[int]]
    """Ids of each sentence that has any, for each document; [] for an empty text."""
    with_special: int
    """Documents that spell out a special token, which has become that token."""


class Encoder:
    """Encodes documents as Megatron-LM does: no begin-of-text token, and `eod` after non-empty documents."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, eod: int | None) -> None:
        self._tokenizer = tokenizer
        self._eod = [] if eod is None else [eod]
        self.dtype: type[np.number] = DType.optimal_dtype(vocabulary_size(tokenizer))
        """Dtype of an id in the .bin."""
        special = {*special_tokens(tokenizer)} - {tokenizer.unk_token}
        self._special = tokenizer.convert_tokens_to_ids(sorted(special))

    def __call__(self, rows: list[tuple[Document, ...]]) -> list[EncodedBatch]:
        """Encode rows with one document per key. Return one batch per key."""
        return [self._encode(documents) for documents in zip(*rows, strict=True)]

    def _encode(self, documents: Iterable[Document]) -> EncodedBatch:
        sentences = list(chain.from_iterable(documents))
        encoded = iter(
            self._tokenizer(
                sentences,
                add_special_tokens=False,
                return_attention_mask=False,
                return_token_type_ids=False,
                verbose=False,
            )["input_ids"]
            if sentences
            else ()
        )
        parts, lengths, with_special = [], [], 0
        for document in documents:
            filled = [ids for ids in islice(encoded, len(document)) if ids]
            with_special += any(np.isin(ids, self._special).any() for ids in filled)
            if filled and filled[-1][-1:] != self._eod:
                filled[-1] = filled[-1] + self._eod
            lengths.append([len(ids) for ids in filled])
            parts += filled
        return EncodedBatch(np.array(list(chain.from_iterable(parts)), self.dtype), lengths, with_special)


def encode_in_order(
    batches: Iterator[list[tuple[Document, ...]]], encoder: Encoder, workers: int
) -> Generator[list[EncodedBatch], None, None]:
    """Yield the results of `encoder` for each batch of rows, in order.

    Args:
        batches: rows; read as far ahead as the workers need.
        workers: forked processes; with 1, this process does the work.
    Raises:
        DataError: reading `batches` raised it; or a worker was killed, for example for memory.
        TrainingError: the processes cannot be started.
    """
    if workers == 1:
        yield from map(encoder, batches)
        return
    pool = BoundedMap(encoder, workers, bounded=False)
    try:
        for _, (encoded,) in pool([batch] for batch in batches):
            yield encoded
    except ChildEndedError as error:
        raise DataError(
            f"one of {workers} worker processes was killed, perhaps because memory ran out; "
            "expected enough memory for all; lower --workers"
        ) from error
