"""Preprocesses a pre-training set: writes the texts of JSON rows as megatron-core's .bin and .idx."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np
from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder
from transformers import PreTrainedTokenizerBase

from patch.data.formats import missing_keys
from patch.data.readers.json_rows import read_rows
from patch.data.tokenizer import vocabulary_size
from patch.errors import DataError
from patch.logger import get_logger
from patch.progress import LineTimer
from patch.storage.atomic import publish_file

_logger = get_logger(__name__)

_ROWS_AT_ONCE = 1000


def write_indexed(
    source: Path, tokenizer: PreTrainedTokenizerBase, prefix: str, *, json_key: str, append_eod: bool
) -> int:
    """Write `prefix`.bin and `prefix`.idx, one document for each row.

    The files appear only when they are complete. No begin-of-text token is added. Rows with an empty text are
    left out and counted.

    Args:
        source: a JSON list or a JSONL file.
        tokenizer: encodes the texts.
        prefix: path of the two files without their endings.
        json_key: the key of the text in each row.
        append_eod: end each document with the tokenizer's end-of-text token.
    Returns:
        The number of tokens written.
    Raises:
        DataError: see `read_rows`; a row lacks the key; the tokenizer has no end-of-text token; all texts are
            empty; or the files cannot be written.
    """
    eod = [tokenizer.eos_token_id] if append_eod else []
    if None in eod:
        raise DataError(
            f"tokenizer: {tokenizer.name_or_path} has no eos token to end documents with; "
            "give one that has, or --no-append-eod"
        )
    try:
        Path(prefix).parent.mkdir(parents=True, exist_ok=True)
        return _publish(read_texts(source, json_key), tokenizer, prefix, eod)
    except OSError as error:
        raise DataError(f"{prefix}: cannot be written: {error.strerror} (--output-prefix)") from error


def read_texts(source: Path, json_key: str) -> Iterator[str]:
    """The text of every row.

    Raises:
        DataError: see `read_rows`; a row lacks `json_key` (the message has the nearest key), or it is not a
            text; or all texts are empty.
    """
    empty = True
    for row in read_rows(source):
        where = f"{source}: {row.place}"
        if json_key not in row.value:
            raise DataError(f"{where}: {missing_keys(row.value, f'{json_key} (--json-key)', [json_key])}")
        text = row.value[json_key]
        if not isinstance(text, str):
            raise DataError(f"{where}: {json_key}: got {text!r:.60}, expected text")
        empty = empty and not text
        yield text
    if empty:
        raise DataError(f"{source}: no row has a text under {json_key} (--json-key)")


def _publish(texts: Iterator[str], tokenizer: PreTrainedTokenizerBase, prefix: str, eod: list[int]) -> int:
    """Write under a temporary name, then rename, so that a file with the final name is always complete."""
    partial = f"{prefix}.partial"
    try:
        tokens = _write(texts, tokenizer, partial, eod)
        for suffix in (".bin", ".idx"):
            publish_file(Path(partial + suffix), Path(prefix + suffix))
        return tokens
    finally:
        for suffix in (".bin", ".idx"):
            Path(partial + suffix).unlink(missing_ok=True)


def _write(texts: Iterator[str], tokenizer: PreTrainedTokenizerBase, prefix: str, eod: list[int]) -> int:
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=DType.optimal_dtype(vocabulary_size(tokenizer)))
    documents = empty = tokens = 0
    timer = LineTimer()
    while batch := list(islice(texts, _ROWS_AT_ONCE)):
        filled = [text for text in batch if text]
        empty += len(batch) - len(filled)
        encoded = tokenizer(filled, add_special_tokens=False, verbose=False)["input_ids"] if filled else []
        for ids in encoded:
            document = np.array(ids + eod)
            builder.add_document(document, [len(document)])
            tokens += len(document)
        documents += len(filled)
        if timer.is_due():
            rate = tokens / timer.elapsed_s()
            _logger.info("%d documents, %d tokens, %.0f tokens/s", documents, tokens, rate)
    builder.finalize(f"{prefix}.idx")
    _logger.info("%d documents, %d tokens; %d rows with an empty text left out", documents, tokens, empty)
    return tokens
