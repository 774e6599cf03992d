"""Opens megatron-core's IndexedDataset (.bin, .idx) after checks that upstream lacks or does by `assert`.

An `assert` of a library names neither the file nor the cure, and `python -O` removes it.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import NamedTuple, NoReturn

import numpy as np
from megatron.core.datasets.indexed_dataset import DType, IndexedDataset

from patch.errors import DataError
from patch.storage.places import open_to_read

# Magic, version, code of the token type, sequences, documents. Source: indexed_dataset.py, _IndexWriter.
_HEADER = struct.Struct("<9sQBQQ")
_INTEGERS = {kind.value: DType.size(kind.value) for kind in DType if not kind.name.startswith("float")}
"""Codes of the integer dtypes of token ids -> bytes per token."""
_SEQUENCES_AT_ONCE = 1 << 22


class _Index(NamedTuple):
    """Memory-mapped .idx file, with N sequences in D documents."""

    itemsize: int
    """Bytes per token."""
    lengths: np.ndarray
    """int32 [N]: tokens of each sequence."""
    pointers: np.ndarray
    """int64 [N]: offset of each sequence in the .bin, in bytes."""
    documents: np.ndarray
    """int64 [D + 1]: the index of each document's first sequence, and N at the end."""


def open_indexed(prefix: str) -> IndexedDataset:
    """Return upstream's reader of `prefix`.bin and `prefix`.idx, after a check that both are complete.

    Token ids are not checked here; see `check_ids`.

    Raises:
        DataError: a file is missing, of another format, truncated, damaged or empty, or the two files do not
            belong together.
    """
    bin_path, idx_path = Path(f"{prefix}.bin"), Path(f"{prefix}.idx")
    for path in (bin_path, idx_path):
        if not path.is_file():
            raise DataError(
                f"{path}: no such file; expected the prefix of a .bin and an .idx as DATASET_PATH, made with "
                "llama-patch preprocess (raw JSON rows: MP_DATASET_TYPE=raw)"
            )
    index = _read_index(idx_path)
    size = bin_path.stat().st_size
    if size == 0:
        raise DataError(f"{bin_path}: is empty, expected at least two tokens; make the set again")
    tokens = _check_index(idx_path, index)
    if size != tokens * index.itemsize:
        raise DataError(
            f"{bin_path}: {size} bytes, expected {tokens * index.itemsize} by {idx_path.name}: "
            "cut short, or of another data set; copy or make both again"
        )
    if tokens < 2:
        raise DataError(f"{bin_path}: has one token, expected at least two; make the set again")
    return IndexedDataset(prefix)


def total_tokens(indexed: IndexedDataset) -> int:
    """Return the tokens of all documents in the set."""
    return int(indexed.sequence_lengths.sum(dtype=np.int64))


def check_ids(name: str, smallest: int, largest: int, vocab_size: int) -> None:
    """Refuse token ids for which the model has no embedding. Without this check such an id causes an index
    error in one layout, and silently an embedding of zeros in another layout.

    Raises:
        DataError: an id is negative or not below `vocab_size`; the message names both.
    """
    if smallest < 0 or largest >= vocab_size:
        raise DataError(
            f"{name}: has token id {smallest if smallest < 0 else largest}, the model's vocabulary has "
            f"{vocab_size} rows (--vocab-size); expected a set made with this model's tokenizer"
        )


def _read_index(path: Path) -> _Index:
    with open_to_read(path) as file:
        header = file.read(_HEADER.size)
    if len(header) < _HEADER.size:
        raise DataError(f"{path}: {len(header)} bytes, expected a header of {_HEADER.size}: cut short?")
    magic, version, code, sequences, documents = _HEADER.unpack(header)
    if magic != b"MMIDIDX\0\0" or version != 1:
        raise DataError(
            f"{path}: is not a megatron-core index, expected version 1; make the set with llama-patch "
            "preprocess"
        )
    if code not in _INTEGERS:
        raise DataError(
            f"{path}: the dtype code is {code}, expected an integer dtype "
            f"({', '.join(map(str, _INTEGERS))}); copy or make the file again"
        )
    # Each sequence has a length (4 bytes) and a pointer (8 bytes), each document 8 bytes.
    expected = _HEADER.size + 12 * sequences + 8 * documents
    if path.stat().st_size != expected:
        raise DataError(f"{path}: {path.stat().st_size} bytes, expected {expected} by its header: cut short?")
    if documents == 0:
        _refuse(path, "no documents")
    parts = np.memmap(path, np.uint8, "r", _HEADER.size)
    ends = (4 * sequences, 12 * sequences)
    lengths, pointers, starts = np.split(parts, ends)
    return _Index(_INTEGERS[code], lengths.view(np.int32), pointers.view(np.int64), starts.view(np.int64))


def _check_index(path: Path, index: _Index) -> int:
    """Refuse an index that was not written correctly. Return the number of tokens."""
    documents, sequences = index.documents, len(index.lengths)
    if documents[0] != 0 or documents[-1] != sequences:
        _refuse(path, f"documents that do not begin at 0 or end at its {sequences} sequences")
    if (documents[1:] < documents[:-1]).any():
        _refuse(path, "a document that ends before it begins")
    end = 0
    for first in range(0, sequences, _SEQUENCES_AT_ONCE):
        part = slice(first, first + _SEQUENCES_AT_ONCE)
        lengths = index.lengths[part].astype(np.int64)
        if (lengths < 0).any():
            _refuse(path, f"a sequence of {lengths.min()} tokens")
        ends = end + np.cumsum(lengths)
        if not np.array_equal(index.pointers[part], (ends - lengths) * index.itemsize):
            _refuse(path, "a sequence that does not begin where the one before it ends")
        end = int(ends[-1])
    return end


def _refuse(path: Path, what: str) -> NoReturn:
    raise DataError(f"{path}: is damaged: has {what}; copy or make it and the .bin again")
