"""Tokenizes the files of a set, by several processes, in the order of the rows, in bounded memory."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from patch.data.readers import Row, SetReader, shown_progress
from patch.data.rendering.bounded_process import BoundedMap, ChildEndedError
from patch.data.sft.cache import TokenWriter
from patch.data.sft.options import SftOptions
from patch.data.sft.report import SetReport
from patch.data.sft.rows import Item, RowTokenizer, TokenizedRow

_ROWS_AT_ONCE = 256
_BYTES_AT_ONCE = 1 << 18
"""Limits of one batch. Each worker has one, and a few more wait, so they also limit the memory."""

Work = Callable[[Iterable[list[Item]]], Iterator[tuple[list[Item], list[TokenizedRow]]]]
"""For batches of rows: each batch and what became of its rows, in order. It raises a DataError for a row of
no known format, or one that cannot be rendered or encoded."""


def tokenize(
    files: Sequence[Path],
    name: str,
    tokenizer: PreTrainedTokenizerBase,
    options: SftOptions,
    length: int,
    writer: TokenWriter,
) -> SetReport:
    """Tokenize the rows of files, write the samples, and report.

    Args:
        files: the files of the set.
        name: of the set, for the progress and the report.
        tokenizer: renders and encodes the rows.
        options: how rows become samples, and how many processes share the work.
        length: tokens of a sample.
        writer: gets the samples.

    Raises:
        DataError: a row cannot be read, is of no known format, or cannot be rendered or encoded.
        TrainingError: the processes cannot be started.
        OSError: the samples cannot be written.
    """
    report = SetReport(
        length,
        options.long_samples,
        options.render.allow_special_tokens,
        unseen_columns=dict(options.format.columns),
    )
    names = dict(zip(files, names_of(files), strict=True))

    def item(file: Path, row: Row) -> tuple[Item, int]:
        value = pickle.dumps(row.value)
        return Item(f"{file}: {row.place}", names[file] + row.place, value), len(value)

    reader = SetReader(files, item, _ROWS_AT_ONCE, _BYTES_AT_ONCE)
    tokenized = start_workers(tokenizer, options, length)
    with shown_progress(f"tokenizing {name}", reader) as show:
        for items, rows in tokenized(reader.batches()):
            for item_of_row, row in zip(items, rows, strict=True):
                report.add(item_of_row.place, row)
            writer.write(
                b"".join(row.ids for row in rows),
                b"".join(row.learned for row in rows),
                [size for row in rows for size in row.sizes],
            )
            writer.share = reader.share
            show(f"{report.rows} rows")
    return report


def start_workers(tokenizer: PreTrainedTokenizerBase, options: SftOptions, length: int) -> Work:
    """Start the processes that tokenize rows; they end with the function that is returned.

    Args:
        tokenizer: renders and encodes the rows.
        options: how rows become samples, and how many processes share the work.
        length: tokens of a sample.

    Raises:
        TrainingError: the processes cannot be started.
    """
    work = RowTokenizer(tokenizer, options, length)
    rows: BoundedMap[Item, TokenizedRow] = BoundedMap(work, options.num_workers)

    def tokenized(batches: Iterable[list[Item]]) -> Iterator[tuple[list[Item], list[TokenizedRow]]]:
        try:
            yield from rows(batches)
        except ChildEndedError as error:
            raise work.blame(error) from error

    return tokenized


def names_of(files: Sequence[Path]) -> list[str]:
    """For each file of a set, what stands before "line 7" in the report: nothing if there is one file."""
    if len(files) == 1:
        return [""]
    folder = Path(os.path.commonpath([file.parent for file in files]))
    return [f"{file.relative_to(folder)}: " for file in files]
