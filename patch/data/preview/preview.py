"""Preview of a run's training data: rows as tokens and figures of each set, printed and as JSON.

The number of samples is shown if it is known before the run. For .bin/.idx it follows from the .idx. For rows
it is in the token cache, or a small set is tokenized at once.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, TextIO

import numpy as np
from rich.console import Console
from transformers import PreTrainedTokenizerBase

from patch.config.choices import RowKind
from patch.config.data_spec import DataPart, files_of, format_data, sets_of
from patch.config.schema import DataConfig, ModelConfig
from patch.data.chat_templates import ensure_chat_template
from patch.data.packing import SOURCES
from patch.data.preview.figures import Figures, figures_of_rows
from patch.data.preview.tokens import (
    ShownRow,
    ShownToken,
    TokenTexts,
    print_figures,
    print_legend,
    print_row,
    terminal,
)
from patch.data.readers.rows import read_rows
from patch.data.sft.options import user_cache
from patch.data.sft.rows import Item, TokenizedRow
from patch.data.sft.source import is_cached, load_sft, start_workers
from patch.data.tokenizer import check_vocabulary, load_tokenizer
from patch.errors import ConfigError, DataError, about
from patch.storage.names import DATA_CACHE_FOLDER
from patch.text import counted

if TYPE_CHECKING:
    from patch.data.preview.indexed import IndexedPreview

_FIELD = "train_data_path"
_FEW_LINES = 30
"""Lines of a sample that `--dry-run` shows."""
_SMALL_BYTES = 1 << 20
"""Largest set, in bytes, whose rows `--dry-run` tokenizes, in a second or two."""
_UNKNOWN = (
    "its samples are counted when it is tokenized, by the run or before it: llama-patch preview "
    "--config FILE (what --dry-run prints, in a file)"
)


@dataclass(frozen=True, slots=True)
class Preview:
    """Rows and figures of the training sets of a run."""

    data: DataConfig
    tokenizer: PreTrainedTokenizerBase
    row_kind: RowKind = "conversation"
    rows: list[ShownRow] = field(default_factory=list)
    sets: list[Figures] = field(default_factory=list)

    @property
    def parts(self) -> tuple[DataPart, ...]:
        """Training sets of the run.

        Raises:
            ConfigError: their names cannot be parsed.
        """
        return sets_of(self.data)[_FIELD]

    def show_rows(
        self, console: Console, count: int = 1, number: int | None = None, max_lines: int | None = None
    ) -> None:
        """Print rows, or documents of .bin/.idx, as tokens. No other row is read, and no file is written.

        Args:
            count: rows to print of each set.
            number: print instead this document, or this line or row of each file, counted from 1.
            max_lines: most lines of tokens to print for each sample; None prints all.
        Raises:
            DataError: a row, a file or the chat template cannot be used, or no file has this row.
        """
        for row in self._chosen(count, number):
            if not self.rows:
                print_legend(console)
            print_row(console, row, max_lines)
            self.rows.append(row)

    def show_statistics(self, console: Console) -> None:
        """Print figures of the sets. Rows are tokenized as in a run, into the run's token cache.

        Raises:
            DataError: a file or a row cannot be used, or no row has trained tokens.
        """
        length = self.data.max_padding_length
        for part in self.parts:
            figures = self._of_rows(part) if self._has_rows else self._indexed(part).figures(length)
            print_figures(console, figures)
            self.sets.append(figures)

    def check(self) -> None:
        """Refuse sets that a run would refuse although they could be shown.

        Raises:
            DataError: too large a share of a set's rows is dropped.
        """
        for part, figures in zip(self.parts, self.sets, strict=False):
            if figures.report is not None:
                figures.report.refuse_drops(part.path, self.data.max_dropped_share)

    def write(self, file: Path) -> None:
        """Write everything that was shown as JSON.

        Raises:
            ConfigError: the file cannot be written.
        """
        values = {
            "data": self.data.train_data_path,
            "tokenizer": self.tokenizer.name_or_path,
            "sets": [{"name": each.name, **each.values} for each in self.sets],
            "rows": [row.to_json() for row in self.rows],
        }
        try:
            file.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            what = f"cannot be written: {error.strerror}; expected a writable file; name another"
            raise ConfigError(f"{file} {what}") from error

    @property
    def _has_rows(self) -> bool:
        """Whether the sets hold rows, not .bin/.idx."""
        return self.data.dataset_type == "raw"

    def _indexed(self, part: DataPart) -> IndexedPreview:
        from patch.data.preview.indexed import IndexedPreview  # imports megatron-core, which rows do not need

        with about(_FIELD):
            return IndexedPreview(part, self.tokenizer)

    def known_samples(
        self, part: DataPart, model: ModelConfig, fallback_cache: Path, *, sft: bool
    ) -> int | None:
        """Return the samples of one pass over a set, as the run counts them, or None. Write no file.

        Args:
            part: one of the run's sets.
            model: the shape of the model.
            fallback_cache: the folder of the token cache if the run names none.
            sft: whether .bin/.idx holds conversations.
        """
        data, tokenizer, length = self.data, self.tokenizer, self.data.max_padding_length
        if not self._has_rows:
            # These import megatron-core, which raw rows do not need.
            if sft:
                from patch.data.pretraining.indexed_sft import load_indexed_sft

                return len(load_indexed_sft(part.path, tokenizer, model))
            from patch.data.pretraining.run_sets import PretrainOptions, train_samples

            return train_samples(part, PretrainOptions(data, model, tokenizer))
        cache = data.cache_dir or user_cache(fallback_cache)
        is_tokenized = is_cached(part.path, tokenizer, data, self.row_kind, cache)
        if not is_tokenized and sum(file.stat().st_size for file in files_of(part.path)) > _SMALL_BYTES:
            return None
        source = load_sft(
            part.path, tokenizer, length, data, self.row_kind, cache if is_tokenized else None
        )  # fmt: skip
        return len(SOURCES[self.row_kind](source, length, is_packed=data.packing))

    def _of_rows(self, part: DataPart) -> Figures:
        data, length = replace(self.data, max_dropped_share=1.0), self.data.max_padding_length
        with TemporaryDirectory() as fallback:
            cache = data.cache_dir or user_cache(Path(fallback))
            source = load_sft(part.path, self.tokenizer, length, data, self.row_kind, cache)
            return figures_of_rows(part, source, length)

    def _chosen(self, count: int, number: int | None) -> Iterator[ShownRow]:
        if not self._has_rows:
            numbers = range(1, count + 1) if number is None else [number]
            for part in self.parts:
                yield from self._indexed(part).rows(numbers)
            return
        ensure_chat_template(self.tokenizer, self.data.chat_template, self.data.chat_template_kwargs)
        data, texts = replace(self.data, data_workers=1), TokenTexts(self.tokenizer)
        for part in self.parts:
            with about(_FIELD):
                files = files_of(part.path)
            items = list(islice(_items(files), count)) if number is None else _numbered(files, number)
            for _, rows in start_workers(self.tokenizer, data, self.row_kind)([items]):
                for item, row in zip(items, rows, strict=True):
                    remarks = _remarks(row, data, self.row_kind)
                    is_pair = self.row_kind == "pair"
                    yield ShownRow(item.where, _samples(row, texts), remarks, is_pair, has_label=True)


def _items(files: Sequence[Path]) -> Iterator[Item]:
    for file in files:
        for row in read_rows(file):
            yield Item(f"{file}: {row.place}", row.place, pickle.dumps(row.value))


def _numbered(files: Sequence[Path], number: int) -> list[Item]:
    """Return the row that messages call line or row `number` (from 1), of each file that has it."""
    found = []
    for file in files:
        # A place ends with a number, and the numbers ascend within a file.
        placed = ((int(item.place.rsplit(" ", 1)[1]), item) for item in _items([file]))
        place, item = next((pair for pair in placed if pair[0] >= number), (0, None))
        if item is not None and place == number:
            found.append(item)
    if not found:
        names = ", ".join(map(str, files[:3])) + (", ..." if len(files) > 3 else "")
        raise DataError(f"{names}: no line {number} with a row, and no row {number} (--row)")
    return found


def _samples(row: TokenizedRow, texts: TokenTexts) -> list[list[ShownToken]]:
    ends = np.cumsum(row.sizes)[:-1]
    ids = np.split(np.frombuffer(row.ids, np.int32), ends)
    learned = [each & (np.arange(len(each)) > 0) for each in np.split(np.frombuffer(row.learned, bool), ends)]
    return [texts.shown(*sample) for sample in zip(ids, learned, strict=True) if len(sample[0])]


def _remarks(row: TokenizedRow, data: DataConfig, row_kind: RowKind) -> list[str]:
    remarks, length = [], data.max_padding_length
    if row_kind == "unpaired" and row.sizes:
        remarks.append("desirable" if row.learned[0] else "undesirable")
    if row.dropped is not None:
        remarks.append(f"dropped: {row.dropped}")
    elif row.longest > length:
        lost = "learned tokens are lost" if row.loses_learned else "no learned token is lost"
        remarks.append(f"{row.longest} tokens, {length} fit: --long-samples {data.long_samples}; {lost}")
    if row.is_special:
        are = "are encoded as such" if data.allow_special_tokens else "are encoded as text"
        remarks.append(f"special tokens that its text spells out {are} (--allow-special-tokens)")
    return remarks


def show_data(
    data: DataConfig, model: ModelConfig, tokenizer: str | None, *, sft: bool, output: Path, stream: TextIO,
    row_kind: RowKind = "conversation",
) -> int | None:
    """Show the first row or document that a run reads, and the samples of its training sets. Write no file.

    Returns:
        Samples of one pass over all training sets, or None if they are unknown before tokenization.
    Raises:
        DataError: the tokenizer, the row, or a set whose samples can be counted cannot be used.
    """
    loaded = load_tokenizer(tokenizer)
    check_vocabulary(loaded, model.vocab_size)
    whole, known = Preview(data, loaded, row_kind), []
    first = Preview(replace(data, train_data_path=format_data(whole.parts[:1])), loaded, row_kind)
    first.show_rows(terminal(stream), max_lines=_FEW_LINES)
    for part in whole.parts:
        with about(_FIELD):
            samples = whole.known_samples(part, model, output / DATA_CACHE_FOLDER, sft=sft)
        packs = " (packs)" if data.packing and data.dataset_type == "raw" else ""
        words = _UNKNOWN if samples is None else f"{counted(samples, 'sample')}{packs} in one epoch"
        stream.write(f"data        {part.path}: {words}\n")
        known.append(samples)
    return None if None in known else sum(samples for samples in known if samples is not None)
