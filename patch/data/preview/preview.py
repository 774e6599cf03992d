"""What a user sees of a run's training data: rows as tokens and figures of each set, printed and as files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TextIO

from rich.console import Console
from transformers import PreTrainedTokenizerBase

from patch.config.data_spec import DataPart, files_of, format_data, parse_data
from patch.config.schema import DataConfig
from patch.data.chat_templates import ensure_chat_template
from patch.data.preview.page import page
from patch.data.preview.plot import write_png
from patch.data.preview.rows import first_items, numbered_items, shown_rows
from patch.data.preview.shown import ShownRow
from patch.data.preview.statistics import SetStatistics
from patch.data.preview.terminal import print_legend, print_row, print_statistics, terminal
from patch.data.sft.options import sft_options
from patch.data.sft.source import load_sft
from patch.data.tokenizer import check_vocabulary, load_tokenizer
from patch.errors import ConfigError

_FIELD = "train_data_path"
_FEW_LINES = 30
"""What `--dry-run` shows of a sample."""


@dataclass(frozen=True, slots=True)
class Preview:
    """Rows and figures of the training sets of a run."""

    data: DataConfig
    tokenizer: PreTrainedTokenizerBase
    rows: list[ShownRow] = field(default_factory=list)
    sets: list[SetStatistics] = field(default_factory=list)

    @property
    def parts(self) -> tuple[DataPart, ...]:
        """The sets.

        Raises:
            ConfigError: they cannot be read.
        """
        return parse_data(self.data.train_data_path, _FIELD)

    def show_rows(
        self, console: Console, count: int = 1, number: int | None = None, max_lines: int | None = None
    ) -> None:
        """Print rows as tokens. No other row is tokenized, and no file is written.

        Args:
            console: where they are printed.
            count: print so many rows of each set.
            number: print the row that messages call line or row `number` of each file instead.
            max_lines: print at most so many lines of tokens for each sample; None: all.

        Raises:
            DataError: a row, a file or the chat template cannot be used, or no file has this row.
        """
        print_legend(console)
        for row in self._chosen(count, number):
            print_row(console, row, max_lines)
            self.rows.append(row)

    def show_statistics(self, console: Console) -> None:
        """Tokenize the sets as a run does, into the token cache that it uses, and print their figures.

        Raises:
            DataError: a file or a row cannot be used, or no row has anything to learn.
        """
        length = self.data.max_padding_length
        for part in self.parts:
            with TemporaryDirectory() as fallback:
                options = replace(sft_options(self.data, Path(fallback)), max_dropped_share=1.0)
                source = load_sft(Path(part.path), self.tokenizer, length, options)
            figures = SetStatistics.of(part, source, length)
            print_statistics(console, figures)
            self.sets.append(figures)

    def check(self) -> None:
        """Refuse the sets that a run would refuse although they could be shown.

        Raises:
            DataError: too large a share of a set's rows is dropped.
        """
        for part, figures in zip(self.parts, self.sets, strict=False):
            figures.report.refuse_drops(part.path, self.data.max_dropped_share)

    def write(self, html: Path | None, plot: Path | None, json_file: Path | None) -> None:
        """Write what was shown as one HTML page, the histograms as a PNG, and all of it as JSON.

        Args:
            html: the page's file; None: none. The same holds for the others.
            plot: the picture's file.
            json_file: the file of JSON.

        Raises:
            ConfigError: a file cannot be written.
        """
        try:
            if html is not None:
                text = page(self.data.train_data_path, self.tokenizer.name_or_path, self.sets, self.rows)
                html.write_text(text, encoding="utf-8")
            if plot is not None:
                write_png(self.sets, plot)
            if json_file is not None:
                json_file.write_text(json.dumps(self.to_json(), indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{error.filename} cannot be written: {error.strerror}") from error

    def to_json(self) -> dict[str, Any]:
        """What was shown as plain values."""
        return {
            "data": self.data.train_data_path,
            "tokenizer": self.tokenizer.name_or_path,
            "sets": [each.to_json() for each in self.sets],
            "rows": [row.to_json() for row in self.rows],
        }

    def _chosen(self, count: int, number: int | None) -> Iterator[ShownRow]:
        ensure_chat_template(self.tokenizer, self.data.chat_template)
        # Rows are shown without the token cache, and a few of them need one process.
        options = replace(sft_options(self.data, Path()), cache_dir=None, num_workers=1)
        for part in self.parts:
            files = files_of(part.path, _FIELD)
            items = first_items(files, count) if number is None else numbered_items(files, number)
            yield from shown_rows(items, self.tokenizer, options, self.data.max_padding_length)


def show_first_row(data: DataConfig, tokenizer: str | None, vocab_size: int, stream: TextIO) -> None:
    """Show the first row that a run on raw rows reads. Writes no file; of pre-training sets it shows nothing.

    Args:
        data: the run's data.
        tokenizer: folder or name of the tokenizer.
        vocab_size: rows of the model's vocabulary.
        stream: where it is printed.

    Raises:
        DataError: the tokenizer or the row cannot be used.
    """
    if data.dataset_type != "raw":
        return
    loaded = load_tokenizer(tokenizer)
    check_vocabulary(loaded, vocab_size)
    first, *_ = parse_data(data.train_data_path, _FIELD)
    Preview(replace(data, train_data_path=format_data([first])), loaded).show_rows(
        terminal(stream), max_lines=_FEW_LINES
    )
