"""Some rows of a set as tokens. Nothing is read or tokenized beyond them."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerBase

from patch.data.preview.pieces import TokenTexts
from patch.data.preview.shown import ShownRow, ShownToken, shown_tokens
from patch.data.readers import read_rows
from patch.data.sft.build import start_workers
from patch.data.sft.options import SftOptions
from patch.data.sft.rows import Item, TokenizedRow
from patch.errors import DataError


def first_items(files: Sequence[Path], count: int) -> list[Item]:
    """The first `count` rows of a set; fewer if the set has fewer.

    Raises:
        DataError: as when the whole set is read.
    """
    return list(islice(_items(files), count))


def numbered_items(files: Sequence[Path], number: int) -> list[Item]:
    """The row that messages call line `number` or row `number` (from 1), of each file that has one.

    Raises:
        DataError: no file has it; or as when the whole set is read.
    """
    found = [item for file in files if (item := _numbered(file, number)) is not None]
    if not found:
        names = ", ".join(map(str, files[:3])) + (", ..." if len(files) > 3 else "")
        raise DataError(f"{names}: no line {number} with a row, and no row {number} (--row)")
    return found


def shown_rows(
    items: list[Item], tokenizer: PreTrainedTokenizerBase, options: SftOptions, length: int
) -> Iterator[ShownRow]:
    """Rows of a set as tokens, and what becomes of them.

    Args:
        items: the rows.
        tokenizer: has its chat template.
        options: of the set.
        length: tokens of a sample.

    Raises:
        DataError: as when the whole set is read.
    """
    texts = TokenTexts(tokenizer)
    for _, rows in start_workers(tokenizer, options, length)([items]):
        for item, row in zip(items, rows, strict=True):
            yield ShownRow(item.where, _samples(row, texts), _remarks(row, options, length))


def _items(files: Sequence[Path]) -> Iterator[Item]:
    for file in files:
        for row in read_rows(file):
            yield Item(f"{file}: {row.place}", row.place, pickle.dumps(row.value))


def _numbered(file: Path, number: int) -> Item | None:
    """The row whose place ends in this number. Numbers ascend within a file."""
    for item in _items([file]):
        if (place := int(item.place.rsplit(" ", 1)[1])) >= number:
            return item if place == number else None
    return None


def _samples(row: TokenizedRow, texts: TokenTexts) -> list[list[ShownToken]]:
    ends = np.cumsum(row.sizes)[:-1]
    ids = np.split(np.frombuffer(row.ids, np.int32), ends)
    learned = np.split(np.frombuffer(row.learned, bool), ends)
    return [shown_tokens(texts, *sample) for sample in zip(ids, learned, strict=True) if len(sample[0])]


def _remarks(row: TokenizedRow, options: SftOptions, length: int) -> list[str]:
    remarks = []
    if row.dropped is not None:
        remarks.append(f"dropped: {row.dropped}")
    elif row.longest > length:
        lost = "learned tokens are lost" if row.loses_learned else "no learned token is lost"
        remarks.append(f"{row.longest} tokens, {length} fit: --long-samples {options.long_samples}; {lost}")
    if row.is_special:
        are = "are encoded as such" if options.render.allow_special_tokens else "are encoded as text"
        remarks.append(f"special tokens that its text spells out {are} (--allow-special-tokens)")
    return remarks
