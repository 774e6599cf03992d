"""Preprocesses a pre-training set: writes the texts of rows as megatron-core's .bin and .idx.

The files have the bytes that Megatron-LM's tools/preprocess_data.py writes with the same tokenizer. An empty
text is a document without a sequence, and a list of texts is one document of several sequences. There is one
difference: a document that ends with the end-of-text token gets no second one.
"""

from __future__ import annotations

import os
import time
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from itertools import chain, islice
from operator import add
from pathlib import Path
from typing import NamedTuple

import numpy as np
from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder
from transformers import PreTrainedTokenizerBase

import patch
from patch.data.formats.keys import missing_keys
from patch.data.pretraining.provenance import Provenance, path_of, vocabulary_hash
from patch.data.readers.rows import Row, SetReader
from patch.data.rendering.bounded_process import BoundedMap
from patch.data.tokenizer import special_tokens, vocabulary_size
from patch.errors import DataError
from patch.logger import get_logger
from patch.progress import shown_progress
from patch.storage.atomic import publish_file

_logger = get_logger(__name__)

Document = list[str]
"""Sentences of a document, which Megatron-LM's index lists one by one. Most documents are one text."""
_ROWS_AT_ONCE = 1000
_CHARACTERS_AT_ONCE = 1 << 20


class WrittenSet(NamedTuple):
    """Counts of the files written for one key."""

    documents: int = 0
    empty: int = 0
    """Documents whose text is empty."""
    tokens: int = 0
    with_special: int = 0
    """Documents that spell out a special token."""


def write_indexed(
    files: Sequence[Path],
    tokenizer: PreTrainedTokenizerBase,
    outputs: Mapping[str, str],
    *,
    append_eod: bool,
    workers: int = 1,
    splits_text: bool = False,
) -> dict[str, WrittenSet]:
    """Write a .bin, an .idx and a .meta.json for each key, with one document for each row.

    An old .idx is removed first, and the new .idx appears last. After an interruption, no .bin therefore has
    the .idx of another .bin. No begin-of-text token is added. A special token that a text spells out becomes
    that token, as in Megatron-LM; such documents are counted.

    Args:
        outputs: for each key of a row, the path of its files without their endings.
        append_eod: end each document with the tokenizer's end-of-text token.
        splits_text: blank lines separate the documents of .txt files.
    Raises:
        DataError: see `read_rows`; a row lacks a key; the tokenizer has no end-of-text token; all texts under
            a key are empty; or the files cannot be written.
    """
    eod = tokenizer.eos_token_id if append_eod else None
    if append_eod and eod is None:
        raise DataError(
            f"tokenizer: {tokenizer.name_or_path} has no eos token to end documents with; "
            "give one that has, or --no-append-eod"
        )
    encoder = Encoder(tokenizer, eod)
    sets: dict[str, _Set] = {}
    try:
        with ExitStack() as cleanup:
            for key, prefix in outputs.items():
                sets[key] = _Set(key, prefix, encoder)
                cleanup.callback(sets[key].discard)
            reader, began = document_reader(files, list(outputs), splits_text=splits_text), time.monotonic()
            show = cleanup.enter_context(shown_progress("tokenizing", 1))
            encoded = encode_in_order(reader.batches(), encoder, workers)
            for batches in cleanup.enter_context(closing(encoded)):
                for each, batch in zip(sets.values(), batches, strict=True):
                    each.add(batch)
                tokens = sum(each.written.tokens for each in sets.values())
                rate = tokens / (time.monotonic() - began)
                documents = max(each.written.documents for each in sets.values())
                show(reader.share, f"{documents} documents, {tokens} tokens, {rate:.0f} tokens/s")
            for each in sets.values():
                if not each.written.tokens:
                    names = ", ".join(map(str, files[:3])) + (", ..." if len(files) > 3 else "")
                    raise DataError(f"{names}: no row has a text under {each.key} (--json-keys)")
            for each in sets.values():
                each.publish(tokenizer, eod)
    except OSError as error:
        names = ", ".join(outputs.values())
        raise DataError(f"{names}: cannot be written: {error.strerror} (--output-prefix)") from error
    return {key: each.written for key, each in sets.items()}


def refuse_existing(prefixes: Iterable[str]) -> None:
    """Refuse to overwrite a set, which may be the work of hours.

    Raises:
        DataError: a .bin or .idx exists.
    """
    files = [f"{prefix}{ending}" for prefix in prefixes for ending in (".bin", ".idx")]
    if existing := [file for file in files if os.path.lexists(file)]:
        raise DataError(
            f"--output-prefix: {', '.join(existing)} exist already, expected a new name: remove these files, "
            "or give another --output-prefix"
        )


class _Set:
    """Files of one key while they are written, under a temporary name."""

    def __init__(self, key: str, prefix: str, encoder: Encoder) -> None:
        self.key, self._prefix = key, prefix
        self._partial = f"{prefix}.partial"
        Path(prefix).parent.mkdir(parents=True, exist_ok=True)
        self._builder = IndexedDatasetBuilder(f"{self._partial}.bin", dtype=encoder.dtype)
        self.written = WrittenSet()

    def add(self, batch: EncodedBatch) -> None:
        start = 0
        for lengths in batch.lengths:
            end = start + sum(lengths)
            self._builder.add_document(batch.ids[start:end], lengths)
            start = end
        counts = (len(batch.lengths), batch.lengths.count([]), len(batch.ids), batch.with_special)
        self.written = WrittenSet(*map(add, self.written, counts))

    def publish(self, tokenizer: PreTrainedTokenizerBase, eod: int | None) -> None:
        self._builder.finalize(f"{self._partial}.idx")
        Path(f"{self._prefix}.idx").unlink(missing_ok=True)
        path_of(self._prefix).unlink(missing_ok=True)
        publish_file(Path(f"{self._partial}.bin"), Path(f"{self._prefix}.bin"))
        size = vocabulary_size(tokenizer)
        documents, empty, tokens, with_special = self.written
        Provenance(
            tokenizer=tokenizer.name_or_path,
            vocabulary_size=size,
            vocabulary_sha256=vocabulary_hash(tokenizer, size),
            eod=eod,
            json_key=self.key,
            documents=documents,
            tokens=tokens,
            made_by=f"llama-megatron-patch {patch.__version__}",
        ).write(self._prefix)
        publish_file(Path(f"{self._partial}.idx"), Path(f"{self._prefix}.idx"))
        _logger.info(
            "%s: %d documents, %d of them empty, %d tokens", self._prefix, documents, empty, tokens
        )
        if with_special:
            _logger.warning(
                "%s: %d documents spell out special tokens in their text, which have become these tokens, as "
                "in Megatron-LM",
                self._prefix, with_special,
            )  # fmt: skip

    def discard(self) -> None:
        with suppress(OSError):  # data that it could not write is discarded
            self._builder.data_file.close()
        for suffix in (".bin", ".idx"):
            Path(self._partial + suffix).unlink(missing_ok=True)


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
    killed = DataError(
        f"one of {workers} worker processes was killed, perhaps because memory ran out; "
        "expected enough memory for all; lower --workers"
    )
    pool = BoundedMap(encoder, workers, bounded=False, error=lambda ended: killed)
    for _, (encoded,) in pool([batch] for batch in batches):
        yield encoded
